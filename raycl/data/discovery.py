"""Find the source at an address: its files, their format, and their columns and labels."""

import contextlib
import os
import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa

from raycl.data.arrow_tables import descriptions, unread_files
from raycl.data.columns import ColumnNames, is_text
from raycl.data.delta_tables import LOG, delta_files
from raycl.data.iceberg_tables import METADATA, find_metadata, open_iceberg
from raycl.data.images import EXTENSIONS, is_image_struct
from raycl.data.labels import (
    are_numbers,
    check_label_names,
    class_names,
    distinct_labels,
    inexact_label,
    may_be_fractions,
    names_of_integers,
)
from raycl.data.lance_tables import is_lance, lance_fragments
from raycl.data.patterns import FORMS, expand, folder_of, is_pattern
from raycl.data.sources import FILES, READERS, VERSIONED, Fragment, Source
from raycl.data.tables import TableFile, TableFormat, chosen, reading, roles_in
from raycl.data.weights import check_weight_columns
from raycl.errors import ConfigError, DataError
from raycl.storage import Place, absolute

ROWS_PER_FRAGMENT = 2_048
FORMATS = "parquet, CSV, JSONL, Arrow, tar"
_LINES = ("csv", "jsonl")
_WITH_KEYS = ("jsonl", "tar")  # each row names its columns, and may lack some
_ENOUGH_PARTS = 256  # of large row groups in all files, to read in parallel
_PARQUET_MARK = b"PAR1"  # the first bytes of each file
_SPLITS = {"train", "training", "dev", "val", "valid", "validation", "eval", "test", "testing", "unlabeled"}
_ENDINGS = [ending for each in FILES for ending in each.endings]
# Words of names that tell no data sets apart, as in train_images, and in train-00000-of-00002.parquet.
_HASH = re.compile(
    r"(?<=-of-)(\d+).*"
)  # and what follows, as in test-00000-of-00001-a09b74b3ef9c3b56.parquet
_COMMON = {"images", "imgs", "set", "of", *re.findall("[a-z]+", " ".join(_ENDINGS))}


def find_source(uri: str, columns: ColumnNames | None = None) -> Source:
    """Find the source at ``uri``: a file of rows, a folder or a pattern of them, a table, or a folder of images.

    Raises ``DataError`` if nothing is there, a column is missing or a file is broken, ``StorageError`` if the storage
    cannot be reached.
    """
    uri, columns = absolute(uri), columns or ColumnNames()
    check_exists(uri)
    root, files = Place(folder_of(uri)), [""]
    if is_pattern(uri):
        files = expand(uri)
    elif table := _versioned_table(root, columns):
        return table
    elif root.is_folder():
        return _folder_source(root, columns)
    kinds = {_kind_of_table(root / file) for file in files}
    if len(kinds) > 1:
        names = ", ".join(sorted(kinds))
        raise DataError(f"{uri} names files of several formats ({names}); give files of one format")
    return _table_source(uri, files, columns, kinds.pop())


def check_exists(uri: str) -> None:
    """Raise ``DataError`` if a data set or a file of a pattern does not exist."""
    uri = absolute(uri)
    if not is_pattern(uri):
        existing(uri)
        return
    root = Place(folder_of(uri))
    with ThreadPoolExecutor(8) as pool:
        for place in pool.map(lambda file: _existing(root / file), expand(uri)):
            if place.is_folder():
                raise DataError(
                    f"{place} is a folder, but the pattern {uri} must name files; give the folder"
                )


def check_output_is_outside(output: str, data: Iterable[str]) -> None:
    """Raise ``ConfigError`` if an output lies in a folder of data, which its files would make unreadable."""
    inner = _real(output)
    for uri in data:
        outer = _real(uri)
        is_hidden = "/." in inner[len(outer) :]  # and no data
        is_inside = f"{inner}/".startswith(f"{outer}/") and not is_hidden
        if is_inside and Place(absolute(uri)).is_folder():
            raise ConfigError(
                f"the output {output} lies in the data at {uri}, which could not be read again beside other files; "
                "give an --output outside of that folder"
            )


