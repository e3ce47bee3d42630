"""Distillation: the similarities of a teacher are the targets of a student (SEED: Fang et al., 2021)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor

from raycl.distributed import rank
from raycl.errors import ConfigError
from raycl.losses.checks import (
    check_offset,
    check_pair,
    checked_gathered,
    checked_temperature,
    checked_weight,
)
from raycl.losses.example_ids import ExampleIds
from raycl.losses.guide import Guide
from raycl.losses.objective import StoreBatch, gathered
from raycl.losses.tiled import (
    BLOCK_ROWS,
    Gradients,
    check_temperature,
    fused,
    gradient_buffers,
    product,
    read_scalars,
    scaled_gradients,
    spans,
    working_precision,
)


def distillation(
    query: Tensor,
    key: Tensor,
    teacher: Guide,
    *,
    temperature: float | Tensor,
    teacher_temperature: float,
    teacher_keys: bool = False,
    gathered_query: Tensor | None = None,
    gathered_key: Tensor | None = None,
    offset: int = 0,
    weight: Tensor | None = None,
) -> Tensor:
    """Match the softmax of each row over the batch with that of a teacher, in both directions (SEED: Fang et al., 2021).

    With p the softmax of the teacher's similarities of a query to all keys / ``teacher_temperature``, and q that of
    query . key / ``temperature``, the loss of the query is the cross-entropy -sum p log q. Keys are compared with
    queries in the same way. The loss is the **mean** over the local_batch pairs and then over the two directions. The
    teacher's embeddings may have any dim. With ``teacher_keys``, both are compared with the teacher's embeddings in
    place of the student's, as in the paper; then the student has the teacher's dim, and learns its directions too. At
    most 256 rows of the logits are held at a time.

    Args:
        query: [local_batch, dim], this worker's embeddings, usually of unit length. Half precision is computed in
            float32.
        key: [local_batch, dim], row i the positive of query i.
        teacher: the teacher's embeddings of all pairs of the batch, of unit length; its limits are not used.
        temperature: above 0; a 0-d tensor that requires grad is learned, with an exact gradient.
        teacher_temperature: above 0; a low one leaves the nearest rows only.
        teacher_keys: whether the columns of the student's logits are the teacher's embeddings.
        gathered_query: [batch, dim], the queries of all workers, gathered with gradient. The average of the
            gradients over workers (as in DDP) is the gradient of the whole batch.
        gathered_key: [batch, dim], the keys of all workers, gathered with gradient. Neither is used with
            ``teacher_keys``.
        offset: the index of this worker's first row in the gathered rows.
        weight: [local_batch], the weight of each pair in the mean; of mean 1 over all workers for a
            weighted mean. No gradient.

    Returns:
        A scalar, float32 (float64 for float64 embeddings). It can be differentiated once.

    Raises:
        ConfigError: Shapes or arguments do not match, or a temperature is not above 0.
    """
    check_pair("query and key", query, key)
    if not teacher_temperature > 0:
        raise ConfigError(f"the teacher's temperature must be above 0, got {teacher_temperature:g}; give 0.1")
    columns = (teacher.query, teacher.key)
    if not teacher_keys:
        columns = checked_gathered(gathered_query=(query, gathered_query), gathered_key=(key, gathered_key))
    elif teacher.key.shape[1] != query.shape[1]:
        raise ConfigError(
            f"teacher_keys needs embeddings of one width, and the student has {query.shape[1]} numbers and the teacher "
            f"{teacher.key.shape[1]}; give the student the teacher's width"
        )
    check_offset(offset, len(query), len(columns[1]))
    teacher.check(len(columns[1]), 0)
    own, weight = slice(offset, offset + len(query)), checked_weight(weight, query)

    def direction(rows: Tensor, columns: Tensor, of_rows: Tensor, of_columns: Tensor) -> Tensor:
        rows = working_precision(rows)
        targets = partial(_targets, of_rows[own].to(rows), of_columns.to(rows), teacher_temperature)
        evaluate = partial(_evaluate, targets=targets, weight=weight)
        return fused(evaluate, rows, columns.to(rows), checked_temperature(temperature, rows))

    to_keys = direction(query, columns[1], teacher.query, teacher.key)
    return (to_keys + direction(key, columns[0], teacher.key, teacher.query)) / 2


def _targets(of_rows: Tensor, of_columns: Tensor, temperature: float, block: slice) -> Tensor:
    """Return the teacher's softmax of some rows over all columns."""
    return (product(of_rows[block], of_columns) / temperature).softmax(1)


def _evaluate(
    rows: Tensor,
    columns: Tensor,
    temperature: Tensor,
    *,
    targets: Any,
    weight: Tensor | None,
    with_gradient: bool,
) -> tuple[Tensor, Gradients]:
    """Return the mean cross-entropy of rows [num_rows, dim] over columns, and its gradients."""
    check_temperature(*read_scalars(temperature))
    at_rows, at_columns = gradient_buffers(
        rows, columns, temperature=temperature, with_gradient=with_gradient
    )
    loss = rows.new_zeros(())
    for block in spans(0, len(rows), BLOCK_ROWS):
        target = targets(block)
        log_softmax = (product(rows[block], columns) / temperature).log_softmax(1)
        of_row = -(target * log_softmax).sum(1)
        difference = log_softmax.exp_().sub_(target)  # the derivative at the logits
        if weight is not None:
            of_row, difference = of_row * weight[block], difference.mul_(weight[block, None])
        loss += of_row.sum()
        if at_rows is not None:
            at_rows[block] = product(difference, columns.T)
        if at_columns is not None:
            at_columns += product(difference.T, rows[block].T)
    return loss / len(rows), scaled_gradients(rows, (at_rows, at_columns), temperature, len(rows))


@final
@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The similarities of a teacher over the pairs of all workers."""

    temperature: float | Tensor
    teacher_temperature: float = 0.1
    teacher_keys: bool = False

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss."""
        assert key is not None, "the configuration provides a key for each query"
        assert stored.guide is not None, "the configuration gives a student a teacher"
        others = {"offset": rank() * len(query)} if self.teacher_keys else gathered(query=query, key=key)
        settings: dict[str, Any] = vars(self) | others
        return distillation(query, key, stored.guide, **settings, weight=ids.weight)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return None: a teacher that finds all rows equally near has this loss too."""
        return None
