"""Losses over all workers whose embeddings travel round a ring: no worker ever holds all of them.

Gathered rows, and their gradient, take num_workers * local_batch * dim on every worker. Here a
worker holds its own rows and those that visit it (as Inf-CL does: Cheng et al., 2024), at the price
of one more product of matrices for each pair of workers.

There are two rounds. In the first the candidates travel, and each row learns its logsumexp over all
of them. In the second the rows travel with their logsumexp, and each candidate sums up at home what
they ask of it: no gradient travels, and what travels is only read, so it goes on while it is met.

All workers call a loss alike, with equal local batches. Which gradients are wanted should be the same
on all of them too, but is agreed upon, so that one which wants none stops nobody.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from raycl.distributed import gather_detached, num_workers, pass_on
from raycl.losses import info_nce, nt_xent
from raycl.losses.blocks import BlockWalk, add_column_gradient, subtract_positives
from raycl.losses.checks import (
    check_columns,
    check_companion,
    check_pair,
    check_sample_id,
    checked_ids,
    checked_temperature,
)
from raycl.losses.rectangle import Block, Ids, Side, scaled_gradients
from raycl.losses.tiled import LOG2_E, Gradients, Softmax, fused, has_duplicates, longest, working_precision


def ring_nt_xent(view_a: Tensor, view_b: Tensor, sample_id: Tensor, *, temperature: float | Tensor) -> Tensor:
    """NT-Xent over the embeddings of all workers (SimCLR: Chen et al., 2020), by a ring.

    Value and gradients are those of :func:`raycl.losses.nt_xent` over gathered rows: averaged over
    workers (as DDP does) they are those of the whole batch. Collective, in the forward only.

    Args:
        view_a: [local_batch, dim], this worker's embeddings of one view; the same shape and type
            on every worker.
        view_b: [local_batch, dim], row i the positive of view_a's row i.
        sample_id: [local_batch] int64; candidates with the row's id are masked, on any worker.
        temperature: above 0; a 0-d tensor that requires grad is learned, its gradient exact.

    Returns:
        A scalar, the **mean** over this worker's 2 * local_batch rows; it can be differentiated once.
        Every worker must scale it alike, for the gradients are taken when it is computed.

    Raises:
        ConfigError: shapes do not agree, or the temperature is not above 0.
    """
    if num_workers() == 1:
        return nt_xent(view_a, view_b, temperature=temperature, sample_id=sample_id)
    check_pair("the two views", view_a, view_b)
    check_sample_id(sample_id, view_a)
    rows = working_precision(torch.cat([view_a, view_b]))
    batch, end = len(view_a), len(rows)
    sides = (Side(slice(0, batch), positive=batch, own=0), Side(slice(batch, end), positive=0, own=batch))
    evaluate = partial(_evaluate_views, sides=sides, sample_id=sample_id)
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
    """InfoNCE over the keys of all workers (van den Oord et al., 2018), by a ring.

    Value and gradients are those of :func:`raycl.losses.info_nce` over gathered keys: averaged over
    workers (as DDP does) they are those of the whole batch. Collective, in the forward only. Keys
    that want no gradient on any worker cost one round and no product more than gathered ones.

    Args:
        query: [local_batch, dim], this worker's embeddings; the same shape and type on every worker.
        key: [local_batch, dim], row i the positive of query i.
        sample_id: [local_batch] int64; candidates with the query's id are masked, on any worker.
        negatives: [num_negatives, dim], further candidates of this worker's queries, in half
            precision too: a queue, the same rows on every worker. They do not travel.
        negative_id: [num_negatives] int64, the ids of the negatives.
        temperature: above 0; a 0-d tensor that requires grad is learned, its gradient exact.

    Returns:
        A scalar, the **mean** over this worker's queries; it can be differentiated once. Every
        worker must scale it alike, for the gradients are taken when it is computed.

    Raises:
        ConfigError: shapes or arguments do not agree, or the temperature is not above 0.
    """
    lent: dict[str, Any] = {"negatives": negatives, "negative_id": negative_id}
    if num_workers() == 1:
        return info_nce(query, key, temperature=temperature, sample_id=sample_id, **lent)
    check_pair("query and key", query, key)
    check_sample_id(sample_id, query)
    check_companion("negative_id", negative_id, "negatives", negatives)
    others = query.new_empty(0, query.shape[1]) if negatives is None else negatives
    check_columns("the negatives", others, query)
    negative_ids = None
    if negatives is not None:
        negative_ids = checked_ids(("sample_id", sample_id), ("negative_id", negative_id), len(others))
    rows = working_precision(query)
    others = others.to(rows) if others.requires_grad else others
    sides = (Side(slice(0, len(rows)), positive=0, own=None),)
    evaluate = partial(_evaluate, sides=sides, sample_id=sample_id, negative_ids=negative_ids)
    return fused(evaluate, rows, key.to(rows), others, checked_temperature(temperature, rows))


def _evaluate_views(
    rows: Tensor, temperature: Tensor, *, sides: tuple[Side, ...], sample_id: Tensor, with_gradient: bool
) -> tuple[Tensor, Gradients]:
    """Let the rows of both views be the columns too, and have one gradient for both parts."""
    no_others = rows.new_empty(0, rows.shape[1])
    loss, (as_rows, as_columns, _, degrees) = _evaluate(
        rows, rows, no_others, temperature, sides=sides, sample_id=sample_id, with_gradient=with_gradient
    )
    if as_rows is not None and as_columns is not None:
        as_rows += as_columns
    return loss, (as_rows, degrees)


def _evaluate(
    rows: Tensor,
    columns: Tensor,
    negatives: Tensor,
    temperature: Tensor,
    *,
    sides: tuple[Side, ...],
    sample_id: Tensor,
    negative_ids: Ids | None = None,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Classify each row's positive among the columns of all workers and the negatives.

    As ``evaluate_rectangle``, but columns [num_columns, dim] are those of this worker only, and one
    side of rows, as one of columns, is a local batch with the ids ``sample_id``.
    """
    wants_rows = with_gradient and (rows.requires_grad or temperature.requires_grad)
    longest_candidate, anyone_asks = _agree(columns, negatives, asks=with_gradient and columns.requires_grad)
    scale = LOG2_E / temperature
    walk = BlockWalk(
        rows, columns, sides, scale=scale, longest_column=longest_candidate, wants_gradient=wants_rows
    )
    walk.meet(Block(negatives, negative_ids))
    ring = _Ring(sample_id, num_sides=len(sides))
    for block, is_own, _ in ring.visits(columns):
        walk.meet(block, holds_positives=is_own)
    softmax = walk.finish()
    at_columns = at_negatives = None
    if anyone_asks:
        at_columns = _gradient_at_columns(rows, columns, softmax, sides, scale, ring)
    if with_gradient and negatives.requires_grad:
        at_negatives = _gradient_at_negatives(rows, negatives, negative_ids, softmax, scale)
    return softmax.loss.mean(), scaled_gradients(rows, (walk.gradient, at_columns, at_negatives), temperature)


