"""Tables for notebooks, terminals and the report, a notebook's progress bar, and the formats of values."""

import html
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

_LEFT, _RIGHT = "text-align:left;vertical-align:top", "text-align:right"


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """A titled table: facts by name, rows under ``columns``, or both."""

    title: str
    facts: Mapping[str, object] = field(default_factory=dict[str, object])
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()

    def to_text(self) -> str:
        """Return one line per fact, with names and values aligned, then the rows."""
        facts = text_table((), list(self.facts.items()))
        lines = [self.title, *(f"  {line}" for line in facts.splitlines())]
        if self.rows:
            lines += ["", text_table(self.columns, self.rows)]
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
    """A value that a notebook and ``print`` show as a table; its ``repr`` stays unchanged."""

    @abstractmethod
    def to_table(self) -> Table:
        """Return the table that represents this value."""

    def __str__(self) -> str:
        return self.to_table().to_text()

    def _repr_html_(self) -> str:
        return self.to_table().to_html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Let IPython print the table in a terminal, too."""
        printer.text("..." if cycle else str(self))


@final
class EvaluationResult(dict[str, Any], Displayable):
    """The metrics of an evaluation: a dictionary, ready for JSON, that a notebook shows as a table."""

    def to_table(self) -> Table:
        """Show the metrics in rows, with the encoder and its baselines in columns; lists are counted."""
        own = {name: value for name, value in self.items() if name not in ("measure", "hybrid", "baseline")}
        values = flatten({n: f"{len(v)} of them" if isinstance(v, list) else v for n, v in own.items()})
        metrics = [name for name, value in values.items() if isinstance(value, float)]
        columns, numbers = {"encoder": values}, dict[str, Any]()
        for name, value in {"hybrid": self.get("hybrid"), **self.get("baseline", {})}.items():
            if isinstance(value, int):
                numbers[f"baseline.{name}"] = value
            if isinstance(value, Mapping):
                columns[name] = flatten(value)
            elif isinstance(value, float):  # of the only metric
                columns[name] = dict.fromkeys(metrics, value)
        return Table(
            title=str(self.get("measure", "scores")),
            facts={name: value for name, value in values.items() if name not in metrics} | numbers,
            columns=("metric", *columns),
            rows=[(name, *(column.get(name) for column in columns.values())) for name in metrics],
        )


def text_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return aligned lines of text, numbers to the right, under the columns' names if there are any."""
    cells = [list(map(format_value, row)) for row in rows]
    lines = [list(columns), *cells] if columns else cells
    if not lines:
        return ""
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    is_number = [isinstance(value, int | float) for value in (rows[0] if rows else columns)]
    return "\n".join(
        "  ".join(
            " " * (width - _width(cell)) + cell if right else cell + " " * (width - _width(cell))
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    )


def _width(text: str) -> int:
    """Return the cells of a terminal that a text takes: two for each wide character of East Asian scripts."""
    return len(text) + sum(unicodedata.east_asian_width(character) in "FW" for character in text)


def progress_html(title: str, done: float, total: float, text: str) -> str:
    """Return a progress bar with its numbers, drawn by the browser itself."""
    caption = f"{title} {done:,.0f}/{total:,.0f}  {text}"
    return (
        f'<div><progress value="{max(0.0, done):g}" max="{max(1.0, total):g}" style="width:16em;vertical-align:middle">'
        f"</progress> <span>{html.escape(caption)}</span></div>"
    )


def flatten(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested values by their path, ``a.b``; lists stay whole unless they hold mappings."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        is_list_of_mappings = (
            isinstance(value, list | tuple) and value and all(isinstance(each, Mapping) for each in value)
        )
        inner = dict(enumerate(value)) if is_list_of_mappings else value
        if isinstance(inner, Mapping) and inner:
            found |= flatten({str(key): each for key, each in inner.items()}, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = value
    return found


def format_value(value: object) -> str:
    """Return a value as text: 65,536, floats with six digits, yes or no, and a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1_000 else f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {format_value(each)}" for name, each in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value)) or "-"
    return " ".join(str(value).split())


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes with its unit: 12 B, 1.5 KiB, 3.0 MiB or 2.0 GiB."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def _escaped(value: object) -> str:
    return html.escape(format_value(value))


def _cell(value: object) -> str:
    side = _RIGHT if isinstance(value, int | float) else _LEFT
    return f'<td style="{side}">{_escaped(value)}</td>'
