"""Distinct texts, and which of them are one thing by their ids."""

from collections.abc import Iterable, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components


@final
class DistinctTexts:
    """Texts by number, the ``thing`` [num_texts] that each is, and the first of its ``ids`` if it has any.

    Texts that have an id in common are one thing.
    """

    def __init__(self, texts: Sequence[str], ids: Iterable[int | None]) -> None:
        self.number = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        self.texts = list(self.number)
        named = [(self.number[text], each) for text, each in zip(texts, ids, strict=True) if each is not None]
        self.ids = dict(reversed(named))
        self.thing = _things(np.array(named, np.int64).reshape(-1, 2), len(self.texts))

    def alike(self) -> dict[int, list[int]]:
        """Return the numbers of the texts of each thing."""
        found: dict[int, list[int]] = {}
        for number, thing in enumerate(self.thing):
            found.setdefault(thing, []).append(number)
        return found

    def distinct(self, numbers: Iterable[int]) -> list[int]:
        """Return the first text of each thing among these."""
        first: dict[int, int] = {}
        for number in numbers:
            first.setdefault(self.thing[number], number)
        return list(first.values())


def _things(named: NDArray[np.int64], num_texts: int) -> list[int]:
    """Return one number a thing, by rows of a text and an id [num_named, 2]."""
    ids, place = np.unique(named[:, 1], return_inverse=True)
    size = num_texts + len(ids)
    graph = coo_array((np.ones(len(named)), (named[:, 0], num_texts + place)), shape=(size, size))
    return connected_components(graph, directed=False)[1][:num_texts].tolist()
