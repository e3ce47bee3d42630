"""Whom a run trusts: the packages whose code a file may name to be called."""

import os
from collections.abc import Collection

from raycl.errors import ConfigError
from raycl.models.registry import HUGGING_FACE

OWN = "a network of the user's own"
TRUSTED = "RAYCL_TRUSTED"


def trusted_packages() -> tuple[str, ...]:
    """Return the packages in RAYCL_TRUSTED, which are separated by commas."""
    return tuple(name.strip() for name in os.environ.get(TRUSTED, "").split(",") if name.strip())


def check_trusted(name: str, where: str, trusted: Collection[str] | None = None, *, is_text: bool) -> None:
    """Refuse code that a file names, unless it is of a package that the user named as well: ``ConfigError``."""
    if ":" not in name or name == OWN or (is_text and name.startswith(HUGGING_FACE)):
        return
    module = name.partition(":")[0]
    if not any(
        f"{module}.".startswith(f"{each}.") for each in (trusted_packages() if trusted is None else trusted)
    ):
        raise ConfigError(
            f"{where} asks to import {module!r} and call {name!r}; if you trust whoever wrote it, "
            f"set {TRUSTED}={module.partition('.')[0]}"
        )
