"""The page of results: tables, commands, machine and pictures, between two marks in the page."""

import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparisons import AbsentError, Benchmark, Measured, Results
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from measuring import markdown_table, write_figure
from pictures import BLUE, INK, ORANGE, RED, panels, save
from suite import SECTIONS

BEGIN = "<!-- benchmarks/run.py writes what follows -->"
END = "<!-- benchmarks/run.py wrote what precedes -->"
NEW = f"# Performance\n\n{BEGIN}\n{END}\n"
Records = dict[str, dict[str, Any]]  # command, commit, machine and date of each result


def check_page(page: Path) -> str | None:
    """Return why a page cannot be updated, if so."""
    text = page.read_text() if page.exists() else NEW
    if BEGIN in text and END in text.partition(BEGIN)[2]:
        return None
    return f"{page} has no place for the figures; put the lines '{BEGIN}' and '{END}' there"


def write_page(
    page: Path, suite: Sequence[Benchmark], results: Results, records: Records, *, pictures: Path
) -> None:
    """Write between the marks of a page, and pictures into the folder ``images`` beside it.

    ``pictures`` is the folder of those that benchmarks drew themselves.
    """
    text = page.read_text() if page.exists() else NEW
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    done = [benchmark for benchmark in suite if benchmark.name in results]
    found = {each.name: read_measured(each, results, records) for each in done}
    picture = page.parent / "images" / f"{page.stem}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    parts = [introduction(suite, done, records)]
    if draw([each for lines in found.values() for each in lines if isinstance(each, Measured)], picture):
        parts.append(f"![Times that raycl is ahead of each peer](images/{picture.name})")
    for title in SECTIONS:
        if members := [benchmark for benchmark in done if benchmark.section == title]:
            parts += section(title, members, found, records)
            for benchmark in members:
                parts += own_parts(benchmark, results[benchmark.name], pictures, picture)
    page.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}")


def read_measured(benchmark: Benchmark, results: Results, records: Records) -> list[Measured | AbsentError]:
    is_evaluated = not is_quick(benchmark, records[benchmark.name])
    return list(benchmark.measured(results, is_evaluated=is_evaluated))


def is_quick(benchmark: Benchmark, record: dict[str, Any]) -> bool:
    """Whether a result is of other flags than a measurement has."""
    full = benchmark.words(quick=False)
    return record.get("words", full) != full


def introduction(suite: Sequence[Benchmark], done: Sequence[Benchmark], records: Records) -> str:
    """Say how to read the tables, and on which machine each result was measured."""
    circumstances: dict[str, list[str]] = {}
    for benchmark in done:
        circumstances.setdefault(describe(records[benchmark.name]), []).append(benchmark.name)
    lines = [
        "`python benchmarks/run.py --data FOLDER --write docs/performance.md` measures and writes this section.",
        "Values are medians, with minimum and maximum in parentheses if a side ran several times. *Times* is how",
        "many times faster or smaller raycl is; below 1 it is behind. The machine is shared and its speed varies",
        "by a third, so compare only ratios from one run.",
        "",
        *(f"- {text}: {', '.join(names)}" for text, names in circumstances.items()),
    ]
    if quick := [each.name for each in done if is_quick(each, records[each.name])]:
        lines.append(f"- run at other sizes only, without an aim: {', '.join(quick)}")
    if left := [each.name for each in suite if each not in done]:
        lines.append(f"- not measured: {', '.join(left)}")
    return "\n".join(lines)


def describe(record: dict[str, Any]) -> str:
    """Describe the machine of a result."""
    if not record:
        return "machine and commit not recorded"
    machine = record["machine"]
    return (
        f"{machine['cpu']} ({machine['capability']}), {machine['num_cores']} cores, "
        f"{machine['gpu'] or 'no GPU'}, Python {machine['python']}, torch {machine['torch']}, "
        f"commit {record['commit']}, {record['date']}"
    )


