"""Checks of the data: size, and a sample of decoded rows with their errors, sizes and labels."""

from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import ray

from raycl.config import RunConfig
from raycl.data.click_logs import check_labels, is_clicked, labels_as_given
from raycl.data.codecs import Formats, store_all
from raycl.data.columns import ColumnNames
from raycl.data.coordinator import NUM_EXAMPLES
from raycl.data.decode import are_flat, row_error
from raycl.data.images import BrokenImageError, image_sides
from raycl.data.labels import NO_LABEL
from raycl.data.sources import Fragment, RawRows, Source, find_source
from raycl.display import format_bytes
from raycl.doctor.result import CheckResult, failed, passed, passed_if
from raycl.errors import BrokenValueError, DataError, RayclError, last_line
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.tokenization import Vocabulary
from raycl.training import build
from raycl.training.preflight import column_names

MAX_FRAGMENTS = 8
MAX_ROWS = 2_048  # in all fragments together
_TIMEOUT_S = 180.0
# The recipe that reads each kind of data where none is given.
_READERS = {"image": "simclr", "image_text": "clip", "text": "simcse", "pairs": "two_tower"}
_KINDS = {"image": "images", "text": "texts", "image_text": "images with captions", "pairs": "pairs"}
_FIX_ACCESS = "check that every node reaches the data, with the same credentials (`--debug` shows more)"


@final
@dataclass(kw_only=True)
class SampleStats:
    """Statistics of some rows.

    ``errors`` counts invalid rows by cause, ``labels`` rows by label, ``clicks`` rows by whether they are clicks. ``sizes`` are width and height of images in pixels; all pixels of ``num_flat`` images have one value.
    ``num_characters`` of each text and ``num_texts`` of each row are by role. ``decoded_bytes`` is the size of the
    valid rows in the object store.
    """

    num_rows: int = 0
    num_flat: int = 0
    decoded_bytes: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    labels: Counter[int] = field(default_factory=Counter)
    clicks: Counter[bool] = field(default_factory=Counter)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    num_characters: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_texts: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def merge(self, other: "SampleStats") -> None:
        """Add the statistics of other rows."""
        self.num_rows += other.num_rows
        self.num_flat += other.num_flat
        self.decoded_bytes += other.decoded_bytes
        self.errors += other.errors
        self.examples = (self.examples + other.examples)[:NUM_EXAMPLES]
        self.labels += other.labels
        self.clicks += other.clicks
        self.sizes += other.sizes
        for role, numbers in other.num_characters.items():
            self.num_characters[role] += numbers
        for role, numbers in other.num_texts.items():
            self.num_texts[role] += numbers


@final
@dataclass(frozen=True)
class DataSummary:
    """A data source and the statistics of a sample of its rows."""

    source: Source
    sample: SampleStats

    @property
    def decoded_bytes(self) -> float:
        """The estimated size of all rows after decoding, in bytes."""
        return self.sample.decoded_bytes / max(1, self.sample.num_rows) * self.source.num_rows

    @property
    def negatives_per_pair(self) -> float:
        """The mean number of explicit negatives of a pair."""
        if counts := self.sample.num_texts.get("negatives"):
            return float(np.mean(counts))
        if self.source.columns.label is None or not _has_pairs(self.source):
            return 0.0
        return self.sample.clicks[False] / max(1, self.sample.clicks[True])


def check_data(
    uri: str, columns: ColumnNames | None, config: RunConfig | None
) -> Generator[CheckResult, None, DataSummary | None]:
    """Yield the results for the data; return the summary, or None if the data cannot be read."""
    try:
        source, config = _find(uri, columns, config)
        yield passed("data", _describe(source, config))
    except RayclError as error:
        yield failed("data", str(error))
        return None
    if source.ignored:
        ignored = ", ".join(f"{count} {extension}" for extension, count in source.ignored)
        yield passed("other files", f"ignored: {ignored}")
    try:
        sample = _read_sample(source, config)
    # Whatever stops a task, the other checks still run.
    except Exception as error:
        yield failed("sample", last_line(error), _FIX_ACCESS)
        return None
    yield _check_sample(sample, config.data.max_invalid_fraction)
    if source.columns.label is not None or source.has_labels:
        yield _check_labels(sample, source.columns.label or "the folders")
    return DataSummary(source, sample)


