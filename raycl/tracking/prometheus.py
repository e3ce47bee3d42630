"""What Ray exports to Prometheus: every metric by name, and what records it."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import ray
from ray.util.metrics import Counter, Gauge

# Ray hands a gauge on once, at its next export, and forgets it two exports later: what is to stay
# must be recorded again, as often as the shortest interval that Ray allows.
EVERY_S = 1.0


@final
@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric; readings of a counter are totals since its process began.

    ``tags`` are the same for all readings of a process but the last one, if ``by`` names it.
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
    """The value of a metric now, and that of the tag it is told apart by."""

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
    "seconds": "Seconds of training, judgments and checkpoints left out",
    "loss": "Loss of the last logged step",
    "learning_rate": "Learning rate of the last logged step",
    "samples_per_second": "Samples trained on a second, over all workers",
    "data_wait_fraction": "Fraction of the time that the first worker waits for data",
    "negatives_wait_fraction": "Fraction of the time that the first worker waits for the bank",
    "negatives_age_mean": "Mean age of the negatives lent, in steps",
    "negatives_age_max": "Greatest age of the negatives lent, in steps",
    "bank_restarts": "Shards of the bank that came back from their death",
    "knn_top1": "Accuracy of the periodic kNN judge",
    "recall_at_1": "Held-out pairs whose key is the nearest one",
    "recall_at_10": "Held-out pairs whose key is among the nearest ten",
    "leakage": "How much easier shared BatchNorm statistics make the task",
    "spread": "Spread of the embeddings: 1 on the whole sphere, 0 at a point",
    "effective_rank": "Effective rank of the embeddings",
    "uniformity": "Uniformity of the embeddings",
    "alignment": "Mean squared distance of positives",
    "positive_negative_gap": "Similarity of positives less that of other pairs",
    "tracking_failures": "Failed attempts to hand metrics to a tracker",
}

METRICS = {
    metric.name: metric
    for metric in (
        *(Metric(name=name, description=text, tags=_RUN) for name, text in _OF_A_LINE.items()),
        Metric(
            name="trained_steps",
            description="Steps made, also those made again after a restart",
            tags=_RUN,
            kind="counter",
        ),
        Metric(
            name="trained_samples",
            description="Samples trained on, also those trained on again after a restart",
            tags=_RUN,
            kind="counter",
        ),
        Metric(name="rows_read", description="Rows of the data read so far, each once", tags=_RUN),
        Metric(
            name="rows_broken", description="Rows left out because they are broken", tags=_RUN, by="cause"
        ),
        Metric(name="rows_left_out", description="Rows that are sound but of no use", tags=_RUN, by="cause"),
        Metric(name="bank_rows", description="Rows that a shard of the bank holds", tags=_BANK),
        Metric(name="bank_bytes", description="Memory of a full shard, in bytes", tags=_BANK),
        Metric(name="bank_rows_written", description="Rows that workers wrote", tags=_BANK, kind="counter"),
        Metric(name="bank_rows_read", description="Rows that workers read", tags=_BANK, kind="counter"),
        Metric(
            name="bank_calls",
            description="Calls to a shard: pushes, exchanges, questions",
            tags=_BANK,
            by="method",
            kind="counter",
        ),
    )
}


@final
class Exporter:
    """Record the readings that ``look`` returns once a second, from a thread of its own.

    ``look`` is a method, and the thread ends with the object that has it. Readings of names that are
    no metrics are passed over. Where Ray has no agent that takes metrics
    (it comes with ``ray[default]``) or is not joined at all, nothing happens.
    """

    def __init__(self, tags: Mapping[str, str], look: Callable[[], Iterable[Reading]]) -> None:
        self._tags, self._look = dict(tags), weakref.WeakMethod(look)
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
        while not closed and self._look() is not None:
            closed = self._closed.wait(EVERY_S)
            # Its owner works on meanwhile, so a look may meet a change: the next one will do.
            with contextlib.suppress(Exception):
                self._record_all()

    def _record_all(self) -> None:
        look = self._look()
        for reading in look() if look else ():
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
