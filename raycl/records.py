"""The files of a run's output: their names, ``metrics.jsonl``, ``result.json``, and the list of checkpoints."""

import contextlib
import errno
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from raycl.chain import LogHash
from raycl.errors import DataError, StorageError
from raycl.storage import Place, absolute, parse_object

CONFIG = "config.yaml"
DATA = "data.json"
READ_ROWS = "read_rows.json.gz"  # of a stream: the counts of each fragment
METRICS = "metrics.jsonl"
RESULT = "result.json"
CHECKPOINTS = "checkpoints"  # the folder of Ray Train's checkpoints
CHECKPOINT_LIST = "checkpoint_manager_snapshot.json"  # Ray Train's list of them
STATE = "state.pt"  # in each checkpoint
_COPY = "checkpoint_list.json"  # of the list
_LIST_ATTEMPTS, _LIST_WAIT_S = 3, 0.5
_RESULTS, _LATEST, _NUMBERS = "checkpoint_results", "latest_checkpoint_result", "checkpoint_report_indices"
_NAME = "checkpoint_dir_name"
RENAMED = {  # keys of lines and results that older versions wrote
    "spread": "embedding_std",
    "leakage": "batchnorm_leakage",
    "broken_rows": "invalid_rows",
    "left_out": "skipped",
}
_BLOCK = 4_096  # bytes allocated to any file, even on a full disk
FAILURE = "failure"  # the ``event`` of a line about the loss of a group of workers
NOT_EVALUATED = ": no periodic "  # in a notice, after the reason and before the measure
ROLLBACK = "rollback"  # the ``event`` of a line after which the run resumes at an earlier step


