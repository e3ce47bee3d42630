"""The hierarchy of raycl's errors.

RayclError
├── ConfigError     a setting is unknown, invalid or of the wrong type      (exit status 2)
├── DataError       the data cannot be read, lack a column or have no rows  (exit status 2)
├── StorageError    a path or address cannot be read or written             (exit status 2)
└── RunError        the run started and failed                              (exit status 1)
    ├── NonFiniteLossError
    ├── CollapseError
    ├── ReplayError
    ├── ShardAwayError
    └── StoppedError   the run was interrupted by a signal     (exit status 143, Ctrl-C 130)
"""

import signal


class RayclError(Exception):
    """Base class of raycl's errors; the message is one line: the problem, the value, the remedy."""


class ConfigError(RayclError, ValueError):
    """A setting is unknown, invalid or of the wrong type."""


class DataError(RayclError):
    """The data cannot be used: no rows, a missing column, or too many invalid rows."""


class StorageError(RayclError):
    """A local path or s3:// address cannot be read or written."""


class RunError(RayclError):
    """A run failed after it started."""


class NonFiniteLossError(RunError):
    """The loss became NaN or infinite."""


class CollapseError(RunError):
    """The embeddings collapsed, and ``monitor.on_collapse`` ended the run."""


class ReplayError(RunError):
    """A chunk of an accumulated batch had different embeddings in the second pass."""


class ShardAwayError(RunError):
    """A shard of a bank did not answer in time; a run restarts its workers, up to ``max_failures`` times."""


class StoppedError(RunError):
    """The run saved a checkpoint and stopped after the signal ``signum``."""

    def __init__(self, message: str, signum: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.signum = signum


class InvalidValueError(ValueError):
    """A value is invalid; the message is the cause, the same for all values of that kind, and ``detail`` is of this one."""

    detail: str = ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return str(error).strip().split("\n")[0].rstrip(": ") or type(error).__name__


def one_line(error: BaseException, *, most: int = 200) -> str:
    """Return an error's message in one line of at most this many characters."""
    return " ".join(str(error).split())[:most]


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message: the cause, for an error of another process."""
    return str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
