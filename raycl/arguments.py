"""Checks of the arguments of raycl's functions, which code without types may call."""

import os
from numbers import Integral, Real
from typing import Any

from raycl.errors import ConfigError

Address = str | os.PathLike[str]
_SAID: dict[type, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "text"),
}


def check_type(name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """Raise ``ConfigError`` unless an argument is of a type: numbers may be numpy's; True and False are none."""
    accepted, said = _SAID.get(kind, (kind, f"a {kind.__name__}"))
    is_flag = isinstance(value, bool) and kind is not bool
    if not (optional and value is None) and (is_flag or not isinstance(value, accepted)):
        raise ConfigError(f"{name} must be {said}, came {value!r:.60} of type {type(value).__name__}")


def as_address(name: str, value: object) -> str:
    """Return an address as text, with the home folder for ``~``; raises ``ConfigError`` for another type."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name} must be an address, came {type(value).__name__}; give text or a path")
    text = os.fspath(value)
    return text if "://" in text else os.path.expanduser(text)


def optional_address(name: str, value: object) -> str | None:
    """Return ``as_address``, or None for None."""
    return None if value is None else as_address(name, value)


def as_addresses(name: str, value: object) -> list[str]:
    """Return ``as_address`` of one address or of each in a list; nothing for None."""
    return [as_address(name, each) for each in listed(value)]


def listed(value: Any) -> list[Any]:
    """Return the values of a list, or one value as a list; nothing for None."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