@final
class MetricsLog:
    """``metrics.jsonl``: one JSON object per logged step.

    Lines are kept in memory, and the whole file is written every ``flush_interval_s`` seconds, since an
    object store cannot append. A run that resumes at ``resume_step``, after ``num_rollbacks`` rollbacks,
    drops the lines after its checkpoint, but keeps the lines before each rollback. A run that starts over keeps
    the lines about lost groups only, at step 0. ``check`` is called before each write, and may raise.
    """

    def __init__(
        self,
        output: Place,
        *,
        resume_step: int | None = None,
        num_rollbacks: int = 0,
        flush_interval_s: float = 5.0,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._place, self._check = output / METRICS, check
        self._flush_interval_s = flush_interval_s
        lines = read_metrics(output)
        if resume_step is None:  # at step 0, so that a later group that resumes keeps them, too
            lines = [{**line, "step": 0} for line in lines if line.get("event") == FAILURE]
        self._lines, self._hash = list[str](), LogHash()
        self.failed_at = set[int]()  # of the failures in the lines that are kept
        for line in _until(lines, resume_step or 0, num_rollbacks):
            self._add(line)
            if "failed_at" in line:
                self.failed_at.add(line["failed_at"])
        self._flushed_at = time.monotonic()

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line, which must contain ``step``."""
        self._add(_jsonable(line))
        # A longer file is written less often, to bound the cost of rewriting it.
        if time.monotonic() - self._flushed_at >= self._flush_interval_s * max(1.0, len(self._lines) / 2_000):
            self.flush()

    def head(self) -> dict[str, Any]:
        """Return the number of all lines so far and their SHA-256."""
        return self._hash.head()

    def flush(self) -> None:
        """Write all lines to storage; raises ``StorageError``."""
        self._check()
        self._place.write_text("".join(f"{line}\n" for line in self._lines))
        self._flushed_at = time.monotonic()

    def _add(self, line: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(line))
        self._hash.add(self._lines[-1])


def find_run(run: str) -> Place:
    """Return the output of a run; raises ``DataError`` if there is none, ``StorageError`` if it cannot be read."""
    output = Place(absolute(run))
    if not (output / CONFIG).exists():
        raise DataError(f"{run} holds no run: there is no {CONFIG}; give the --output of a run")
    return output


def read_metrics(output: Place) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` in ``output``, in order, none without a log.

    Raises ``DataError`` for a damaged line.
    """
    if not (output / METRICS).exists():
        return []
    lines = list(map(read_line, (output / METRICS).read_text().splitlines()))
    if None in lines:
        raise DataError(f"line {lines.index(None) + 1} of {output / METRICS} is damaged: remove or repair it")
    return [line for line in lines if line is not None]


def read_line(line: str | bytes) -> dict[str, Any] | None:
    """Return a line of ``metrics.jsonl``, None if it is damaged."""
    try:
        values = with_new_names(json.loads(line))
        numbers = [values["step"], *(values.get(name) or 0 for name in ("time", "epoch", "num_steps"))]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    is_valid = isinstance(numbers[0], int) and all(isinstance(each, int | float) for each in numbers)
    return values if is_valid else None


def wall_seconds(output: Place) -> float:
    """Return the time that a run has taken so far by its last line, 0 for a new one."""
    return max((line.get("wall_seconds") or 0.0 for line in read_metrics(output)), default=0.0)


def failures(output: Place) -> list[dict[str, Any]]:
    """Return the lines about lost groups of workers: their text, and the time and steps that each one cost."""
    keys = ("step", "text", "lost_seconds", "repeated_steps")
    return [{key: line[key] for key in keys} for line in read_metrics(output) if line.get("event") == FAILURE]


def reported_failures(output: Place) -> set[int]:
    """Return when the groups of workers were lost that have a line, in whole seconds since 1970."""
    return {line["failed_at"] for line in read_metrics(output) if "failed_at" in line}


def run_name(output: Place) -> str:
    """Return the name of a run: its folder, and also the parent folder if that is just ``run``, as in the demo."""
    if output.name != "run":
        return output.name
    with contextlib.suppress(StorageError):  # a whole bucket has no parent
        return f"{output.parent.name}/run"
    return output.name


def with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Rename the old keys of a line or a result; without old keys it is returned unchanged."""
    if RENAMED.keys() & values.keys():
        return {RENAMED.get(key, key): value for key, value in values.items()}
    return values


def _until(lines: Sequence[Mapping[str, Any]], step: int, num_rollbacks: int) -> Iterator[Mapping[str, Any]]:
    """Yield the lines before the last rollback, then the lines up to the step."""
    num_seen = 0
    for line in lines:
        is_rollback = line.get("event") == ROLLBACK
        if is_rollback and num_seen == num_rollbacks:
            return  # no checkpoint was saved after this rollback
        if num_seen < num_rollbacks or line["step"] <= step:
            yield line
        num_seen += is_rollback


def write_result(output: Place, result: Mapping[str, Any]) -> None:
    """Write ``result.json`` to ``output``; on a full disk, overwrite the old file in its allocated block."""
    place, text = output / RESULT, json.dumps(_jsonable(result), indent=2) + "\n"
    try:
        place.write_text(text)
    except StorageError as error:
        if not (place.is_local and place.exists() and _is_full(error.__cause__)):
            raise
        content = text.encode()
        if len(content) > _BLOCK:
            short = {"status": result["status"], "error": str(result.get("error", ""))[:500]}
            content = f"{json.dumps(short)}\n".encode()
        with place.wrap_errors("write"), open(place.resolve()[1], "r+b") as file:
            file.write(content)
            file.truncate()


def read_result(output: Place) -> dict[str, Any]:
    """Return ``result.json`` of ``output``; raises ``DataError`` if it is damaged."""
    return with_new_names(read_object(output / RESULT))


def read_object(place: Place, *, remedy: str = "") -> dict[str, Any]:
    """Return the object in a file of JSON; raises ``DataError``, which ends with the remedy, if the file is damaged."""
    try:
        found = json.loads(place.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__} instead of an object")
    except ValueError as error:
        raise DataError(f"{place} is damaged: {error}{remedy}") from None
    return found


def as_object(value: Any) -> dict[str, Any]:
    """Return an object in a file of JSON, an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def _is_full(error: BaseException | None) -> bool:
    """Whether the disk or the user's quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _jsonable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Round floats to six digits; NaN and infinity become null, since JSON cannot represent them."""
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _jsonable(value)
    if isinstance(value, float):
        return float(f"{value:.6g}") if value - value == 0.0 else None
    return value


def backup_manifest(output: Place) -> None:
    """Copy the list of checkpoints, unless it is truncated."""
    if output.is_local and (listed := _read(output / CHECKPOINTS / CHECKPOINT_LIST)) is not None:
        (output / CHECKPOINTS / _COPY).write_text(json.dumps(listed))


def repair_manifest(output: Place) -> str | None:
    """Replace a truncated list of checkpoints by its copy; return a message, or None for an intact list.

    Without a copy, at most one checkpoint should exist, which no list contains: the truncated list is
    deleted.

    Raises:
        StorageError: The list is truncated, and there are several checkpoints and no copy.
    """
    folder = output / CHECKPOINTS
    place = folder / CHECKPOINT_LIST
    if not (output.is_local and place.exists()) or _read(place) is not None:
        return None
    copy = copied_list(folder)
    if copy is not None:
        place.write_text(json.dumps(copy))
        return "the list of checkpoints was truncated: resuming from the one before"
    if len({path.split("/")[0] for path, _ in folder.files() if "/" in path}) > 1:
        raise StorageError(
            f"{place} is truncated and has no copy: move the folder {CHECKPOINTS} away to start over with "
            "--resume, or give another --output"
        )
    Path(place.resolve()[1]).unlink()
    return "the list of the first checkpoint was truncated: starting over"


def copied_list(folder: Place) -> dict[str, Any] | None:
    """Return the copied list of checkpoints in ``folder``, without deleted ones; None without a copy."""
    copy = _read(folder / _COPY)
    return None if copy is None else _without_deleted(copy, folder)


def last_checkpoint(output: Place) -> str:
    """Return the name of the last complete checkpoint; raises ``StorageError`` if there is none."""
    folder = output / CHECKPOINTS
    latest = (
        _read_list(folder).get("latest_checkpoint_result") if (folder / CHECKPOINT_LIST).exists() else None
    )
    if latest is None:
        raise StorageError(f"the run at {output} has no checkpoint yet; repeat the command after its first")
    return latest["checkpoint_dir_name"]


def complete_checkpoints(output: Place) -> list[str]:
    """Return the names of the complete checkpoints that the run still has, in no order."""
    folder = output / CHECKPOINTS
    listed = _read_list(folder) if (folder / CHECKPOINT_LIST).exists() else {}
    names = {each[_NAME] for each in [*listed.get(_RESULTS, []), listed.get(_LATEST)] if each}
    return sorted(name for name in names if (folder / name / STATE).exists())


def _read_list(folder: Place) -> dict[str, Any]:
    place = folder / CHECKPOINT_LIST
    for _ in range(_LIST_ATTEMPTS):
        if (listed := _read(place)) is not None:
            return listed
        time.sleep(_LIST_WAIT_S)  # Ray rewrites the file in place, so it may be incomplete
    copy = copied_list(folder)
    if copy is not None:
        return copy
    raise StorageError(f"cannot read {place}: the list of checkpoints is damaged; repeat the command")


def _read(place: Place) -> dict[str, Any] | None:
    """Return the parsed content, or None if the file is missing or truncated."""
    return parse_object(place.read_text()) if place.exists() else None


def _without_deleted(listed: dict[str, Any], folder: Place) -> dict[str, Any]:
    """Remove checkpoints that were deleted after the copy was made."""
    numbers = listed.get(_NUMBERS) or range(len(listed[_RESULTS]))
    kept = [
        (result, number)
        for result, number in zip(listed[_RESULTS], numbers, strict=True)
        if (folder / result[_NAME]).exists()
    ]
    results = [result for result, _ in kept]
    # Results are ordered by score, numbers by time.
    newest = max(kept, key=lambda pair: pair[1], default=(None, 0))[0]
    latest = listed[_LATEST] if listed[_LATEST] in results else newest
    return listed | {_RESULTS: results, _NUMBERS: [number for _, number in kept], _LATEST: latest}
