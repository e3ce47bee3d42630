"""Softmax over the columns of all workers by ring communication: no worker holds the rows of all workers.

Gathered rows and their gradient take num_workers * local_batch * dim on every worker. Here a worker holds
its own rows, those of the worker that visits it, those that arrive next (as in Inf-CL: Cheng et al., 2024),
and gradients of as many rows.

Columns pass around the ring twice. In the first round, each row computes its logsumexp over all of them. In
the second, each worker computes the gradient of the visiting columns from its rows, and sends it to their
worker, which sums. Tensors in transfer are read-only, so communication overlaps with computation.

CLIP's loss has a softmax in both directions of the same logits. Both share the first round, which also
sums over the rows of each column; each worker then receives the sums of its own columns. In the second
round, columns bring their logsumexp: 4 matrix products instead of 8.

All workers must call a loss with equal local batches. Workers agree on the gradients to compute, so
that a worker without gradients cannot block the others.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from raycl.distributed import RowExchange, gather_detached, num_workers, rank, visit_all
from raycl.losses.checks import checked_pair_ids
from raycl.losses.false_negatives import Mask
from raycl.losses.mutual import MutualSoftmax, Sums, first_sums
from raycl.losses.softmax import (
    ColumnBlock,
    RowGroup,
    RowLoss,
    Softmax,
    SoftmaxRows,
    concatenated,
    cross_entropy,
    subtract_positives,
)
from raycl.losses.tiled import (
    LOG2_E,
    Gradients,
    gradient_buffers,
    longest,
    product,
    read_bound,
    spans,
    tile_size,
    zero_denormals,
)


def gather_ring_ids(
    query_id: Tensor,
    key_id: Tensor,
    *,
    local: int,
    negative_id: Tensor | None = None,
    num_negatives: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the ids of the queries and keys of all workers, one tensor if both are the same; collective.

    Args:
        query_id: [local] int64, ids of this worker's queries.
        key_id: [local] int64, ids of its keys.
        local: the number of this worker's pairs.
        negative_id: [num_negatives] int64, ids of further candidates of the queries.
        num_negatives: the number of these candidates, None without.

    Raises:
        ConfigError: Ids do not fit the pairs or the candidates.
    """
    checked_pair_ids(
        sample_id=None,
        query_id=(query_id, None),
        key_id=(key_id, None),
        negative_id=negative_id,
        own=slice(0, local),
        batch=None,
        in_batch=True,
        num_negatives=num_negatives,
    )
    query_ids = gather_detached(query_id)
    return query_ids, query_ids if key_id is query_id else gather_detached(key_id)


def evaluate_ring(
    rows: Tensor,
    columns: Tensor,
    negatives: Tensor,
    temperature: Tensor,
    *,
    positive: Tensor,
    groups: Sequence[RowGroup],
    mask: Mask | None,
    biases: tuple[Tensor, Tensor] | None = None,
    row_loss: RowLoss = cross_entropy,
    with_gradient: bool,
) -> tuple[Softmax, Gradients]:
    """Compare each row's positive with the columns of all workers and the negatives; collective.

    Args:
        rows: [num_rows, dim], this worker's rows.
        columns: [num_rows, dim], this worker's columns.
        negatives: [num_negatives, dim], further candidates of these rows; they are not sent.
        temperature: a scalar.
        positive: base-2 logits of the positives, with their biases, [num_rows] or [num_rows, num_positives].
        groups: positions of this worker's columns that are not negatives.
        mask: false negatives of these rows among the columns of all workers, in the order of ranks, and the negatives.
        biases: biases of the columns of all workers, in the order of ranks, and of the negatives, added to the
            base-2 logits; at most 0.
        row_loss: the loss of each row; by default it classifies the positive.
        with_gradient: whether to compute gradients.

    Returns:
        The loss of each row, and the unscaled gradients of rows, columns and negatives, without the positives.
    """
    wants_columns = with_gradient and columns.requires_grad
    needs_negatives = with_gradient and negatives.requires_grad
    lengths = torch.stack([longest(each, columns.dtype) for each in (columns, negatives)]).amax()
    agreed = gather_detached(torch.stack([lengths, lengths.new_full((), wants_columns)])[None]).amax(0)
    # The second round is collective: all workers take part if one needs it.
    of_columns, of_negatives = biases or (None, None)
    spread = 0.0 if biases is None else -torch.cat(biases).amin()
    bound, (needs_columns,) = read_bound(
        longest(rows, rows.dtype), agreed[0], temperature, mask, spread=spread, flags=agreed[1:]
    )
    of_worker = [None] * num_workers() if of_columns is None else of_columns.split(len(columns))
    scale = LOG2_E / temperature
    (at_rows,) = gradient_buffers(rows, temperature=temperature, with_gradient=with_gradient)
    blocks = [
        SoftmaxRows(rows, block, scale=scale, bound=bound, gradient=at_rows, diagonals=group.diagonals)
        for group in groups
        for block in group.blocks
    ]
    others = ColumnBlock(negatives, mask=mask, first=num_workers() * len(columns), bias=of_negatives)
    for block in blocks:
        block.add(others)

    def candidates(worker: int, visiting: Tensor) -> ColumnBlock:
        return ColumnBlock(visiting, mask=mask, first=worker * len(columns), bias=of_worker[worker])

    def visit(worker: int, visiting: Tensor) -> None:
        visitors = candidates(worker, visiting)
        for block in blocks:
            block.add(visitors, holds_positives=worker == rank())

    visit_all(visit, columns)
    softmax = concatenated([block.finish(positive, row_loss) for block in blocks])
    gradient_of = partial(_column_gradient, rows, softmax, groups, scale)

    def send_back(worker: int, visiting: Tensor) -> Tensor:
        return gradient_of(candidates(worker, visiting), holds_positives=worker == rank())

    at_columns = visit_all(send_back, columns) if needs_columns else None
    at_negatives = gradient_of(others, holds_positives=False) if needs_negatives else None
    return softmax, (at_rows, at_columns, at_negatives)


