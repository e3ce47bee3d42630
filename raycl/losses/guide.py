"""A guide: another encoder, which masks the negatives that it finds nearer than the positive (Solatorio, 2024)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Tensor

from raycl.distributed import gather_detached, gather_uneven
from raycl.distributed.device_copy import upload
from raycl.errors import ConfigError
from raycl.losses.false_negatives import FalseNegativeMask
from raycl.losses.tiled import product, working_precision

# Above the rounding of a similarity, so that a candidate as near as the positive is kept in any order of summation.
TOLERANCE = 1e-6


@final
@dataclass(frozen=True, kw_only=True)
class Guide:
    """A guide's embeddings of pairs and negatives: of this worker's or of all workers' (GISTEmbed: Solatorio, 2024).

    A candidate of a query, or of a key, is masked if its similarity exceeds the limit of the pair; the positive
    never is.

    Attributes:
        query: [num_pairs, guide_dim], of unit length, in any precision; guide_dim may differ from the loss's dim.
        key: [num_pairs, guide_dim].
        limit: [num_pairs], the similarity of each pair minus the margin.
        negatives: [num_negatives, guide_dim], the negatives of the queries; None without negatives.
        counts: int64 [2], to which the loss adds the number of masked negatives of queries, and of all negatives
            that have no positive's id; None to count nothing.
    """

    query: Tensor
    key: Tensor
    limit: Tensor
    negatives: Tensor | None = None
    counts: Tensor | None = None

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        negatives: Tensor | None = None,
        *,
        margin: float = 0.0,
        relative: bool = False,
    ) -> Self:
        """Return the guide of these embeddings, of unit length.

        A negative is masked if it is nearer than s - ``margin``, where s is the similarity of the pair;
        ``relative``: than s - ``margin`` * |s|.
        """
        similarity = (working_precision(query) * working_precision(key)).sum(1)
        lowered = similarity - margin * (similarity.abs() if relative else 1.0)
        counts = torch.zeros(2, dtype=torch.int64, device=query.device)
        return cls(query=query, key=key, limit=lowered + TOLERANCE, negatives=negatives, counts=counts)

    def on(self, device: torch.device) -> Self:
        """Return the guide on a device, in one transfer."""
        moved = upload(list(vars(self).values()), device)
        return replace(self, **dict(zip(vars(self), moved, strict=True)))

    def gathered(self, num_negatives: Sequence[int]) -> Self:
        """Return the embeddings of all workers, given each worker's number of negatives; collective."""
        pairs = {name: gather_detached(getattr(self, name)) for name in ("query", "key", "limit")}
        negatives = self.negatives
        if negatives is not None:
            negatives = gather_uneven(negatives, num_negatives)
        return replace(self, **pairs, negatives=negatives)

    def swapped(self) -> Self:
        """Return the guide with keys in the place of queries; keys have no further negatives and are not counted."""
        return replace(self, query=self.key, key=self.query, negatives=None, counts=None)

    def check(self, num_pairs: int, num_negatives: int) -> None:
        """Raise ``ConfigError`` unless there is a row for each pair of the batch and each negative."""
        found = len(self.query), len(self.key), 0 if self.negatives is None else len(self.negatives)
        if found != (num_pairs, num_pairs, num_negatives):
            raise ConfigError(
                f"the guide has {found[0]} queries, {found[1]} keys and {found[2]} negatives, and the batch has "
                f"{num_pairs} pairs and {num_negatives} negatives; gather its rows in the same way"
            )

    def mask(self, mask: FalseNegativeMask | None, own: slice, *, in_batch: bool = True) -> "GuidedMask":
        """Return a mask of the rows ``own`` among the queries against the keys (if ``in_batch``) and the negatives.

        ``mask`` is the mask of false negatives of the same rows.
        """
        columns = self.key if in_batch else self.key[:0]
        if self.negatives is not None:
            columns = torch.cat([columns, self.negatives])
        return GuidedMask(mask, self.query[own], columns, limit=self.limit[own, None], counts=self.counts)


@final
class GuidedMask:
    """Mask false negatives, and the candidates that a guide finds nearer than the positive."""

    def __init__(
        self,
        mask: FalseNegativeMask | None,
        rows: Tensor,
        columns: Tensor,
        *,
        limit: Tensor,
        counts: Tensor | None,
    ) -> None:
        """Mask candidates whose similarity exceeds the ``limit`` of their row, [num_rows, 1].

        Args:
            mask: mask of false negatives.
            rows: [num_rows, guide_dim].
            columns: [num_columns, guide_dim].
            limit: the limits.
            counts: see :class:`Guide`.
        """
        self._mask, self._rows, self._columns, self._limit = mask, rows, columns, limit
        self._counts, self._counted = counts, set[tuple[int, int]]()
        self.sizes = rows.new_empty(0) if mask is None else mask.sizes

    def set_sizes(self, sizes: Sequence[float]) -> None:
        """Set the sizes of the mask of false negatives."""
        if self._mask is not None:
            self._mask.set_sizes(sizes)

    def apply_(self, tile: Tensor, rows: slice, columns: slice) -> None:
        """Set the logits of masked candidates in a tile [rows, columns] to -inf."""
        if self._mask is not None:
            self._mask.apply_(tile, rows, columns)
        similarity = product(working_precision(self._rows[rows]), working_precision(self._columns[columns]))
        is_nearer = similarity > self._limit[rows]
        self._count(tile, is_nearer, (rows.start, columns.start))
        tile.masked_fill_(is_nearer, -torch.inf)

    def _count(self, tile: Tensor, is_nearer: Tensor, place: tuple[int, int]) -> None:
        """Count the candidates of a tile, the first time that it is computed."""
        if self._counts is None or place in self._counted:
            return
        self._counted.add(place)
        is_candidate = tile > -torch.inf
        self._counts += torch.stack([(is_nearer & is_candidate).sum(), is_candidate.sum()])
