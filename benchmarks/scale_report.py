"""Report the lines of ``scale.py``: exponents, the price of a call, and the table of docs/scale.md.

CPU times cover shards and clients, without Ray's own processes.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from measuring import Line, table

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


def text(lines: Sequence[Line], **more: Any) -> str:
    """Return the table, the fits and other results."""
    return "\n\n".join([table(lines, **TITLES), json.dumps({"fits": fit(lines), **more}, indent=2)])
