"""Softmax losses of the views of each sample: against the views of this worker, of all workers, or of a ring.

The rows are the views of this worker's samples, one view after the other. A loss brings its cost of a row, a
:class:`~raycl.losses.softmax.RowLoss`, and the positives of the rows, :class:`Positives`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import ClassVar, NamedTuple, Protocol, final

import torch
from torch import Tensor

from raycl.distributed import exceeds_gather_limit, gather, gather_detached, num_workers, rank
from raycl.losses.checks import (
    check_not_given,
    check_offset,
    check_pair,
    check_sample_id,
    checked_gathered,
    checked_ids,
    checked_temperature,
    checked_weight,
)
from raycl.losses.example_ids import ExampleIds
from raycl.losses.false_negatives import FalseNegativeMask
from raycl.losses.mutual import MutualSoftmax
from raycl.losses.objective import StoreBatch
from raycl.losses.ring import evaluate_ring
from raycl.losses.softmax import (
    RowGroup,
    RowLoss,
    cross_entropy,
    evaluate_softmax,
    row_blocks,
    weighted,
)
from raycl.losses.tiled import (
    LOG2_E,
    Gradients,
    fused,
    gradient_buffers,
    longest,
    read_bound,
    scaled_gradients,
    spans,
    tile_size,
    working_precision,
)


class GatheredViews(NamedTuple):
    """The views of all workers, [batch, dim] each, and the ids of their samples, [batch].

    ``views`` is None if the views pass around a ring instead of being gathered.
    """

    views: Sequence[Tensor] | None
    ids: Tensor | None
    offset: int  # the index of this worker's first sample


class ViewBatch(NamedTuple):
    """The views of this worker's samples, [local_batch, dim] each, and of all workers unless it is the only one."""

    views: Sequence[Tensor]
    ids: Tensor | None  # [local_batch], of the samples, or their labels
    gathered: GatheredViews | None = None
    weight: Tensor | None = None  # [local_batch], of the samples in the mean

    @property
    def num_samples(self) -> int:
        """The number of samples of all workers."""
        if self.gathered is None:
            return len(self.views[0])
        if self.gathered.views is not None:
            return len(self.gathered.views[0])
        return num_workers() * len(self.views[0])


class Layout(NamedTuple):
    """The rows, ``num_views`` * ``local_batch``, and the columns, ``num_views`` * ``batch``."""

    num_views: int
    local_batch: int
    batch: int
    offset: int  # the index of this worker's first sample among the columns of a view

    def groups(self, *, exclude_samples: bool) -> list[RowGroup]:
        """Return the rows of each view; they are not compared with themselves, or with any view of their sample."""
        own = [view * self.batch + self.offset for view in range(self.num_views)]
        return [
            RowGroup(
                slice(view * self.local_batch, (view + 1) * self.local_batch),
                excluded=tuple(own) if exclude_samples else (own[view],),
            )
            for view in range(self.num_views)
        ]

    def own(self, columns: Tensor) -> Tensor:
        """Return this worker's columns, [num_views, local_batch, dim]."""
        return columns.unflatten(0, (self.num_views, -1)).narrow(1, self.offset, self.local_batch)


class Positives(Protocol):
    """The positives of all rows."""

    #: Whether the other views of a sample are positives only, and no other candidates.
    exclude_samples: ClassVar[bool]

    def logits(self, scale: Tensor) -> Tensor:
        """Return the base-2 logits of the positives, [num_rows] or [num_rows, num_positives]."""
        ...

    def subtract(self, weight: Tensor, at_rows: Tensor | None, at_columns: Tensor | None) -> None:
        """Subtract the gradients of ``weight`` * logits from buffers, unscaled."""
        ...


#: Makes positives from the rows, the columns, which are None if they pass around a ring, and their layout.
PositivesOf = Callable[[Tensor, Tensor | None, Layout], Positives]


@final
class OtherViews:
    """The other views of each sample, in their order."""

    exclude_samples: ClassVar[bool] = True

    def __init__(self, rows: Tensor, columns: Tensor | None, layout: Layout) -> None:
        self._views, self._layout = rows.chunk(layout.num_views), layout

    def logits(self, scale: Tensor) -> Tensor:
        """Return the logits of the other views, [num_rows] if there is one, else [num_rows, num_views - 1]."""
        views, numbers = self._views, range(len(self._views))
        logits = {(a, b): (views[a] * views[b]).sum(1) * scale for a, b in combinations(numbers, 2)}
        if len(views) == 2:
            return logits[0, 1].repeat(2)
        of_view = [[logits[min(a, b), max(a, b)] for b in numbers if b != a] for a in numbers]
        return torch.cat([torch.stack(each, dim=1) for each in of_view])

    def subtract(self, weight: Tensor, at_rows: Tensor | None, at_columns: Tensor | None) -> None:
        """Subtract the gradients of ``weight`` * logits from buffers, unscaled."""
        views, weight = self._views, weight.view(len(self._views), len(self._views[0]), -1)
        to_rows = None if at_rows is None else at_rows.chunk(len(views))
        to_columns = None if at_columns is None else self._layout.own(at_columns)
        for a, b in permutations(range(len(views)), 2):
            share = weight[a, :, b - (b > a), None]
            if to_rows is not None:
                to_rows[a].addcmul_(share, views[b], value=-1)
            if to_columns is not None:
                to_columns[b].addcmul_(share, views[a], value=-1)