def _find(uri: str, columns: ColumnNames | None, config: RunConfig | None) -> tuple[Source, RunConfig]:
    """Return the source and a configuration that reads it; without either, the first kind that fits."""
    if config is not None:
        return _open(uri, column_names(config)), config
    if columns is not None:
        source = _open(uri, columns)
        roles = source.columns.contents
        kinds = {"query": "pairs", "caption": "image_text", "image": "image", "text": "text"}
        return source, recipe(_READERS[next(kind for role, kind in kinds.items() if role in roles)])
    errors: dict[str, DataError] = {}
    for kind in ("image_text", "image", "text", "pairs"):
        config = recipe(_READERS[kind])
        try:
            return _open(uri, column_names(config)), config
        except DataError as error:
            errors[kind] = error
    raise errors["image"]  # images are the default of raycl


def _open(uri: str, columns: ColumnNames) -> Source:
    source = find_source(uri, columns)
    if _has_pairs(source):
        check_labels(source.columns)
    return source


def _has_pairs(source: Source) -> bool:
    return "query" in source.columns.contents


def _describe(source: Source, config: RunConfig) -> str:
    num_bytes = _file_bytes(source)
    labels = "with labels" if source.has_labels else "without labels"
    if config.data.kind == "image" and not source.has_labels:
        labels += " (no periodic kNN)"
    pieces = f"{len(source.pieces):,} piece{'' if len(source.pieces) == 1 else 's'}"
    return (
        f"{source.num_rows:,} rows {labels}, {_KINDS[config.data.kind]}, {source.kind} in {pieces}, "
        f"{format_bytes(num_bytes)} ({format_bytes(num_bytes / source.num_rows)} per row)"
    )


def _file_bytes(source: Source) -> int:
    """Return the size of the source's files, with all of their columns."""
    place = Place(source.uri)
    if not place.is_folder():
        with place.open() as file:
            return file.size()
    used = {path for piece in source.pieces for path in piece.paths or (piece.file,)}
    return sum(num_bytes for path, num_bytes in place.files() if path in used)


