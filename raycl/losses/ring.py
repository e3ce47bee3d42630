"""Softmax over the columns of all workers by ring communication: no worker holds the rows of all workers.

Gathered rows and their gradient take num_workers * local_batch * dim on every worker. Here a worker
holds its own rows and the rows of one other worker at a time (as in Inf-CL: Cheng et al., 2024), at
the cost of one additional matrix product per pair of workers.

Most losses take two rounds. In the first, columns pass around the ring, and each row computes its logsumexp
over all of them. In the second, rows pass around with their logsumexp, and each worker sums the
gradient of its own columns. Gradients are never sent. Sent rows are read-only, so communication
overlaps with computation.

CLIP's loss has a softmax in both directions of the same logits. Both share the first round, which also
sums over the rows of each column; each worker then receives the sums of its own columns. In the second
round, columns pass around with their logsumexp for the gradient of rows, and in the third, rows for the
gradient of columns: 5 matrix products instead of 8.

All workers must call a loss with equal local batches. Workers agree on the gradients to compute, so
that a worker without gradients cannot block the others.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from raycl.distributed import RowExchange, gather_detached, num_workers, rank, visit_all
from raycl.losses.checks import checked_pair_ids
from raycl.losses.false_negatives import FalseNegativeMask, Mask, key_mask, query_mask
from raycl.losses.mutual import MutualSoftmax, Sums, first_sums
from raycl.losses.softmax import (
    ColumnBlock,
    RowGroup,
    RowLoss,
    Softmax,
    SoftmaxRows,
    concatenated,
    cross_entropy,
    row_blocks,
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


def ring_masks(
    query_id: Tensor,
    key_id: Tensor,
    blocks: Sequence[slice],
    *,
    negative_id: Tensor | None = None,
    num_negatives: int | None = None,
) -> tuple[FalseNegativeMask | None, FalseNegativeMask | None]:
    """Return the masks of own queries against all keys, and of own keys against all queries; collective.

    Args:
        query_id: [local_batch] int64, ids of this worker's queries.
        key_id: [local_batch] int64, ids of its keys. If they are ``query_id`` itself, both masks are one.
        blocks: the blocks of rows that are processed together.
        negative_id: [num_negatives] int64, ids of further candidates of the queries.
        num_negatives: the number of these candidates, None without.

    Raises:
        ConfigError: Ids do not fit the blocks or the candidates.
    """
    checked_pair_ids(
        sample_id=None,
        query_id=(query_id, None),
        key_id=(key_id, None),
        negative_id=negative_id,
        own=slice(0, blocks[-1].stop),
        batch=None,
        in_batch=True,
        num_negatives=num_negatives,
    )
    own = slice(rank() * len(query_id), (rank() + 1) * len(query_id))
    query_ids = gather_detached(query_id)
    key_ids = query_ids if key_id is query_id else gather_detached(key_id)
    to_keys = query_mask((query_ids, key_ids), own, negative_id, blocks, in_batch=True)
    # With one id for both sides, a key has the false negatives of its query.
    return to_keys, to_keys if key_ids is query_ids else key_mask((query_ids, key_ids), own, blocks)


def evaluate_ring(
    rows: Tensor,
    columns: Tensor,
    negatives: Tensor,
    temperature: Tensor,
    *,
    groups: Sequence[RowGroup],
    masks: tuple[Mask | None, Mask | None],
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
        groups: positions of the positives among this worker's columns.
        masks: false negatives of these rows among the columns of all workers, in the order of ranks, and
            the negatives; and of these columns among the rows of all workers. One mask may be both.
        biases: biases of the columns of all workers, in the order of ranks, and of the negatives, added to the
            base-2 logits; at most 0.
        row_loss: the loss of each row; by default it classifies the positive.
        with_gradient: whether to compute gradients.

    Returns:
        The loss of each row, and the unscaled gradients of rows, columns and negatives.
    """
    to_columns, to_rows = masks
    wants_columns = with_gradient and columns.requires_grad
    lengths = torch.stack([longest(each, columns.dtype) for each in (columns, negatives)]).amax()
    agreed = gather_detached(torch.stack([lengths, lengths.new_full((), wants_columns)])[None]).amax(0)
    # The second round is collective: all workers take part if one needs it.
    of_columns, of_negatives = biases or (None, None)
    spread = 0.0 if biases is None else -torch.cat(biases).amin()
    bound, (needs_second_round,) = read_bound(
        longest(rows, rows.dtype), agreed[0], temperature, *masks, spread=spread, flags=agreed[1:]
    )
    of_worker = [None] * num_workers() if of_columns is None else of_columns.split(len(columns))
    own_bias = of_worker[rank()]
    scale = LOG2_E / temperature
    at_rows, at_negatives = gradient_buffers(
        rows, negatives, temperature=temperature, with_gradient=with_gradient
    )
    blocks = [
        SoftmaxRows(
            rows,
            group.positives(columns, block),
            block,
            scale=scale,
            bound=bound,
            gradient=at_rows,
            diagonals=group.diagonals,
            positive_bias=None if own_bias is None else own_bias[group.match(block)],
            row_loss=row_loss,
        )
        for group in groups
        for block in group.blocks
    ]
    others = ColumnBlock(negatives, mask=to_columns, first=num_workers() * len(columns), bias=of_negatives)
    for block in blocks:
        block.add(others)

    def visit(worker: int, visiting: Tensor) -> None:
        first = worker * len(columns)
        visitors = ColumnBlock(visiting, mask=to_columns, first=first, bias=of_worker[worker])
        for block in blocks:
            block.add(visitors, holds_positives=worker == rank())

    visit_all(visit, columns)
    softmax = concatenated([block.finish() for block in blocks])
    at_columns = None
    if needs_second_round:
        at_columns = _column_gradient(rows, columns, softmax, groups, scale, to_rows, bias=own_bias)
    if at_negatives is not None:
        for block in row_blocks(groups):
            logsumexp = softmax.logsumexp[block, None]
            for k, _, tile in others.tiles(rows[block] * scale, block, bias=of_negatives):
                weights = zero_denormals(tile.sub_(logsumexp)).exp2_()
                at_negatives[others.pieces[k]] += product(weights.T, rows[block].T)
    return softmax, (at_rows, at_columns, at_negatives)


