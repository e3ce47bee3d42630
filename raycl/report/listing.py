"""``raycl runs``: the runs below a folder. It imports neither torch, Ray nor raycl's configuration, to be fast."""

import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

import yaml
from pyarrow import fs

from raycl.arguments import Address, as_address
from raycl.errors import DataError, StorageError
from raycl.lease import is_being_written, is_claim
from raycl.records import CONFIG, DATA, METRICS, RESULT, ROLLBACK, as_object, read_line
from raycl.report.history import History, read_history
from raycl.storage import Place, absolute, is_outage, parse_object

Answer = TypeVar("Answer")
MAX_DEPTH = 3  # folders below the given one
_NUM_THREADS = 16  # for an object store, whose answers take long
_EVALUATION_METRICS = ("knn_top1", "recall_at_10")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # seven times as fast, where PyYAML has it
# Lines with an evaluation or a rollback, and lines without both braces.
_TELLING = re.compile(rf'"({"|".join(_EVALUATION_METRICS)})": |"event": "{ROLLBACK}"|^[^{{]|[^}}]$'.encode())


@final
@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run in a list.

    Attributes:
        name: its path below the listed folder.
        run: its address.
        recipe: the name of its recipe.
        status: ``running`` if a process writes to it, or else ``finished``, ``stopped``, ``failed``, or ``unfinished``
            if it has no result.
        step: the last logged step.
        num_steps: the planned steps, None if the run counts epochs and has no log, or an older version trains it.
        epoch: the complete epochs.
        num_epochs: the planned epochs, None if the run counts steps.
        metric: the metric of the periodic evaluation, None if there was none.
        best: its largest value that no rollback undid.
        time: the time of the last logged step, in seconds since 1970.
        num_damaged: the damaged lines of the log among those that were read; the report reads all.
    """

    name: str
    run: str
    recipe: str
    status: str
    step: int | None
    num_steps: int | None
    epoch: int | None
    num_epochs: int | None
    metric: str | None
    best: float | None
    time: float
    num_damaged: int = 0


def list_runs(folder: Address) -> list[RunSummary]:
    """Return the runs in a folder, local or on S3, and in the folders below it, up to three levels deep.

    Folders below it that cannot be read are skipped, and a line names them. Raises ``DataError`` if there is no such
    folder, and ``StorageError`` if it cannot be read or the storage does not work.
    """
    root = Place(absolute(as_address("folder", folder)))
    if not root.is_folder():
        raise DataError(f"{root} is not a folder; give one that holds runs")
    skipped: dict[str, StorageError] = {}

    def tried(place: Place, read: Callable[[], Answer]) -> Answer | None:
        try:
            return read()
        except StorageError as error:
            if place == root or is_outage(error):
                raise
            skipped[place.path] = error
            return None

    found: list[tuple[Place, dict[str, fs.FileInfo]]] = []
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        level = [root]
        for _ in range(MAX_DEPTH + 1):
            listed = list(pool.map(lambda each: (each, tried(each, each.entries) or {}), level))
            found += [(place, entries) for place, entries in listed if _is_run(entries)]
            level = [each for place, entries in listed for each in _folders(place, entries)]
        runs = list(pool.map(lambda each: tried(each[0], partial(_summary, *each)), found))
    if skipped:
        first = min(skipped)
        print(
            f"folders that cannot be read were skipped: {', '.join(sorted(skipped))} ({skipped[first]})",
            file=sys.stderr,
        )
    return sorted((run for run in runs if run is not None), key=lambda run: run.name)


def _is_run(entries: Mapping[str, fs.FileInfo]) -> bool:
    """Whether these are the files of a run, which has more than a ``config.yaml``: other programs have one, too."""
    return CONFIG in entries and any(name in (DATA, METRICS, RESULT) or is_claim(name) for name in entries)


def _folders(place: Place, entries: Mapping[str, fs.FileInfo]) -> list[Place]:
    """Return the folders to search below one that is not a run."""
    is_folder = {
        name: info.type == fs.FileType.Directory for name, info in entries.items()
    }  # a socket is none
    names = [name for name in entries if is_folder[name] and not name.startswith((".", "_"))]
    return [] if _is_run(entries) else [place / name for name in names]


def _summary(output: Place, entries: Mapping[str, fs.FileInfo]) -> RunSummary | None:
    """Return the summary of a run, None if ``config.yaml`` is not of a run."""
    config = _read_config(output)
    if config is None:
        return None
    result = (parse_object((output / RESULT).read_bytes()) if RESULT in entries else None) or {}
    lines = (output / METRICS).read_bytes().splitlines() if METRICS in entries else []
    last = next(filter(None, map(read_line, reversed(lines))), {})
    history = read_history(line for line in lines if _TELLING.search(line))
    status = result.get("status")
    # A run that was over has its old result until it is resumed. Without a claim, it costs no other request.
    if any(map(is_claim, entries)) and is_being_written(output):
        status = "running"
    elif status not in ("finished", "stopped", "failed"):
        status = "unfinished"
    metric, best = _best(history, as_object(result.get("final")))
    return RunSummary(
        name=output.path or ".",
        run=output.uri,
        recipe=config["recipe"],
        status=status,
        step=result.get("steps", last.get("step")),
        num_steps=result.get("steps", _planned(config["stages"], "steps") or last.get("num_steps")),
        epoch=result.get("epochs", last.get("epoch")),
        num_epochs=_planned(config["stages"], "epochs"),
        metric=metric,
        best=best,
        time=last.get("time") or max(info.mtime_ns or 0 for info in entries.values()) / 1e9,
        num_damaged=history.num_unreadable,
    )


def _read_config(output: Place) -> dict[str, Any] | None:
    """Return the values in ``config.yaml``; None if another program wrote it."""
    try:
        config = _Loader((output / CONFIG).read_bytes()).get_single_data()
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    match config:
        case {"recipe": str(), "stages": list(stages)} if all(isinstance(each, dict) for each in stages):
            return config
    return None


def _planned(stages: list[Any], unit: str) -> int | None:
    """Return the sum of the lengths of all stages, None unless all have this unit."""
    lengths = [stage.get(unit) for stage in stages]
    return sum(lengths) if all(isinstance(each, int) for each in lengths) else None


def _best(history: History, final: Mapping[str, Any]) -> tuple[str | None, float | None]:
    """Return the evaluation metric and its largest value, in the log or else at the end."""
    logged = [(name, history[name].max) for name in _EVALUATION_METRICS]
    found = [(name, value) for name, value in logged if value is not None] or [
        (name, final[name]) for name in _EVALUATION_METRICS if isinstance(final.get(name), int | float)
    ]
    return max(found, key=lambda each: each[1], default=(None, None))