def _read_sample(source: Source, config: RunConfig) -> SampleStats:
    """Decode rows of fragments spread over the source, in tasks that take no CPU."""
    # The tokenizer does not exist yet, and no row is invalid because of it.
    vocabulary = Vocabulary.stand_in() if config.has_texts else None
    formats: Any = build.modality(config, vocabulary).formats(source.columns)
    step = max(1, len(source.pieces) // MAX_FRAGMENTS)
    fragments = source.pieces[::step][:MAX_FRAGMENTS]
    task: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(sample_rows)  # pyright: ignore
    description = ray.put(replace(source, pieces=()))
    refs: list[Any] = [
        task.remote(description, fragment.to_json(), formats, MAX_ROWS // len(fragments))
        for fragment in fragments
    ]
    parts: list[SampleStats] = ray.get(refs, timeout=_TIMEOUT_S)
    sample = SampleStats()
    for part in parts:
        sample.merge(part)
    return sample


def sample_rows(source: Source, fragment: str, formats: Formats, num_rows: int) -> SampleStats:
    """Decode the first rows of a fragment as a run does; labels of clicks must be 0 or 1."""
    stats = SampleStats()
    for rows in source.read(Fragment.from_json(fragment)):
        _add_rows(stats, rows, formats, num_rows - stats.num_rows, source)
        if stats.num_rows >= num_rows:
            break
    return stats


def _add_rows(stats: SampleStats, rows: RawRows, formats: Formats, num_rows: int, source: Source) -> None:
    count = min(num_rows, len(rows.sample_id))
    values = {role: rows.values[role][:count] for role in formats}
    decoded = {role: each.decode_all(values[role]) for role, each in formats.items()}
    stats.num_rows += count
    stats.labels.update(rows.label[:count].tolist())
    has_clicks = _has_pairs(source) and source.columns.label is not None
    clicks = labels_as_given(rows, source) if has_clicks else None
    valid = []
    for row in range(count):
        error = row_error(decoded, row) or (clicks and _count_click(stats, clicks[row]))
        if error is None:
            valid.append(row)
            continue
        stats.errors[str(error)] += 1
        if len(stats.examples) < NUM_EXAMPLES:
            stats.examples.append(f"{rows.where[row]} ({error})")
    kept = {role: [each[row] for row in valid] for role, each in decoded.items()}
    stats.num_flat += int(are_flat(formats, kept).sum())
    stats.decoded_bytes += sum(column.nbytes for column in store_all(formats, kept).values())
    _add_sizes(stats, {role: [each[row] for row in valid] for role, each in values.items()})


def _count_click(stats: SampleStats, label: Any) -> BrokenValueError | None:
    """Count a click or its absence; return the error of any other label."""
    try:
        stats.clicks[is_clicked(label)] += 1
    except BrokenValueError as error:
        return error
    return None


def _add_sizes(stats: SampleStats, values: Mapping[str, Sequence[Any]]) -> None:
    for image in values.get("image", ()):
        try:
            stats.sizes.append(image_sides(image))
        except BrokenImageError:
            continue
    for role in {"text", "caption", "query", "document", "negatives"} & values.keys():
        for value in values[role]:
            texts = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
            texts = [text for text in texts if isinstance(text, str | bytes)]
            stats.num_texts[role].append(len(texts))
            stats.num_characters[role] += [
                len(text.decode() if isinstance(text, bytes) else text) for text in texts
            ]


def _check_sample(sample: SampleStats, max_invalid_fraction: float) -> CheckResult:
    num_invalid = sample.errors.total()
    seen = ", ".join(
        [f"{sample.num_rows:,} rows decoded", f"{num_invalid:,} invalid", *_describe_sizes(sample)]
    )
    if num_invalid:
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(sample.errors.items()))
        seen += f": {causes}; for example {'; '.join(sample.examples)}"
    remedy = f"fix them, or raise data.max_invalid_fraction ({max_invalid_fraction:g})"
    return passed_if(num_invalid <= max_invalid_fraction * sample.num_rows, "sample", seen, remedy)


def _describe_sizes(sample: SampleStats) -> Iterator[str]:
    if sample.sizes:
        widths, heights = zip(*sample.sizes, strict=True)
        yield f"images of {min(widths)}x{min(heights)} to {max(widths)}x{max(heights)} pixels"
    if sample.num_flat:
        yield f"{sample.num_flat:,} flat (all pixels of one value)"
    for role, lengths in sorted(sample.num_characters.items()):
        if not lengths:
            continue
        per_row = sample.num_texts[role]
        several = f" in {np.mean(per_row):.1f} per row" if set(per_row) != {1} else ""
        yield (
            f"{role} of {min(lengths):,} to {max(lengths):,} characters, {np.mean(lengths):,.0f} on average{several}"
        )


def _check_labels(sample: SampleStats, column: str) -> CheckResult:
    num_missing = sample.labels[NO_LABEL]
    if num_missing == sample.num_rows:
        seen = f"{column!r} holds no label in the {sample.num_rows:,} rows of the sample"
        return failed("labels", seen, "fill the column, or name another with --set data.columns.label=NAME")
    seen = f"{len(sample.labels.keys() - {NO_LABEL}):,} different ones in the sample"
    if num_missing:
        seen += f", {num_missing:,} of {sample.num_rows:,} rows without one"
    return passed("labels", seen)