def _agree(columns: Tensor, negatives: Tensor, *, asks: bool) -> tuple[Tensor, bool]:
    """Return the length of the longest candidate of all workers, and whether any asks for a gradient.

    All must go the second round if one does, for it needs the rows of all.
    """
    length = torch.maximum(*(longest(each, columns.dtype) for each in (columns, negatives)))
    length, asked = gather_detached(torch.stack([length, length.new_tensor(asks)])[None]).amax(0)
    return length, bool(asked)


def _gradient_at_columns(
    rows: Tensor, columns: Tensor, softmax: Softmax, sides: tuple[Side, ...], scale: Tensor, ring: "_Ring"
) -> Tensor:
    """Return what the rows of all workers ask of this worker's columns, yet to be scaled."""
    gradient = torch.zeros_like(columns)
    diagonals = [-diagonal for side in sides for diagonal in side.diagonals]
    for block, is_own, (logsumexp,) in ring.visits(rows, softmax.logsumexp):
        masked = diagonals if is_own else ()
        add_column_gradient(gradient, columns, block, logsumexp, scale=scale, diagonals=masked)
    subtract_positives(gradient, rows, softmax.missing, sides)
    return gradient


def _gradient_at_negatives(
    rows: Tensor, negatives: Tensor, ids: Ids | None, softmax: Softmax, scale: Tensor
) -> Tensor:
    """Return what this worker's rows ask of its negatives, yet to be scaled."""
    gradient = torch.zeros_like(negatives)
    block = Block(rows, None if ids is None else (ids[1], ids[0]))
    add_column_gradient(gradient, negatives, block, softmax.logsumexp, scale=scale)
    return gradient


@final
class _Ring:
    """The workers, each of which lends its block to all; the ids say who is the same sample."""

    def __init__(self, sample_id: Tensor, *, num_sides: int) -> None:
        self._ids = sample_id.repeat(num_sides)
        self._masks_own = has_duplicates(sample_id)

    def visits(self, rows: Tensor, *companions: Tensor) -> Iterator[tuple[Block, bool, list[Tensor]]]:
        """Yield this worker's block, then those of the others; whether it is ours; its companions."""
        for visit, (theirs, their_ids, *more) in enumerate(_round(rows, self._ids, *companions)):
            is_own = visit == 0
            ids = (self._ids, their_ids) if self._masks_own or not is_own else None
            yield Block(theirs, ids), is_own, more


def _round(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield this worker's tensors, then those of each other one; the next travel while these are met."""
    for visits_left in reversed(range(num_workers())):
        passing = pass_on(*tensors) if visits_left else None
        yield tensors
        if passing is not None:
            tensors = passing.arrived()
