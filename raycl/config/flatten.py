"""Flatten a configuration to the paths that ``--set`` takes."""

from typing import Any

from pydantic import BaseModel


def leaves(config: BaseModel) -> dict[str, Any]:
    """Return each setting's value by its path, such as ``stages.0.batch_size``."""
    return _leaves(config.model_dump(mode="json"), "")


def _leaves(values: Any, path: str) -> dict[str, Any]:
    if not isinstance(values, dict | list):
        return {path: values}
    items = values.items() if isinstance(values, dict) else enumerate(values)
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _leaves(value, f"{path}.{key}" if path else str(key))
    return flat
