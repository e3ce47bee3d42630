"""One check of a run: its name, its result, and what it found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from raycl.errors import ConfigError, DataError


@final
@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check: ``passed`` is None if the run does not allow it."""

    name: str
    passed: bool | None
    text: str


def checked(name: str, work: Callable[[], str]) -> Check:
    """Return the result of a check, which raises ``DataError`` if it fails, and ``ConfigError`` if it cannot be made."""
    try:
        return Check(name=name, passed=True, text=work())
    except DataError as error:
        return Check(name=name, passed=False, text=str(error))
    except ConfigError as error:
        return Check(name=name, passed=None, text=str(error))