def _column_gradient(
    rows: Tensor,
    softmax: Softmax,
    groups: Sequence[RowGroup],
    scale: Tensor,
    candidates: ColumnBlock,
    *,
    holds_positives: bool,
) -> Tensor:
    """Return the unscaled gradient of columns from the rows that have them as candidates, without positives."""
    gradient = torch.zeros_like(candidates.columns)
    for group in groups:
        diagonals = group.diagonals if holds_positives else ()
        for block in group.blocks:
            logsumexp = softmax.logsumexp[block, None]
            tiles = candidates.tiles(rows[block] * scale, block, diagonals=diagonals, bias=candidates.bias)
            for k, _, tile in tiles:
                # No logit exceeds the logsumexp of a cross-entropy, so exp2 cannot overflow.
                weights = zero_denormals(tile.sub_(logsumexp)).exp2_()
                gradient[candidates.pieces[k]] += product(weights.T, rows[block].T)
    return gradient


def evaluate_mutual_ring(
    rows: Tensor,
    columns: Tensor,
    temperature: Tensor,
    *,
    blocks: list[slice],
    mask: Mask | None,
    losses: tuple[RowLoss, RowLoss],
    with_gradient: bool,
) -> tuple[tuple[Softmax, Softmax], Gradients]:
    """Compare rows with the columns of all workers, and columns with their rows; collective.

    Args:
        rows: [num_rows, dim], this worker's rows.
        columns: [num_rows, dim], this worker's columns; column i is the positive of row i.
        temperature: a scalar.
        blocks: the blocks of rows that the mask is made for.
        mask: false negatives of these rows among the columns of all workers, in the order of ranks.
        losses: the loss of each row, and of each column.
        with_gradient: whether to compute gradients.

    Returns:
        The losses of this worker's rows and columns, and their unscaled gradients, from the losses of all workers.
    """
    (at_rows,) = gradient_buffers(rows, temperature=temperature, with_gradient=with_gradient)
    lengths = [longest(each, rows.dtype) for each in (rows, columns)]
    flags = [
        rows.new_full((), each) for each in (at_rows is not None, with_gradient and columns.requires_grad)
    ]
    longest_row, longest_column, *agreed = gather_detached(torch.stack([*lengths, *flags])[None]).amax(0)
    # The second round is collective: all workers take part if one needs it.
    bound, (round_for_rows, needs_columns) = read_bound(
        longest_row, longest_column, temperature, mask, flags=agreed
    )
    scale = LOG2_E / temperature

    def tiles(worker: int, visiting: Tensor) -> MutualSoftmax:
        return MutualSoftmax(
            rows,
            visiting,
            scale=scale,
            bound=bound,
            diagonals=(0,) if worker == rank() else (),
            spans=(blocks, list(spans(0, len(visiting), 2 * tile_size(visiting)))),
            mask=mask,
            first=worker * len(visiting),
        )

    of_rows = first_sums(bound, rows)
    of_columns = [first_sums(bound, columns) for _ in range(num_workers())]

    def visit(worker: int, visiting: Tensor) -> None:
        tiles(worker, visiting).add_sums(of_rows, of_columns[worker])

    visit_all(visit, columns)
    positive, everything = (rows * scale * columns).sum(1), slice(0, len(rows))
    by_row = losses[0](positive, *of_rows, everything)
    by_column = losses[1](positive, *_sums_of_own(of_columns), everything)
    if not (round_for_rows or needs_columns):
        return (by_row, by_column), (None, None)

    def send_back(worker: int, visiting: Tensor, logsumexp: Tensor) -> Tensor | None:
        at_visiting = torch.zeros_like(visiting) if needs_columns else None
        for across, down, weights in tiles(worker, visiting).weights(by_row.logsumexp, logsumexp):
            if at_rows is not None:
                at_rows[across] += product(weights, visiting[down].T)
            if at_visiting is not None:
                at_visiting[down] += product(weights.T, rows[across].T)
        return at_visiting

    at_columns = visit_all(send_back, columns, by_column.logsumexp)
    weight = by_row.positive_weight + by_column.positive_weight
    subtract_positives(weight, rows, columns, at_rows, at_columns)
    return (by_row, by_column), (at_rows, at_columns)


def _sums_of_own(sums: Sequence[Sums]) -> Sums:
    """Return the sums of this worker's columns over the rows of all workers; collective.

    ``sums`` has the sums of each worker's columns over this worker's rows.
    """
    sizes = [len(shift) for shift, _ in sums]
    stacked = torch.cat([torch.stack(each, dim=1) for each in sums])
    received = RowExchange(stacked, sent=sizes, received=sizes).arrived()
    shift, total = received.view(len(sums), -1, 2).unbind(2)
    peak = shift.amax(0)
    return peak, (total * (shift - peak).exp2_()).sum(0)
