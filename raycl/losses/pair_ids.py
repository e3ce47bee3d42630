"""The ids of pairs: which query is the same as another, and which key, across workers and negatives."""

from typing import NamedTuple

from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses.checks import check_companion, check_offset, checked_ids
from raycl.losses.tiled import has_duplicates


class SideIds(NamedTuple):
    """The ids of the queries, or of the keys, as they came."""

    name: str
    own: Tensor | None
    gathered: Tensor | None

    @property
    def is_given(self) -> bool:
        """Whether any came."""
        return self.own is not None or self.gathered is not None


class GivenIds(NamedTuple):
    """The ids that came with a loss of pairs: this worker's, the gathered ones, and those of negatives."""

    sample: Tensor | None  # the short form: a query and a key that are one sample
    gathered_sample: Tensor | None
    query: Tensor | None
    gathered_query: Tensor | None
    key: Tensor | None
    gathered_key: Tensor | None
    negative: Tensor | None

    @property
    def short(self) -> SideIds:
        """The ids of both sides at once."""
        return SideIds("sample_id", self.sample, self.gathered_sample)

    @property
    def long(self) -> tuple[SideIds, SideIds]:
        """The ids of the queries and those of the keys."""
        return (
            SideIds("query_id", self.query, self.gathered_query),
            SideIds("key_id", self.key, self.gathered_key),
        )


class PairIds(NamedTuple):
    """What is known of the pairs of a batch, and of the negatives that its queries meet."""

    queries: Tensor  # [batch], row i a pair with key i
    keys: Tensor  # [batch]
    own: slice  # where this worker's pairs stand
    negatives: Tensor | None  # [num_negatives]

    @property
    def are_distinct(self) -> bool:
        """Whether all candidates of the batch are negatives: a mask costs time, so ask first."""
        sides = (self.keys,) if self.queries is self.keys else (self.queries, self.keys)
        return not any(has_duplicates(ids) for ids in sides)


def checked_pair_ids(
    given: GivenIds, *, own: slice, batch: int | None, in_batch: bool, num_negatives: int | None
) -> PairIds | None:
    """Return the ids of all pairs and of the negatives, or None where none came.

    ``batch`` is the number of gathered pairs and ``num_negatives`` that of the negatives, None where
    there are none.
    """
    sides, local_batch = _sides(given), own.stop - own.start
    if not in_batch:
        # No keys are gathered, but which pairs other workers have may be known all the same.
        batch = next((side.gathered.numel() for side in sides if side.gathered is not None), None)
        check_offset(own.start, local_batch, local_batch if batch is None else batch)
    queries, keys = (_checked_side(side, local_batch, batch) for side in sides)
    _check_negative_id(given.negative, sides[1], num_negatives)
    # Where only queries have ids, or only keys, all the others are different: then a query and a key
    # make a pair if their own pairs have the same id, whichever side it came for.
    queries, keys = keys if queries is None else queries, queries if keys is None else keys
    return None if queries is None or keys is None else PairIds(queries, keys, own, given.negative)


def _sides(given: GivenIds) -> tuple[SideIds, SideIds]:
    """Return queries and keys, of the one form that came."""
    names = [side.name for side in given.long if side.is_given]
    if not names:
        return given.short, given.short
    if given.short.is_given:
        raise ConfigError(
            f"the pairs have two kinds of ids: sample_id came beside {' and '.join(names)}; "
            "pass sample_id where a pair is one sample, query_id and key_id otherwise"
        )
    return given.long


def _checked_side(side: SideIds, local_batch: int, batch: int | None) -> Tensor | None:
    """Return the ids of all pairs of the batch on one side, if they came."""
    name, own, gathered = side
    if own is not None and own.shape != (local_batch,):
        raise ConfigError(
            f"{name} does not match its rows: {list(own.shape)} ids came for {local_batch} rows; "
            "pass one id per row"
        )
    if batch is None:
        check_companion(f"gathered_{name}", gathered, "gathered_key", None)
        return own
    ids = checked_ids((name, own), (f"gathered_{name}", gathered), batch)
    return None if ids is None else ids[1]


def _check_negative_id(negative_id: Tensor | None, keys: SideIds, num_negatives: int | None) -> None:
    """Refuse ids of negatives without those of the keys that they may be, and the other way round."""
    if num_negatives is None:
        check_companion("negative_id", negative_id, "negatives", None)
    else:
        checked_ids((keys.name, keys.own), ("negative_id", negative_id), num_negatives)
