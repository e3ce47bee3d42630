"""Softmax over the columns of all workers by ring communication: no worker holds the rows of all workers.

Gathered rows and their gradient take num_workers * local_batch * dim on every worker. Here a worker
holds its own rows and the rows of one other worker at a time (as in Inf-CL: Cheng et al., 2024), at
the cost of one additional matrix product per pair of workers.

There are two rounds. In the first, columns pass around the ring, and each row computes its logsumexp
over all of them. In the second, rows pass around with their logsumexp, and each worker sums the
gradient of its own columns. Gradients are never sent. Sent rows are read-only, so communication
overlaps with computation.

All workers must call a loss with equal local batches. Workers agree on the gradients to compute, so
that a worker without gradients cannot block the others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from raycl.distributed import gather_detached, num_workers, rank, visit_all
from raycl.losses.false_negatives import Mask
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
    zero_denormals,
)


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
    distinct = masks if to_rows is not to_columns else (to_columns,)
    of_columns, of_negatives = biases or (None, None)
    spread = 0.0 if biases is None else -torch.cat(biases).amin()
    bound, needs_second_round = read_bound(
        rows, agreed[0], temperature, *distinct, spread=spread, flag=agreed[1]
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
