"""Values that show themselves: a table in a notebook, lines of text elsewhere; and a bar for a notebook."""

import html
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

_LEFT, _RIGHT = "text-align:left;vertical-align:top", "text-align:right"


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """What is shown of a value: facts by name, and perhaps rows below them under ``columns``."""

    title: str
    facts: Mapping[str, object]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()

    def to_text(self) -> str:
        """Return a line a fact, names and values below one another, then the rows."""
        told = {name: plain(value) for name, value in self.facts.items()}
        width = max(map(len, told), default=0)
        lines = [self.title, *(f"  {name:{width}}  {value}" for name, value in told.items())]
        if self.rows:
            lines += ["", *_aligned([list(self.columns), *(list(map(plain, row)) for row in self.rows)])]
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return tables without colors of their own, so that they fit any theme; all text is escaped."""
        facts = "".join(
            f'<tr><th style="{_LEFT}">{html.escape(name)}</th><td style="{_LEFT}">{_escaped(value)}</td></tr>'
            for name, value in self.facts.items()
        )
        caption = f'<caption style="{_LEFT}"><b>{html.escape(self.title)}</b></caption>'
        return f"<table>{caption}<tbody>{facts}</tbody></table>" + (self._rows_html() if self.rows else "")

    def _rows_html(self) -> str:
        head = "".join(f'<th style="{_LEFT}">{html.escape(name)}</th>' for name in self.columns)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Displayable(ABC):
    """A value that shows itself in a notebook and when it is printed; its ``repr`` stays what it was."""

    @abstractmethod
    def shown(self) -> Table:
        """Return what people shall see of it."""

    def __str__(self) -> str:
        return self.shown().to_text()

    def _repr_html_(self) -> str:
        return self.shown().to_html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Let IPython print the lines in a terminal, too."""
        printer.text("..." if cycle else str(self))


@final
class EvaluationResult(dict[str, Any], Displayable):
    """What a judgment found: a dictionary, ready for JSON, that shows itself."""

    def shown(self) -> Table:
        """Show single values; lists, such as those of examples, are counted."""
        told = {
            name: f"{len(value)} of them" if isinstance(value, list) else value
            for name, value in self.items()
            if name != "measure"
        }
        return Table(title=str(self.get("measure", "scores")), facts=flat(told))


def progress_html(title: str, done: float, total: float, text: str) -> str:
    """Return a bar with its numbers, drawn by the browser itself."""
    words = f"{title} {done:,.0f}/{total:,.0f}  {text}"
    return (
        f'<div><progress value="{max(0.0, done):g}" max="{max(1.0, total):g}" style="width:16em;vertical-align:middle">'
        f"</progress> <span>{html.escape(words)}</span></div>"
    )


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested values by their path, ``a.b``; lists stay whole unless they hold nested values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = dict(enumerate(value)) if _holds_values(value) else value
        if isinstance(inner, Mapping) and inner:
            found |= flat({str(key): each for key, each in inner.items()}, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = value
    return found


def plain(value: object) -> str:
    """Return a value as people read it: thousands parted, floats at six digits, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1_000 else f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {plain(each)}" for name, each in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value)) or "-"
    return " ".join(str(value).split())


def _holds_values(value: Any) -> bool:
    return (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Mapping) for each in value)
    )


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _escaped(value: object) -> str:
    return html.escape(plain(value))


def _cell(value: object) -> str:
    side = _RIGHT if isinstance(value, int | float) else _LEFT
    return f'<td style="{side}">{_escaped(value)}</td>'