def check_views(views: Sequence[Tensor], id_name: str, ids: Tensor | None) -> None:
    """Raise unless all views have the same shape [local_batch, dim], and there is one id per sample."""
    for view in views[1:]:
        check_pair("the two views" if len(views) == 2 else "all views", views[0], view)
    check_sample_id(ids, views[0], id_name)


def softmax_of_views(
    batch: ViewBatch,
    *,
    temperature: float | Tensor,
    row_loss: RowLoss = cross_entropy,
    positives: PositivesOf = OtherViews,
) -> Tensor:
    """Return the mean of ``row_loss`` over all views of this worker, which are checked.

    Rows of all workers with equal ids are not negatives. With a ring it is collective, in the forward pass only: every
    worker must scale the loss equally.
    """
    views, sample_id, gathered, weight = batch
    rows = working_precision(_joined(views))
    temperature = checked_temperature(temperature, rows)
    columns = None if gathered is None else gathered.views
    num_columns, offset = len(views[0]), 0
    if gathered is not None and columns is not None:
        num_columns, offset = len(columns[0]), gathered.offset
    comparison = _Comparison(
        layout=Layout(len(views), len(views[0]), num_columns, offset),
        sample_id=sample_id,
        all_ids=sample_id if gathered is None else gathered.ids,
        row_loss=weighted(row_loss, None if weight is None else weight.repeat(len(views))),
        positives=positives,
    )
    if gathered is None:
        return fused(comparison.with_themselves, rows, temperature)
    if columns is None:
        return fused(comparison.by_ring, rows, temperature)
    return fused(comparison.with_columns, rows, _joined(columns).to(rows), temperature)


def _joined(views: Sequence[Tensor]) -> Tensor:
    with torch.autocast(views[0].device.type, enabled=False):  # which refuses float16 on a CPU
        return torch.cat(list(views))