def _column_gradient(
    rows: Tensor,
    columns: Tensor,
    softmax: Softmax,
    groups: Sequence[RowGroup],
    scale: Tensor,
    mask: Mask | None,
    *,
    bias: Tensor | None,
) -> Tensor:
    """Return the unscaled gradient of this worker's columns, with biases, from the rows of all workers."""
    gradient = torch.zeros_like(columns)
    diagonals = [-diagonal for group in groups for diagonal in group.diagonals]

    def visit(worker: int, visiting: Tensor, logsumexp: Tensor) -> None:
        # No logit exceeds the logsumexp of a cross-entropy, so exp2 cannot overflow.
        visitors = ColumnBlock(visiting, mask=mask, first=worker * len(rows), bias=-logsumexp)
        for block in row_blocks(groups):
            masked = diagonals if worker == rank() else ()
            for _, piece, tile in visitors.tiles(
                columns[block] * scale, block, diagonals=masked, bias=visitors.bias
            ):
                if bias is not None:
                    tile += bias[block, None]
                gradient[block] += product(zero_denormals(tile).exp2_(), piece.T)

    visit_all(visit, rows, softmax.logsumexp)
    for group in groups:
        if group.positive is not None:
            matched = group.match(group.rows)
            gradient[matched] -= softmax.positive_weight[group.rows, None] * rows[group.rows]
    return gradient


