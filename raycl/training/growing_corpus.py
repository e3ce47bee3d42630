"""The corpus of a stream: the rows that were read so far, in the order in which they came."""

from collections import deque
from collections.abc import Callable
from typing import final

import numpy as np
import pyarrow as pa

from raycl.data.codecs import Formats
from raycl.data.in_memory import InMemoryDataset
from raycl.training.corpus import Built, Corpus


@final
class GrowingCorpus:
    """The corpus of all rows so far; ``build`` makes it, and ``formats`` are the formats of the rows."""

    def __init__(self, formats: Formats, build: Callable[[InMemoryDataset], Built]) -> None:
        self._formats, self._build = formats, build
        self._new: deque[pa.Table] = deque()  # appended by another thread
        self._tables: list[pa.Table] = []
        self._known = np.empty(0, np.int64)
        self._built: Built | None = None

    def add(self, rows: pa.Table) -> None:
        """Add decoded rows, some of which may be known by their ids."""
        self._new.append(rows)

    def built(self) -> Built | None:
        """Return the corpus of all rows, None before the first one; it is the same object until another row comes."""
        new: list[pa.Table] = []
        while self._new:
            new.append(self._new.popleft())
        if new:
            rows = unknown(pa.concat_tables(new), self._known)
            if rows.num_rows:
                tables = [*self._tables, rows]
                self._built = self._build(InMemoryDataset(tables, self._formats))
                self._tables = tables
                self._known = np.union1d(self._known, rows["sample_id"].to_numpy())
        return self._built

    def to_bytes(self) -> bytes:
        """Return the rows of the corpus, for ``corpus_of_bytes``."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._tables[0].schema) as writer:
            for table in self._tables:
                writer.write_table(table)
        return sink.getvalue().to_pybytes()


def unknown(rows: pa.Table, known: np.ndarray) -> pa.Table:
    """Return the first row of each id that is not among the ``known`` ones, ascending int64 [num_known]."""
    ids = rows["sample_id"].to_numpy()
    is_first = np.zeros(len(ids), np.bool_)
    is_first[np.unique(ids, return_index=True)[1]] = True
    if len(known):
        is_first &= known[np.searchsorted(known, ids).clip(max=len(known) - 1)] != ids
    return rows.filter(pa.array(is_first))


def table_of_bytes(rows: bytes) -> pa.Table:
    """Return the rows of ``GrowingCorpus.to_bytes``."""
    with pa.ipc.open_stream(rows) as reader:
        return reader.read_all()


def corpus_of_bytes(formats: Formats, build: Callable[[InMemoryDataset], Built], rows: bytes) -> Corpus:
    """Return the corpus of the rows of ``GrowingCorpus.to_bytes``, with the same numbers."""
    return build(InMemoryDataset([table_of_bytes(rows)], formats)).corpus
