"""The data: rows, pieces and bytes, and what a look at some of the rows says of all."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import ray

from raycl.config import RunConfig
from raycl.data.click_logs import check_labels
from raycl.data.columns import ColumnNames
from raycl.data.labels import NO_LABEL
from raycl.data.sources import Source, find_source
from raycl.doctor.nodes import why
from raycl.doctor.result import CheckResult, size
from raycl.doctor.sample_rows import Look, look_at
from raycl.errors import DataError, RayclError
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.tokenization import Vocabulary
from raycl.training import build
from raycl.training.preflight import column_names

NUM_PIECES = 8
NUM_ROWS = 2_048  # of all these pieces together
_PATIENCE_S = 180.0
# A recipe that reads each kind of samples, for data that come without one.
_READERS = {"image": "simclr", "image_text": "image_text", "text": "simcse", "pairs": "two_tower"}


@final
@dataclass(frozen=True)
class Seen:
    """A source, and what a look at some of its rows found."""

    source: Source
    look: Look

    @property
    def decoded_bytes(self) -> float:
        """What all rows would take when they are decoded, in bytes."""
        return self.look.decoded_bytes / max(1, self.look.num_rows) * self.source.num_rows

    @property
    def negatives_a_row(self) -> float:
        """How many explicit negatives a pair brings along, on average."""
        if "negatives" in self.look.listed:
            return self.look.listed["negatives"].mean
        if self.source.columns.label is None or "query" not in self.source.columns.contents:
            return 0.0
        return self.look.clicks[False] / max(1, self.look.clicks[True])


@final
class DataExam:
    """Look at a set; :attr:`seen` is there afterwards, if it could be read at all."""

    def __init__(self, uri: str, columns: ColumnNames | None, config: RunConfig | None) -> None:
        self._uri, self._columns, self._config = uri, columns, config
        self.seen: Seen | None = None

    def findings(self) -> Iterator[CheckResult]:
        """Yield what was found; never raises raycl's own errors."""
        try:
            source, config = self._found()
            yield _described(source, config)
            if source.ignored:
                ignored = ", ".join(f"{count} {extension}" for extension, count in source.ignored)
                yield CheckResult(good=True, name="other files", seen=f"ignored: {ignored}")
        except RayclError as error:
            yield CheckResult(good=False, name="data", seen=str(error))
            return
        try:
            self.seen = Seen(source, _look(source, config))
        # Whatever stops a task: the rest of the examination goes on.
        except Exception as error:
            yield CheckResult(good=False, name="sample", seen=why(error), remedy=_READABLE)
            return
        yield from _judged(self.seen, config)

    def _found(self) -> tuple[Source, RunConfig]:
        """Return the source and a configuration that reads it; without one, the first kind that fits."""
        if self._config is not None:
            return _checked(find_source(self._uri, column_names(self._config))), self._config
        if self._columns is not None:
            source = find_source(self._uri, self._columns)
            return _checked(source), recipe(_READERS[_kind_of(source)])
        first_error: DataError | None = None
        for kind in ("image_text", "image", "text", "pairs"):
            config = recipe(_READERS[kind])
            try:
                return _checked(find_source(self._uri, column_names(config))), config
            except DataError as error:
                # Of a set that fits no kind, what images need is told: they are what raycl expects.
                first_error = error if first_error is None or kind == "image" else first_error
        assert first_error is not None, "every kind failed"
        raise first_error


_READABLE = "check that every node reaches the data, with the same credentials (`--debug` shows more)"


def _kind_of(source: Source) -> str:
    roles = source.columns.contents
    if "query" in roles:
        return "pairs"
    return "image_text" if "caption" in roles else "image" if "image" in roles else "text"


def _checked(source: Source) -> Source:
    if "query" in source.columns.contents:
        check_labels(source.columns)
    return source


