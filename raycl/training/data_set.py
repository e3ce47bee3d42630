"""One data set of a run: its rows, columns and classes, from files or from the user's Ray Dataset."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray

from raycl.config import RunConfig, TextConfig
from raycl.data.click_logs import group_dataset, group_source, grouped_columns
from raycl.data.columns import ColumnNames, is_list
from raycl.data.decode import Decoder, classes_of, columns_of, decode_dataset, decode_here, decode_source
from raycl.data.fingerprint import fingerprint, fingerprint_of_blocks
from raycl.data.ids import content_id
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Fragment, Source, plain_values
from raycl.data.weights import check_weight_columns
from raycl.errors import DataError
from raycl.ray_runtime import fetch_tables, unwrap_ray_errors
from raycl.tokenization import InvalidTextError, Tokenizer, Vocabulary, read_text
from raycl.training.coordinator import rows_in
from raycl.training.preflight import check_pairs, column_names

ROLES = ("text", "caption", "query", "document", "negatives")


@final
@dataclass(frozen=True)
class DecodedRows:
    """The decoded rows of a data set that are kept in memory: blocks of Ray Data, or tables of this process."""

    rows: ray.data.Dataset | list[pa.Table]

    def columns(self, names: Sequence[str]) -> list[pa.Table]:
        """Return columns of all rows, in order."""
        if isinstance(self.rows, list):
            return [table.select(list(names)) for table in self.rows]
        return fetch_tables(self.rows.select_columns(list(names)))

    def blocks(self) -> list[Any]:
        """Return references to tables of the rows."""
        return (
            [ray.put(table) for table in self.rows]
            if isinstance(self.rows, list)
            else self.rows.to_arrow_refs()
        )

    def fingerprint(self, names: Sequence[str] | None = None) -> int:
        """Return the fingerprint of all rows, or of these columns, see :mod:`raycl.data.fingerprint`."""
        if isinstance(self.rows, list):
            return fingerprint(*(self.rows if names is None else self.columns(names)))
        return fingerprint_of_blocks(self.blocks(), names)


@final
class DataSet:
    """One data set of a run: a source, or a Ray Dataset.

    Labeled pairs are grouped by query first, which reads all of them. The coordinator counts the rows under names that
    begin with ``prefix``.
    """

    def __init__(
        self,
        config: RunConfig,
        coordinator: Any,
        data: Source | ray.data.Dataset,
        *,
        number: int = 0,
        prefix: str = "",
    ) -> None:
        self._coordinator, self._config = coordinator, config
        self.prefix = prefix
        self.name = data.uri if isinstance(data, Source) else f"dataset {number}"
        self.source = data if isinstance(data, Source) else None
        self.dataset: Any = None if self.source else data
        self.num_clicks: int | None = None  # the rows of a click log that became pairs
        self.columns = self.source.columns if self.source else columns_of(self.dataset, column_names(config))
        self.columns_of_file = self.columns  # before a click log became pairs
        if config.data.kind == "pairs":
            if self.source is None:  # a source was checked before Ray started
                check_pairs(config, self.columns)
            if self.columns.label is not None:
                self._group()
        if self.source is None and self.columns.weight is not None:
            self._check_weights(self.columns.weight)
        self.classes = self.source.classes if self.source else classes_of(self.dataset, self.columns)
        self.num_rows: int = self.source.num_rows if self.source else self.dataset.count()

    @property
    def rows(self) -> Source | ray.data.Dataset:
        """The source, or the Ray Dataset, which may be a grouped click log."""
        return self.source or self.dataset

    @property
    def num_read(self) -> int:
        """The number of rows to read; for a click log, the rows that became pairs."""
        return self.num_rows if self.num_clicks is None else self.num_clicks

    @property
    def has_labels(self) -> bool:
        """Whether the rows have labels."""
        return self.source.has_labels if self.source else self.columns.label is not None

    def use_classes(self, classes: tuple[str, ...]) -> None:
        """Number the text labels by these class names, which contain the own ones."""
        self.classes = classes
        if self.source is not None:
            self.source = replace(self.source, classes=classes)

    def stats(self) -> ReadStats:
        """Return the counts of the rows read so far."""
        return rows_in(self._coordinator, self.prefix)

    def counts(self) -> dict[str, Any]:
        """Return the numbers of rows, with the invalid and skipped ones by cause."""
        rows = self.stats()
        return {"rows": self.num_read, "invalid_rows": dict(rows.invalid), "skipped": dict(rows.skipped)}

    def read(
        self, decoder: Decoder, fragments: tuple[Fragment, ...] | None = None, *, here: bool = False
    ) -> DecodedRows:
        """Read and decode the rows of all fragments, or of these, by tasks; those of a source in this process if ``here``."""
        if self.source is None:
            decoded = decode_dataset(self.dataset, self.columns, decoder, classes=self.classes)
            return DecodedRows(decoded.materialize())
        fragments = self.source.fragments if fragments is None else fragments
        if here:
            read = partial(self.source.read, keep=decoder.keep)
            return DecodedRows(list(decode_here(fragments, read, decoder)))
        return DecodedRows(decode_source(self.source, decoder, fragments).materialize())

    def _check_weights(self, name: str) -> None:
        """Raise ``DataError`` if a weight of the Ray Dataset is invalid; executes it for that column."""
        batches = self.dataset.select_columns([name]).iter_batches(batch_format="pyarrow")
        check_weight_columns(((self.name, batch[name]) for batch in batches), where=self.name)

    def _group(self) -> None:
        grouped = (
            group_source(self.source, self._coordinator, prefix=self.prefix)
            if self.source is not None
            else group_dataset(self.dataset, self.columns, self._coordinator, prefix=self.prefix)
        )
        self.source, self.dataset = None, _ordered(grouped.materialize())
        rows = self.stats()
        rows.check(self._config.data.max_invalid_fraction)
        self.num_clicks = rows.num_rows
        self.columns = grouped_columns(self.columns)
        if self.dataset.count() == 0:
            raise DataError("no query has a document with label 1; training needs positive pairs")


def _ordered(pairs: ray.data.Dataset) -> ray.data.Dataset:
    """Return the blocks of distinct pairs by their first rows: a shuffle returns them in any order, which a stream keeps."""
    blocks: Any = pairs.to_arrow_refs()
    first = ray.get([ray.remote(_first_row).remote(block) for block in blocks])
    in_order = sorted((row, place) for place, row in enumerate(first) if row is not None)
    return ray.data.from_arrow_refs([blocks[place] for _, place in in_order]) if in_order else pairs


def _first_row(block: pa.Table) -> str | None:
    return repr(block.slice(0, 1).to_pylist()) if len(block) else None


def texts_per_row(data: Source | ray.data.Dataset, columns: ColumnNames) -> dict[str, float]:
    """Return the mean number of texts by role; lists are counted in the first rows."""
    names = {role: name for role, name in columns.contents.items() if role in ROLES}
    first, counts = _first_rows(data, list(names.values())), dict.fromkeys(names, 1.0)
    for role, name in names.items():
        if first is not None and is_list(first[name].type):
            num_texts = sum(len(chunk.flatten()) for chunk in first[name].chunks)
            counts[role] = num_texts / max(1, len(first))
    return counts


def _first_rows(data: Source | ray.data.Dataset, names: list[str]) -> pa.Table | None:
    """Return some rows of a source; of a dataset, which is executed for them, only if it has lists."""
    if isinstance(data, Source):
        return next((table for _, table in data.tables(data.fragments[0], names)), None) if names else None
    schema: Any = data.schema()
    kinds = dict(zip(schema.names, schema.types, strict=True))
    if not any(isinstance(kinds[name], pa.DataType) and is_list(kinds[name]) for name in names):
        return None
    return data.select_columns(names).take_batch(1_024, batch_format="pyarrow")  # pyright: ignore


def learn_vocabulary(
    text: TextConfig,
    tokenizer: Tokenizer | None,
    columns: ColumnNames,
    data: Sequence[Source | ray.data.Dataset],
    *,
    corpus: Source | None = None,
    counted: bool,
) -> tuple[Vocabulary, ReadStats]:
    """Read texts as ``read_vocabulary`` does: from sources in a task of Ray, near the data."""
    if tokenizer is not None and not counted:
        return Vocabulary(tokenizer), ReadStats()
    if not all(isinstance(each, Source) for each in data):
        return read_vocabulary(text, tokenizer, columns, data, corpus=corpus, counted=counted)
    task: Any = ray.remote(num_cpus=1)(read_vocabulary)  # pyright: ignore
    with unwrap_ray_errors():
        return ray.get(task.remote(text, tokenizer, columns, data, corpus=corpus, counted=counted))


def read_vocabulary(
    text: TextConfig,
    tokenizer: Tokenizer | None,
    columns: ColumnNames,
    data: Sequence[Source | ray.data.Dataset],
    *,
    corpus: Source | None = None,
    counted: bool,
) -> tuple[Vocabulary, ReadStats]:
    """Train a tokenizer on the texts of these columns unless one is given, and count their tokens if ``counted``.

    The texts of a ``corpus`` are read as well, in its own columns; their statistics are returned, since no other part
    of a run reads them. Raises ``DataError`` if no text is valid.
    """
    stats = ReadStats()
    texts = [_texts(text, each, columns, ReadStats()) for each in data]  # counted when the rows are decoded
    if corpus is not None:
        texts.append(_fingerprinted(_texts(text, corpus, corpus.columns, stats), stats))
    # In turn: otherwise a large data set would leave no room for the next one.
    in_turn = (each for group in zip_longest(*texts) for each in group if each is not None)
    found = list(islice(in_turn, text.tokenizer_train_size))
    if not found:
        raise DataError("found no valid text to train a tokenizer on; check the text columns")
    vocabulary = Vocabulary.of_texts(
        found,
        tokenizer,
        max_length=text.longest,
        size=text.vocabulary_size,
        lowercase=text.lowercase,
        counted=counted,
    )
    return vocabulary, stats


def _texts(
    text: TextConfig, data: Source | ray.data.Dataset, columns: ColumnNames, stats: ReadStats
) -> Iterator[str]:
    """Yield the valid texts, with their prompts; ``stats`` counts all texts."""
    columns = replace(columns, **{role: None for role in columns.asked if role not in ROLES})
    is_source = isinstance(data, Source)
    values = _values_of_source(data, columns) if is_source else _values_of_dataset(data, columns)
    for role, column, where in values:
        prompt = text.prompt_of(role)
        for value, place in zip(column, where, strict=True):
            has_none = role == "negatives" and value is None
            for each in value if isinstance(value, list | tuple) else [] if has_none else [value]:
                stats.num_rows += 1
                try:
                    yield prompt + read_text(each)
                except InvalidTextError as error:
                    stats.add_invalid(place, error)


def _fingerprinted(texts: Iterator[str], stats: ReadStats) -> Iterator[str]:
    """Yield the texts, and add the hash of each to the fingerprint of ``stats``."""
    for each in texts:
        stats.fingerprint = (stats.fingerprint + content_id(each.encode())) % 2**64
        yield each


def _values_of_source(source: Source, columns: ColumnNames) -> Iterator[tuple[str, list[Any], Sequence[str]]]:
    described = replace(source, columns=columns)
    # The order is random: with more texts than needed, the sample covers the whole data set.
    for number in np.random.default_rng(0).permutation(len(source.fragments)):
        for rows in described.read(source.fragments[number]):
            yield from ((role, values, rows.where) for role, values in rows.values.items())


def _values_of_dataset(dataset: Any, columns: ColumnNames) -> Iterator[tuple[str, list[Any], Sequence[str]]]:
    names = columns.contents
    chosen = dataset.select_columns(list(names.values()))
    for batch in chosen.iter_batches(batch_format="pyarrow", batch_size=1_024):
        where = ["a row of the dataset"] * len(batch)
        yield from ((role, plain_values(batch[name]), where) for role, name in names.items())
