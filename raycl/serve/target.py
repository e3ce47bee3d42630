"""The bank, run and data set that an explorer serves."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml, override
from raycl.data.columns import ColumnNames
from raycl.data.discovery import find_source
from raycl.data.sources import Source
from raycl.errors import DataError, RayclError, last_line
from raycl.negatives.bank import connect_bank
from raycl.negatives.saved_bank import read_embedded, read_saved_bank
from raycl.records import CONFIG, DATA, find_run
from raycl.serve.explorer import (
    Explorer,
    QueryEncoder,
    ReconnectingBank,
    RepresentationEncoder,
    RunProgress,
)
from raycl.serve.sample_viewer import SampleViewer, rows_by_text
from raycl.serve.schemas import QueryKind
from raycl.storage import Place, absolute, has_options

View = Callable[[str, ColumnNames], SampleViewer]
_PATIENCE_S = 8.0  # a page waits less long for a shard than a worker does

# By kind of data: the columns that the page shows, and the queries that the encoder accepts.
_SHOWN: dict[str, tuple[tuple[str, ...], tuple[QueryKind, ...]]] = {
    "image": (("image",), ("image",)),
    "text": (("text",), ("text",)),
    "image_text": (("image", "caption"), ("image", "text")),
    "pairs": (("query", "document"), ("text",)),
}
_NO_COLUMNS = dict.fromkeys(("image", "text", "caption", "query", "document"))


@final
@dataclass(frozen=True, kw_only=True)
class ServeTarget:
    """The name of a bank, and the addresses of its run and samples, to be pickled.

    ``queries`` are the kinds that the run's encoder accepts, if any; ``trusted`` is the value of
    RAYCL_TRUSTED, the packages whose networks may be built. ``text_ids_of`` is the bank's run if its ids are those of
    texts.
    """

    bank: str
    run: str
    queries: tuple[QueryKind, ...]
    data: str | None
    columns: ColumnNames
    max_pixels: int
    token: str
    trusted: str
    text_ids_of: str | None = None

    def explorer(self) -> Explorer:
        """Create the explorer, in any process of the cluster."""
        by_text = None if self.text_ids_of is None else partial(rows_by_text, self.text_ids_of)
        samples = None
        if self.data:
            samples = SampleViewer(self.data, self.columns, max_pixels=self.max_pixels, read_ids=by_text)
        bank = ReconnectingBank(partial(connect_bank, self.bank, timeout_s=_PATIENCE_S))
        return Explorer(
            bank=bank,
            encoder=QueryEncoder(self.run),
            run=RunProgress(self.run),
            samples=samples,
            queries=self.queries,
        )


def find_target(
    bank: str, *, run: str | None, data: str | None, token: str, settings: Sequence[str] = ()
) -> ServeTarget:
    """Check the bank, its ``run`` (by default the bank's own) and ``data`` before anything starts.

    ``settings`` replace the run's names of the columns of ``data``.
    Raises ``RayclError`` if one of them is invalid. Without ``run`` and ``data`` the run may be unreadable.
    """
    spec = connect_bank(bank).spec
    place = Place(absolute(run or spec.output))
    columns, queries, max_pixels = ColumnNames(), (), 0
    try:
        config = _config_of(place, settings)
        columns, queries, max_pixels = columns_of(config), _SHOWN[config.data.kind][1], config.data.max_pixels
    except RayclError:
        if run is not None or data is not None:
            raise
    if data is not None:
        find_source(data, columns)
    return ServeTarget(
        bank=bank,
        run=place.uri,
        queries=queries,
        data=None if data is None else absolute(data),
        columns=columns,
        max_pixels=max_pixels,
        token=token,
        trusted=os.environ.get("RAYCL_TRUSTED", ""),
        text_ids_of=spec.output if spec.has_text_ids else None,
    )


def saved_explorer(
    run: str, *, embeddings: str | None, data: str | None, settings: Sequence[str] = ()
) -> Explorer:
    """Return an explorer of the saved rows of a run, or of ``embeddings`` made with its encoder.

    Without both, ``data`` are the training data of the run, if they can be read and have not changed. ``settings``
    replace the run's names of the columns of the data. Raises ``RayclError`` if something is invalid.
    """
    place = find_run(run)
    config = _config_of(place, settings)
    if embeddings is None:
        bank = read_saved_bank(run, has_text_ids=config.has_text_ids)
    else:
        bank = read_embedded(run, embeddings)
    view = partial(
        SampleViewer,
        max_pixels=config.data.max_pixels,
        read_ids=partial(rows_by_text, place.uri) if bank.spec.has_text_ids else None,
    )
    samples = None
    if data is not None:
        samples = _viewer(data, columns_of(config), view)
    elif embeddings is None:
        samples = _training_data(place, columns_of(config), view, has_text_ids=bank.spec.has_text_ids)
    queries = _SHOWN[config.data.kind][1]
    is_bank = bank.stats().kind != "embeddings"
    return Explorer(
        bank=ReconnectingBank(lambda: bank),
        encoder=QueryEncoder(place.uri) if is_bank else RepresentationEncoder(place.uri, queries),
        run=RunProgress(place.uri),
        samples=samples,
        queries=queries,
    )


def _viewer(data: str, columns: ColumnNames, view: View) -> SampleViewer:
    """Show a data set, which may have one of two contents: embedded documents come without queries."""
    contents = columns.contents
    try:
        return view(data, columns)
    except DataError:
        for role in contents if len(contents) > 1 else ():
            others = dict.fromkeys(contents.keys() - {role})
            with contextlib.suppress(DataError):
                return view(data, replace(columns, **others))
        raise


def _training_data(
    run: Place, columns: ColumnNames, view: View, *, has_text_ids: bool
) -> SampleViewer | None:
    """Show the training data of a run by its ids; None, with a line about the reason, if their rows have other ids."""
    try:
        described = json.loads((run / DATA).read_text())
        trained_on = described["data"]
        if not isinstance(trained_on, str):
            reason = "the run has several data sets, or a Ray Dataset"
        elif has_options(trained_on):
            reason = f"{trained_on} is an address with options; give it by --data"
        else:
            viewer = view(trained_on, columns)
            reason = _why_other_ids(viewer.source, described, has_text_ids=has_text_ids)
            if not reason:
                return viewer
    except RayclError as error:  # the data may have moved
        reason = last_line(error)
    except (ValueError, KeyError, TypeError):
        reason = f"{run / DATA} is damaged"
    print(f"the page shows ids only: {reason}", file=sys.stderr)
    return None


def _why_other_ids(source: Source, described: Mapping[str, Any], *, has_text_ids: bool) -> str:
    """Return why the rows of a source have other ids than the samples of the run; empty if they have the same.

    ``has_text_ids`` says that ids are those of texts, which a click log has as well.
    """
    if not has_text_ids and source.columns.query is not None and source.columns.label is not None:
        return f"{source.uri} is a click log, and its pairs have ids that its rows do not have"
    if not _has_rows_of(source, described):
        return (
            f"the files of {source.uri} have changed since the run, and ids would show other samples; restore them, or "
            "give the data of the run by --data"
        )
    return ""


def _has_rows_of(source: Source, described: Mapping[str, Any]) -> bool:
    """Whether ids mean the same rows as in ``data.json``, which outputs of older versions have without fingerprints."""
    (files,) = described.get("files", [None])
    if files is not None:
        return source.files_fingerprint == files
    return source.columns.sample_id is not None or source.num_rows == described["num_rows"]


def _config_of(run: Place, settings: Sequence[str]) -> RunConfig:
    config = config_from_yaml((run / CONFIG).read_text(), name=(run / CONFIG).uri, trained=True)
    return override(config, settings) if settings else config


def columns_of(config: RunConfig) -> ColumnNames:
    """Return the columns that the page shows, with labels and ids."""
    named = config.data.columns
    shown = {role: getattr(named, role) for role in _SHOWN[config.data.kind][0]}
    return ColumnNames(**_NO_COLUMNS | shown, label=named.label, sample_id=named.sample_id)
