"""Tables of a report: the facts of a run, its skipped rows, and the differences of several runs."""

import datetime
import math
from collections.abc import Sequence
from typing import Any

from raycl.config import active_settings, flat
from raycl.config.overrides import differences
from raycl.display import Table
from raycl.loss_specs import LOSSES
from raycl.report.run import Run
from raycl.report.sections import EVALUATION_METRICS, timeline_of

NONE = "-"


def run_facts(run: Run) -> list[tuple[str, str]]:
    """Return the facts of a run by name."""
    config, history, result = run.config, run.history, run.result
    has_neighbors = [LOSSES[stage.loss].neighbors for stage in config.stages]
    negatives = ["in the batch"] if config.negatives.in_batch and config.key != "memory_bank" else []
    if config.negatives.store == "partition":
        negatives = ["the whole data set, by partition functions"]
    elif config.negatives.store != "none" and not all(has_neighbors):
        negatives.append(config.negatives.store.replace("_", " "))
    if config.data.kind == "pairs" and config.negatives.explicit:
        negatives.append("explicit ones where pairs have them")
    if config.negatives.mined.num:
        negatives.append("mined")
    data = run.data.get("data") or "a Ray Dataset"
    facts = {
        "Data": ", ".join(map(str, data)) if isinstance(data, list) else str(data),
        "Recipe": config.recipe,
        "Rows": _count(run.data.get("num_rows")),
        "Encoder": config.encoder.name,
        "Loss": ", ".join(dict.fromkeys(stage.loss for stage in config.stages)),
        "Positives": "the nearest rows of the queue" if any(has_neighbors) else NONE,
        "Negatives": " and ".join(negatives) or NONE,
        "Batch size": ", ".join(f"{stage.batch_size:,}" for stage in config.stages),
        "Workers": _count(history["workers"].last),
        "Steps": _count(result.get("steps", history["step"].last)),
        "Epochs": _count(result.get("epochs", history["epoch"].last)),
        "Training time": duration(result.get("seconds", history["seconds"].last)),
        "Samples": _count(history["samples"].last),
        "Flat images": _count(result.get("flat_images") or None),
        "Last logged": _time(history["time"].last),
    }
    return [(name, value) for name, value in facts.items() if value != NONE]


def event_table(run: Run) -> Table | None:
    """Return the events of a run with the letters of their marks, None if there are none."""
    rows = [
        (letter, f"{event.step:,}", event.kind, event.text) for letter, event in timeline_of(run).lettered()
    ]
    return Table(title="Events", columns=("mark", "step", "event", "text"), rows=rows) if rows else None


def skipped_rows(run: Run) -> Table | None:
    """Return the number of skipped rows by cause, None if the run is not over or skipped none."""
    invalid, unused = (run.result.get(name) or {} for name in ("invalid_rows", "skipped"))
    rows = [(str(cause), _count(count), "invalid") for cause, count in invalid.items()]
    rows += [(str(cause), _count(count), "valid, but not used") for cause, count in unused.items()]
    return Table(title="Skipped rows", columns=("cause", "rows", "kind"), rows=rows) if rows else None


def final_metrics(runs: Sequence[Run]) -> Table:
    """Return the last metrics of several runs, one row per run; metrics that no run has are skipped."""
    found = [_last_metrics(run) for run in runs]
    columns = [name for name in found[0] if {metrics[name] for metrics in found} != {NONE}]
    rows = [
        (run.name, *(metrics[name] for name in columns)) for run, metrics in zip(runs, found, strict=True)
    ]
    return Table(title="Final metrics", columns=("run", *columns), rows=rows)


def _last_metrics(run: Run) -> dict[str, str]:
    history, result = run.history, run.result
    metrics = {
        "status": run.status,
        "steps": _count(history["step"].last),
        "samples": _count(history["samples"].last),
        "training time": duration(result.get("seconds", history["seconds"].last)),
        "samples/s": _number(run.samples_per_second),
        "loss": _number(history["loss"].last),
    }
    for name, title in EVALUATION_METRICS.items():
        metrics[title] = _format(history[name].last, ".1%")
        metrics[f"best {title}"] = _format(history[name].max, ".1%")
    return metrics | {
        "effective rank": _number(history["effective_rank"].last),
        "gap": _number(history["positive_negative_gap"].last),
        "waits for data": _format(history["data_wait_fraction"].mean, ".1%"),
    }


def differing_settings(runs: Sequence[Run]) -> Table:
    """Return the settings in which the runs differ, one row per setting that has an effect in a run."""
    first, *others = runs
    keys = dict.fromkeys(key for other in others for key in differences(first.config, other.config))
    settings = [flat(active_settings(run.config)) for run in runs]
    rows = [(key, *(_setting(values.get(key, NONE)) for values in settings)) for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return Table(title="Settings that differ", columns=("setting", *(run.name for run in runs)), rows=rows)


def duration(seconds: Any) -> str:
    """Return 3 h 5 min, 12 min 4 s, or 9 s."""
    if not _is_finite(seconds):
        return NONE
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{left} s"


def _number(value: Any) -> str:
    """Return a number with four significant digits, or a dash."""
    return _format(value, ",.0f" if _is_finite(value) and abs(value) >= 1_000 else ".4g")


def _count(value: Any) -> str:
    return f"{int(value):,}" if _is_finite(value) else NONE


def _format(value: Any, form: str) -> str:
    """Return a finite number in this format, or a dash."""
    return format(value, form) if _is_finite(value) else NONE


def _time(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{datetime.datetime.fromtimestamp(value, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def _setting(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