def section(
    title: str,
    members: Sequence[Benchmark],
    found: dict[str, list[Measured | AbsentError]],
    records: Records,
) -> list[str]:
    """Return heading, introduction, table, absent numbers and commands."""
    lines = [line for benchmark in members for line in found[benchmark.name]]
    rows = [row(line) for line in lines if isinstance(line, Measured)]
    table = markdown_table(["", "raycl", "peer", "peer's figure", "times", "aim"], rows)
    parts = [f"## {title}", SECTIONS[title], table]
    if absent := [f"- {line}" for line in lines if isinstance(line, AbsentError)]:
        parts.append("Absent:\n\n" + "\n".join(absent))
    commands = [command(benchmark, records[benchmark.name]) for benchmark in members]
    return [*parts, "\n".join(["```bash", *commands, "```"])]


def own_parts(benchmark: Benchmark, result: Any, pictures: Path, beside: Path) -> list[str]:
    """Return the table of a benchmark's own, and its picture, which is copied beside the page's."""
    parts = []
    if benchmark.has_table:
        try:
            parts.append(importlib.import_module(Path(benchmark.script).stem).table(result["lines"]))
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            parts.append(f"Absent: the table of {benchmark.name} ({type(error).__name__}: {error})")
    drawn = pictures / f"{benchmark.name}.png"
    if benchmark.picture and drawn.exists():
        copy = beside.with_name(f"{beside.stem}_{drawn.name}")
        shutil.copyfile(drawn, copy)
        parts.append(f"![{benchmark.picture}](images/{copy.name})")
    elif benchmark.picture:
        parts.append(f"Absent: the picture of {benchmark.name} ({drawn.name} is not among the results)")
    return parts


def row(headline: Measured) -> list[str]:
    of = headline.of
    cells = [of.what, f"{write_figure(headline.own)} {of.unit}", of.peer, "", ""]
    if headline.other is not None:
        cells[3:] = [f"{write_figure(headline.other)} {of.unit}", f"**{headline.times}**"]
    return [*cells, f"{of.aim:.2f}, {headline.verdict}" if headline.verdict else ""]


def command(benchmark: Benchmark, record: dict[str, Any]) -> str:
    """Return the command with its duration and the load of the machine."""
    words = [
        word.format(data="FOLDER", output=".") for word in record.get("words", benchmark.words(quick=False))
    ]
    text = f"python benchmarks/{' '.join(words)} --json {benchmark.name}.json"
    if not record:
        return text
    load = record["machine"]["load_average"][0]
    return f"{text}  # {record['seconds'] / 60:.1f} min, load {load:.1f} before"


def draw(measured: Sequence[Measured], path: Path) -> bool:
    """Draw a bar for each peer from 1 to raycl's ratio; a mark is the aim. Return whether there was any."""
    bars = [each for each in measured if each.of.is_drawn and each.ratio]
    if not bars:
        return False
    ratios, rows = [each.ratio or 1.0 for each in bars], range(len(bars))
    aims = [(each.of.aim, row) for row, each in enumerate(bars) if each.verdict]
    figure, (axes,) = panels(1, 1, 9, 0.22 * len(bars) + 1.2)
    colors = [BLUE if ratio >= 1 else ORANGE for ratio in ratios]
    axes.barh(rows, [ratio - 1 for ratio in ratios], left=1, height=0.7, color=colors)
    axes.plot(*zip(*aims, strict=True), "|", color=INK, ms=11, mew=2, label="aim") if aims else None
    for row, each in enumerate(bars):  # in a column of their own, where no mark lies over them
        color = RED if each.verdict == "missed" else INK
        axes.text(1.02, row, each.times, color=color, va="center", transform=axes.get_yaxis_transform())
    axes.axvline(1, color=INK, lw=1)
    axes.set(xscale="log", yticks=rows, yticklabels=[f"{each.of.what} / {each.of.peer}" for each in bars])
    axes.set_xlim(min(0.5, 0.8 * min(ratios)), max(2.0, 1.1 * max(ratios)))
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    title = "times that raycl is faster or smaller; a mark is the aim, red what missed it"
    figure.suptitle(title, fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labeltop=True)
    axes.spines["left"].set_visible(False)
    save(figure, path)
    return True
