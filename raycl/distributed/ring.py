"""Losses over all workers by ring communication: no worker holds the embeddings of all workers.

Gathered rows and their gradient take num_workers * local_batch * dim on every worker. Here a worker
holds its own rows and the rows of one other worker at a time (as in Inf-CL: Cheng et al., 2024), at
the cost of one additional matrix product per pair of workers.

There are two rounds. In the first, candidates pass around the ring, and each row computes its
logsumexp over all candidates. In the second, rows pass around with their logsumexp, and each worker
sums the gradient of its own candidates. Gradients are never sent. Sent rows are read-only, so
communication overlaps with computation.

All workers must call a loss with equal local batches. Workers agree on the gradients to compute, so
that a worker without gradients cannot block the others.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from raycl.distributed import gather_detached, num_workers, rank, visit_all
from raycl.losses import info_nce, nt_xent
from raycl.losses.checks import (
    check_columns,
    check_companion,
    check_pair,
    check_sample_id,
    checked_ids,
    checked_temperature,
)
from raycl.losses.false_negatives import FalseNegativeMask
from raycl.losses.nt_xent import two_views
from raycl.losses.softmax import ColumnBlock, RowGroup, Softmax, SoftmaxRows, row_blocks
from raycl.losses.tiled import (
    LOG2_E,
    Gradients,
    fused,
    gradient_buffers,
    longest,
    product,
    read_bound_and,
    scaled_gradients,
    working_precision,
    zero_denormals,
)


def ring_nt_xent(view_a: Tensor, view_b: Tensor, sample_id: Tensor, *, temperature: float | Tensor) -> Tensor:
    """NT-Xent over the embeddings of all workers (SimCLR: Chen et al., 2020), by ring communication.

    Has the same value and gradients as :func:`raycl.losses.nt_xent` with gathered rows. Their average
    over workers (as in DDP) is the value and gradient of the whole batch. Collective in the forward
    pass only.

    Args:
        view_a: [local_batch, dim], this worker's embeddings of one view; the same shape and dtype
            on every worker.
        view_b: [local_batch, dim], row i the positive of view_a's row i.
        sample_id: [local_batch] int64; candidates of any worker with the row's id are masked.
        temperature: above 0; a 0-d tensor that requires grad is learned, with an exact gradient.

    Returns:
        A scalar, the **mean** over this worker's 2 * local_batch rows; it can be differentiated once.
        Every worker must scale it equally, since the forward pass computes the gradients.

    Raises:
        ConfigError: Shapes do not match, or the temperature is not above 0.
    """
    if num_workers() == 1:
        return nt_xent(view_a, view_b, temperature=temperature, sample_id=sample_id)
    check_pair("the two views", view_a, view_b)
    check_sample_id(sample_id, view_a)
    rows = working_precision(torch.cat([view_a, view_b]))
    groups = two_views(len(view_a), len(view_a), 0)
    evaluate = partial(_evaluate_views, groups=groups, sample_id=sample_id)
    return fused(evaluate, rows, checked_temperature(temperature, rows))


def ring_info_nce(
    query: Tensor,
    key: Tensor,
    sample_id: Tensor,
    *,
    negatives: Tensor | None = None,
    negative_id: Tensor | None = None,
    temperature: float | Tensor,
) -> Tensor:
    """InfoNCE over the keys of all workers (van den Oord et al., 2018), by ring communication.

    Has the same value and gradients as :func:`raycl.losses.info_nce` with gathered keys. Their average
    over workers (as in DDP) is the value and gradient of the whole batch. Collective in the forward
    pass only. If no worker needs the gradient of keys, the second round is skipped.

    Args:
        query: [local_batch, dim], this worker's embeddings; the same shape and dtype on every worker.
        key: [local_batch, dim], row i the positive of query i.
        sample_id: [local_batch] int64; candidates of any worker with the query's id are masked.
        negatives: [num_negatives, dim], additional candidates of this worker's queries: rows of a
            queue, the same on every worker. Half precision is supported. They are not sent.
        negative_id: [num_negatives] int64, ids of the negatives.
        temperature: above 0; a 0-d tensor that requires grad is learned, with an exact gradient.

    Returns:
        A scalar, the **mean** over this worker's queries; it can be differentiated once. Every
        worker must scale it equally, since the forward pass computes the gradients.

    Raises:
        ConfigError: Shapes or arguments do not match, or the temperature is not above 0.
    """
    if num_workers() == 1:
        return info_nce(
            query,
            key,
            temperature=temperature,
            sample_id=sample_id,
            negatives=negatives,
            negative_id=negative_id,
        )
    check_pair("query and key", query, key)
    check_sample_id(sample_id, query)
    check_companion("negative_id", negative_id, "negatives", negatives)
    others = query.new_empty(0, query.shape[1]) if negatives is None else negatives
    check_columns("the negatives", others, query)
    if negatives is not None:
        checked_ids(("sample_id", sample_id), ("negative_id", negative_id), len(others))
    rows = working_precision(query)
    others = others.to(rows) if others.requires_grad else others
    groups = (RowGroup(slice(0, len(rows)), positive=0),)
    evaluate = partial(_evaluate, groups=groups, sample_id=sample_id, negative_id=negative_id)
    return fused(evaluate, rows, key.to(rows), others, checked_temperature(temperature, rows))


def _evaluate_views(
    rows: Tensor,
    temperature: Tensor,
    *,
    groups: Sequence[RowGroup],
    sample_id: Tensor,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Evaluate the rows of both views against themselves; return one gradient for both roles."""
    no_others = rows.new_empty(0, rows.shape[1])
    loss, (as_rows, as_columns, _, at_temperature) = _evaluate(
        rows,
        rows,
        no_others,
        temperature,
        groups=groups,
        sample_id=sample_id,
        negative_id=None,
        with_gradient=with_gradient,
    )
    if as_rows is not None and as_columns is not None:
        as_rows += as_columns
    return loss, (as_rows, at_temperature)


