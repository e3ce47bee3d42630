"""Report the lines of ``scale.py``: exponents, the price of a call, the table of docs/scale.md and its picture.

    python benchmarks/scale_report.py scale.json scale.png

CPU times cover shards and clients, without Ray's own processes.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from measuring import Line, table
from pictures import BLUES, FAINT, INK, ORANGE, as_logs, panels, save

TITLES = {
    "side": "",
    "workers": "workers",
    "shards": "shards",
    "rows": "rows",
    "cpu_ms": "CPU of a step, ms",
    "step_ms": "step, ms (least-most)",
    "calls_a_shard": "calls a shard and step",
    "rows_a_call": "rows a call",
    "shard_us": "shard's CPU a call, µs",
    "thread_us": "its busiest thread's, µs",
    "client_us": "client's, µs",
    "waited_ms": "blocked a step, ms",
    "received": "received, bytes",
    "model_received": "model",
    "tcp_received": "received by TCP",
    "sent": "sent, bytes",
    "model_sent": "model",
    "tcp_sent": "sent by TCP",
    "shard_mb": "MB of a shard",
    "plan_mb": "planned",
    "wrong": "wrong",
}
WORKERS = {"calls a shard": "a worker that calls a shard", "calls none": "a worker that calls none"}
STORES = {
    "workers": "workers",
    "worker": "a worker that",
    "thread_cpu": "CPU of its store, ms",
    "process_cpu": "CPU of its process, ms",
    "wall": "wall time, ms",
    "waited": "waited, ms",
}


def some(lines: Sequence[Line], **words: Any) -> list[Line]:
    """Return the lines of a case."""
    return [line for line in lines if words.items() <= line.items()]


def values(lines: Sequence[Line], name: str) -> list[Any]:
    """Return the different values of a key, in order."""
    return sorted({line[name] for line in lines})


def slope(lines: Sequence[Line], name: str) -> float:
    """Return the exponent of a step's CPU time in the variable ``name``; 0 from one point."""
    if len(lines) < 2:
        return 0.0
    logs = np.log([[line[name], line["cpu_ms"]] for line in lines])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def groups(lines: Sequence[Line]) -> list[tuple[str, str, list[Line]]]:
    """Return the lines that differ in one variable: their title, the variable, and they themselves."""
    found = []
    for side in values(lines, "side"):
        own = some(lines, side=side)
        for shards in values(own, "shards"):
            for rows in values(own, "rows"):
                title = f"{side}, {shards} shard{'s' * (shards > 1)}, {rows:,} rows"
                found.append((title, "workers", some(own, shards=shards, rows=rows)))
        for workers in values(own, "workers"):
            title = f"{side}, {workers} worker{'s' * (workers > 1)}"
            found.append((title, "rows", some(own, workers=workers, shards=max(values(own, "shards")))))
    return [
        (title, name, sorted(each, key=lambda line: line[name]))
        for title, name, each in found
        if len(each) > 1
    ]


def price_of_a_call(lines: Sequence[Line], name: str) -> tuple[float, float]:
    """Return microseconds a call and a row, fitted so that small calls count as much as large ones."""
    points = np.array([[line["rows_a_call"], line[name]] for line in lines])
    scaled = np.c_[np.ones(len(points)), points[:, 0]] / points[:, 1:]
    a_call, a_row = np.linalg.lstsq(scaled, np.ones(len(points)), rcond=None)[0]
    return float(a_call), float(a_row)


