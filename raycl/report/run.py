"""A run as its output tells of it."""

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, final

from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml
from raycl.embedding_snapshot import FIRST, LATEST, EmbeddingSnapshot, ProbeSet, read_gallery, read_portrait
from raycl.errors import DataError
from raycl.provenance import read_commands
from raycl.records import METRICS, RESULT
from raycl.report.history import History, read_history
from raycl.storage import Place

CONFIG, DATA = "config.yaml", "data.json"


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What lies in an output: the run as it was asked for, what it logged, and what came of it.

    ``name`` tells it from others on the page. ``result`` has at least a ``status``.
    """

    name: str
    address: str
    config: RunConfig
    config_text: str
    history: History
    result: dict[str, Any]
    data: dict[str, Any]
    commands: list[str]
    gallery: ProbeSet | None = None
    first: EmbeddingSnapshot | None = None
    latest: EmbeddingSnapshot | None = None

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``failed``, ``stopped`` or ``unknown``."""
        return str(self.result.get("status", "unknown"))

    def class_name(self, label: int) -> str:
        """Return what the data call a label: its folder or text, or the number itself."""
        classes = self.data.get("classes") or []
        return str(classes[label]) if label < len(classes) else str(label)


def read_run(uri: str, *, with_portrait: bool = True) -> Run:
    """Read a run's output, local or on S3.

    Raises:
        DataError: There is no run, none that has logged anything, or a damaged file.
        StorageError: It cannot be read.
    """
    output = Place(uri)
    if not (output / CONFIG).exists():
        raise DataError(f"{uri} holds no run: there is no {CONFIG}; give the --output of a run")
    result = _read_json(output / RESULT)
    if not (output / METRICS).exists() and result.get("status") not in ("failed", "stopped", "finished"):
        raise DataError(f"{uri} has no metrics yet: its run has just begun; try again in a minute")
    text = (output / CONFIG).read_text()
    run = Run(
        name=output.name,
        address=uri,
        config=config_from_yaml(text, name=(output / CONFIG).uri),
        config_text=text,
        history=read_history(_lines(output)),
        result=result,
        data=_read_json(output / DATA),
        commands=read_commands(output),
    )
    return _with_portrait(run, output) if with_portrait else run


def _with_portrait(run: Run, output: Place) -> Run:
    gallery, first, latest = (
        read_gallery(output),
        read_portrait(output, FIRST),
        read_portrait(output, LATEST),
    )
    if gallery is None:
        return run
    # A run that was begun anew at another place may have left a portrait of other samples.
    num_rows = len(gallery.sample_id)
    fitting = [
        each if each is not None and len(each.embedding) == num_rows else None for each in (first, latest)
    ]
    return replace(run, gallery=gallery, first=fitting[0], latest=fitting[1])


def _lines(output: Place) -> Iterable[str]:
    place = output / METRICS
    return io.StringIO(place.read_text()) if place.exists() else []


def _read_json(place: Place) -> dict[str, Any]:
    """Return what lies there, nothing where there is no file; raises ``DataError`` for one that is damaged."""
    if not place.exists():
        return {}
    try:
        found = json.loads(place.read_text())
    except ValueError as error:
        raise DataError(
            f"{place.uri} is damaged: {error}; delete it, and the page is written without"
        ) from None
    if not isinstance(found, dict):
        raise DataError(
            f"{place.uri} is damaged: it holds a {type(found).__name__} and no object; delete it, and the page is "
            "written without"
        )
    return found
