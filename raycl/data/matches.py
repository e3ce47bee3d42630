"""Pairs by their distinct queries and documents: which documents match a query, and which are hard negatives."""

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import Generic, NamedTuple, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from raycl.errors import DataError

Value = TypeVar("Value")
Text = TypeVar("Text", bound=Hashable)

SPARE, _MOST_SPARE = 50, 512  # further candidates, since the nearest may be too near
_FEWEST = 64  # explicit negatives of a pair, if the pairs of a query share them
_MANY, _LARGE_PART = 100, 0.1  # texts of an entity


def divided(negatives: Sequence[Value], num_pairs: int) -> list[Sequence[Value]]:
    """Return the explicit negatives of each pair of a query: all of them, or if they are many, at least 64 in turn.

    Together the pairs have all. The result grows with the sum of negatives and pairs, not with their product.
    """
    size = max(_FEWEST, math.ceil(len(negatives) / num_pairs))
    if len(negatives) <= size:
        return [negatives] * num_pairs
    twice = [*negatives, *negatives]
    starts = (pair * size % len(negatives) for pair in range(num_pairs))
    return [twice[start : start + size] for start in starts]


class HardNegatives(NamedTuple):
    """The numbers of the documents that are negatives of a pair: explicit ones, and mined ones, nearest first.

    ``num_too_near`` counts candidates that may well match, without the explicit ones.
    """

    explicit: Sequence[int]
    mined: list[int]
    num_too_near: int


@final
class DistinctTexts(Generic[Text]):
    """Distinct ``texts`` by number, the ``entity`` [num_texts] of each, the first of its ``ids``, and ``entity_ids``.

    Texts with an id in common are one entity, also through a chain of ids. Its texts share one of ``entity_ids``, the
    first id of the entity: as the only id of each text, it keeps them together.
    """

    def __init__(self, texts: Sequence[Text], ids: Iterable[int | None]) -> None:
        self.number = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        self.texts = list(self.number)
        with_id = [
            (self.number[text], each) for text, each in zip(texts, ids, strict=True) if each is not None
        ]
        self.entity = join_by_id(np.array(with_id, np.int64).reshape(-1, 2), len(self.texts))
        first = {self.entity[number]: each for number, each in reversed(with_id)}
        self.ids = dict(reversed(with_id))
        self.entity_ids = {number: first[self.entity[number]] for number in self.ids}

    def distinct(self, numbers: Iterable[int]) -> list[int]:
        """Return the first text of each entity among these."""
        first: dict[int, int] = {}
        for number in numbers:
            first.setdefault(self.entity[number], number)
        return list(first.values())

    def notices(self, name: str) -> list[str]:
        """Return the :func:`notices` of these texts; ``name`` is query or document."""
        return notices(name, self.entity)


