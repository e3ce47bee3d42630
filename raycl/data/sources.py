"""Sources: data sets that were found, cut into fragments that Ray tasks read."""

import hashlib
import json
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raycl.data.arrow_tables import ArrowTables
from raycl.data.codecs import bytes_of_text
from raycl.data.columns import ColumnNames, is_list, is_text
from raycl.data.csv_tables import CsvTables
from raycl.data.ids import content_ids, stable_ids
from raycl.data.images import EXTENSIONS, is_image_struct, read_image, stored_images
from raycl.data.json_tables import JsonTables
from raycl.data.labels import NO_LABEL, label_numbers
from raycl.data.lance_tables import LanceTables
from raycl.data.parquet_tables import ParquetTables
from raycl.data.patterns import folder_of
from raycl.data.prefetch import Prefetched
from raycl.data.split import Keep
from raycl.data.tables import TableFormat
from raycl.data.tar_tables import TarTables
from raycl.storage import Place, absolute

FILES: tuple[TableFormat, ...] = (ParquetTables(), CsvTables(), JsonTables(), ArrowTables(), TarTables())
# Their files may move when the table is compacted. Delta and Iceberg list parquet files.
VERSIONED: dict[str, TableFormat] = {"delta": FILES[0], "iceberg": FILES[0], "lance": LanceTables()}
READERS = {each.name: each for each in FILES} | VERSIONED