def _evaluate(
    rows: Tensor,
    columns: Tensor,
    negatives: Tensor,
    temperature: Tensor,
    *,
    groups: Sequence[RowGroup],
    sample_id: Tensor,
    negative_id: Tensor | None,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Classify each row's positive among the columns of all workers and the negatives.

    rows and columns [num_rows, dim] belong to this worker; each group is a local batch with these ids.
    """
    wants_columns = with_gradient and columns.requires_grad
    lengths = torch.stack([longest(each, columns.dtype) for each in (columns, negatives)]).amax()
    agreed = gather_detached(torch.stack([lengths, lengths.new_full((), wants_columns)])[None]).amax(0)
    mask = _mask(groups, sample_id, negative_id)
    # The second round is collective: all workers take part if one needs it.
    bound, needs_second_round = read_bound_and(rows, agreed[0], temperature, mask, flag=agreed[1])
    scale = LOG2_E / temperature
    at_rows, at_negatives = gradient_buffers(
        rows, negatives, temperature=temperature, with_gradient=with_gradient
    )
    blocks = [
        SoftmaxRows(
            rows,
            columns[group.match(block)],
            block,
            scale=scale,
            bound=bound,
            gradient=at_rows,
            diagonals=group.diagonals,
        )
        for group in groups
        for block in group.blocks
    ]
    others = ColumnBlock(negatives, mask=mask, first=num_workers() * len(columns))
    for block in blocks:
        block.meet(others)

    def meet(worker: int, visiting: Tensor) -> None:
        visitors = ColumnBlock(visiting, mask=mask, first=worker * len(columns))
        for block in blocks:
            block.meet(visitors, holds_positives=worker == rank())

    visit_all(meet, columns)
    softmax = Softmax(*(torch.cat(parts) for parts in zip(*(each.finish() for each in blocks), strict=True)))
    at_columns = None
    if needs_second_round:
        at_columns = _column_gradient(rows, columns, softmax, groups, scale, mask)
    if at_negatives is not None:
        for block in row_blocks(groups):
            logsumexp = softmax.logsumexp[block, None]
            for k, _, tile in others.tiles(rows[block] * scale, block):
                weights = zero_denormals(tile.sub_(logsumexp)).exp2_()
                at_negatives[others.pieces[k]] += product(weights.T, rows[block].T)
    gradients = scaled_gradients(rows, (at_rows, at_columns, at_negatives), temperature, len(rows))
    return softmax.loss.mean(), gradients


def _mask(groups: Sequence[RowGroup], sample_id: Tensor, negative_id: Tensor | None) -> FalseNegativeMask:
    """Return the mask of this worker's rows against the columns of all workers, by rank, and the negatives."""
    all_ids = gather_detached(sample_id)
    column_ids = all_ids.view(num_workers(), -1).repeat(1, len(groups)).flatten()
    if negative_id is not None:
        column_ids = torch.cat([column_ids, negative_id])
    own = sample_id.repeat(len(groups))
    blocks = row_blocks(groups)
    return FalseNegativeMask((all_ids, all_ids), own, column_ids, row_blocks=blocks, num_own=len(groups))


def _column_gradient(
    rows: Tensor,
    columns: Tensor,
    softmax: Softmax,
    groups: Sequence[RowGroup],
    scale: Tensor,
    mask: FalseNegativeMask,
) -> Tensor:
    """Return the unscaled gradient of this worker's columns from the rows of all workers.

    Ids are symmetric, so a column has the same false negatives as the row with the same index.
    """
    gradient = torch.zeros_like(columns)
    diagonals = [-diagonal for group in groups for diagonal in group.diagonals]

    def meet(worker: int, visiting: Tensor, logsumexp: Tensor) -> None:
        # No logit exceeds the logsumexp of its row, so exp2 cannot overflow.
        visitors = ColumnBlock(visiting, mask=mask, first=worker * len(rows), bias=-logsumexp)
        for block in row_blocks(groups):
            masked = diagonals if worker == rank() else ()
            for _, piece, tile in visitors.tiles(
                columns[block] * scale, block, diagonals=masked, bias=visitors.bias
            ):
                gradient[block] += product(zero_denormals(tile).exp2_(), piece.T)

    visit_all(meet, rows, softmax.logsumexp)
    for group in groups:
        gradient[group.match(group.rows)] -= softmax.one_minus_p[group.rows, None] * rows[group.rows]
    return gradient
