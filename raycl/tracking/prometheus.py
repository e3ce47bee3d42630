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


_RUN = ("run", "recipe")
_BANK = ("run", "bank", "shard")


@final
@dataclass(frozen=True)
class Metric:
    """One metric; readings of a counter are totals since the start of their process.

    ``tags`` are constant in a process; ``by`` names a further tag that differs between readings.
    """

    name: str
    description: str
    tags: tuple[str, ...] = _RUN
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


# Numbers of a line of metrics.jsonl, under the same names.
_OF_A_LINE = {
    "step": "Optimization steps made",
    "samples": "Samples trained on",
    "epoch": "Epochs over",
    "stage": "Stage of the run, from 0 on",
    "workers": "Workers that train",
    "seconds": "Seconds of training, without evaluation and checkpoints",
    "goodput": "Time of the steps that counted, over all time of the run",
    "loss": "Loss of the last logged step",
    "learning_rate": "Learning rate of the last logged step",
    "samples_per_second": "Samples per second, over all workers",
    "data_wait_fraction": "Fraction of the time that the first worker waits for data",
    "negatives_wait_fraction": "Fraction of the time that the slowest worker waits for the bank",
    "negatives_age_mean": "Mean age of the negatives, in steps",
    "negatives_age_max": "Maximum age of the negatives, in steps",
    "key_age_mean": "Mean age of the keys from the pool, in steps",
    "key_age_max": "Maximum age of the keys from the pool, in steps",
    "own_keys_fraction": "Fraction of the batches whose keys the first worker encoded itself",
    "key_encoders": "Actors that encode keys",
    "bank_restarts": "Restarted shards of the bank",
    "knn_top1": "Accuracy of the periodic kNN evaluation",
    "recall_at_1": "Held-out pairs whose key is the nearest one",
    "recall_at_10": "Held-out pairs whose key is among the nearest ten",
    "batchnorm_leakage": "How much easier shared BatchNorm statistics make the task",
    "embedding_std": "Standard deviation of the embeddings: 1 on the whole sphere, 0 at a point",
    "effective_rank": "Effective rank of the embeddings",
    "uniformity": "Uniformity of the embeddings",
    "alignment": "Mean squared distance of positives",
    "positive_negative_gap": "Similarity of positives minus similarity of other pairs",
    "tracking_failures": "Failed attempts to write metrics to a tracker",
}

_REPEATED = "including repetitions after a restart"
_OTHERS = (
    Metric("trained_steps", f"Steps made, {_REPEATED}", kind="counter"),
    Metric("trained_samples", f"Samples trained on, {_REPEATED}", kind="counter"),
    Metric("rows_read", "Rows of the data read so far, each once"),
    Metric("rows_invalid", "Invalid rows that were skipped", by="cause"),
    Metric("rows_skipped", "Valid rows that were skipped", by="cause"),
    Metric("bank_rows", "Rows that a shard of the bank holds", _BANK),
    Metric("bank_bytes", "Memory of a full shard, in bytes", _BANK),
    Metric("bank_rows_written", "Rows that workers wrote", _BANK, kind="counter"),
    Metric("bank_rows_read", "Rows that workers read", _BANK, kind="counter"),
    Metric("bank_calls", "Calls to a shard: writes, reads, queries", _BANK, by="method", kind="counter"),
)
METRICS = {name: Metric(name, text) for name, text in _OF_A_LINE.items()}
METRICS |= {metric.name: metric for metric in _OTHERS}


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
        if metric.name not in self._instruments:
            kind = Counter if metric.kind == "counter" else Gauge
            self._instruments[metric.name] = kind(f"raycl_{metric.name}", metric.description, tuple(tags))
        instrument = self._instruments[metric.name]
        if isinstance(instrument, Gauge):
            instrument.set(reading.value, tags)
            return
        key = (reading.name, reading.tag)
        if (more := reading.value - self._totals.get(key, 0.0)) > 0:
            instrument.inc(more, tags)
            self._totals[key] = reading.value
