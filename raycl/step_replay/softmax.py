"""The softmax of each query of a step, in float64: which candidate pushes it, and how much its positive pulls.

The gradient of a query's loss at its logits is the softmax weight p of each negative, and p - 1 at the positive. So a
negative pushes the query with its weight, and the positive pulls it with 1 - p, the sum over the weights of all
negatives.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from raycl.config import RunConfig
from raycl.errors import ConfigError
from raycl.losses.clip import Clip
from raycl.losses.example_ids import ExampleIds
from raycl.losses.false_negatives import query_mask
from raycl.losses.info_nce import InfoNce
from raycl.losses.nt_xent import NtXent
from raycl.losses.objective import Objective, StoreBatch, positive_of
from raycl.losses.tiled import spans

_LOSSES = {"nt_xent", "info_nce", "clip"}
_BLOCK_ROWS = 128  # queries whose logits are held at a time
CandidateKind = Literal["batch", "explicit", "stored"]


class LossInputs(NamedTuple):
    """The arguments of one call of an objective, detached copies."""

    query: Tensor
    key: Tensor | None
    stored: StoreBatch
    ids: ExampleIds


@final
class WatchedObjective:
    """An objective that keeps copies of its arguments."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.calls = objective, list[LossInputs]()

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        """Return the loss."""
        # The queue's memory changes after the step.
        copies = {name: _copy(rows) for name, rows in vars(stored).items() if isinstance(rows, Tensor)}
        stored_copy = replace(stored, partition=None, guide=None, **copies)
        self.calls.append(LossInputs(query.detach().clone(), _copy(key), stored_copy, ids))
        return self.objective(query, key, stored, ids)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        """Return the loss if all embeddings were equal."""
        return self.objective.collapsed_loss(batch_size=batch_size, stored=stored)


def _copy(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows.detach().clone()


class Candidate(NamedTuple):
    """A row that a query is compared with: number ``row`` of the batch's view ``view``, or of other negatives."""

    place: CandidateKind
    row: int
    view: int = 0


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """Queries of one kind, with their positives and all their candidates, float64.

    ``view`` is the number of the queries' view, ``positive_view`` the one of their positives. ``candidates`` names the
    rows of ``columns``. ``mask`` returns, for a slice of queries, which columns are not negatives, bool
    [rows, num_columns]: the positive, the query itself and false negatives. Biases are added to the logits.
    """

    view: int
    positive_view: int
    queries: Tensor
    positives: Tensor
    columns: Tensor
    candidates: Sequence[Candidate]
    mask: Callable[[slice], Tensor]
    positive_bias: Tensor
    column_bias: Tensor


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SideWeights:
    """The softmax of the queries of a side, float64.

    Attributes:
        similarity: of each query and its positive, [num_queries]; cosines.
        weight: the softmax weight of the positive, [num_queries].
        loss: the cross-entropy, -log of the weight, [num_queries].
        num_negatives: the candidates that are compared, without false negatives, [num_queries].
        top: the columns of the most similar negatives, [num_queries, top]; the most similar first.
        top_similarity: their cosines, -inf for missing ones.
        top_weight: their softmax weights.
    """

    side: Side
    similarity: Tensor
    weight: Tensor
    loss: Tensor
    num_negatives: Tensor
    top: Tensor
    top_similarity: Tensor
    top_weight: Tensor


def check_config(config: RunConfig) -> None:
    """Raise ``ConfigError`` if no step of a run with these settings can be explained."""
    losses = {stage.loss for stage in config.stages}
    if config.monitor.on_collapse == "rollback":
        losses |= {config.without_hinge(stage).loss for stage in config.stages}
    if not losses & _LOSSES:
        raise ConfigError(
            f"replay explains the losses nt_xent, info_nce and clip, and the run has {', '.join(sorted(losses))}"
        )
    if not config.has_two_towers and (config.has_prediction_head or config.num_views > 2):
        raise ConfigError("replay explains one pair of views of a sample, and the run compares several")


def check_loss(objective: Objective) -> None:
    """Raise ``ConfigError`` unless the loss is a softmax over the candidates of each query."""
    name = type(objective).__name__
    if not isinstance(objective, NtXent | InfoNce | Clip):
        raise ConfigError(
            f"replay explains the losses nt_xent, info_nce and clip, and the step has {name}; choose a step of another "
            "stage or run"
        )
    if isinstance(objective, Clip) and objective.refines_logq:
        raise ConfigError("replay does not explain clip with stages.N.logq_correction=refined")
    if isinstance(objective, InfoNce) and objective.proximal_weight:
        raise ConfigError("replay does not explain info_nce with stages.N.proximal_weight")


def explain(watched: WatchedObjective, *, top: int) -> tuple[list[SideWeights], float]:
    """Return the softmax of all queries of a step, and the temperature; raises ``ConfigError`` as ``check_loss`` does."""
    objective = watched.objective
    check_loss(objective)
    assert isinstance(objective, NtXent | InfoNce | Clip), "other losses are refused"
    if len(watched.calls) != 1:
        raise ConfigError(
            f"replay explains two views of a sample, and the step compares {len(watched.calls)} pairs of views"
        )
    given = objective.temperature
    temperature = given.item() if isinstance(given, Tensor) else given
    (inputs,) = watched.calls
    if isinstance(objective, NtXent):
        sides = _sides_of_views(inputs)
    elif isinstance(objective, Clip):
        sides = _sides_of_pairs(inputs, objective)
    else:
        sides = [_side_of_queries(inputs, in_batch=objective.in_batch, of_pairs=objective.pairs)]
    return [_weights(side, temperature, top) for side in sides], temperature


def _weights(side: Side, temperature: float, top: int) -> SideWeights:
    parts: list[tuple[Tensor, ...]] = []
    unit = [_unit(each) for each in (side.queries, side.positives, side.columns)]
    for rows in spans(0, len(side.queries), _BLOCK_ROWS):
        products = side.queries[rows] @ side.columns.T
        masked = side.mask(rows)
        logits = (products / temperature + side.column_bias).masked_fill(masked, -math.inf)
        own = (side.queries[rows] * side.positives[rows]).sum(1) / temperature + side.positive_bias[rows]
        total = torch.logaddexp(own, logits.logsumexp(1))
        cosines = (unit[0][rows] @ unit[2].T).masked_fill(masked, -math.inf)
        highest = cosines.topk(min(top, cosines.shape[1]), dim=1)
        weights = (logits.gather(1, highest.indices) - total[:, None]).exp()
        similarity = (unit[0][rows] * unit[1][rows]).sum(1)
        counts = (~masked).sum(1)
        parts.append(
            (similarity, (own - total).exp(), total - own, counts, highest.indices, highest.values, weights)
        )
    names = ("similarity", "weight", "loss", "num_negatives", "top", "top_similarity", "top_weight")
    joined = {name: torch.cat(each) for name, each in zip(names, zip(*parts, strict=True), strict=True)}
    return SideWeights(side=side, **joined)


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1)


