"""Report the results of ``scale.py``: exponents, the price of a call, the table of docs/scale.md and its picture.

    python benchmarks/scale_report.py scale.json docs/images/scale.png

CPU times cover shards and clients, without Ray's own processes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from measuring import markdown_table

INK, FAINT = "#333333", "#999999"
BLUES, QUEUE = ("#9ecae1", "#4292c6", "#08519c"), "#d95f0e"


def slope(cells: list[dict[str, Any]], name: str) -> float:
    """Return the exponent of a step's CPU time in the variable ``name``; 0 from one point."""
    if len(cells) < 2:
        return 0.0
    logs = np.log([[cell[name], cpu_ms(cell)] for cell in cells])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def cpu_ms(cell: dict[str, Any]) -> float:
    """Return the CPU milliseconds of a step, all shards and clients together."""
    a_call = cell["shard_us_a_call"] + cell["client_us_a_call"]
    return a_call * cell["calls_a_step"] * cell["workers"] / 1e3


def price_of_a_call(cells: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Return microseconds a call and a row, fitted so that small calls count as much as large ones."""
    points = np.array([[cell["rows_a_call"], cell[name]] for cell in cells])
    scaled = np.c_[np.ones(len(points)), points[:, 0]] / points[:, 1:]
    a_call, a_row = np.linalg.lstsq(scaled, np.ones(len(points)), rcond=None)[0]
    return float(a_call), float(a_row)


def fit(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit exponents, and the price of a call."""
    banks, queues = of_kind(cells, "memory_bank"), of_kind(cells, "queue")
    exponents = {}
    for shards, rows in sorted({(cell["shards"], cell["rows"]) for cell in banks}):
        some = [cell for cell in banks if (cell["shards"], cell["rows"]) == (shards, rows)]
        exponents[f"workers, {called(shards)}, {rows:,} rows"] = slope(some, "workers")
    most = max(cell["shards"] for cell in cells)
    for workers in sorted({cell["workers"] for cell in banks}):
        some = [cell for cell in banks if (cell["workers"], cell["shards"]) == (workers, most)]
        if len(some) > 1:
            exponents[f"rows, {workers} workers"] = slope(some, "rows")
    for shards in sorted({cell["shards"] for cell in queues}):
        some = [cell for cell in queues if cell["shards"] == shards]
        exponents[f"workers, queue, {called(shards)}"] = slope(some, "workers")
    names = ("busiest_thread_us_a_call", "shard_us_a_call", "client_us_a_call")
    busy = [cell for cell in banks if cell["workers"] > 1]
    return {"exponents": exponents, "price_of_a_call": {name: price_of_a_call(busy, name) for name in names}}


def show_tables(result: dict[str, Any]) -> None:
    """Print tables in Markdown."""
    rows: list[dict[str, Any]] = []
    for cell in result["cells"]:
        step, payload, tcp = cell["step_ms"], cell["payload"], cell["tcp"]
        rows.append(
            {
                "": {"memory_bank": "bank", "queue": "queue"}[cell["kind"]],
                "workers": cell["workers"],
                "shards": cell["shards"],
                "rows": f"{cell['rows']:,}",
                "CPU of a step, ms": f"{cpu_ms(cell):,.0f}",
                "step, ms (least-most)": f"{step['median']:,.0f} ({step['min']:,.0f}-{step['max']:,.0f})",
                "calls a step and worker": f"{cell['calls_a_step']:.1f}",
                "shard's CPU a call, µs": f"{cell['shard_us_a_call']:,.0f}",
                "client's, µs": f"{cell['client_us_a_call']:,.0f}",
                "blocked a step, ms": f"{cell['waited_ms_a_step']:,.0f}",
                "received, KB": f"{payload['received'] / 1e3:,.0f}",
                "received by TCP": f"{tcp['received'] / 1e3:,.0f}",
                "sent, KB": f"{payload['sent'] / 1e3:,.1f}",
                "sent by TCP": f"{tcp['sent'] / 1e3:,.1f}",
                "wrong": cell["wrong"],
            }
        )
    print(markdown_table(list(rows[0]), [list(row.values()) for row in rows]))
    print(json.dumps({name: result.get(name) for name in ("fits", "lost_shard", "seconds")}, indent=2))


def draw(result: dict[str, Any], place: Path) -> None:
    """Draw four panels into a file."""
    figure, panels = plt.subplots(2, 2, figsize=(9.0, 6.8), dpi=100)
    draw_workers(panels[0, 0], result)
    draw_rows(panels[0, 1], result)
    draw_calls(panels[1, 0], result)
    draw_bytes(panels[1, 1], result)
    for axes in panels.flat:
        axes.grid(alpha=0.25, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
        axes.tick_params(labelsize=8)
    figure.tight_layout()
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place)
    plt.close(figure)


def draw_workers(axes: Axes, result: dict[str, Any]) -> None:
    """Time of a step against workers, a line for each number of shards."""
    cells, fits = result["cells"], result["fits"]["exponents"]
    rows = sorted({cell["rows"] for cell in of_kind(cells, "memory_bank")})
    middle = rows[len(rows) // 2]
    shards = sorted({cell["shards"] for cell in cells})
    for color, number in zip(BLUES, shards, strict=False):
        some = [c for c in of_kind(cells, "memory_bank") if (c["rows"], c["shards"]) == (middle, number)]
        plot_times(
            axes,
            some,
            "workers",
            color,
            f"bank, {called(number)}: W^{fits[f'workers, {called(number)}, {middle:,} rows']:.2f}",
        )
    for number in sorted({cell["shards"] for cell in of_kind(cells, "queue")})[-1:]:
        queue = [c for c in of_kind(cells, "queue") if c["shards"] == number]
        exponent = fits[f"workers, queue, {called(number)}"]
        plot_times(axes, queue, "workers", QUEUE, f"queue, {called(number)}: W^{exponent:.2f}")
    as_logs(axes, "workers W", "CPU of a step, ms, all together")
    axes.set_xticks(sorted({cell["workers"] for cell in cells}))
    axes.set_title(f"Workers: {middle:,} rows")
    axes.legend(fontsize=7.5, frameon=False)


def draw_rows(axes: Axes, result: dict[str, Any]) -> None:
    """Time of a step against rows of the bank."""
    banks, fits = of_kind(result["cells"], "memory_bank"), result["fits"]["exponents"]
    shards = max(cell["shards"] for cell in banks)
    most = max(cell["workers"] for cell in banks)
    for color, number in ((BLUES[1], 1), (BLUES[2], most)):
        some = [c for c in banks if (c["workers"], c["shards"]) == (number, shards)]
        some.sort(key=lambda cell: cell["rows"])
        name = f"{number} worker{'s' * (number > 1)}: rows^{fits.get(f'rows, {number} workers', 0.0):.2f}"
        plot_times(axes, some, "rows", color, name)
    as_logs(axes, "rows of the bank", "CPU of a step, ms, all together")
    axes.set_xticks(sorted({cell["rows"] for cell in banks}))
    axes.set_title(f"Rows of the bank: {called(shards)}")
    axes.set_ylim(bottom=1)
    axes.legend(fontsize=7.5, frameon=False, loc="lower right")


def draw_calls(axes: Axes, result: dict[str, Any]) -> None:
    """CPU of a call against its rows."""
    prices = result["fits"]["price_of_a_call"]
    for name, label, color in (
        ("shard_us_a_call", "shard", BLUES[2]),
        ("client_us_a_call", "client", QUEUE),
    ):
        cells = sorted(of_kind(result["cells"], "memory_bank"), key=lambda cell: cell["rows_a_call"])
        axes.plot(
            [cell["rows_a_call"] for cell in cells],
            [cell[name] for cell in cells],
            "o",
            color=color,
            ms=4,
            alpha=0.7,
        )
        a_call, a_row = prices[name]
        rows = np.geomspace(cells[0]["rows_a_call"], cells[-1]["rows_a_call"])
        text = f"{label}: {a_call:,.0f} µs + {a_row:.2f} µs a row"
        axes.plot(rows, a_call + a_row * rows, color=color, lw=1.2, label=text)
    as_logs(axes, "rows asked and written in a call", "CPU a call, µs")
    axes.set_title("A call: CPU of those who make and answer it")
    axes.legend(fontsize=7.5, frameon=False)


def draw_bytes(axes: Axes, result: dict[str, Any]) -> None:
    """Bytes of a step and worker: the model, counted in messages, and on the network."""
    banks = of_kind(result["cells"], "memory_bank")
    most = max(banks, key=lambda cell: (cell["shards"], cell["workers"], -cell["rows"]))
    queue = max(of_kind(result["cells"], "queue"), key=lambda cell: (cell["shards"], cell["workers"]))
    groups: list[tuple[str, float, float, float]] = [
        ("bank,\nsent", result["model"]["memory_bank"]["sent"], most["payload"]["sent"], most["tcp"]["sent"]),
        (
            "bank,\nreceived",
            result["model"]["memory_bank"]["received"],
            most["payload"]["received"],
            most["tcp"]["received"],
        ),
        ("queue,\nsent", result["model"]["queue"]["sent"], queue["payload"]["sent"], queue["tcp"]["sent"]),
    ]
    labels = ("model", "arrays in messages", "TCP, as the kernel counts")
    for index, (label, color) in enumerate(zip(labels, (FAINT, BLUES[1], QUEUE), strict=True)):
        places = np.arange(len(groups)) + (index - 1) * 0.27
        values = [group[1:][index] / 1e3 for group in groups]
        axes.bar(places, values, 0.25, color=color, label=label)
        for place, value in zip(places, values, strict=True):
            axes.text(place, max(value, 5) * 1.07, f"{value:,.0f}", ha="center", fontsize=7, color=INK)
    axes.set_yscale("log")
    axes.set_xticks(range(len(groups)), [group[0] for group in groups])
    axes.set_ylim(5, 20 * max(group[1] for group in groups) / 1e3)
    axes.set_ylabel("KB a step and worker", fontsize=8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_title(f"Bytes: {most['workers']} workers, {called(most['shards'])}")
    axes.legend(fontsize=7.5, frameon=False, loc="upper right")


def plot_times(axes: Axes, cells: list[dict[str, Any]], name: str, color: str, label: str) -> None:
    """Draw the CPU time of a step against the variable ``name``."""
    axes.plot(
        [cell[name] for cell in cells], list(map(cpu_ms, cells)), "o-", color=color, lw=1.2, ms=4, label=label
    )


def as_logs(axes: Axes, horizontal: str, vertical: str) -> None:
    """Set both axes to logarithms, labeled in plain numbers."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(horizontal, fontsize=8)
    axes.set_ylabel(vertical, fontsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_formatter(NullFormatter())


def of_kind(cells: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the cells of one kind of store."""
    return [cell for cell in cells if cell["kind"] == kind]


def called(shards: int) -> str:
    """Name a number of shards."""
    return "1 shard" if shards == 1 else f"{shards} shards"


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    found["fits"] = fit(found["cells"])
    show_tables(found)
    draw(found, Path(sys.argv[2]))