def _described(source: Source, config: RunConfig) -> CheckResult:
    num_bytes = _num_bytes(source)
    what = {"image": "images", "text": "texts", "image_text": "images with captions", "pairs": "pairs"}
    labels = "with labels" if source.has_labels else "without labels"
    if config.data.kind == "image" and not source.has_labels:
        labels += " (no periodic kNN)"
    pieces = f"{len(source.pieces):,} piece{'' if len(source.pieces) == 1 else 's'}"
    seen = (
        f"{source.num_rows:,} rows {labels}, {what[config.data.kind]}, {source.kind} in {pieces}, "
        f"{size(num_bytes)} ({size(num_bytes / source.num_rows)} a row)"
    )
    return CheckResult(good=True, name="data", seen=seen)


def _num_bytes(source: Source) -> int:
    """Return the size of the source's files, all columns of them."""
    place = Place(source.uri)
    if not place.is_folder():
        filesystem, path = place.resolve()
        with place.explaining("look at"):
            return filesystem.get_file_info(path).size or 0
    used = {path for piece in source.pieces for path in piece.paths or (piece.file,)}
    return sum(num_bytes for path, num_bytes in place.files() if path in used)


def _look(source: Source, config: RunConfig) -> Look:
    """Look at some rows of pieces all over the set, by tasks on any node that take no CPU."""
    # How texts are cut into tokens is not known yet, and no row is broken for it.
    vocabulary = Vocabulary.stand_in() if config.has_texts else None
    formats: Any = build.modality(config, vocabulary).formats(source.columns)
    step = max(1, len(source.pieces) // NUM_PIECES)
    pieces = source.pieces[::step][:NUM_PIECES]
    clicks = "query" in source.columns.contents and source.columns.label is not None
    task: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(look_at)  # pyright: ignore
    described = ray.put(replace(source, pieces=()))
    refs: list[Any] = [
        task.remote(described, piece.to_json(), formats, NUM_ROWS // len(pieces), clicks=clicks)
        for piece in pieces
    ]
    looks: list[Look] = ray.get(refs, timeout=_PATIENCE_S)
    whole = Look()
    for look in looks:
        whole.join(look)
    return whole


def _judged(seen: Seen, config: RunConfig) -> Iterator[CheckResult]:
    look, limit = seen.look, config.data.max_bad_fraction
    parts = [f"{look.num_rows:,} rows decoded", f"{look.broken.total():,} broken", *_extents(look)]
    text = ", ".join(parts)
    if look.broken:
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(look.broken.items()))
        text += f": {causes}; for example {'; '.join(look.examples)}"
    good = look.broken.total() <= limit * look.num_rows
    remedy = f"mend them, or raise data.max_bad_fraction ({limit:g})"
    yield CheckResult(good=good, name="sample", seen=text, remedy="" if good else remedy)
    if seen.source.columns.label is not None or seen.source.has_labels:
        yield _judged_labels(seen)


def _extents(look: Look) -> Iterator[str]:
    if look.widths.count:
        least, most = (f"{w}x{h}" for w, h in zip(*_sides(look), strict=True))
        yield f"images of {least} to {most} pixels"
    if look.num_flat:
        yield f"{look.num_flat:,} flat (all pixels of one value)"
    for role in sorted(look.characters):
        extent, listed = look.characters[role], look.listed[role]
        several = f" in {listed.mean:.1f} a row" if listed.most > 1 or not listed.least else ""
        yield f"{role} of {extent.least:,} to {extent.most:,} characters, {extent.mean:,.0f} on average{several}"


def _sides(look: Look) -> tuple[tuple[int, int], tuple[int, int]]:
    return (look.widths.least, look.widths.most), (look.heights.least, look.heights.most)


def _judged_labels(seen: Seen) -> CheckResult:
    missing, total = seen.look.labels[NO_LABEL], seen.look.num_rows
    num_kinds = len(seen.look.labels.keys() - {NO_LABEL})
    column = seen.source.columns.label or "the folders"
    if missing == total:
        return CheckResult(
            good=False,
            name="labels",
            seen=f"{column!r} holds no label in the {total:,} rows looked at",
            remedy="fill the column, or name another with --set data.columns.label=NAME",
        )
    seen_text = f"{num_kinds:,} different ones in the rows looked at"
    if missing:
        seen_text += f", {missing:,} of {total:,} rows without one"
    return CheckResult(good=True, name="labels", seen=seen_text)