def _double(rows: Tensor) -> Tensor:
    return rows.cpu().double()


def _sides_of_views(inputs: LossInputs) -> list[Side]:
    """NT-Xent: each view against all views of the batch except itself."""
    assert inputs.key is not None, "NT-Xent has two views"
    views = [_double(inputs.query), _double(inputs.key)]
    batch, columns = len(views[0]), torch.cat(views)
    ids = inputs.ids.query.cpu().repeat(2)
    candidates = [Candidate("batch", row, view) for view in (0, 1) for row in range(batch)]

    def mask_of(view: int) -> Callable[[slice], Tensor]:
        # The query and its positive have the id of the sample, like false negatives.
        return lambda rows: ids[view * batch :][rows, None] == ids

    return [
        Side(
            view=view,
            positive_view=1 - view,
            queries=views[view],
            positives=views[1 - view],
            columns=columns,
            candidates=candidates,
            mask=mask_of(view),
            positive_bias=torch.zeros(batch, dtype=torch.float64),
            column_bias=torch.zeros(len(columns), dtype=torch.float64),
        )
        for view in (0, 1)
    ]


def _side_of_queries(
    inputs: LossInputs, *, in_batch: bool, of_pairs: bool, objective: Clip | None = None
) -> Side:
    """InfoNCE: queries against keys, and explicit and stored negatives."""
    stored, ids = inputs.stored, inputs.ids
    query, key = _double(inputs.query), _double(positive_of(inputs.key, stored))
    others = query[:0] if stored.negatives is None else _double(stored.negatives)
    num_stored = 0 if stored.negative_step is None else len(stored.negative_step)
    num_explicit = len(others) - num_stored
    candidates = [Candidate("batch", row, 1) for row in range(len(key) if in_batch else 0)]
    candidates += [Candidate("explicit", row) for row in range(num_explicit)]
    candidates += [Candidate("stored", row) for row in range(num_stored)]
    query_id, key_id = ids.query.cpu(), (ids.key if of_pairs else ids.query).cpu()
    negative_id = None if stored.negative_id is None else stored.negative_id.cpu()
    blocks = list(spans(0, len(query), _BLOCK_ROWS))
    false = query_mask((query_id, key_id), slice(0, len(query)), negative_id, blocks, in_batch=in_batch)
    if false is not None:
        false.set_sizes(false.sizes.flatten().tolist())

    def mask(rows: slice) -> Tensor:
        tile = torch.zeros(len(query[rows]), len(candidates))
        if false is not None:
            false.apply_(tile, rows, slice(0, len(candidates)))
        if in_batch:  # a mask without false negatives spares the positives
            tile.diagonal(rows.start).fill_(-math.inf)
        return tile.isinf()

    positive_bias, column_bias = _biases(inputs, objective, in_batch=in_batch, num_others=len(others))
    return Side(
        view=0,
        positive_view=1,
        queries=query,
        positives=key,
        columns=torch.cat([key, others]) if in_batch else others,
        candidates=candidates,
        mask=mask,
        positive_bias=positive_bias,
        column_bias=column_bias,
    )


def _biases(
    inputs: LossInputs, objective: Clip | None, *, in_batch: bool, num_others: int
) -> tuple[Tensor, Tensor]:
    """Return the terms that the log-Q correction adds to the logits of positives and of all columns."""
    batch = len(inputs.query)
    if objective is None or objective.log_frequency is None:
        none = torch.zeros(batch, dtype=torch.float64)
        return none, torch.zeros(batch * in_batch + num_others, dtype=torch.float64)
    of_keys = -_double(objective.log_frequency(inputs.ids.stored_key))
    name = inputs.stored.negative_name
    of_others = of_keys[:0] if name is None else -_double(objective.log_frequency(name))
    return of_keys, torch.cat([of_keys, of_others])


def _sides_of_pairs(inputs: LossInputs, objective: Clip) -> list[Side]:
    """CLIP's loss: queries against keys and other negatives, and keys against queries."""
    assert inputs.key is not None, "pairs have a key each"
    forward = _side_of_queries(inputs, in_batch=True, of_pairs=True, objective=objective)
    swapped = replace(inputs.ids, query=inputs.ids.key, key=inputs.ids.query)
    backward = _side_of_queries(
        LossInputs(inputs.key, inputs.query, StoreBatch(), swapped), in_batch=True, of_pairs=True
    )
    candidates = [candidate._replace(view=0) for candidate in backward.candidates]
    backward = replace(backward, view=1, positive_view=0, candidates=candidates)
    return [forward, backward]
