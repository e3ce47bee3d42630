"""Checks of the data: size, and a sample of decoded rows with their errors, sizes and labels."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import ray

from raycl.config import RunConfig
from raycl.data.click_logs import is_clicked, labels_as_given
from raycl.data.codecs import Formats, store_all
from raycl.data.columns import ColumnNames, check_labels
from raycl.data.decode import are_flat, row_error
from raycl.data.discovery import check_no_splits, find_source
from raycl.data.images import EXTENSIONS, image_sides
from raycl.data.labels import NO_LABEL
from raycl.data.patterns import is_pattern
from raycl.data.read_stats import NUM_EXAMPLES
from raycl.data.sources import Fragment, RawRows, Source
from raycl.display import format_bytes
from raycl.doctor.result import CheckResult, failed, passed, passed_if
from raycl.errors import DataError, InvalidValueError, RayclError, last_line
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.tokenization import Vocabulary
from raycl.training.data_module import hold_out
from raycl.training.preflight import (
    check_has_labels,
    check_pairs,
    check_sizes,
    column_names,
    find_corpus,
    find_evaluation_rows,
)
from raycl.training.transforms import build_formats

MAX_FRAGMENTS = 8
MAX_ROWS = 2_048  # in all fragments together
_TIMEOUT_S = 180.0
_TEXT_ROLES = ("caption", "document", "negatives", "query", "text")
# The recipe that reads each kind of data where none is given.
_READERS = {"image": "simclr", "image_text": "clip", "text": "simcse", "pairs": "two_tower"}
_KINDS = {"image": "images", "text": "texts", "image_text": "images with captions", "pairs": "pairs"}
_FIX_ACCESS = "check that every node reaches the data, with the same credentials (`--debug` shows more)"


@final
@dataclass(frozen=True, kw_only=True)
class SampledRow:
    """A row of the sample: its origin, its label, and the cause if it is invalid.

    A valid row has ``is_click`` in a click log, the (width, height) of its image in pixels, and by role the
    number of characters of each of its texts.
    """

    where: str
    label: int
    error: str | None
    is_click: bool | None = None
    image_size: tuple[int, int] | None = None
    num_characters: Mapping[str, list[int]] = field(default_factory=dict[str, list[int]])


@final
@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """A data source and a sample of its rows.

    ``num_flat`` images of the sample have one value in all pixels; ``sample_bytes`` is the size of the valid rows
    in the object store.
    """

    source: Source
    rows: Sequence[SampledRow]
    num_flat: int
    sample_bytes: int

    @property
    def decoded_bytes(self) -> float:
        """The estimated size of all rows after decoding, in bytes."""
        return self.sample_bytes / max(1, len(self.rows)) * self.source.num_rows

    @property
    def negatives_per_pair(self) -> float:
        """The mean number of explicit negatives of a pair."""
        if counts := [len(numbers) for numbers in self.num_characters("negatives")]:
            return float(np.mean(counts))
        clicks = Counter(row.is_click for row in self.rows)
        return clicks[False] / max(1, clicks[True])

    @property
    def texts_per_row(self) -> float:
        """The mean number of captions or sentences of a row; 1 without them."""
        counts = [len(numbers) for role in ("caption", "text") for numbers in self.num_characters(role)]
        return float(np.mean(counts)) if counts else 1.0

    @property
    def num_valid(self) -> int:
        """The estimated number of valid rows, or of valid clicks in a click log."""
        valid = sum(row.error is None and row.is_click is not False for row in self.rows)
        return round(valid / max(1, len(self.rows)) * self.source.num_rows)

    def num_characters(self, role: str) -> list[list[int]]:
        """Return the number of characters of each text of each valid row."""
        return [row.num_characters[role] for row in self.rows if role in row.num_characters]


def check_data(
    uri: str, columns: ColumnNames | None, config: RunConfig | None
) -> Generator[CheckResult, None, DataSummary | None]:
    """Yield the results for the data; return the summary, or None if the data cannot be read."""
    given = config
    try:
        source, config = _find(uri, columns, config)
        yield passed("data", _describe(source, config))
    except RayclError as error:
        yield failed("data", str(error))
        return None
    if given is not None:
        yield from _unmet_needs(source, given)
    if source.ignored:
        ignored = ", ".join(f"{count} {extension}" for extension, count in source.ignored)
        yield passed("other files", f"ignored: {ignored}")
    if source.ignored_label:
        yield passed("labels", f"ignored: column 'label' holds {source.ignored_label}, not integers or text")
    try:
        summary = _read_sample(source, config)
    # Whatever stops a task, the other checks still run.
    except Exception as error:
        yield failed("sample", last_line(error), _FIX_ACCESS)
        return None
    yield _check_sample(summary, config.data.max_invalid_fraction)
    if given is not None:
        yield from _unfilled_batch(summary, given)
    if source.columns.label is not None or source.has_labels:
        labels = Counter(row.label for row in summary.rows)
        yield _check_labels(labels, source.columns.label or "the folders")
    return summary


def _unmet_needs(source: Source, config: RunConfig) -> Iterator[CheckResult]:
    """Yield a failed result for splits in place of classes, a missing corpus, and missing labels."""
    checks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("labels", lambda: check_no_splits(source)),
        ("text.corpus", lambda: find_corpus(config)),
        ("evaluation.data", lambda: find_evaluation_rows(config, [source])),
        ("labels", lambda: check_has_labels(config, source.has_labels, source.ignored_label)),
    )
    for name, check in checks:
        try:
            check()
        except RayclError as error:
            yield failed(name, str(error))


def _unfilled_batch(summary: DataSummary, config: RunConfig) -> Iterator[CheckResult]:
    """Yield a failed result if a batch is larger than the estimated number of rows to train on."""
    source, num_rows = summary.source, summary.num_valid
    holdout = hold_out(config, num_rows, can_be_evaluated=config.has_two_towers or source.has_labels)
    of_one = config.model_copy(update={"data": config.data.model_copy(update={"weights": None})})
    try:
        check_sizes(of_one, {source.uri: num_rows - round(num_rows * holdout.test)})
    except RayclError as error:
        yield failed("batch size", str(error))


def _find(uri: str, columns: ColumnNames | None, config: RunConfig | None) -> tuple[Source, RunConfig]:
    """Return the source and a configuration that reads it; the first kind that fits, if no contents are named."""
    if config is not None:
        source = find_source(uri, column_names(config))
        check_pairs(config, source.columns)
        return source, config
    named = {} if columns is None else columns.asked
    kinds = {"query": "pairs", "caption": "image_text", "image": "image", "text": "text"}
    if columns is not None and (found := [kind for role, kind in kinds.items() if role in named]):
        return _open(uri, columns), recipe(_READERS[found[0]])
    errors: dict[str, DataError] = {}
    for kind in ("image_text", "image", "text", "pairs"):
        config = recipe(_READERS[kind])
        try:
            return _open(uri, replace(column_names(config), **named)), config
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
    fragments = f"{len(source.fragments):,} fragment{'' if len(source.fragments) == 1 else 's'}"
    return (
        f"{source.num_rows:,} rows {labels}, {_KINDS[config.data.kind]}, {source.kind} in {fragments}, "
        f"{format_bytes(num_bytes)} ({format_bytes(num_bytes / source.num_rows)} per row)"
    )


def _file_bytes(source: Source) -> int:
    """Return the size of the source's files, with all of their columns."""
    uri = source.fragments[0].uri  # of an Iceberg table, its folder
    if is_pattern(uri):
        return sum(_size(place) for place in {fragment.place for fragment in source.fragments})
    place = Place(uri)
    if not place.is_folder():
        return _size(place)
    used = {path for fragment in source.fragments for path in fragment.paths or (fragment.file,)}
    # A fragment of Lance has several files; files of earlier versions are counted too.
    files = place.files(underscored=EXTENSIONS)
    return sum(num_bytes for path, num_bytes in files if path in used or source.kind == "lance")


