"""Sets of data read into this process: decoded images, texts and pairs; small ones without Ray."""

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any, final

import numpy as np
import ray
from numpy.typing import NDArray

from raycl.data.codecs import Formats
from raycl.data.columns import ColumnNames
from raycl.data.decode import Decoder, decode_here, decode_source, row_error
from raycl.data.discovery import check_no_splits, find_source
from raycl.data.ids import IdFormat
from raycl.data.images import ImageFormat, InvalidImageError
from raycl.data.in_memory import InMemoryDataset
from raycl.data.labels import NO_LABEL
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Source
from raycl.data.split import Keep
from raycl.errors import DataError
from raycl.gpus import starts_here
from raycl.progress import ProgressLine, rows_read
from raycl.ray_runtime import NEW_NODE_S, connect_cluster, fetch_tables, unwrap_ray_errors, wait_for_gpu
from raycl.tokenization import InvalidTextError, read_text
from raycl.training.coordinator import RunCoordinator, rows_in, start_coordinator

MAX_BYTES = 256 * 2**20  # of decoded rows and their representations that one process holds without Ray
TEXTS = ("text", "caption", "query", "document")


def report_unread(sources: Iterable[Source], *, quiet: bool) -> None:
    """Print the files and labels of these sources that are not read, unless ``quiet``."""
    for line in (line for source in sources if not quiet for line in source.unread()):
        print(line, file=sys.stderr)


def report_invalid(name: str, rows: ReadStats, *, quiet: bool) -> None:
    """Print the number of invalid rows of a set by cause, unless there are none or ``quiet``."""
    if rows.num_invalid and not quiet:
        counts = f"{rows.num_invalid:,} of {rows.num_rows:,} rows of {name}"
        print(f"raycl: {counts} are invalid and are skipped: {rows.describe_invalid()}", file=sys.stderr)


def connect_unless_small(
    num_bytes: int, *, gpu: bool = False, address: str | None = None, debug: bool = False
) -> None:
    """Connect to Ray, which takes seconds, unless the rows are small and neither a GPU nor a cluster is asked for.

    Without Ray, :func:`read_images` and :func:`raycl.inference.embed.embedded_tables` work in this process.
    Waits for a GPU that a cluster starts on demand; raises ``ConfigError`` if there is none.
    """
    # Also if Ray was started elsewhere, since this makes Ray Data keep the order of rows.
    if ray.is_initialized() or gpu or address or os.environ.get("RAY_ADDRESS") or num_bytes > MAX_BYTES:
        is_own = starts_here(address)  # and cannot grow
        connect_cluster(address, debug=debug, quiet_core=True)
        if gpu:
            wait_for_gpu(0.0 if is_own else NEW_NODE_S)


@contextlib.contextmanager
def counting_decoder(
    formats: Formats,
    *,
    num_rows: int,
    title: str,
    keep: Keep | None = None,
    max_invalid_fraction: float | None = 0.01,
    quiet: bool = False,
) -> Iterator[Decoder]:
    """Yield a decoder whose rows a progress line counts.

    Raises ``DataError`` at the end if too many rows were invalid, as ``ReadStats.check`` does.
    """
    counting = start_coordinator() if ray.is_initialized() else contextlib.nullcontext(RunCoordinator())
    with counting as coordinator:
        with unwrap_ray_errors(), ProgressLine(title, rows_read(coordinator, num_rows), quiet=quiet):
            yield Decoder(formats=formats, coordinator=coordinator, keep=keep)
        rows_in(coordinator).check(max_invalid_fraction)


def counted_rows(decoder: Decoder) -> ReadStats:
    """Return the statistics of the rows that a decoder has read so far."""
    return rows_in(decoder.coordinator)


def read_images(
    source: Source | str,
    image_format: ImageFormat,
    *,
    keep: Keep | None = None,
    title: str = "reading",
    max_invalid_fraction: float = 0.01,
    quiet: bool = True,
) -> InMemoryDataset:
    """Decode the images of a source, with Ray Data if the set is not small; ``keep`` selects rows by id.

    Raises ``DataError`` for an empty source or too many invalid images.
    """
    source = find_source(source) if isinstance(source, str) else source
    formats: Formats = {"image": image_format}
    connect_unless_small(source.num_rows * image_format.num_bytes)
    with counting_decoder(
        formats,
        num_rows=source.num_rows,
        title=title,
        keep=keep,
        max_invalid_fraction=max_invalid_fraction,
        quiet=quiet,
    ) as decoder:
        if ray.is_initialized():
            tables = fetch_tables(decode_source(source, decoder))
        else:
            tables = list(decode_here(source.fragments, partial(source.read, keep=keep), decoder))
    return InMemoryDataset(tables, formats)


@final
class _NamedIds(ColumnNames):
    """The columns of pairs, without ids that are not named; a named ``document_id`` adds the usual ``negative_ids``."""

    @property
    def usual(self) -> tuple[str, ...]:
        unread = {"query_id", "document_id", *(["negative_ids"] if self.document_id is None else [])}
        return tuple(role for role in super().usual if role not in unread)


