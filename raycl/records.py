"""What a run writes down for others: ``metrics.jsonl`` and ``result.json``."""

import json
import time
from collections.abc import Mapping
from typing import Any, final

from raycl.storage import Place

METRICS = "metrics.jsonl"
RESULT = "result.json"


@final
class MetricsLog:
    """``metrics.jsonl``: one JSON object a logged step.

    Lines are kept in memory and written out every ``flush_interval_s`` seconds, whole, since an
    object store cannot append. A resumed run drops the lines after its checkpoint first.
    """

    def __init__(self, output: Place, *, resume_step: int = 0, flush_interval_s: float = 5.0) -> None:
        self._place = output / METRICS
        self._flush_interval_s = flush_interval_s
        kept = read_metrics(output) if resume_step and self._place.exists() else []
        self._lines = [json.dumps(line) for line in kept if line["step"] <= resume_step]
        self._flushed_at = time.monotonic()

    def write(self, line: Mapping[str, Any]) -> None:
        """Add one line; ``line["step"]`` says when."""
        self._lines.append(json.dumps(_jsonable(line)))
        if time.monotonic() - self._flushed_at >= self._flush_interval_s:
            self.flush()

    def flush(self) -> None:
        """Write all lines to storage; raises ``StorageError``."""
        self._place.write_text("".join(f"{line}\n" for line in self._lines))
        self._flushed_at = time.monotonic()


def read_metrics(output: Place) -> list[dict[str, Any]]:
    """Return the objects of ``metrics.jsonl`` below ``output``, in order."""
    return [json.loads(line) for line in (output / METRICS).read_text().splitlines()]


def write_result(output: Place, result: Mapping[str, Any]) -> None:
    """Write ``result.json`` below ``output``."""
    (output / RESULT).write_text(json.dumps(_jsonable(result), indent=2) + "\n")


def read_result(output: Place) -> dict[str, Any]:
    """Return ``result.json`` below ``output``."""
    return json.loads((output / RESULT).read_text())


def _jsonable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Round floats to six digits; JSON knows no NaN, so a number that is none becomes null."""
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _jsonable(value)
    if isinstance(value, float):
        return float(f"{value:.6g}") if value - value == 0.0 else None
    return value