def check_parquet_output(output: str) -> None:
    """Raise ``ConfigError`` if the name of a parquet file to write ends as another format, as which it would be read."""
    if _kind_of(Place(absolute(output)).name) not in (None, "parquet"):
        raise ConfigError(
            f"the output {output} would hold parquet, and be read as another format by its ending; end its name in .parquet"
        )


def _real(uri: str) -> str:
    """Return an address without options and links, to compare it."""
    return uri.partition("?")[0].rstrip("/") if "://" in uri else os.path.realpath(absolute(uri))


def check_no_splits(source: Source) -> None:
    """Raise ``DataError`` if a folder holds splits, such as train and test; a pattern may name files of several.

    Folders name the splits, as ``train``, ``split=train`` and ``train_images`` do, or words in the names of files, as in
    ``train-00000-of-00002.parquet``.
    """
    paths = dict.fromkeys(each.file for each in source.fragments)
    if source.kind == "folder":  # the names of images mean nothing
        images = (path for each in source.fragments for path in each.paths)
        paths = dict.fromkeys("".join(path.rpartition("/")[:2]) for path in images)
    is_chosen = is_pattern(source.uri) or source.kind in VERSIONED  # a table's folders are its own
    splits, others = ({}, []) if is_chosen else _splits(list(paths))
    if splits:
        addresses = ((Place(source.uri) / _of_all(files)).uri for _, files in sorted(splits.items()))
        given = " or ".join(f"--data {shlex.quote(each)}" for each in addresses)
        shown = others if len(others) <= 3 else [*others[:3], "..."]
        beside = f", beside {', '.join(shown)}" if others else ""
        remedy = " (rename them if they are classes)" if others and source.kind == "folder" else ""
        raise DataError(
            f"{source.uri} holds a data set in {len(splits)} splits{beside}; give {given}{remedy}"
        )