def _size(place: Place) -> int:
    with place.open() as file:
        return file.size()


def _read_sample(source: Source, config: RunConfig) -> DataSummary:
    """Decode rows of fragments spread over the source, in tasks that take no CPU."""
    # The tokenizer does not exist yet, and no row is invalid because of it.
    formats: Any = build_formats(config, Vocabulary.stand_in().tokenizer, source.columns)
    fragments = spread(source.fragments)
    task: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(sample_rows)  # pyright: ignore
    description = ray.put(replace(source, fragments=()))
    refs: list[Any] = [
        task.remote(description, fragment, formats, MAX_ROWS // len(fragments)) for fragment in fragments
    ]
    parts: list[DataSummary] = ray.get(refs, timeout=_TIMEOUT_S)
    return DataSummary(
        source=source,
        rows=[row for part in parts for row in part.rows],
        num_flat=sum(part.num_flat for part in parts),
        sample_bytes=sum(part.sample_bytes for part in parts),
    )


def spread(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Return at most ``MAX_FRAGMENTS``, from the first to the last one."""
    number = len(fragments)
    places = np.linspace(0, number - 1, min(number, MAX_FRAGMENTS)).astype(int)
    return [fragments[place] for place in places]


def sample_rows(source: Source, fragment: Fragment, formats: Formats, num_rows: int) -> DataSummary:
    """Decode the first rows of a fragment as a run does; labels of clicks must be 0 or 1."""
    rows: list[SampledRow] = []
    num_flat = num_bytes = 0
    for raw in source.read(fragment):
        count = min(num_rows - len(rows), len(raw.sample_id))
        values = {role: raw.values[role][:count] for role in formats}
        decoded = {role: each.decode_all(values[role]) for role, each in formats.items()}
        has_clicks = _has_pairs(source) and source.columns.label is not None
        labels = labels_as_given(raw, source) if has_clicks else None
        sampled = [_sampled_row(raw, row, decoded, labels) for row in range(count)]
        kept = {
            role: [value for value, row in zip(column, sampled, strict=True) if row.error is None]
            for role, column in decoded.items()
        }
        num_flat += int(are_flat(formats, kept).sum())
        num_bytes += sum(column.nbytes for column in store_all(formats, kept).values())
        rows += sampled
        if len(rows) >= num_rows:
            break
    return DataSummary(source=source, rows=rows, num_flat=num_flat, sample_bytes=num_bytes)


def _sampled_row(
    raw: RawRows, row: int, decoded: Mapping[str, Sequence[Any]], labels: Sequence[Any] | None
) -> SampledRow:
    error, is_click = row_error(decoded, row), None
    if error is None and labels is not None:
        try:
            is_click = is_clicked(labels[row])
        except InvalidValueError as invalid:
            error = invalid
    where, label = raw.where[row], int(raw.label[row])
    if error is not None:
        return SampledRow(where=where, label=label, error=str(error))
    return SampledRow(
        where=where,
        label=label,
        error=None,
        is_click=is_click,
        image_size=image_sides(raw.values["image"][row]) if "image" in decoded else None,
        num_characters={
            role: _num_characters(raw.values[role][row]) for role in _TEXT_ROLES if role in decoded
        },
    )


def _num_characters(value: Any) -> list[int]:
    texts = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
    return [
        len(text.decode() if isinstance(text, bytes) else text)
        for text in texts
        if isinstance(text, str | bytes)
    ]


def _check_sample(summary: DataSummary, max_invalid_fraction: float) -> CheckResult:
    num_rows = len(summary.rows)
    invalid = [row for row in summary.rows if row.error is not None]
    counts = [f"{num_rows:,} rows decoded", f"{len(invalid):,} invalid"]
    seen = ", ".join([*counts, *_describe_sizes(summary)])
    if invalid:
        by_cause = Counter(row.error for row in invalid)
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(by_cause.items()))
        examples = "; ".join(f"{row.where} ({row.error})" for row in invalid[:NUM_EXAMPLES])
        seen += f": {causes}; for example {examples}"
    remedy = f"fix them, or raise data.max_invalid_fraction ({max_invalid_fraction:g})"
    return passed_if(len(invalid) <= max_invalid_fraction * num_rows, "sample", seen, remedy)


def _describe_sizes(summary: DataSummary) -> Iterator[str]:
    if sizes := [row.image_size for row in summary.rows if row.image_size is not None]:
        widths, heights = zip(*sizes, strict=True)
        yield f"images of {min(widths)}x{min(heights)} to {max(widths)}x{max(heights)} pixels"
    if summary.num_flat:
        yield f"{summary.num_flat:,} flat (all pixels of one value)"
    for role in _TEXT_ROLES:
        rows = summary.num_characters(role)
        if not any(rows):
            continue
        lengths = np.concatenate(rows)
        per_row = [len(numbers) for numbers in rows]
        several = f" in {np.mean(per_row):.1f} per row" if set(per_row) != {1} else ""
        yield (
            f"{role} of {lengths.min():,.0f} to {lengths.max():,.0f} characters, {lengths.mean():,.0f} on average{several}"
        )


def _check_labels(counts: Counter[int], column: str) -> CheckResult:
    num_missing, num_rows = counts[NO_LABEL], counts.total()
    if num_missing == num_rows:
        seen = f"{column!r} holds no label in the {num_rows:,} rows of the sample"
        return failed("labels", seen, "fill the column, or name another with --set data.columns.label=NAME")
    seen = f"{len(counts.keys() - {NO_LABEL}):,} different ones in the sample"
    if num_missing:
        seen += f", {num_missing:,} of {num_rows:,} rows without one"
    return passed("labels", seen)
