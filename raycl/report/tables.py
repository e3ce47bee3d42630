"""Tables of a report: what a run is, what came of it, and in what several runs differ."""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raycl.config import leaves
from raycl.config.overrides import differences
from raycl.report.figures import JUDGMENTS
from raycl.report.run import Run

NONE = "-"


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under a head; the first cell of a row names it."""

    title: str
    head: list[str]
    rows: list[list[str]]


def facts(run: Run) -> list[tuple[str, str]]:
    """Return what the run is, by name."""
    config, history, result = run.config, run.history, run.result
    store = config.negatives.store.replace("_", " ")
    negatives = [
        *(["in the batch"] if config.negatives.in_batch else []),
        *([] if store == "none" else [store]),
    ]
    found = {
        "Recipe": config.recipe,
        "Data": str(run.data.get("data") or "a Ray Dataset"),
        "Rows": _count(run.data.get("num_rows")),
        "Encoder": config.encoder.name,
        "Loss": ", ".join(dict.fromkeys(stage.loss for stage in config.stages)),
        "Negatives": " and ".join(negatives) or "those of the pairs",
        "Batch size": ", ".join(f"{stage.batch_size:,}" for stage in config.stages),
        "Workers": _count(history["workers"].last),
        "Steps": _count(result.get("steps", history["step"].last)),
        "Epochs": _count(result.get("epochs", history["epoch"].last)),
        "Training time": duration(result.get("seconds", history["seconds"].last)),
        "Samples": _count(history["samples"].last),
        "Flat images": _count(result.get("flat_images") or None),
        "Last line": _time(history["time"].last),
    }
    return [(name, value) for name, value in found.items() if value != NONE]


def broken_rows(run: Run) -> Table | None:
    """Return how many rows were left out, by cause; None if the run is not over or none was."""
    broken, left_out = (run.result.get(name) or {} for name in ("broken_rows", "left_out"))
    rows = [[str(cause), _count(count), "broken"] for cause, count in broken.items()]
    rows += [[str(cause), _count(count), "sound, of no use"] for cause, count in left_out.items()]
    if not rows:
        return None
    return Table(title="Rows left out", head=["cause", "rows", "kind"], rows=rows)


def final_figures(runs: Sequence[Run]) -> Table:
    """Return the last figures of several runs, a row each."""
    columns: dict[str, Callable[[Run], str]] = {
        "status": lambda run: run.status,
        "steps": lambda run: _count(run.history["step"].last),
        "samples": lambda run: _count(run.history["samples"].last),
        "training time": lambda run: duration(run.result.get("seconds", run.history["seconds"].last)),
        "samples/s": lambda run: number(
            run.result.get("samples_per_second", _mean(run, "samples_per_second"))
        ),
        "loss": lambda run: number(run.history["loss"].last),
    }
    for name, text in JUDGMENTS.items():
        columns[text] = lambda run, name=name: _percent(run.history[name].last)
        columns[f"best {text}"] = lambda run, name=name: _percent(_best(run, name))
    columns |= {
        "effective rank": lambda run: number(run.history["effective_rank"].last),
        "gap": lambda run: number(run.history["positive_negative_gap"].last),
        "waits for data": lambda run: _percent(_mean(run, "data_wait_fraction")),
    }
    cells = {name: [look(run) for run in runs] for name, look in columns.items()}
    used = [name for name, values in cells.items() if set(values) != {NONE}]
    rows = [[run.name, *(cells[name][place] for name in used)] for place, run in enumerate(runs)]
    return Table(title="Final figures", head=["run", *used], rows=rows)


def differing_settings(runs: Sequence[Run]) -> Table:
    """Return the settings in which the runs differ, a row each."""
    first, *others = runs
    keys = dict.fromkeys(key for other in others for key in differences(first.config, other.config))
    flat = [leaves(run.config) for run in runs]
    rows = [[key, *(_setting(values, key) for values in flat)] for key in keys]
    return Table(title="Settings that differ", head=["setting", *(run.name for run in runs)], rows=rows)


def number(value: Any) -> str:
    """Return a number with four digits that count, or a dash."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return NONE
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration(seconds: Any) -> str:
    """Return 3 h 5 min, 12 min 4 s, or 9 s."""
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return NONE
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{left} s"


def _setting(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key, NONE)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _mean(run: Run, name: str) -> float | None:
    value = run.history[name].kept().value
    good = value[~np.isnan(value)]
    return float(good.mean()) if len(good) else None


def _best(run: Run, name: str) -> float | None:
    value = run.history[name].kept().value
    good = value[~np.isnan(value)]
    return float(good.max()) if len(good) else None


def _percent(value: float | None) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:.1%}"


def _count(value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return NONE
    return f"{int(value):,}"


def _time(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{datetime.datetime.fromtimestamp(value, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