def _splits(paths: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the folders or files of each split by name, and the names beside them; nothing without two splits.

    They are in the folder of all ``paths``, or below it in the only folder there. The path of an image has no name after
    its folder.
    """
    above = ""
    while True:
        parts = [path.partition("/") for path in paths]
        is_folder = {name: bool(slash) for name, slash, _ in parts}
        folders = [name for name in is_folder if is_folder[name]]
        if words := _words_of_splits(is_folder):
            found = dict[str, list[str]]()
            for name, word in words.items():
                found.setdefault(name if is_folder[name] else word, []).append(posixpath.join(above, name))
            return found, [name or "images outside of folders" for name in is_folder if name not in words]
        if len(folders) != 1:
            return {}, []
        above = posixpath.join(above, folders[0])
        paths = [rest for _, slash, rest in parts if slash]


def _words_of_splits(is_folder: Mapping[str, bool]) -> dict[str, str]:
    """Return the word of the split in each name of one, such as train; nothing if all have the same word.

    Two such names differ only in that word, in numbers and in words such as images, unlike the classes freight_train and
    blood_test. Files may differ in other words too if there is a split in each name. Values such as env=dev and env=test
    beside env=prod are no splits.
    """
    words = {name: re.findall("[a-z]+", _HASH.sub("", name.rpartition("=")[2].lower())) for name in is_folder}
    found = {name: _SPLITS.intersection(each) for name, each in words.items()}
    split = {name: each.pop() for name, each in found.items() if len(each) == 1}
    may_differ = len(split) == len(words) and not all(is_folder.values())
    ignored = {word for each in words.values() for word in each} if may_differ else _SPLITS | _COMMON
    rest = {name: tuple(each for each in words[name] if each not in ignored) for name in split}
    num_splits = Counter(kind for kind, _ in {(rest[name], split[name]) for name in split})
    several = {
        name: word for name, word in split.items() if num_splits[rest[name]] > 1
    }  # not test1 and test2
    is_other_key = len(several) < len(words) and any(
        "=" in name and not name.startswith(("split=", "subset=")) for name in several
    )
    return {} if is_other_key else several


def _of_all(files: Sequence[str]) -> str:
    """Return the only file, or a pattern of all: a range if they differ in their first number alone."""
    folder, names = posixpath.dirname(files[0]), [posixpath.basename(each) for each in files]
    numbers = sorted((each for name in names for each in re.findall(r"\d{1,18}", name)[:1]), key=int)
    pattern = f"{{{','.join(names if len(names) <= 3 else [*names[:2], '...'])}}}"
    if len(names) == 1:
        pattern = names[0]
    elif numbers and int(numbers[-1]) - int(numbers[0]) == len(names) - 1:
        counted = re.sub(r"\d{1,18}", f"{{{numbers[0]}..{numbers[-1]}}}", names[0], count=1)
        with contextlib.suppress(DataError):  # for more files than a pattern may have
            pattern = counted if expand(f"/{counted}") == names else pattern
    return posixpath.join(folder, pattern)


def existing(uri: str) -> Place:
    """Return the place of a dataset; raises ``DataError`` if nothing is there."""
    return _existing(Place(absolute(uri)))


def _existing(place: Place) -> Place:
    uri = place.uri
    if not place.exists():
        if set("*?[") & set(uri.partition("?")[0] if "://" in uri else uri):
            raise DataError(
                f"there is nothing at {uri}, and wildcards (*, ?, [) are not supported; write {FORMS}, or "
                "give the folder"
            )
        raise DataError(
            f"there is nothing at {uri}; give a file ({FORMATS}), a folder of them, a table (Delta, Iceberg, "
            "Lance) or a folder of images"
        )
    return place


def _kind_of(path: str) -> str | None:
    """Return the kind of a file by the end of its name, ``folder`` for an image."""
    if _ending(path) in EXTENSIONS:
        return "folder"
    return next((each.name for each in FILES if path.lower().endswith(each.endings)), None)


def _kind_of_table(place: Place) -> str:
    """Return the format of a file: parquet under any name; raises ``DataError`` for other files."""
    kind = _kind_of(place.name)
    if kind == "folder":
        raise DataError(f"{place} is a single image; give the folder of the images")
    if kind is not None:
        return kind
    with reading(place, "parquet", "write the file again"), place.open() as file:
        if file.read(len(_PARQUET_MARK)) == _PARQUET_MARK:
            return "parquet"
    if _ending(place.name) == ".txt":
        raise DataError(
            f'{place} is plain text; write each line as {{"text": "..."}} to a file that ends in .jsonl'
        )
    raise DataError(
        f"{place} is not parquet, and its name has no ending of another format; convert it to {', '.join(_ENDINGS)}"
    )


def _versioned_table(place: Place, columns: ColumnNames) -> Source | None:
    """Return the newest version of a Delta, Iceberg or Lance table; None for another place."""
    if not place.is_folder() and not place.name.endswith(METADATA):
        return None
    # A folder of images may have millions of names, so it is not listed here.
    # A label that was found in the table was not asked for, so its type may be another.
    if (place / LOG).is_folder():
        files, found = delta_files(place, columns)
        return _table_source(place.uri, files, replace(found, label=columns.label), "delta")
    if is_lance(place):
        return _table_source(place.uri, lance_fragments(place, columns), columns, "lance")
    if metadata := find_metadata(place):
        table = open_iceberg(metadata, columns)
        asked = replace(table.columns, label=columns.label)
        found = _table_source(table.place.uri, table.files, asked, "iceberg", check=table.check)
        return replace(found, uri=place.uri)
    return None


def _folder_source(root: Place, columns: ColumnNames) -> Source:
    """Return the rows of a folder, which may hold other files too."""
    only_images = set(columns.contents) == {"image"}
    files = [path for path, _ in root.files(underscored=EXTENSIONS)]  # cameras write _DSC0001.JPG
    unread, found = unread_files(root.uri, files), dict[str | None, list[str]]()
    for path in files:
        if path not in unread:
            found.setdefault(_kind_of(path), []).append(path)
    kind = _kind_to_read(root, columns, found)
    if kind is None and only_images:
        raise DataError(
            f"{root} holds no images and no files of rows ({FORMATS}), but {len(files)} other files; "
            f"known endings of images are {', '.join(sorted(EXTENSIONS))}"
        )
    if kind is None:
        raise DataError(
            f"{root} holds no files of rows ({FORMATS}), but {len(files)} others; give some with the columns "
            f"{', '.join(columns.contents.values())}"
        )
    paths = found[kind]
    others = set(files).difference(paths, descriptions(paths))
    if kind == "folder":
        return replace(_image_source(root.uri, paths, columns), ignored=_endings(others))
    try:
        return _table_source(root.uri, paths, columns, kind, others=others)
    except DataError as error:
        # Perhaps images of an unknown format beside a table.
        if only_images and kind in _LINES and None in found:
            known = ", ".join(sorted(EXTENSIONS))
            raise DataError(f"{error}; for images of {root}, known endings are {known}") from None
        raise


def _kind_to_read(root: Place, columns: ColumnNames, found: Mapping[str | None, Sequence[str]]) -> str | None:
    """Return which of the kinds ``found`` in a folder is read, None if it holds no data.

    Raises ``DataError`` for several formats.
    """
    # The first of these kinds that the folder holds is read, unless it holds two of one group.
    only_images, images, shards = set(columns.contents) == {"image"}, ("folder",), ("arrow", "tar")
    kinds = (shards, _LINES) if only_images else (_LINES, shards)
    if only_images and "folder" in found:  # a table of lines often describes the images
        kinds = (_LINES, shards, images) if _of_tables(columns) else (images,)
    # img2dataset writes parquet files of the same names, without images, beside its tars.
    names = [{posixpath.splitext(path)[0] for path in found.get(each, ())} for each in ("parquet", "tar")]
    tables = ("parquet", "tar") if set.intersection(*names) else ("parquet",)
    groups = ([each for each in group if each in found] for group in (tables, *kinds))
    kind, *others = next(filter(None, groups), [None])
    if others:
        counts = ", ".join(f"{len(found[each])} {each}" for each in (kind, *others))
        raise DataError(
            f"{root} holds files of several formats ({counts}); give a folder of one format, or a pattern of files: {FORMS}"
        )
    return kind


def _of_tables(columns: ColumnNames) -> tuple[str, ...]:
    """Return the settings that name columns, which images without a table do not have."""
    named = (f"data.columns.{role}={name}" for role, name in columns.asked.items())
    return tuple(each for each in named if each != "data.columns.image=image")  # the default


def _image_source(uri: str, paths: list[str], columns: ColumnNames) -> Source:
    fragments = tuple(
        Fragment(uri=uri, first_id=first, paths=tuple(paths[first : first + ROWS_PER_FRAGMENT]))
        for first in range(0, len(paths), ROWS_PER_FRAGMENT)
    )
    classes = _class_folders(Place(uri), paths)
    return Source(
        uri=uri,
        kind="folder",
        fragments=fragments,
        columns=ColumnNames(),
        classes=classes,
        has_labels=classes is not None,
        unused_settings=_of_tables(columns),
    )


def _endings(paths: Iterable[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(_ending(path) or "without an ending" for path in paths).items()))


def _ending(path: str) -> str:
    return posixpath.splitext(path)[1].lower()


def _class_folders(root: Place, paths: list[str]) -> tuple[str, ...] | None:
    """Return the class folders, if every image is in one, but for links without a file, and there are at least two."""
    beside = [path for path in paths if "/" not in path]
    if len(beside) == len(paths) or any((root / path).exists() for path in beside):
        return None
    classes = sorted({path.split("/")[0] for path in paths} - set(beside))
    return tuple(classes) if len(classes) > 1 else None


def _table_source(
    uri: str,
    files: list[str],
    columns: ColumnNames,
    kind: str,
    *,
    check: Callable[[Place, pa.Schema], None] = lambda *_: None,
    others: Iterable[str] = (),
) -> Source:
    """Return the rows of ``files``; ``others`` are the further files of a folder, which are counted as ignored."""
    root, reader = Place(folder_of(uri)), READERS[kind]
    places = [root / file for file in files]
    _check_links(places)
    with ThreadPoolExecutor(8) as pool:
        tables = list(pool.map(lambda place: reader.inspect(place, columns), places))
    for each in tables:
        check(each.place, each.schema)
    # A file without rows may have no columns either.
    tables = [each for each in tables if each.schema.names or sum(each.group_sizes)]
    tables = _with_all_columns(tables, columns) if kind in _WITH_KEYS else tables
    ignored_label = _ignored_label([each.schema for each in tables], columns)
    asked = columns
    found = [_check_columns(each, asked, reads_label=not ignored_label) for each in tables]
    if any(each != found[0] for each in found):
        raise DataError(f"the files of {uri} differ in their label or id columns; give them the same columns")
    fragments: list[Fragment] = []
    first_id = 0
    for each in tables:
        for start, stop in _cut(each.group_sizes, len(tables)):
            fragments.append(
                Fragment(uri=uri, file=each.place.path, first_id=first_id, start=start, stop=stop)
            )
            first_id += stop - start
    if not fragments:
        skipped = " outside of hidden folders" if kind == "tar" else ""
        raise DataError(f"{uri} holds no rows{skipped}; give a dataset with at least one batch")
    columns = found[0]
    names = list(dict.fromkeys(columns.asked.values()))
    types = reader.shared_types([chosen(each.schema, names) for each in tables], where=uri)
    if columns.weight is not None:
        parts = ((str(each.place), reader.column(each, columns.weight, types)) for each in tables)
        check_weight_columns(parts, where=uri)
    classes = label_names = None
    if columns.label is not None:
        names_by_file = [names_of_integers(each.schema, columns.label) for each in tables]
        if not columns.labels_are_grades:
            check_label_names(names_by_file, where=uri)
        label_names = names_by_file[0]
        is_asked = asked.label is not None
        classes, ignored_label = _classes(reader, tables, columns, types, is_asked=is_asked)
        if ignored_label:
            columns = replace(columns, label=None)
    return Source(
        uri=uri,
        kind=kind,
        fragments=tuple(fragments),
        columns=columns,
        classes=classes,
        has_labels=columns.label is not None,
        ignored=_endings(_without_images(others, tables, columns)),
        ignored_label=ignored_label,
        unread_columns=_unread_of_pairs(tables[0].schema, columns) if "label" in asked.usual else (),
        types=types,
        label_names=label_names,
    )


def _with_all_columns(tables: Sequence[TableFile], columns: ColumnNames) -> list[TableFile]:
    """Add the columns of other files to each, which lacks their keys in all rows: their values are missing.

    No id of a row may be missing.
    """
    sample_id = columns.sample_id or "sample_id"
    names = {name: None for each in tables for name in each.schema.names if name != sample_id}
    schemas = [
        pa.unify_schemas([each.schema, pa.schema([(name, pa.null()) for name in names])]) for each in tables
    ]
    return [replace(each, schema=schema) for each, schema in zip(tables, schemas, strict=True)]


def _classes(
    reader: TableFormat,
    tables: Sequence[TableFile],
    columns: ColumnNames,
    types: pa.Schema | None,
    *,
    is_asked: bool,
) -> tuple[tuple[str, ...] | None, str]:
    """Return the class names of labels, None for integers, and the type of numbers to ignore, empty for labels.

    Floats and decimals that are integers are labels; raises ``DataError`` for others if the column is asked for.
    """
    label = str(columns.label)
    kinds = [each.field(label).type for each in ([types] if types else [each.schema for each in tables])]
    floats = [str(kind) for kind in kinds if may_be_fractions(kind)]
    # A file without any label does not determine whether labels are integers.
    first = next((kind for kind in kinds if not pa.types.is_null(kind)), pa.null())
    if not floats:
        _check_one_kind({str(each.place): kind for each, kind in zip(tables, kinds, strict=False)})
        if are_numbers(first):
            return None, ""
    with ThreadPoolExecutor(8) as pool:
        distinct = list(pool.map(lambda each: distinct_labels(reader.column(each, label, types)), tables))
    if not floats or columns.labels_are_grades:
        return class_names(distinct), ""
    # Floats may all be NaN, of a file without a label.
    held = {
        str(each.place): own.type for each, own in zip(tables, distinct, strict=True) if class_names([own])
    }
    _check_one_kind(held)
    if held and all(map(is_text, held.values())):
        return class_names(distinct), ""
    for each, other in zip(tables, map(inexact_label, distinct), strict=True):
        if other is not None and is_asked:
            raise columns.label_error(other, where=str(each.place))
        if other is not None:
            return None, floats[0]
    return None, ""


def _check_one_kind(kinds: Mapping[str, pa.DataType]) -> None:
    """Raise if the labels of some files are numbers and those of others text; ``kinds`` are by file."""
    numbers = [place for place, kind in kinds.items() if are_numbers(kind) or may_be_fractions(kind)]
    texts = [place for place, kind in kinds.items() if is_text(kind) and not pa.types.is_null(kind)]
    if numbers and texts:
        raise DataError(
            f"labels are numbers in {numbers[0]} and {kinds[texts[0]]} in {texts[0]}; give integers or text in all files"
        )


def _check_links(places: Sequence[Place]) -> None:
    for place in places:
        if place.is_local and os.path.islink(place.uri) and not place.exists():
            raise DataError(f"{place} is a link to a file that does not exist; remove it")


def _ignored_label(schemas: Sequence[pa.Schema], columns: ColumnNames) -> str:
    """Return the type of a column ``label`` that was not asked for and cannot be one; empty without such a column.

    Grades are not ignored, since unclicked documents would become positives.
    """
    if "label" not in columns.usual or columns.labels_are_grades:
        return ""
    kinds = [schema.field("label").type for schema in schemas if schema.names.count("label") == 1]
    return next((str(kind) for kind in kinds if not columns.can_be_label(kind)), "")


def _without_images(
    others: Iterable[str], tables: Sequence[TableFile], columns: ColumnNames
) -> Iterable[str]:
    """Return the files beside tables that are not read: if the tables have paths of images, those may be read."""
    kinds = (each.schema.field(columns.image).type for each in tables if columns.image is not None)
    if not any(is_image_struct(kind) or is_text(kind) for kind in kinds):
        return others
    return (path for path in others if _ending(path) not in EXTENSIONS)


def _unread_of_pairs(schema: pa.Schema, columns: ColumnNames) -> tuple[str, ...]:
    """Return the columns that are not read of pairs without labels or negatives, which may be a click log."""
    if columns.query is None or columns.document is None or columns.label or columns.negatives:
        return ()
    return tuple(sorted({*schema.names} - {*columns.asked.values()}))


def _check_columns(table: TableFile, columns: ColumnNames, *, reads_label: bool) -> ColumnNames:
    schema, where = table.schema, str(table.place)
    roles_in(table.place, schema.names, columns)  # refuses a name of two columns
    found = columns.found_in(schema.names, where=where)
    found = found if reads_label else replace(found, label=None)
    found.check_types({name: schema.field(name).type for name in found.asked.values()}, where=where)
    return found


def _cut(group_sizes: list[int], num_files: int) -> Iterator[tuple[int, int]]:
    """Cut a file into ranges of about ``ROWS_PER_FRAGMENT`` rows: join small row groups, split large ones.

    Each part of a row group reads the whole group, or the file up to its end: at most eight parts, and fewer in many
    files, which are read in parallel as they are.
    """
    most_parts = min(8, max(1, _ENOUGH_PARTS // num_files))
    start = stop = 0
    for size in group_sizes:
        if stop > start and stop + size - start > ROWS_PER_FRAGMENT:
            yield start, stop
            start = stop
        stop += size
        rows = max(ROWS_PER_FRAGMENT, size // most_parts)
        while stop - start > 2 * rows:
            yield start, start + rows
            start += rows
    if stop > start:
        yield start, stop