def evaluate_mutual_ring(
    rows: Tensor,
    columns: Tensor,
    temperature: Tensor,
    *,
    blocks: list[slice],
    masks: tuple[Mask | None, Mask | None],
    losses: tuple[RowLoss, RowLoss],
    with_gradient: bool,
) -> tuple[tuple[Softmax, Softmax], Gradients]:
    """Compare rows with the columns of all workers, and columns with their rows; collective.

    Args:
        rows: [num_rows, dim], this worker's rows.
        columns: [num_rows, dim], this worker's columns; column i is the positive of row i.
        temperature: a scalar.
        blocks: the blocks of rows, and of columns, that the masks are made for.
        masks: as for :func:`evaluate_ring`; both mask the same pairs.
        losses: the loss of each row, and of each column.
        with_gradient: whether to compute gradients.

    Returns:
        The losses of this worker's rows and columns, and their unscaled gradients, from the losses of all workers.
    """
    wanted = rows.requires_grad or temperature.requires_grad, columns.requires_grad
    lengths = [longest(each, rows.dtype) for each in (rows, columns)]
    flags = [rows.new_full((), with_gradient and each) for each in wanted]
    longest_row, longest_column, *agreed = gather_detached(torch.stack([*lengths, *flags])[None]).amax(0)
    # The other rounds are collective: all workers take part if one needs them.
    bound, (needs_rows, needs_columns) = read_bound(
        longest_row, longest_column, temperature, *masks, flags=agreed
    )
    scale = LOG2_E / temperature
    tiles = partial(_tiles_of_visit, blocks=blocks, scale=scale, bound=bound)
    of_rows = first_sums(bound, rows)
    of_columns = [first_sums(bound, columns) for _ in range(num_workers())]

    def visit(worker: int, visiting: Tensor) -> None:
        tiles(rows, visiting, worker, masks[0]).add_sums(of_rows, of_columns[worker])

    visit_all(visit, columns)
    positive, everything = (rows * scale * columns).sum(1), slice(0, len(rows))
    by_row = losses[0](positive, *of_rows, everything)
    by_column = losses[1](positive, *_sums_of_own(of_columns), everything)
    at_rows = at_columns = None
    if needs_rows:
        at_rows = _mutual_gradient(tiles, rows, columns, (by_row, by_column), masks[0])
    if needs_columns:
        at_columns = _mutual_gradient(tiles, columns, rows, (by_column, by_row), masks[1])
    return (by_row, by_column), (at_rows, at_columns)


def _tiles_of_visit(
    own: Tensor,
    visiting: Tensor,
    worker: int,
    mask: Mask | None,
    *,
    blocks: list[slice],
    scale: Tensor,
    bound: Tensor | None,
) -> MutualSoftmax:
    """Return the logits of own rows with the rows that visit from a worker."""
    cuts = blocks, list(spans(0, len(visiting), 2 * tile_size(visiting)))
    diagonals = (0,) if worker == rank() else ()
    first = worker * len(visiting)
    return MutualSoftmax(
        own, visiting, scale=scale, bound=bound, diagonals=diagonals, spans=cuts, mask=mask, first=first
    )


def _sums_of_own(sums: Sequence[Sums]) -> Sums:
    """Return the sums of this worker's columns over the rows of all workers; collective.

    ``sums`` are those of each worker's columns over this worker's rows.
    """
    sizes = [len(shift) for shift, _ in sums]
    stacked = torch.cat([torch.stack(each, dim=1) for each in sums])
    received = RowExchange(stacked, sent=sizes, received=sizes).arrived()
    shift, total = received.view(len(sums), -1, 2).unbind(2)
    peak = shift.amax(0)
    return peak, (total * (shift - peak).exp2_()).sum(0)


def _mutual_gradient(
    tiles: Callable[..., MutualSoftmax],
    own: Tensor,
    others: Tensor,
    softmaxes: tuple[Softmax, Softmax],
    mask: Mask | None,
) -> Tensor:
    """Return the unscaled gradient of own rows, while the others pass around with their logsumexp."""
    of_own, of_others = softmaxes
    gradient = torch.zeros_like(own)

    def visit(worker: int, visiting: Tensor, logsumexp: Tensor) -> None:
        pairs = tiles(own, visiting, worker, mask)
        for across, down, weights in pairs.weights(of_own.logsumexp, logsumexp):
            gradient[across] += product(weights, visiting[down].T)

    visit_all(visit, others, of_others.logsumexp)
    positive_weight = of_own.positive_weight + of_others.positive_weight
    return gradient.addcmul_(positive_weight[:, None], others, value=-1)
