"""One-time conversions of a data set, so that runs can read it fast."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from numpy.typing import NDArray

from raycl.arguments import check_type
from raycl.config.overrides import override
from raycl.data.click_logs import group_source, grouped_columns
from raycl.data.columns import ColumnNames, UnlabeledColumnNames, check_labels, is_text
from raycl.data.decode import map_fragments
from raycl.data.discovery import check_no_splits, check_output_is_outside, find_source
from raycl.data.ids import is_missing, stable_id, why_invalid
from raycl.data.images import InvalidImageError, stored_images
from raycl.data.labels import NO_LABEL
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Fragment, Source, plain_values
from raycl.errors import ConfigError, DataError
from raycl.lease import writing_new
from raycl.ray_runtime import connect_cluster, unwrap_ray_errors
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.tokenization import InvalidTextError, Tokenizer, read_text
from raycl.training.coordinator import rows_in, start_coordinator
from raycl.training.data_set import learn_vocabulary


def pack_images(
    data: str, output: str, *, rows_per_file: int = 10_000, address: str | None = None, debug: bool = False
) -> tuple[Source, ReadStats]:
    """Copy the images of a folder into parquet files, unchanged; return the source and the counts of unreadable images.

    Many small files read slowly, above all from S3. Columns: ``image``, ``label`` (the name of the
    class folder), ``sample_id``, ``path``. Invalid images are copied too, and an
    unreadable file becomes null; training counts both. Raises ``StorageError`` if the output exists,
    ``DataError`` for a folder of splits or of other files, ``ConfigError`` for less than a row per file.
    """
    _check_rows_per_file(rows_per_file)
    check_output_is_outside(output, [data])
    with writing_new(output) as place:
        source = find_source(data)
        check_no_splits(source)
        if source.kind != "folder":
            raise DataError(
                f"{data} holds rows ({source.kind}), whose other columns would be lost; pack tars, CSV or JSONL files by "
                "`prepare.py rows --columns image,...`, or train on it as it is"
            )
        stats = _write(
            source, _image_tables, place, rows_per_file=rows_per_file, address=address, debug=debug
        )
        return source, stats


def pack_rows(
    data: str,
    output: str,
    *,
    columns: ColumnNames,
    rows_per_file: int = 10_000,
    address: str | None = None,
    debug: bool = False,
) -> tuple[Source, ReadStats]:
    """Copy the ``columns`` of tars, CSV or JSONL files into parquet files, with the same ids.

    Returns the source and the counts of unreadable images. Without a column of ids, these are the numbers of the rows,
    in the column ``sample_id``. Texts become bytes, since some may not be UTF-8; training counts those. Images that are
    named by paths are copied too; one that cannot be read is null, which training counts as missing. Raises
    ``DataError`` for other or broken files and for a folder of splits, ``StorageError`` if the output exists,
    ``ConfigError`` for less than a row per file.
    """
    _check_rows_per_file(rows_per_file)
    check_output_is_outside(output, [data])
    with writing_new(output) as place:
        source = find_source(data, columns)
        check_no_splits(source)
        if source.types is None:
            raise DataError(f"{data} holds no tars, CSV or JSONL files; give some, or train on it as it is")
        stats = _write(source, _row_tables, place, rows_per_file=rows_per_file, address=address, debug=debug)
        return source, stats


def _check_rows_per_file(rows_per_file: int) -> None:
    check_type("rows_per_file", rows_per_file, int)
    if rows_per_file < 1:
        raise ConfigError(f"rows_per_file must be at least 1, came {rows_per_file}; 10,000 is the default")


def _write(
    source: Source,
    tables: Callable[[Source, Fragment, ReadStats], Iterator[pa.Table]],
    place: Place,
    *,
    rows_per_file: int,
    address: str | None,
    debug: bool,
) -> ReadStats:
    """Write the ``tables`` of all fragments in tasks of Ray, as files of at least ``rows_per_file`` rows.

    Returns the counts of the images that the tables copy.
    """
    connect_cluster(address, debug=debug)
    filesystem, path = place.resolve()
    with start_coordinator() as coordinator, unwrap_ray_errors():

        def counted_tables(described: Source, fragment: Fragment) -> Iterator[pa.Table]:
            stats = ReadStats()
            yield from tables(described, fragment, stats)
            ray.get(coordinator.add_rows.remote(fragment.name, stats))

        # With small row groups a task reads only its own rows. With the CPUs of the reading, Ray Data would join both in
        # tasks of as many fragments as a file has rows.
        map_fragments(source, counted_tables).write_parquet(
            path,
            filesystem=filesystem,
            min_rows_per_file=rows_per_file,
            row_group_size=1_024,
            ray_remote_args={"num_cpus": 0.5},
        )
        return rows_in(coordinator)


def _image_tables(source: Source, fragment: Fragment, stats: ReadStats) -> Iterator[pa.Table]:
    for rows in source.read(fragment):
        columns = {
            "image": _readable(rows.values["image"], rows.where, stats),
            "sample_id": rows.sample_id,
            "path": rows.where,
        }
        if source.has_labels:
            columns["label"] = _labels(rows.label, source.classes)
        yield pa.table(columns)


def _row_tables(source: Source, fragment: Fragment, stats: ReadStats) -> Iterator[pa.Table]:
    assert source.types is not None
    for position, table in source.tables(fragment, source.types.names):
        if source.columns.sample_id is None:
            first = fragment.first_id + position - fragment.start
            table = table.append_column(
                "sample_id", pa.array(range(first, first + table.num_rows), pa.int64())
            )
        image = source.columns.image
        if image is not None and is_text(table[image].type):
            images = stored_images(table[image], fragment.place.parent)
            where = [f"{fragment.place.name} row {row}" for row in range(position, position + len(images))]
            # A relative path would name no file in the folder of the copy.
            copied = _readable(images, where, stats)
            table = table.set_column(table.column_names.index(image), image, copied)
        yield table


def _readable(images: Sequence[Any], where: Sequence[str], stats: ReadStats) -> pa.Array:
    """Return a column of images, with null for one that cannot be read; ``stats`` counts them."""
    stats.num_rows += len(images)
    for image, place in zip(images, where, strict=True):
        if isinstance(image, InvalidImageError):
            stats.add_invalid(place, image)
    return pa.array([image if isinstance(image, bytes) else None for image in images], pa.binary())


def _labels(label: NDArray[np.int64], classes: tuple[str, ...] | None) -> pa.Array:
    """Return labels for a file: classes by name, since another set may number them differently."""
    numbers = pa.array(label, pa.int64(), mask=label == NO_LABEL)
    return numbers if classes is None else pa.array(classes, pa.string()).take(numbers)


def group_pairs(
    data: str,
    output: str,
    *,
    columns: ColumnNames,
    max_invalid_fraction: float = 0.01,
    address: str | None = None,
    debug: bool = False,
) -> tuple[int, ReadStats]:
    """Group a labeled click log into rows of one positive with its query's negatives, as parquet files.

    Returns the number of pairs and the read statistics. A run of ``two_tower`` groups a log in memory
    itself; a streamed log needs this. Raises ``DataError`` for a folder of splits, if the log has no labels or
    also lists of negatives, if too many rows are invalid, or if no query has a positive.
    """
    check_output_is_outside(output, [data])
    with writing_new(output) as place:
        source = find_source(data, columns)
        check_no_splits(source)
        if source.columns.label is None:
            raise DataError(f"{data} has no column of labels; name it with --set data.columns.label=NAME")
        check_labels(source.columns)
        connect_cluster(address, debug=debug)
        filesystem, path = place.resolve()
        with start_coordinator() as coordinator:
            with unwrap_ray_errors():
                grouped = group_source(source, coordinator).drop_columns(_absent_ids(source.columns))
                grouped = grouped.materialize()
            rows = rows_in(coordinator)
            rows.check(max_invalid_fraction)
            num_pairs = grouped.count()
            if not num_pairs:
                raise DataError(
                    "no query has a document of label 1; a run learns from pairs that belong together"
                )
            with unwrap_ray_errors():
                grouped.write_parquet(path, filesystem=filesystem, row_group_size=1_024)
            for line in ray.get(coordinator.notices.remote()):
                print(line, file=sys.stderr)
        return num_pairs, rows


def _absent_ids(columns: ColumnNames) -> list[str]:
    """Return the id columns that the log lacks; a run would count each of their values as missing."""
    grouped = grouped_columns(columns)
    return [role for role in ("query_id", "document_id", "negative_ids") if getattr(grouped, role) is None]


def make_tokenizer(
    data: str,
    output: str,
    *,
    columns: ColumnNames,
    vocabulary_size: int = 16_384,
    lowercase: bool = True,
    num_texts: int = 1_000_000,
    address: str | None = None,
    debug: bool = False,
) -> tuple[Tokenizer, ReadStats]:
    """Train a tokenizer on at most ``num_texts`` texts at ``data`` and write it to ``output``.

    Reads all ``columns`` as texts. ``output`` ends in .json; a run takes it as ``text.tokenizer``. Returns the tokenizer
    and the counts of the texts. Raises ``ConfigError`` for an invalid size, ``DataError`` without texts or for a folder of
    splits.
    """
    asked = {"vocabulary_size": vocabulary_size, "lowercase": lowercase, "tokenizer_train_size": num_texts}
    settings = override(recipe("simcse"), {f"text.{name}": value for name, value in asked.items()}).text
    source = find_source(data, UnlabeledColumnNames(**vars(columns)))
    check_no_splits(source)
    with writing_new(output, is_file=True) as place:
        connect_cluster(address, debug=debug)
        corpus = replace(source, columns=columns)  # not the columns of the usual names
        vocabulary, stats = learn_vocabulary(settings, None, columns, [], corpus=corpus, counted=False)
        place.write_text(vocabulary.tokenizer.to_json())
        return vocabulary.tokenizer, stats


@final
@dataclass(frozen=True, kw_only=True)
class GatheredTexts:
    """Counts of rows and texts written, of texts alone in their group or without one, and of invalid texts."""

    num_rows: int
    num_texts: int
    num_alone: int
    num_without_group: int
    num_invalid: int


def gather_texts(data: str, output: str, *, group: str, text: str = "text") -> GatheredTexts:
    """Write a row for each value of the column ``group``: the list of its distinct texts.

    A run of ``simcse`` then takes two texts of a row as two views. Rows without a group are skipped, and
    so are groups of a single text. This process reads all texts. Raises ``DataError`` for a missing
    column, for a folder of splits, for a group that is a float and may have lost digits, or if no row remains.
    """
    check_output_is_outside(output, [data])
    with writing_new(output, is_file=True) as place:
        texts_by_group: dict[int, dict[str, None]] = {}
        num_invalid = num_without_group = 0
        source = find_source(data, UnlabeledColumnNames(image=None, text=text, sample_id=group))
        check_no_splits(source)
        for _, table in (
            rows for fragment in source.fragments for rows in source.tables(fragment, [group, text])
        ):
            for name, value in zip(plain_values(table[group]), plain_values(table[text]), strict=True):
                if is_missing(name):
                    num_without_group += 1
                    continue
                if cause := why_invalid(name):  # which would merge different groups
                    raise DataError(f"{data} has an {cause} in {group!r}; give groups as integers or text")
                try:
                    valid = read_text(value)
                except InvalidTextError:
                    num_invalid += 1
                    continue
                texts_by_group.setdefault(stable_id(name), {})[valid] = None
        rows = [list(texts) for texts in texts_by_group.values() if len(texts) > 1]
        if not rows:
            raise DataError(
                f"no two texts of {data} share a value of {group!r}; name the right column by --group"
            )
        filesystem, path = place.resolve()
        pq.write_table(pa.table({"text": rows}), path, filesystem=filesystem, row_group_size=1_024)
        return GatheredTexts(
            num_rows=len(rows),
            num_texts=sum(map(len, rows)),
            num_alone=len(texts_by_group) - len(rows),
            num_without_group=num_without_group,
            num_invalid=num_invalid,
        )
