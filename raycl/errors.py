"""The error tree: every error that raycl raises on purpose.

RayclError
├── ConfigError     a setting is unknown, of the wrong type or impossible   (exit status 2)
├── DataError       the data cannot be read, lack a column, hold no rows    (exit status 2)
├── StorageError    a place cannot be read from or written to               (exit status 2)
└── RunError        the run started and failed                              (exit status 1)
    ├── NonFiniteLossError
    ├── CollapseError
    ├── ReplayError
    └── StoppedError   somebody asked it to stop               (exit status 143, Ctrl-C 130)
"""

import signal


class RayclError(Exception):
    """The root of raycl's own errors; its text is one line: what is wrong, what came, what to do."""


class ConfigError(RayclError, ValueError):
    """A setting is unknown, of the wrong type or impossible."""


class DataError(RayclError):
    """The data cannot be used: no rows, no such column, too many broken rows."""


class StorageError(RayclError):
    """A place (a local path or s3:// address) cannot be read from or written to."""


class RunError(RayclError):
    """A run that had started failed."""


class NonFiniteLossError(RunError):
    """The loss became NaN or infinite."""


class CollapseError(RunError):
    """The embeddings collapsed, and the run was told to stop then."""


class ReplayError(RunError):
    """A chunk of an accumulated batch was embedded otherwise the second time."""


class StoppedError(RunError):
    """The run was asked to stop, by the signal ``signum``; it is saved."""

    def __init__(self, message: str, signum: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.signum = signum


class BrokenValueError(ValueError):
    """One value cannot be used; the text is its cause, the same for all values of that kind."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if the text is empty."""
    return str(error).strip().split("\n")[0].rstrip(": ") or type(error).__name__


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text: for an error of another process, its cause."""
    return str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