@final
@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Rows ``start`` to ``stop`` of the table ``file``, or a list of image files, below ``uri``.

    ``file`` is empty if the address itself is the file, and in the folder of the files if the address is a pattern.
    """

    uri: str
    first_id: int
    file: str = ""
    start: int = 0
    stop: int = 0
    paths: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """The number of rows, invalid ones included."""
        return len(self.paths) or self.stop - self.start

    @property
    def place(self) -> Place:
        """The place of the table file."""
        return Place(folder_of(self.uri)) / self.file

    @property
    def name(self) -> str:
        """A name that is unique among the fragments of all sources."""
        return f"{self.uri}:{self.first_id}"

    def to_json(self) -> str:
        """Return the fragment as text, for a column of a Ray Dataset."""
        return json.dumps(vars(self))

    @staticmethod
    def from_json(text: str) -> "Fragment":
        """Parse the result of ``to_json``."""
        fields = json.loads(text)
        return Fragment(**fields | {"paths": tuple(fields["paths"])})


@final
@dataclass(frozen=True, kw_only=True)
class RawRows:
    """Rows as in the source: values by role, ids, labels, and the origin of each row."""

    values: Mapping[str, list[Any]]
    sample_id: NDArray[np.int64]
    label: NDArray[np.int64]
    where: list[str]

    @staticmethod
    def of_table(
        table: pa.Table,
        columns: ColumnNames,
        classes: tuple[str, ...] | None,
        *,
        ids: NDArray[np.int64] | None = None,
        where: list[str] | None = None,
        folder: Place | None = None,
    ) -> "RawRows":
        """Return the rows of a table; without an id column their ids are ``ids``, or hashes of the contents.

        Relative paths of images lie below ``folder``.
        """
        values = values_of(table, columns, folder)
        if columns.sample_id is not None:
            ids = stable_ids(plain_values(table[columns.sample_id]), where)
        elif ids is None:
            ids = content_ids({role: each for role, each in values.items() if role != "weight"})
        label = np.full(len(ids), NO_LABEL, np.int64)
        if columns.label is not None:
            are_grades = columns.labels_are_grades
            label = label_numbers(table[columns.label], classes, may_be_negative=are_grades)
        where = [f"row with id {row_id}" for row_id in ids] if where is None else where
        return RawRows(values=values, sample_id=ids, label=label, where=where)


@final
@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset that was found but not read yet.

    Ids count the rows in the order of sorted file names, or come from the id column, so they are equal in
    every run over the same files. ``kind`` is "folder" or the name of a table format, and ``types`` are those with which
    its columns are read, None if the files know them. ``classes`` are numbered by the labels; ``label_names`` are for
    display only, of integers. ``ignored`` counts other files by ending; ``ignored_label`` is the type of a column ``label``
    that is not read; ``unread_columns`` are the other columns of pairs without labels, ``unused_settings`` name columns for images,
    which have none.
    """

    uri: str
    kind: str
    fragments: tuple[Fragment, ...]
    columns: ColumnNames
    classes: tuple[str, ...] | None
    has_labels: bool
    ignored: tuple[tuple[str, int], ...] = ()
    ignored_label: str = ""
    unread_columns: tuple[str, ...] = ()
    unused_settings: tuple[str, ...] = ()
    types: pa.Schema | None = None
    label_names: tuple[str, ...] | None = None

    @property
    def files_fingerprint(self) -> str | None:
        """A hash of the files below the address and their numbers of rows, which rows without ids of their own depend on."""
        if self.columns.sample_id is not None:
            return None
        num_rows, paths = Counter[str](), hashlib.sha256()
        for each in self.fragments:
            num_rows[each.file] += each.num_rows
            paths.update(json.dumps(each.paths).encode())
        return hashlib.sha256(json.dumps([*num_rows.items(), paths.hexdigest()]).encode()).hexdigest()

    @property
    def fragments_fingerprint(self) -> str:
        """A hash of the fragments by file and number of rows, which the order of a stream depends on."""
        cut = [(each.file, each.num_rows) for each in self.fragments]
        return hashlib.sha256(json.dumps(cut).encode()).hexdigest()

    @property
    def files(self) -> Iterator[str]:
        """The absolute addresses of the files; a file of several fragments may be repeated."""
        for each in self.fragments:
            place = Place(absolute(each.place.uri))
            yield from (f"{place.uri}/{path}" for path in each.paths) if each.paths else [place.uri]

    @property
    def num_rows(self) -> int:
        """The number of all rows, invalid ones included."""
        return sum(fragment.num_rows for fragment in self.fragments)

    def label_name(self, label: int) -> str:
        """Return the name of a label, or its number if it has none."""
        names = self.classes or self.label_names or ()
        return names[label] if 0 <= label < len(names) else str(label)

    def unread(self) -> list[str]:
        """Return lines about the files and columns that are not read and the settings without effect, if there are any."""
        lines = []
        if self.ignored:
            counts = ", ".join(f"{count} {ending}" for ending, count in self.ignored)
            remedy = self._formats_read() if any(map(self._is_of_other_format, dict(self.ignored))) else ""
            lines.append(f"files not read in {self.uri}: {counts}{remedy}")
        if self.ignored_label:
            held = f"it holds {self.ignored_label}, not integers or text"
            lines.append(f"ignored the column 'label' of {self.uri}: {held}")
        if self.unused_settings:
            settings = ", ".join(self.unused_settings)
            lines.append(f"no effect on the images of {self.uri}, which have no columns: {settings}")
        if self.unread_columns:
            lines.append(
                f"all rows of {self.uri} count as matching pairs; columns not read: {', '.join(self.unread_columns)} "
                "(if one tells which rows match, name it with --set data.columns.label=NAME)"
            )
        return lines

    def _is_of_other_format(self, ending: str) -> bool:
        """Whether a file that is not read, by its ending, is of another format than those that are."""
        tables = (each for each in FILES if each.name != self.kind)
        return ending in (() if self.kind == "folder" else EXTENSIONS) or any(
            ending in each.endings for each in tables
        )

    def _formats_read(self) -> str:
        """Return the end of a line about other files: the files that are read by ending, and what to do."""
        read = Counter(posixpath.splitext(each)[1].lower() for each in set(self.files))
        counts = ", ".join(f"{count} {ending}" for ending, count in sorted(read.items()))
        return f" (read: {counts}); to read the others, put them into a folder of their own"

    def read(self, fragment: Fragment, keep: Keep | None = None) -> Iterator[RawRows]:
        """Yield the rows of one fragment in batches; raises ``StorageError`` or ``DataError``.

        Files of images that ``keep`` refuses are not read, and their values are None. The next files are read while
        a batch is used.
        """
        if self.kind == "folder":
            return Prefetched(self._read_files(fragment, keep), depth=1)
        return self._read_table(fragment)

    def tables(self, fragment: Fragment, names: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """Yield (position in the file, rows) of a fragment of a table; only the columns ``names``."""
        reader = READERS[self.kind]
        return reader.read(fragment.place, names, self.types, start=fragment.start, stop=fragment.stop)

    def image_files(self) -> list[str]:
        """Return the addresses of the images of a folder, in the order of their ids."""
        return [(Place(each.uri) / path).uri for each in self.fragments for path in each.paths]

    def sample_ids(self, fragments: Sequence[Fragment]) -> NDArray[np.int64]:
        """Return the ids of all rows of these fragments, invalid ones included; reads at most the id column."""
        with ThreadPoolExecutor(8) as pool:
            return np.concatenate([np.empty(0, np.int64), *pool.map(self._fragment_ids, fragments)])

    def labels(self) -> NDArray[np.int64]:
        """Return the labels of all rows, invalid ones included; reads at most the column of labels."""
        with ThreadPoolExecutor(8) as pool:
            return np.concatenate([np.empty(0, np.int64), *pool.map(self._fragment_labels, self.fragments)])

    def _fragment_labels(self, fragment: Fragment) -> NDArray[np.int64]:
        column = self.columns.label
        if column is None:
            return self._labels_of_files(fragment.paths)
        parts = [label_numbers(table[column], self.classes) for _, table in self.tables(fragment, [column])]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _labels_of_files(self, paths: Sequence[str]) -> NDArray[np.int64]:
        numbers = {name: number for number, name in enumerate(self.classes or ()) if self.has_labels}
        return np.array([numbers.get(path.split("/")[0], NO_LABEL) for path in paths], np.int64)

    def _fragment_ids(self, fragment: Fragment) -> NDArray[np.int64]:
        column = self.columns.sample_id
        if column is None:
            return np.arange(fragment.first_id, fragment.first_id + fragment.num_rows, dtype=np.int64)
        parts = [
            stable_ids(
                plain_values(table[column]),
                [f"{fragment.place.name} row {row}" for row in range(first, first + len(table))],
            )
            for first, table in self.tables(fragment, [column])
        ]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _read_files(self, fragment: Fragment, keep: Keep | None) -> Iterator[RawRows]:
        root = Place(fragment.uri)
        for start in range(0, len(fragment.paths), 256):
            paths = fragment.paths[start : start + 256]
            ids = np.arange(start, start + len(paths), dtype=np.int64) + fragment.first_id
            wanted = [True] * len(paths) if keep is None else keep(ids).tolist()
            with ThreadPoolExecutor(8) as pool:
                read = pool.map(lambda path, kept: read_image(root / path) if kept else None, paths, wanted)
                images = list(read)
            labels = self._labels_of_files(paths)
            yield RawRows(values={"image": images}, sample_id=ids, label=labels, where=list(paths))

    def _read_table(self, fragment: Fragment) -> Iterator[RawRows]:
        named = (*self.columns.contents.values(), self.columns.label, self.columns.sample_id)
        file = fragment.place.name
        folder = None if self.kind in VERSIONED else fragment.place.parent
        for first, table in self.tables(fragment, list(dict.fromkeys(name for name in named if name))):
            position = np.arange(first, first + table.num_rows, dtype=np.int64)
            yield RawRows.of_table(
                table,
                self.columns,
                self.classes,
                ids=position - fragment.start + fragment.first_id,
                where=[f"{file} row {row}" for row in position.tolist()],
                folder=folder,
            )


def values_of(table: pa.Table, columns: ColumnNames, folder: Place | None = None) -> dict[str, list[Any]]:
    """Return the contents of a table by role; images of structs and of paths, relative to ``folder``, become bytes.

    From Arrow: NumPy would turn integers into floats if one is missing, and so merge large ids.
    """
    values: dict[str, list[Any]] = {}
    for role, name in columns.contents.items():
        kind = table[name].type
        are_files = role == "image" and (is_image_struct(kind) or is_text(kind))
        values[role] = stored_images(table[name], folder) if are_files else plain_values(table[name])
    return values


def plain_values(column: pa.ChunkedArray) -> list[Any]:
    """Return the values; texts become bytes, since they may not be UTF-8."""
    kind = column.type
    if is_list(kind) and is_text(kind.value_type):
        return column.cast(pa.list_(bytes_of_text(kind.value_type))).to_pylist()
    return (column.cast(bytes_of_text(kind)) if is_text(kind) else column).to_pylist()
