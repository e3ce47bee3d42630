"""The settings of a configuration by their paths, which are those of ``--set``."""

from typing import Any

from pydantic import BaseModel


def leaves(config: BaseModel) -> dict[str, Any]:
    """Return each setting's value by its path, such as ``stages.0.batch_size``."""
    return _leaves(config.model_dump(mode="json"), "")


def _leaves(values: Any, path: str) -> dict[str, Any]:
    if not isinstance(values, dict | list):
        return {path: values}
    items = values.items() if isinstance(values, dict) else enumerate(values)
    found: dict[str, Any] = {}
    for key, value in items:
        found |= _leaves(value, f"{path}.{key}" if path else str(key))
    return found