@final
@dataclass(frozen=True, kw_only=True)
class Values:
    """The values of a set by role, the origin of each image, and labels [num_rows], -1 for a missing label.

    ``num_invalid`` counts skipped rows: invalid texts (negatives included), images that are missing or cannot be
    read, and missing labels if the set has a label column.
    """

    by_role: dict[str, list[Any]]
    label: NDArray[np.int64]
    where: list[str] = field(default_factory=list)
    num_invalid: int = 0

    @property
    def has_labels(self) -> bool:
        """Whether any row has a label."""
        return bool((self.label >= 0).any())

    def select(self, is_valid: NDArray[np.bool_], uri: str) -> "Values":
        """Keep the valid rows of ``uri`` and count the others; raises ``DataError`` if none is valid."""
        if not is_valid.any():
            raise DataError(
                f"none of the {len(is_valid)} rows of {uri} can be used: texts, images, labels or ids are missing, "
                "or texts are invalid UTF-8; fix the data or name other columns with --set data.columns"
            )
        return Values(
            by_role={role: list(compress(values, is_valid)) for role, values in self.by_role.items()},
            label=self.label[is_valid],
            where=list(compress(self.where, is_valid)),
            num_invalid=self.num_invalid + int((~is_valid).sum()),
        )


def read_values(uri: str, columns: ColumnNames, *, keep_invalid: bool = False, quiet: bool = True) -> Values:
    """Read the columns of a set, texts as strings.

    ``keep_invalid`` keeps all rows, with None for an invalid text or an unreadable image. Files and labels that
    are not read are printed, unless ``quiet``. Raises ``DataError`` for a missing column, a folder of splits, or if no row
    is valid.
    """
    source = find_source(uri, columns)
    check_no_splits(source)
    report_unread([source], quiet=quiet)
    by_role: dict[str, list[Any]] = {role: [] for role in source.columns.contents}
    labels, where = [np.empty(0, np.int64)], list[str]()
    for fragment in source.fragments:
        for rows in source.read(fragment):
            for role, values in rows.values.items():
                by_role[role] += (_valid_value(role, value) for value in values)
            labels.append(_integer_labels(rows.label, source.classes))
            where += rows.where if "image" in by_role else ()  # millions of texts need none
    found = Values(by_role=by_role, label=np.concatenate(labels), where=where)
    is_valid = np.ones(len(found.label), np.bool_)
    for role in {*TEXTS, "negatives", "image"} & by_role.keys():
        is_valid &= [value is not None for value in by_role[role]]
    if source.columns.label is not None and not keep_invalid:
        is_valid &= found.label >= 0
    valid = found.select(is_valid, uri)
    return found if keep_invalid else valid


def read_pairs(uri: str, names: ColumnNames, *, only_named_ids: bool = False, quiet: bool = True) -> Values:
    """Read pairs: queries and documents, and if present negatives, labels and ids (as integers).

    ``only_named_ids`` ignores columns of ids that ``names`` does not name. Skips rows with invalid ids, as a run does.
    Raises ``DataError`` as ``read_values`` does.
    """
    asked = {"query": names.query or "query", "document": names.document or "document"}
    columns = replace(names, image=None, text=None, caption=None, **asked)
    values = read_values(uri, _NamedIds(**vars(columns)) if only_named_ids else columns, quiet=quiet)
    by_role = values.by_role
    if "negatives" not in by_role:
        by_role.pop("negative_ids", None)
    for role in by_role.keys() & {"query_id", "document_id", "negative_ids"}:
        by_role[role] = IdFormat(in_lists=role == "negative_ids").decode_all(by_role[role])
    is_valid = [row_error(by_role, row) is None for row in range(len(values.label))]
    found = values.select(np.array(is_valid), uri)
    for role in found.by_role.keys() & {"query_id", "document_id"}:
        found.by_role[role] = [number for (number,) in found.by_role[role]]
    return found


def _valid_value(role: str, value: Any) -> Any:
    """Return texts as strings, None for an invalid one or an image that was not read, and other values unchanged."""
    if role == "image":
        return None if isinstance(value, InvalidImageError) else value
    if role == "negatives":  # the list may be empty, but an invalid text in it invalidates the row
        texts = [_valid_text(text) for text in value or ()]
        return None if None in texts else texts
    return _valid_text(value) if role in TEXTS else value


def _valid_text(value: Any) -> Any:
    """Return a text, or the valid texts of a list; None without any."""
    if isinstance(value, list | tuple):
        return [text for text in map(_valid_text, value) if text is not None] or None
    try:
        return read_text(value)
    except InvalidTextError:
        return None


def _integer_labels(label: NDArray[np.int64], classes: tuple[str, ...] | None) -> NDArray[np.int64]:
    """Return integer labels, parsed if the column holds text."""
    if not classes:  # integers, or no label at all
        return label
    try:
        parsed = np.array([_grade(name) for name in classes], np.int64)
    except (ValueError, OverflowError):
        raise DataError(
            f"labels of pairs must be grades such as 0 and 1, came {', '.join(classes[:5])}"
        ) from None
    return np.where(label < 0, label, parsed[label])


def _grade(name: str) -> int:
    """Return the integer of a text such as 2, 1.0 or True, ``NO_LABEL`` of NaN; raise ``ValueError`` or ``OverflowError``."""
    if name.lower() in ("true", "false"):
        return int(name.lower() == "true")
    grade = float(name)
    if math.isnan(grade):
        return NO_LABEL
    if not grade.is_integer():
        raise ValueError
    return int(grade)
