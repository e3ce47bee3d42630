"""What a run writes down for others: ``metrics.jsonl`` and ``result.json``."""

import errno
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from raycl.errors import StorageError
from raycl.storage import Place

METRICS = "metrics.jsonl"
RESULT = "result.json"
RENAMED = {  # keys of lines and results that older versions wrote
    "spread": "embedding_std",
    "leakage": "batchnorm_leakage",
    "broken_rows": "invalid_rows",
    "left_out": "skipped",
}
_BLOCK = 4_096  # bytes that a file has for itself, even on a full disk
ROLLBACK = "rollback"  # the ``event`` of a line from which the run goes on at an earlier step


@final
class MetricsLog:
    """``metrics.jsonl``: one JSON object a logged step.

    Lines are kept in memory and written out every ``flush_interval_s`` seconds, whole, since an
    object store cannot append. A run that goes on at ``resume_step``, after ``num_rollbacks`` rollbacks,
    first drops the lines after its checkpoint; what led to a rollback is kept. ``check`` is called before
    each write, and may raise.
    """

    def __init__(
        self,
        output: Place,
        *,
        resume_step: int = 0,
        num_rollbacks: int = 0,
        flush_interval_s: float = 5.0,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._place, self._check = output / METRICS, check
        self._flush_interval_s = flush_interval_s
        goes_on = (resume_step or num_rollbacks) and self._place.exists()
        lines = read_metrics(output) if goes_on else []
        self._lines = [json.dumps(line) for line in _until(lines, resume_step, num_rollbacks)]
        self._flushed_at = time.monotonic()

    def write(self, line: Mapping[str, Any]) -> None:
        """Add one line; ``line["step"]`` says when."""
        self._lines.append(json.dumps(_jsonable(line)))
        # The file is written whole: the longer it is, the rarer, so that its cost stays a small part.
        if time.monotonic() - self._flushed_at >= self._flush_interval_s * max(1.0, len(self._lines) / 2_000):
            self.flush()

    def flush(self) -> None:
        """Write all lines to storage; raises ``StorageError``."""
        self._check()
        self._place.write_text("".join(f"{line}\n" for line in self._lines))
        self._flushed_at = time.monotonic()


def read_metrics(output: Place) -> list[dict[str, Any]]:
    """Return the objects of ``metrics.jsonl`` below ``output``, in order."""
    return [with_new_names(json.loads(line)) for line in (output / METRICS).read_text().splitlines()]


def with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return a line or a result under the keys that it has now; one without old keys is returned as it is."""
    if RENAMED.keys() & values.keys():
        return {RENAMED.get(key, key): value for key, value in values.items()}
    return values


def _until(lines: Sequence[Mapping[str, Any]], step: int, num_rollbacks: int) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of all that was rolled back, then those up to the step."""
    num_seen = 0
    for line in lines:
        is_rollback = line.get("event") == ROLLBACK
        if is_rollback and num_seen == num_rollbacks:
            return  # it came to nothing: no checkpoint was made after it
        if num_seen < num_rollbacks or line["step"] <= step:
            yield line
        num_seen += is_rollback


def write_result(output: Place, result: Mapping[str, Any]) -> None:
    """Write ``result.json`` below ``output``; on a full disk over the old one, into the room that it has."""
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
    """Return ``result.json`` below ``output``."""
    return with_new_names(json.loads((output / RESULT).read_text()))


def _is_full(error: BaseException | None) -> bool:
    """Whether a disk, or a user's share of it, has no room left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _jsonable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Round floats to six digits; JSON knows no NaN, so a number that is none becomes null."""
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _jsonable(value)
    if isinstance(value, float):
        return float(f"{value:.6g}") if value - value == 0.0 else None
    return value
