"""The commands that started and resumed a run, one per line of ``command.txt``, to reproduce it."""

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

from raycl.storage import Place

COMMAND = "command.txt"
_typed: ContextVar[str | None] = ContextVar("typed", default=None)


@contextlib.contextmanager
def typed(arguments: Sequence[str]) -> Iterator[None]:
    """Set the command line of runs that start within, in the form of ``sys.argv``."""
    token = _typed.set(_as_typed(arguments))
    try:
        yield
    finally:
        _typed.reset(token)


def save_command_line(output: Place) -> None:
    """Append the command line to ``command.txt``; a run started from Python has none."""
    command = _typed.get()
    if command is not None:
        (output / COMMAND).write_text("".join(f"{line}\n" for line in [*read_commands(output), command]))


def this_command() -> str:
    """Return the command line of this process."""
    return _as_typed(sys.argv or ["python"])


def read_commands(output: Place) -> list[str]:
    """Return the commands that started the run and resumed it, in order."""
    place = output / COMMAND
    return place.read_text().splitlines() if place.exists() else []


def _as_typed(arguments: Sequence[str]) -> str:
    program, *rest = arguments
    name = ["python", program] if program.endswith(".py") else [Path(program).name]
    return " ".join(map(_quoted, [*name, *rest]))


def _quoted(argument: str) -> str:
    """Quote an argument for a shell; line breaks are escaped, since each command is one line."""
    if len(f"{argument}.".splitlines()) == 1:
        return shlex.quote(argument)
    escaped = argument.replace("\\", r"\\").replace("'", r"\'")
    return f"$'{''.join(map(_escape_line_break, escaped))}'"


def _escape_line_break(character: str) -> str:
    return character if len(f"{character}.".splitlines()) == 1 else f"\\u{ord(character):04x}"