def fit(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the exponents, and what a call and a row cost."""
    busy = [line for line in some(lines, side="bank") if line["workers"] > 1]
    prices = {name: price_of_a_call(busy, name) for name in ("thread_us", "shard_us", "client_us")}
    exponents = {f"{title}, in {name}": slope(each, name) for title, name, each in groups(lines)}
    return {"exponents": exponents, "price_of_a_call": prices}


def text(lines: Sequence[Line], of_stores: Sequence[Line], **more: Any) -> str:
    """Return the tables, and what else was found."""
    tables = table(lines, **TITLES), table(of_stores, **STORES)
    return "\n\n".join([*tables, json.dumps({"fits": fit(lines), **more}, indent=2)])


def draw(lines: Sequence[Line], of_stores: Sequence[Line], path: Path) -> None:
    """Draw four panels into a file."""
    figure, (of_workers, stores, of_calls, of_bytes) = panels(2, 2, 9.0, 6.8)
    most = max(values(some(lines, side="bank"), "shards"))
    for number, shards in enumerate(values(some(lines, side="bank"), "shards")):
        each = sorted(some(lines, side="bank", shards=shards), key=lambda line: line["workers"])
        x, y = zip(*((line["workers"], line["calls_a_shard"]) for line in each), strict=True)
        label = f"{shards} shard{'s' * (shards > 1)}"
        of_workers.plot(x, y, "o-", color=f"C{number}", ms=7 - 2 * number, label=label)
    x = np.array(values(some(lines, side="bank"), "workers"))
    of_workers.plot(x, x, "--", color=FAINT, label="one call from each worker")
    as_logs(of_workers, "workers W", "calls to a shard in a step")
    for color, (worker, label) in zip((ORANGE, BLUES[2]), WORKERS.items(), strict=True):
        own = some(of_stores, worker=worker)
        stores.plot(
            *zip(*((line["workers"], line["thread_cpu"]) for line in own), strict=True),
            "o-",
            ms=4,
            color=color,
            label=label,
        )
    as_logs(stores, f"workers W, {most} shards", "CPU of a worker's store in a step, ms")
    draw_calls(of_calls, some(lines, side="bank"))
    draw_bytes(of_bytes, lines)
    for axes in (of_workers, stores, of_calls, of_bytes):
        axes.legend(fontsize=7, frameon=False)
        axes.grid(alpha=0.25, lw=0.6)
    save(figure, path)


def draw_calls(axes: Axes, lines: Sequence[Line]) -> None:
    """CPU of a call against its rows."""
    for name, label, color in (("shard_us", "shard", BLUES[2]), ("client_us", "client", ORANGE)):
        x = np.array([line["rows_a_call"] for line in lines])
        axes.plot(x, [line[name] for line in lines], "o", color=color, ms=4, alpha=0.7)
        a_call, a_row = price_of_a_call(lines, name)
        ends = np.array([x.min(), x.max()])
        axes.plot(
            ends,
            a_call + a_row * ends,
            color=color,
            label=f"{label}: {a_call:,.0f} µs + {a_row:.2f} µs a row",
        )
    as_logs(axes, "rows asked and written in a call", "CPU a call, µs")


def draw_bytes(axes: Axes, lines: Sequence[Line]) -> None:
    """Bytes of a step's calls: the model, counted in messages, and on the network."""
    bars = {"bank": ("sent", "received"), "queue": ("sent",)}
    most = {
        side: max(some(lines, side=side), key=lambda line: (line["shards"], line["workers"])) for side in bars
    }
    places = [(side, way) for side, ways in bars.items() for way in ways]
    kinds = {
        "model": [most[side][f"model_{way}"] for side, way in places],
        "arrays in messages": [most[side][way] for side, way in places],
        "TCP, as the kernel counts": [most[side][f"tcp_{way}"] for side, way in places],
    }
    for number, ((label, sizes), color) in enumerate(
        zip(kinds.items(), (FAINT, BLUES[1], ORANGE), strict=True)
    ):
        for at, size in enumerate(sizes):
            bar = axes.bar(at + 0.27 * (number - 1), size / 1e3, 0.25, color=color, label="" if at else label)
            axes.bar_label(bar, [f"{size / 1e3:,.0f}"], fontsize=7, color=INK)
    most_bytes = max(size for sizes in kinds.values() for size in sizes)
    axes.set(
        yscale="log", ylabel="KB a step, all workers", ylim=(5, 20 * most_bytes / 1e3)
    )  # below the legend
    axes.set_xticks(range(len(places)), [f"{side},\n{way}" for side, way in places])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    found = json.loads(options.result.read_text())
    print(text(found["lines"], found["stores"]))
    draw(found["lines"], found["stores"], options.picture)


if __name__ == "__main__":
    main()