@final
class Matches(Generic[Text]):
    """Distinct queries and documents of labeled rows, their matches, and the explicit negatives of each query.

    A text is any value that is equal for equal texts. ``documents`` holds the negatives as well. ``positive``
    [num_pairs, 2] are the numbers of query and document of each distinct pair.
    """

    def __init__(
        self,
        queries: Sequence[Text],
        documents: Sequence[Text],
        *,
        negatives: Sequence[Sequence[Text]] | None = None,
        query_ids: Sequence[int | None] | None = None,
        document_ids: Sequence[int | None] | None = None,
        negative_ids: Sequence[Sequence[int | None]] | None = None,
        is_negative: Sequence[bool] | None = None,
    ) -> None:
        """``is_negative`` marks rows whose document does not match; raises ``DataError`` if none does."""
        no_ids: list[int | None] = [None] * len(queries)
        lists: Sequence[Sequence[Text]] = negatives or [[]] * len(queries)
        lists_of_ids = negative_ids or [[None] * len(each) for each in lists]
        self.query = DistinctTexts(queries, query_ids or no_ids)
        self.document = DistinctTexts(
            [*documents, *chain.from_iterable(lists)],
            [*(document_ids or no_ids), *chain.from_iterable(lists_of_ids)],
        )
        query, document = self.query.number, self.document.number
        rows = list(zip(queries, documents, is_negative or [False] * len(queries), lists, strict=True))
        positive = [(query[q], document[d]) for q, d, is_other, _ in rows if not is_other]
        if not positive:
            raise DataError("no pair has label 1; mining needs queries with a matching document")
        self.positive = np.array(list(dict.fromkeys(positive)), np.int64)
        own_text = [(number, document[text]) for text, number in query.items() if text in document]
        self._matches: dict[int, set[int]] = {}
        for q, d in [*positive, *own_text]:
            self._matches.setdefault(self.query.entity[q], set()).add(self.document.entity[d])
        all_explicit: dict[int, dict[int, None]] = {}
        for q, d, is_other, others in rows:
            explicit = all_explicit.setdefault(self.query.entity[query[q]], {})
            explicit.update(dict.fromkeys([document[d]] if is_other else []))
            explicit.update(dict.fromkeys(document[text] for text in others))
        pairs: dict[int, list[int]] = {}
        for pair, number in enumerate(self.positive[:, 0].tolist()):
            pairs.setdefault(self.query.entity[number], []).append(pair)
        self._explicit: dict[int, Sequence[int]] = {}  # of each pair
        for entity, numbers in pairs.items():
            unmatched = (
                each
                for each in all_explicit[entity]
                if self.document.entity[each] not in self._matches[entity]
            )
            shares = divided(self.document.distinct(unmatched), len(numbers))
            self._explicit.update(zip(numbers, shares, strict=True))

    def of_entities(self) -> NDArray[np.int64]:
        """Return all matches as entities of queries and of documents, [num_matches, 2], ascending.

        There are at most as many as pairs and queries that are documents, however many texts share an id.
        """
        pairs = sorted((q, d) for q, matches in self._matches.items() for d in matches)
        return np.array(pairs, np.int64)

    @property
    def spare(self) -> int:
        """How many further candidates to search: at least half as many as usual without the explicit negatives of a pair.

        Explicit negatives are often the nearest. A pair with more than the limit allows may get no others.
        """
        most = max(map(len, self._explicit.values()))
        return max(SPARE, min(most + SPARE // 2, _MOST_SPARE))

    def notices(self) -> list[str]:
        """Return lines about queries and documents of which a large part is one entity, and queries without negatives."""
        lines = self.query.notices("query") + self.document.notices("document")
        num_documents = max(self.document.entity) + 1
        num = sum(len(self._matches.get(each, ())) == num_documents for each in self.query.entity)
        if num:
            lines.append(
                f"{num:,} of {len(self.query.texts):,} queries match all documents, and get no mined negatives"
            )
        return lines

    def hard_negatives(
        self,
        pair: int,
        near: Iterable[tuple[int, float]],
        similarity: float,
        *,
        num_negatives: int,
        max_relative_score: float,
    ) -> HardNegatives:
        """Return the negatives of a pair among the documents ``near`` its query, nearest first and without matches.

        ``near`` holds their numbers and similarities. A document nearer than ``max_relative_score`` times the pair's
        own ``similarity`` is skipped, since it may well match (Moreira et al., 2024).
        """
        document, explicit = self.document, self._explicit[pair]
        known = {document.entity[place] for place in explicit}
        others = [(place, cosine) for place, cosine in near if document.entity[place] not in known]
        candidates = [place for place, cosine in others if cosine <= max_relative_score * similarity]
        mined = document.distinct(candidates)[:num_negatives]
        return HardNegatives(explicit, mined, len(others) - len(candidates))


def join_by_id(texts_and_ids: NDArray[np.int64], num_texts: int) -> list[int]:
    """Number the connected components of texts by rows of a text and an id, [num_rows, 2]."""
    from scipy.sparse import coo_array  # not at the start of every worker
    from scipy.sparse.csgraph import connected_components

    ids, place = np.unique(texts_and_ids[:, 1], return_inverse=True)
    size = num_texts + len(ids)
    edges = (texts_and_ids[:, 0], num_texts + place)
    graph = coo_array((np.ones(len(texts_and_ids)), edges), shape=(size, size))
    return connected_components(graph, directed=False)[1][:num_texts].tolist()


def notices(name: str, entity: Sequence[int] | NDArray[np.int64]) -> list[str]:
    """Return a line if a large part of the texts is one entity, as by ids of sessions; ``name`` is query or document."""
    num, largest = len(entity), int(np.bincount(entity).max())
    if largest < max(_MANY, _LARGE_PART * num):
        return []
    return [
        f"{largest:,} of {num:,} different {name} texts are one {name}, since ids join them: no match of one is a "
        f"negative of another; if {name}_id names more than a {name}, such as a session, rename the column"
    ]
