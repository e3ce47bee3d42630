"""The corpus of a run with mined negatives: its distinct queries and documents, and which of them match.

The documents come from pairs, or are captions of images, or sentences. Every kind of data becomes rows of a query and a
document; a row of several captions or sentences becomes several of them. The corpus of a stream grows: it has the rows
that were read so far, in the order in which they came.
"""

import io
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raycl.config import RunConfig
from raycl.data.codecs import Formats
from raycl.data.ids import content_id
from raycl.data.in_memory import Batch, InMemoryDataset, ids_of, texts_of, tokens_of
from raycl.data.matches import DistinctTexts, Matches
from raycl.data.texts import Tokens
from raycl.tokenization import Tokenizer

_ROWS = 4_096  # of a batch in which rows are read
_TOKENS_PER_IMAGE = 256  # an image takes about the time of so many tokens


@final
@dataclass(frozen=True)
class Images:
    """The images of samples by number, ``sample_id`` int64 [num_images], read from the rows that ``load`` returns."""

    load: Callable[[], InMemoryDataset]
    sample_id: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sample_id)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The work of embedding each image, as a number of tokens, int64 [num_images]."""
        return np.full(len(self), _TOKENS_PER_IMAGE)

    def take(self, numbers: NDArray[np.int64]) -> Batch:
        """Return the images with these numbers."""
        return self._rows.take(np.searchsorted(self._rows.sample_id, self.sample_id[numbers]))

    @cached_property
    def _rows(self) -> InMemoryDataset:
        """The rows without their other contents, in the order of ids."""
        return self.load().only("image").where(lambda ids: np.ones(len(ids), np.bool_))


@final
@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Distinct queries and documents, by number.

    Attributes:
        query: the queries: texts, or images with captions.
        document: the documents, explicit negatives among them.
        document_id: the first id of each document in the data, int64 [num_documents], the text's where it has none;
            None if the documents of the data have no ids, as captions and sentences.
        bank_id: the id of each document in the bank, int64 [num_documents]: the ``sample_id`` of the first row whose
            first document it is, the least one if rows are sorted, or the text's id if there is none.
        positive: the query and the document of each distinct pair, int64 [num_pairs, 2].
        sample_id: the ids of the rows, ascending, int64 [num_rows].
        pair: the numbers of each row's pairs, one for each of its texts: the pairs of row i are
            ``pair[first_pair[i] : first_pair[i + 1]]``.
        first_pair: int64 [num_rows + 1].
        query_entity: the entity of each query, texts with an id in common, from 0, int64 [num_queries].
        document_entity: the same of each document, int64 [num_documents].
        matches: the entities of documents that match each entity of queries: the matches of entity e are
            ``matches[first_match[e] : first_match[e + 1]]``.
        first_match: int64 [num_entities + 1].
    """

    query: Tokens | Images
    document: Tokens
    document_id: NDArray[np.int64] | None
    bank_id: NDArray[np.int64]
    positive: NDArray[np.int64]
    sample_id: NDArray[np.int64]
    pair: NDArray[np.int64]
    first_pair: NDArray[np.int64]
    query_entity: NDArray[np.int64]
    document_entity: NDArray[np.int64]
    matches: NDArray[np.int64]
    first_match: NDArray[np.int64]

    def pairs_of(
        self, sample_id: NDArray[np.int64], number: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return the number of a pair of each row, int64 [n]: the first, or its text's with this ``number``.

        It is -1 for a row that the corpus does not have: one of a stream that was not read yet.
        """
        row = np.searchsorted(self.sample_id, sample_id).clip(max=len(self.sample_id) - 1)
        place = self.first_pair[row] + (0 if number is None else number)
        pair = self.pair[np.minimum(place, self.first_pair[row + 1] - 1)]
        return np.where(self.sample_id[row] == sample_id, pair, -1)

    def matches_of(self, query: int) -> NDArray[np.int64]:
        """Return the documents that match a query, ascending."""
        entity, (order, first) = self.query_entity[query], self._documents_by_entity
        matches = self.matches[self.first_match[entity] : self.first_match[entity + 1]]
        found = [order[first[each] : first[each + 1]] for each in matches]
        return found[0] if len(found) == 1 else np.sort(np.concatenate(found))

    def documents_of(self, bank_id: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the documents with these ids in the bank, int64 [n]; -1 for unknown ids."""
        place = np.searchsorted(self._ascending, bank_id).clip(max=len(self._ascending) - 1)
        return np.where(self._ascending[place] == bank_id, self._by_id[place], -1)

    @cached_property
    def most_texts(self) -> int:
        """The number of texts of the row that has the most."""
        return int(np.diff(self.first_pair).max())

    @cached_property
    def key(self) -> int:
        """A number that is equal for corpora with the same numbers of documents, pairs and rows, and the same matches."""
        numbers = (self.bank_id, self.positive, self.sample_id, self.pair)
        numbers += (self.query_entity, self.document_entity, self.first_match, self.matches)
        return content_id(b"".join(each.tobytes() for each in numbers))

    def to_bytes(self) -> bytes:
        """Return what draws need, all but the contents of the queries, for ``from_bytes``."""
        named = [(each.name, getattr(self, each.name)) for each in fields(self) if each.name != "query"]
        named += [(f"document.{each.name}", getattr(self.document, each.name)) for each in fields(Tokens)]
        arrays: dict[str, Any] = {name: value for name, value in named if isinstance(value, np.ndarray)}
        file = io.BytesIO()
        np.savez(file, **arrays)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Corpus":
        """Return the corpus of ``to_bytes``."""
        arrays: dict[str, Any] = dict(np.load(io.BytesIO(content), allow_pickle=False))
        document = Tokens(*(arrays.pop(f"document.{each.name}") for each in fields(Tokens)))
        query = document.take(np.empty(0, np.int64))
        arrays.setdefault("document_id", None)
        return cls(query=query, document=document, **arrays)

    @cached_property
    def _documents_by_entity(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The documents in the order of entities, and the place of the first one of each, [num_entities + 1]."""
        counts = np.bincount(self.document_entity)
        return np.argsort(self.document_entity, kind="stable"), np.cumsum([0, *counts])

    @cached_property
    def _by_id(self) -> NDArray[np.int64]:
        return np.argsort(self.bank_id)

    @cached_property
    def _ascending(self) -> NDArray[np.int64]:
        return self.bank_id[self._by_id]


class Built(NamedTuple):
    """A corpus, and the matches of its texts, which only a miner needs."""

    corpus: Corpus
    matches: Matches[int]


def corpus_of_run(
    config: RunConfig,
    tokenizer: Tokenizer,
    load: Callable[[], InMemoryDataset] | None,
    rows: InMemoryDataset,
) -> Built:
    """Return the corpus of decoded rows, by their kind; ``load`` returns the rows again.

    Without ``load`` they are rows of a stream, whose first texts alone are documents: a bank has a slot for each row.
    """
    if config.data.kind == "text":
        return build_corpus_of_sentences(rows, first_only=load is None)
    if config.data.kind == "image_text":
        assert load is not None, "images of a stream are not kept"
        return build_corpus_of_captions(rows, load)
    prompts = config.text.query_prompt, config.text.document_prompt
    lengths = tokenizer.num_prompt_tokens(prompts[0]), tokenizer.num_prompt_tokens(prompts[1])
    explicit = bool(config.negatives.explicit) and load is not None
    return build_corpus(rows, explicit=explicit, prompt_lengths=lengths)


def build_corpus(rows: InMemoryDataset, *, explicit: bool, prompt_lengths: tuple[int, int] = (0, 0)) -> Built:
    """Return the corpus of decoded pairs; ``explicit`` includes the documents of explicit negatives.

    A query's own text among the documents matches it. ``prompt_lengths`` are the tokens of both prompts, which are
    not compared. Raises ``DataError`` without rows.
    """
    read = [_read(rows, start, explicit=explicit) for start in range(0, len(rows), _ROWS)]
    query = Tokens.joined([each.query for each in read])
    document = Tokens.joined([each.document for each in read])
    negatives = Tokens.joined([each.negatives for each in read])
    counts = np.concatenate([each.counts for each in read])
    keys = _keys(query, prompt_lengths[0]), _keys(document, prompt_lengths[1])
    other_keys = _split(_keys(negatives, prompt_lengths[1]), counts)
    has_ids = read[0].document_ids is not None
    matches = Matches[int](
        keys[0],
        keys[1],
        negatives=other_keys,
        query_ids=[number for each in read for number in each.query_ids or []] or None,
        document_ids=[number for each in read for number in each.document_ids or []] or None,
        negative_ids=[ids for each in read for ids in each.negative_ids or []] or None,
    )
    everything = Tokens.joined([document, negatives])
    first = _first_places(matches.document.number, [*keys[1], *(key for row in other_keys for key in row)])
    documents = everything.take(first)
    return _built(
        matches,
        keys,
        query=query.take(_first_places(matches.query.number, keys[0])),
        document=documents,
        document_id=_document_ids(matches, documents) if has_ids else None,
        first_document=np.array([matches.document.number[key] for key in keys[1]], np.int64),
        sample_id=rows.sample_id,
        counts=np.ones(len(rows), np.int64),
    )


def build_corpus_of_captions(rows: InMemoryDataset, load: Callable[[], InMemoryDataset]) -> Built:
    """Return the corpus of decoded images with captions: each image matches its captions alone.

    ``load`` returns the rows again, where the images are read. Raises ``DataError`` without rows.
    """
    captions, counts = _read_lists(rows, "caption")
    ids = np.repeat(rows.sample_id, counts)
    keys = ids.tolist(), captions.text_id.tolist()
    matches = Matches[int](*keys)
    return _built_of_lists(
        matches, keys, Images(load, np.array(matches.query.texts, np.int64)), captions, rows, counts
    )


def build_corpus_of_sentences(rows: InMemoryDataset, *, first_only: bool = False) -> Built:
    """Return the corpus of decoded sentences, which are both queries and documents.

    The sentences of a row match each other and whatever these match. The pair of a sentence is the next one of its
    row, or itself if it is alone. With ``first_only`` the first sentence of a row is its only document, and the pair
    of all of them. Raises ``DataError`` without rows.
    """
    sentences, counts = _read_lists(rows, "text")
    ends = np.cumsum(counts)
    following = np.arange(1, len(sentences) + 1)
    following[ends - 1] = ends - counts
    ids = np.repeat(rows.sample_id, counts).tolist()
    if first_only:
        following = np.repeat(ends - counts, counts)
        # Rows may share a sentence that is not a document.
        texts = DistinctTexts[int](sentences.text_id.tolist(), ids)
        ids = [texts.entity[texts.number[each]] for each in sentences.text_id.tolist()]
    keys = sentences.text_id.tolist(), sentences.text_id[following].tolist()
    matches = Matches[int](*keys, query_ids=ids, document_ids=ids)
    query = sentences.take(_first_places(matches.query.number, keys[0]))
    return _built_of_lists(
        matches, keys, query, sentences.take(following) if first_only else sentences, rows, counts
    )


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


def _built_of_lists(
    matches: Matches[int],
    keys: tuple[list[int], list[int]],
    query: Tokens | Images,
    texts: Tokens,
    rows: InMemoryDataset,
    counts: NDArray[np.int64],
) -> Built:
    """Return the corpus of lists of ``counts`` [num_rows] texts, which are the documents."""
    number, text_id = matches.document.number, texts.text_id.tolist()
    documents = np.array([number[each] for each in text_id], np.int64)
    return _built(
        matches,
        keys,
        query=query,
        document=texts.take(_first_places(number, text_id)),
        document_id=None,
        first_document=documents[np.cumsum(counts) - counts],
        sample_id=rows.sample_id,
        counts=counts,
    )


def _built(
    matches: Matches[int],
    keys: tuple[list[int], list[int]],
    *,
    query: Tokens | Images,
    document: Tokens,
    document_id: NDArray[np.int64] | None,
    first_document: NDArray[np.int64],
    sample_id: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> Built:
    """Return the corpus of these matches, whose pairs have these ``keys``; each row has ``counts`` of the pairs.

    ``first_document`` is the number of each row's first document, int64 [num_rows] as ``sample_id`` and ``counts``.
    """
    pair_of_texts = {(q, d): number for number, (q, d) in enumerate(matches.positive.tolist())}
    number, number_of_document = matches.query.number, matches.document.number
    pair = np.array(
        [pair_of_texts[number[q], number_of_document[d]] for q, d in zip(*keys, strict=True)], np.int64
    )
    ids, place = np.unique(sample_id, return_index=True)
    begin = np.cumsum(counts) - counts
    of_rows = [pair[begin[each] : begin[each] + counts[each]] for each in place.tolist()]
    query_entity, matching = np.array(matches.query.entity, np.int64), matches.of_entities()
    corpus = Corpus(
        query=query,
        document=document,
        document_id=document_id,
        bank_id=_bank_ids(sample_id, first_document, document),
        positive=matches.positive,
        sample_id=ids,
        pair=np.concatenate(of_rows),
        first_pair=np.cumsum([0, *counts[place]]),
        query_entity=query_entity,
        document_entity=np.array(matches.document.entity, np.int64),
        matches=matching[:, 1],
        first_match=np.cumsum([0, *np.bincount(matching[:, 0])]),
    )
    return Built(corpus, matches)


class _Read(NamedTuple):
    """Some rows: texts, the number of negatives of each, and ids by role."""

    query: Tokens
    document: Tokens
    negatives: Tokens
    counts: NDArray[np.int64]
    query_ids: list[int] | None
    document_ids: list[int] | None
    negative_ids: list[list[int]] | None


def _read(rows: InMemoryDataset, start: int, *, explicit: bool) -> _Read:
    batch = rows.take(np.arange(start, min(start + _ROWS, len(rows))))
    negatives, counts, negative_ids = tokens_of(batch, "document").take(np.empty(0, np.int64)), None, None
    if explicit and "negatives" in batch.contents:
        lists = texts_of(batch, "negatives")
        negatives, counts = lists.tokens, lists.counts
        ids = ids_of(batch, "negative_ids")
        negative_ids = None if ids is None else _split(ids.tolist(), counts)
    query_id, document_id = ids_of(batch, "query_id"), ids_of(batch, "document_id")
    return _Read(
        tokens_of(batch, "query"),
        tokens_of(batch, "document"),
        negatives,
        np.zeros(len(batch), np.int64) if counts is None else counts,
        None if query_id is None else query_id.tolist(),
        None if document_id is None else document_id.tolist(),
        negative_ids,
    )


def _read_lists(rows: InMemoryDataset, role: str) -> tuple[Tokens, NDArray[np.int64]]:
    """Return all texts of lists in this role, and the number of each row's, int64 [num_rows]."""
    read = [texts_of(batch, role) for batch in rows.only(role).batches(_ROWS)]
    empty = np.empty(0, np.int64)
    texts = [Tokens(empty.astype(np.int32), empty, empty), *(each.tokens for each in read)]
    return Tokens.joined(texts), np.concatenate([empty, *(each.counts for each in read)])


def _split(values: list[int], counts: NDArray[np.int64]) -> list[list[int]]:
    """Split values into lists of these lengths."""
    ends = np.cumsum(counts).tolist()
    return [values[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]


def _keys(texts: Tokens, prompt_length: int) -> list[int]:
    """Return a number of each text that is equal for equal texts after the prompt."""
    if prompt_length == 0:
        return texts.text_id.tolist()
    ends = np.cumsum(texts.lengths)
    starts = np.minimum(ends - texts.lengths + prompt_length, ends)
    return [
        content_id(texts.values[start:end].astype("<i4").tobytes())
        for start, end in zip(starts, ends, strict=True)
    ]


def _first_places(number: dict[int, int], keys: list[int]) -> NDArray[np.int64]:
    """Return the first place of each distinct text, in the order of their numbers."""
    first: dict[int, int] = {}
    for place, key in enumerate(keys):
        first.setdefault(number[key], place)
    return np.array([first[each] for each in range(len(number))], np.int64)


def _document_ids(matches: Matches[int], documents: Tokens) -> NDArray[np.int64]:
    ids = matches.document.ids
    return np.array([ids.get(each, text) for each, text in enumerate(documents.text_id.tolist())], np.int64)


def _bank_ids(
    sample_id: NDArray[np.int64], first_document: NDArray[np.int64], documents: Tokens
) -> NDArray[np.int64]:
    """Return the ids in the bank; ``first_document`` [num_rows] are the first documents of these samples.

    A sample that has several rows counts with its first one.
    """
    found = documents.text_id.copy()
    rows = np.sort(np.unique(sample_id, return_index=True)[1])
    number, first = np.unique(first_document[rows], return_index=True)
    found[number] = sample_id[rows[first]]
    return found
