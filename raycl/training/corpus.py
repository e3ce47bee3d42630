"""The corpus of a run with mined negatives: its distinct queries and documents, and which of them match."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from raycl.data.ids import content_id
from raycl.data.in_memory import InMemoryDataset, ids_of, texts_of, tokens_of
from raycl.data.matches import Matches
from raycl.data.texts import Tokens

_ROWS = 4_096  # of a batch in which rows are read


@final
@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Distinct queries and documents, by number.

    Attributes:
        query: the queries.
        document: the documents, explicit negatives among them.
        document_id: the first id of each document in the data, int64 [num_documents], the text's where it has none;
            None if the documents of the data have no ids.
        bank_id: the id of each document in the bank, int64 [num_documents]: the least ``sample_id`` of the rows with
            this document, or the text's id if it is only an explicit negative.
        positive: the query and the document of each distinct pair, int64 [num_pairs, 2].
        sample_id: the ids of the rows, ascending, int64 [num_rows], and
        pair: the number of each one's pair, int64 [num_rows].
        matches: the documents that match each query, ascending: those of query q are
            ``matches[first_match[q] : first_match[q + 1]]``.
        first_match: int64 [num_queries + 1].
    """

    query: Tokens
    document: Tokens
    document_id: NDArray[np.int64] | None
    bank_id: NDArray[np.int64]
    positive: NDArray[np.int64]
    sample_id: NDArray[np.int64]
    pair: NDArray[np.int64]
    matches: NDArray[np.int64]
    first_match: NDArray[np.int64]

    def pairs_of(self, sample_id: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the pair of each row, int64 [n]."""
        return self.pair[np.searchsorted(self.sample_id, sample_id)]

    def matches_of(self, query: int) -> NDArray[np.int64]:
        """Return the documents that match a query, ascending."""
        return self.matches[self.first_match[query] : self.first_match[query + 1]]

    @cached_property
    def slot(self) -> NDArray[np.int64]:
        """The slot of each document in the bank, whose slots are in the order of ids, int64 [num_documents]."""
        slots = np.empty(len(self.bank_id), np.int64)
        slots[self._by_id] = np.arange(len(slots))
        return slots

    def documents_of(self, bank_id: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the documents with these ids in the bank, int64 [n]."""
        return self._by_id[np.searchsorted(self._ascending, bank_id)]

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
    pair_of_texts = {(q, d): number for number, (q, d) in enumerate(matches.positive.tolist())}
    number, number_of_document = matches.query.number, matches.document.number
    pair = np.array(
        [pair_of_texts[number[q], number_of_document[d]] for q, d in zip(*keys, strict=True)], np.int64
    )
    sample_id, place = np.unique(rows.sample_id, return_index=True)
    all_matches = matches.all()
    order = np.lexsort((all_matches[:, 1], all_matches[:, 0]))
    queries = np.bincount(all_matches[:, 0], minlength=len(number))
    corpus = Corpus(
        query=query.take(_first_places(number, keys[0])),
        document=documents,
        document_id=_document_ids(matches, documents) if has_ids else None,
        bank_id=_bank_ids(rows.sample_id, keys[1], matches, documents),
        positive=matches.positive,
        sample_id=sample_id,
        pair=pair[place],
        matches=all_matches[order, 1],
        first_match=np.cumsum([0, *queries]),
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
        negative_ids = None if ids is None else _split(ids.values.tolist(), counts)
    query_id, document_id = ids_of(batch, "query_id"), ids_of(batch, "document_id")
    return _Read(
        tokens_of(batch, "query"),
        tokens_of(batch, "document"),
        negatives,
        np.zeros(len(batch), np.int64) if counts is None else counts,
        None if query_id is None else query_id.values.tolist(),
        None if document_id is None else document_id.values.tolist(),
        negative_ids,
    )


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
    sample_id: NDArray[np.int64], keys: list[int], matches: Matches[int], documents: Tokens
) -> NDArray[np.int64]:
    found = documents.text_id.copy()
    numbers = np.array([matches.document.number[key] for key in keys], np.int64)
    found[numbers] = np.iinfo(np.int64).max
    np.minimum.at(found, numbers, sample_id)
    return found
