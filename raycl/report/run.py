"""A run, read from its output."""

import io
from dataclasses import dataclass
from typing import Any, final

from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml
from raycl.embedding_snapshot import FIRST, LATEST, EmbeddingSnapshot, ProbeSet, read_probe_set, read_snapshot
from raycl.errors import DataError
from raycl.lease import is_being_written
from raycl.provenance import read_commands
from raycl.records import CONFIG, DATA, METRICS, RESULT, read_object, run_name, with_new_names
from raycl.report.history import History, read_history
from raycl.storage import Place, absolute


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The files of an output: the configuration of a run, its metrics, its result and its embedding snapshots.

    ``name`` distinguishes it from other runs on the page. ``result`` has at least a ``status``.
    """

    name: str
    address: str
    config: RunConfig
    config_text: str
    history: History
    result: dict[str, Any]
    data: dict[str, Any]
    commands: list[str]
    probes: ProbeSet | None = None
    first: EmbeddingSnapshot | None = None
    latest: EmbeddingSnapshot | None = None

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``failed``, ``stopped`` or ``unknown``."""
        return str(self.result.get("status", "unknown"))

    @property
    def samples_per_second(self) -> float | None:
        """The throughput in the result, or else the last samples by the last seconds of training, None without them.

        In both, the time of the steps that a rollback undid counts, but not their samples.
        """
        rate = self.result.get("samples_per_second")
        if isinstance(rate, int | float):
            return rate
        samples, seconds = self.history["samples"].last, self.history["seconds"].last
        return samples / seconds if samples is not None and seconds else None

    def class_name(self, label: int) -> str:
        """Return the name of a label in the data, a folder or a text, or else its number."""
        classes = self.data.get("classes") or self.data.get("label_names") or []
        return str(classes[label]) if label < len(classes) else str(label)

    def snapshots(self) -> list[tuple[str, EmbeddingSnapshot]]:
        """Return the embedding snapshots of the run, each with its time in words."""
        found = [] if self.first is None else [("before training", self.first)]
        return found if self.latest is None else [*found, (f"at step {self.latest.step:,}", self.latest)]


def read_run(uri: str, *, with_snapshots: bool = True) -> Run:
    """Read a run's output, local or on S3.

    Raises:
        DataError: The output holds no run, the run has not logged anything yet, or a file is damaged.
        StorageError: It cannot be read.
    """
    output = Place(uri)
    if not (output / CONFIG).exists():
        raise DataError(f"{uri} holds no run: there is no {CONFIG}; give the --output of a run")
    result = with_new_names(_values(output / RESULT))
    has_metrics = (output / METRICS).exists()
    if not has_metrics and result.get("status") not in ("failed", "stopped", "finished"):
        started = "its run has just started; try again in a minute"
        ended = "its run ended before its first logged step; repeat its `raycl train` with --resume"
        raise DataError(f"{uri} has no metrics yet: {started if is_being_written(output) else ended}")
    text = (output / CONFIG).read_text()
    probes, snapshots = None, [None, None]
    if with_snapshots and (probes := read_probe_set(output)) is not None:
        # A run that was restarted elsewhere may have left a snapshot of other samples.
        snapshots = [
            each if each is not None and len(each.embedding) == len(probes.sample_id) else None
            for each in (read_snapshot(output, FIRST), read_snapshot(output, LATEST))
        ]
    return Run(
        name=run_name(Place(absolute(uri))),
        address=uri,
        config=config_from_yaml(text, name=(output / CONFIG).uri, trained=True),
        config_text=text,
        history=read_history(io.BytesIO((output / METRICS).read_bytes()) if has_metrics else []),
        result=result,
        data=_values(output / DATA),
        commands=read_commands(output),
        probes=probes,
        first=snapshots[0],
        latest=snapshots[1],
    )


def _values(place: Place) -> dict[str, Any]:
    """Return the object in a file, empty without the file."""
    return read_object(place, remedy="; delete it to write the page without it") if place.exists() else {}