@final
@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """The evaluations of a loss, which return its value and the gradients of their tensors."""

    layout: Layout
    sample_id: Tensor | None
    all_ids: Tensor | None
    row_loss: RowLoss
    positives: PositivesOf

    def with_themselves(
        self, rows: Tensor, temperature: Tensor, *, with_gradient: bool
    ) -> tuple[Tensor, Gradients]:
        """Compare rows [num_views * batch, dim] with each other."""
        positives = self.positives(rows, rows, self.layout)
        cuts = list(spans(0, len(rows), tile_size(rows)))
        groups = self.layout.groups(exclude_samples=positives.exclude_samples)
        mask = self._mask(cuts)
        length = longest(rows, rows.dtype)
        bound, _ = read_bound(length, length, temperature, mask)
        scale = LOG2_E / temperature
        mutual = MutualSoftmax(
            rows,
            None,
            scale=scale,
            bound=bound,
            diagonals=tuple({diagonal for group in groups for diagonal in group.diagonals}),
            spans=(cuts, cuts),
            mask=mask,
        )
        softmax, _ = mutual.sums(positives.logits(scale), self.row_loss)
        loss = softmax.loss.mean()
        if not with_gradient:
            return loss, ()
        gradient, _ = mutual.gradients(softmax.logsumexp, softmax.logsumexp, wanted=(True, True))
        positives.subtract(softmax.positive_weight, gradient, gradient)
        # Half, because each similarity contributes to the gradients of both of its rows.
        return loss, scaled_gradients(rows, (gradient,), temperature, len(rows), share=0.5)

    def with_columns(
        self, rows: Tensor, columns: Tensor, temperature: Tensor, *, with_gradient: bool
    ) -> tuple[Tensor, Gradients]:
        """Compare rows [num_views * local_batch, dim] with columns [num_views * batch, dim]."""
        positives = self.positives(rows, columns, self.layout)
        groups = self.layout.groups(exclude_samples=positives.exclude_samples)
        mask = self._mask(row_blocks(groups))
        longest_row, longest_column = (longest(each, rows.dtype) for each in (rows, columns))
        bound, _ = read_bound(longest_row, longest_column, temperature, mask)
        scale = LOG2_E / temperature
        at_rows, at_columns = gradient_buffers(
            rows, columns, temperature=temperature, with_gradient=with_gradient
        )
        softmax = evaluate_softmax(
            rows,
            columns,
            rows[:0],
            positive=positives.logits(scale),
            groups=groups,
            scale=scale,
            bound=bound,
            mask=mask,
            row_loss=self.row_loss,
            gradients=(at_rows, at_columns, None),
        )
        positives.subtract(softmax.positive_weight, at_rows, at_columns)
        return softmax.loss.mean(), scaled_gradients(rows, (at_rows, at_columns), temperature, len(rows))

    def by_ring(self, rows: Tensor, temperature: Tensor, *, with_gradient: bool) -> tuple[Tensor, Gradients]:
        """Compare rows [num_views * local_batch, dim] with the rows of all workers; the gradient is of both roles."""
        positives = self.positives(rows, None, self.layout)
        groups = self.layout.groups(exclude_samples=positives.exclude_samples)
        mask = self._mask(row_blocks(groups))
        softmax, (at_rows, at_columns, _) = evaluate_ring(
            rows,
            rows,
            rows[:0],
            temperature,
            positive=positives.logits(LOG2_E / temperature),
            groups=groups,
            mask=mask,
            row_loss=self.row_loss,
            with_gradient=with_gradient,
        )
        positives.subtract(softmax.positive_weight, at_rows, at_columns)
        as_rows, as_columns, at_temperature = scaled_gradients(
            rows, (at_rows, at_columns), temperature, len(rows)
        )
        if as_rows is not None and as_columns is not None:
            as_rows += as_columns
        return softmax.loss.mean(), (as_rows, at_temperature)

    def _mask(self, blocks: Sequence[slice]) -> FalseNegativeMask | None:
        """Return the mask of the rows among the views of this worker, or of each worker of a ring."""
        own, ids, count = self.sample_id, self.all_ids, self.layout.num_views
        if own is None or ids is None:
            return None
        of_rows = of_columns = own.repeat(count)
        if ids is not own:
            of_columns = ids.view(-1, self.layout.batch).repeat(1, count).flatten()
        return FalseNegativeMask((ids, ids), of_rows, of_columns, row_blocks=blocks, num_own=count)


def over_workers(views: Sequence[Tensor], ids: Tensor) -> GatheredViews | None:
    """Gather the views of all workers, or only their ids if the views are too large; None for one worker."""
    if num_workers() == 1:
        return None
    all_views = None
    if not exceeds_gather_limit(*views):
        all_views = gather(torch.stack(list(views), dim=1)).unbind(1)
    return GatheredViews(all_views, gather_detached(ids), rank() * len(ids))


@dataclass(frozen=True, kw_only=True)
class ViewsObjective(ABC):
    """A loss of the views of all workers, which are gathered, or pass around a ring if they are too large."""

    temperature: float | Tensor
    id_name: ClassVar[str] = "sample_id"  # or label

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss; no store is used."""
        assert key is not None, "the configuration gives the loss two views"
        views, own = (query, *key.split(len(query))), ids.query if self.id_name == "sample_id" else ids.label
        assert own is not None, "the configuration gives the loss labels"
        return self.loss(ViewBatch(views, own, over_workers(views, own), checked_weight(ids.weight, query)))

    def checked_loss(
        self,
        views: Sequence[Tensor],
        ids: Tensor | None,
        gathered: Mapping[str, Tensor | None],
        gathered_ids: Tensor | None,
        offset: int,
        weight: Tensor | None,
    ) -> Tensor:
        """Return the loss of the arguments of a loss function; raise if they do not match.

        ``gathered`` are the views of all workers by the names of their arguments.
        """
        check_views(views, self.id_name, ids)
        weight = checked_weight(weight, views[0])
        name = f"gathered_{self.id_name}"
        if all(each is None for each in gathered.values()):
            check_not_given(name, gathered_ids, next(iter(gathered)))
            check_offset(offset, len(views[0]), len(views[0]))
            return self.loss(ViewBatch(views, ids, None, weight))
        sides = zip(views, gathered.values(), strict=True)
        given = checked_gathered(**dict(zip(gathered, sides, strict=True)))
        check_offset(offset, len(views[0]), len(given[0]))
        matched = checked_ids((self.id_name, ids), (name, gathered_ids), len(given[0]))
        of_all = GatheredViews(given, None if matched is None else matched[1], offset)
        return self.loss(ViewBatch(views, ids, of_all, weight))

    @abstractmethod
    def loss(self, batch: ViewBatch) -> Tensor:
        """Return the loss of checked views."""

    @abstractmethod
    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the loss if all embeddings were equal, or None if it is unknown."""
