"""The metrics that Ray exports to Prometheus, and the thread that records them."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import ray
from ray.util.metrics import Counter, Gauge

# Ray exports a gauge once and forgets it two exports later: a lasting value must be recorded again, as
# often as the shortest export interval of Ray.
EVERY_S = 1.0


@final
@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric; readings of a counter are totals since the start of their process.

    ``tags`` are constant in a process; ``by`` names a further tag that differs between readings.
    """

    name: str
    description: str
    tags: tuple[str, ...]
    by: str | None = None
    kind: Literal["gauge", "counter"] = "gauge"

    @property
    def exported(self) -> str:
        """Its name in Prometheus."""
        return f"ray_raycl_{self.name}{'_total' if self.kind == 'counter' else ''}"


class Reading(NamedTuple):
    """The current value of a metric, and the value of its tag ``by``."""

    name: str
    value: float
    tag: str = ""


_RUN = ("run", "recipe")
_BANK = ("run", "bank", "shard")

# Numbers of a line of metrics.jsonl, under the same names.
_OF_A_LINE = {
    "step": "Optimization steps made",
    "samples": "Samples trained on",
    "epoch": "Epochs over",
    "stage": "Stage of the run, from 0 on",
    "workers": "Workers that train",
    "seconds": "Seconds of training, without evaluation and checkpoints",
    "loss": "Loss of the last logged step",
    "learning_rate": "Learning rate of the last logged step",
    "samples_per_second": "Samples per second, over all workers",
    "data_wait_fraction": "Fraction of the time that the first worker waits for data",
    "negatives_wait_fraction": "Fraction of the time that the first worker waits for the bank",
    "negatives_age_mean": "Mean age of the negatives, in steps",
    "negatives_age_max": "Maximum age of the negatives, in steps",
    "bank_restarts": "Restarted shards of the bank",
    "knn_top1": "Accuracy of the periodic kNN evaluation",
    "recall_at_1": "Held-out pairs whose key is the nearest one",
    "recall_at_10": "Held-out pairs whose key is among the nearest ten",
    "batchnorm_leakage": "How much easier shared BatchNorm statistics make the task",
    "embedding_std": "Standard deviation of the embeddings: 1 on the whole sphere, 0 at a point",
    "effective_rank": "Effective rank of the embeddings",
    "uniformity": "Uniformity of the embeddings",
    "alignment": "Mean squared distance of positives",
    "positive_negative_gap": "Similarity of positives less that of other pairs",
    "tracking_failures": "Failed attempts to write metrics to a tracker",
}

METRICS = {
    metric.name: metric
    for metric in (
        *(Metric(name=name, description=text, tags=_RUN) for name, text in _OF_A_LINE.items()),
        Metric(
            name="trained_steps",
            description="Steps made, including repetitions after a restart",
            tags=_RUN,
            kind="counter",
        ),
        Metric(
            name="trained_samples",
            description="Samples trained on, including repetitions after a restart",
            tags=_RUN,
            kind="counter",
        ),
        Metric(name="rows_read", description="Rows of the data read so far, each once", tags=_RUN),
        Metric(name="rows_invalid", description="Invalid rows that were skipped", tags=_RUN, by="cause"),
        Metric(name="rows_skipped", description="Valid rows that were skipped", tags=_RUN, by="cause"),
        Metric(name="bank_rows", description="Rows that a shard of the bank holds", tags=_BANK),
        Metric(name="bank_bytes", description="Memory of a full shard, in bytes", tags=_BANK),
        Metric(name="bank_rows_written", description="Rows that workers wrote", tags=_BANK, kind="counter"),
        Metric(name="bank_rows_read", description="Rows that workers read", tags=_BANK, kind="counter"),
        Metric(
            name="bank_calls",
            description="Calls to a shard: writes, reads, queries",
            tags=_BANK,
            by="method",
            kind="counter",
        ),
    )
}


@final
class Exporter:
    """Record the readings that ``read`` returns once per second, from a thread of its own.

    ``read`` is a method, and the thread ends with its object. Readings of unknown names are skipped.
    Nothing happens without Ray, or without its metrics agent (part of ``ray[default]``).
    """

    def __init__(self, tags: Mapping[str, str], read: Callable[[], Iterable[Reading]]) -> None:
        self._tags, self._read = dict(tags), weakref.WeakMethod(read)
        self._instruments: dict[str, Counter | Gauge] = {}
        self._totals: dict[tuple[str, str], float] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raycl-prometheus", daemon=True)
        if ray.is_initialized():
            self._thread.start()

    def close(self) -> None:
        """Record the last readings and stop."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        closed = False
        while not closed and self._read() is not None:
            closed = self._closed.wait(EVERY_S)
            # A reading may fail while its owner changes; the next one will succeed.
            with contextlib.suppress(Exception):
                self._record_all()

    def _record_all(self) -> None:
        read = self._read()
        for reading in read() if read else ():
            if metric := METRICS.get(reading.name):
                self._record(metric, reading)

    def _record(self, metric: Metric, reading: Reading) -> None:
        tags = self._tags if metric.by is None else self._tags | {metric.by: reading.tag}
        instrument = self._instruments.get(metric.name)
        if instrument is None:
            instrument = self._instruments[metric.name] = _instrument(metric)
        if isinstance(instrument, Gauge):
            instrument.set(reading.value, tags)
            return
        key = (reading.name, reading.tag)
        if (more := reading.value - self._totals.get(key, 0.0)) > 0:
            instrument.inc(more, tags)
            self._totals[key] = reading.value


def _instrument(metric: Metric) -> Counter | Gauge:
    kind = Counter if metric.kind == "counter" else Gauge
    keys = metric.tags if metric.by is None else (*metric.tags, metric.by)
    return kind(f"raycl_{metric.name}", metric.description, keys)
