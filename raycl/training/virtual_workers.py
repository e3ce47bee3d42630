"""The embeddings of a batch in one process that stands for several workers.

Workers differ in their dropout masks, and in the statistics of local BatchNorm. Everything else of a step depends on
the whole batch only.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from raycl.config import RunConfig, Stage
from raycl.errors import ConfigError
from raycl.losses.objective import ViewPair
from raycl.training.train_state import Embedded, TrainState
from raycl.training.views import Views


def dropout_seed(seed: int, step: int, worker: int) -> int:
    """Return the seed of the dropout masks of a worker in a step."""
    return hash((seed, step, worker)) % 2**63


def embedding_of(
    state: TrainState, config: RunConfig, stage: Stage, num_workers: int
) -> Callable[..., Embedded] | None:
    """Return the embedding of whole batches as ``num_workers`` workers make it; None if ``state.embed`` does.

    Raises ``ConfigError`` for a network with dropout and BatchNorm whose rows of each worker are unknown, and its result
    for one whose other layers draw random numbers beside BatchNorm.
    """
    if num_workers == 1:
        return None
    has_batchnorm = _has(state, _BatchNorm)
    if not has_batchnorm or config.batchnorm in ("local", "local_view"):
        return partial(embed_as_workers, state, seed=config.seed, num_workers=num_workers)
    if not has_dropout(state):
        return partial(_embed_at_once, state, num_workers=num_workers)
    if config.has_texts:  # their layers have rows of tokens, or attention with dropout of its own
        raise ConfigError(
            f"one process cannot repeat the dropout of {num_workers} workers in texts beside BatchNorm over all rows; "
            "replay a run with workers=1"
        )
    recomputes = stage.chunk_size is not None or stage.activation_checkpoint_every is not None
    has_shuffled = config.batchnorm == "shuffled"
    if recomputes or (has_shuffled and config.num_views > 2):
        how = "recomputed activations" if recomputes else "shuffled BatchNorm and more than two views"
        raise ConfigError(
            f"one process cannot repeat the dropout of {num_workers} workers with {how}; replay a run with workers=1"
        )
    masks = WorkerDropout(
        _networks(state), num_workers=num_workers, seed=config.seed, in_turn=not has_shuffled
    )
    return partial(masks.embed, state)


@final
class WorkerDropout:
    """Dropout masks of whole batches, drawn worker by worker: for networks whose rows depend on each other."""

    def __init__(
        self, networks: Sequence[nn.Module], *, num_workers: int, seed: int, in_turn: bool = True
    ) -> None:
        """Replace the masks of all dropout layers of these networks, within ``embed`` only.

        ``in_turn``, the rows of a layer are those of one view of all workers after the other; otherwise, as in shuffled
        BatchNorm, they are all rows of one worker after the other.
        """
        self._num_workers, self._seed, self._in_turn = num_workers, seed, in_turn
        self._batch = 0  # rows of the batch that is embedded, if any
        self._states: list[Tensor] = []
        for layer in [layer for network in networks for layer in network.modules()]:
            if isinstance(layer, _DropoutNd):
                layer.inplace = False  # the hook needs the input
                layer.register_forward_hook(self._draw)

    def embed(self, state: TrainState, views: Views, *, step: int) -> Embedded:
        """Embed a whole batch."""
        self._batch, self._states = len(views), []
        for worker in range(self._num_workers):
            torch.manual_seed(dropout_seed(self._seed, step, worker))
            self._states.append(_generator(views.view_a).get_rng_state())
        try:
            return state.embed(views, step=step)
        finally:
            self._batch = 0

    def _draw(self, layer: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> Tensor | None:
        """Return the output of a layer."""
        (rows,) = given
        if not (self._batch and layer.training):
            return None
        if len(rows) % self._batch:
            raise ConfigError(
                f"a dropout layer of the network has {len(rows)} rows in a batch of {self._batch}, which cannot be "
                f"assigned to {self._num_workers} workers; replay a run with workers=1"
            )
        size = self._batch if self._in_turn else len(rows)
        worker = torch.arange(len(rows), device=rows.device) % size // (size // self._num_workers)
        dropped, generator = torch.empty_like(rows), _generator(rows)
        for each in range(self._num_workers):
            generator.set_rng_state(self._states[each])
            own = worker == each
            # The masks are drawn in the order of memory.
            part = torch.empty_like(rows[: int(own.sum())])
            part.copy_(rows[own])
            dropped[own] = layer.forward(part)  # without this hook
            self._states[each] = generator.get_rng_state()
        return dropped


def embed_as_workers(state: TrainState, views: Views, *, seed: int, num_workers: int, step: int) -> Embedded:
    """Embed a whole batch in ``num_workers`` equal shares of adjacent rows, each with its worker's dropout."""
    if views.negatives is not None and not has_dropout(state):
        return _embed_at_once(state, views, num_workers=num_workers, step=step)
    if views.negatives is not None:
        raise ConfigError(
            f"the run's pairs have explicit negatives on {num_workers} workers, whose dropout depends on their own; "
            "only a run with workers=1 can be replayed"
        )
    parts, size = [], len(views) // num_workers
    for worker in range(num_workers):
        torch.manual_seed(dropout_seed(seed, step, worker))
        share = _share(views, slice(worker * size, (worker + 1) * size))
        parts.append(state.embed(share, step=step))
    pairs = [
        ViewPair(
            _joined([pair.query for pair in of_workers]),
            None if of_workers[0].key is None else _joined([_key(pair) for pair in of_workers]),
            of_workers[0].weight,
        )
        for of_workers in zip(*(part.pairs for part in parts), strict=True)
    ]
    keys = [part.key for part in parts if part.key is not None]
    return Embedded(_joined([part.query for part in parts]), _joined(keys) if keys else None, pairs=pairs)


def _embed_at_once(state: TrainState, views: Views, *, num_workers: int, step: int) -> Embedded:
    """Embed a whole batch by networks without random numbers."""
    generator = _generator(views.view_a)
    before = generator.get_rng_state()
    embedded = state.embed(views, step=step)
    if not torch.equal(generator.get_rng_state(), before):
        raise ConfigError(
            "the network draws random numbers in layers other than nn.Dropout, such as stochastic depth, which one process "
            f"cannot repeat for {num_workers} workers; replay a run with workers=1"
        )
    return embedded


def _share(views: Views, rows: slice) -> Views:
    """Return these rows of a batch, with tokens as long as their longest text."""
    return replace(
        views,
        view_a=_cut(views.view_a[rows]),
        view_b=None if views.view_b is None else _cut(views.view_b[rows]),
        further=tuple(_cut(each[rows]) for each in views.further),
        crops=tuple(_cut(each[rows]) for each in views.crops),
        sample_id=views.sample_id[rows],
        ids=views.ids[rows],
    )


def _cut(rows: Tensor) -> Tensor:
    """Return tokens [n, length] without the columns that are padding in all rows; images as they are."""
    if rows.ndim != 2:
        return rows
    length = int((rows != 0).any(0).nonzero().max()) + 1 if rows.any() else 1
    return rows[:, :length]


def _key(pair: ViewPair) -> Tensor:
    assert pair.key is not None, "all workers have keys, or none"
    return pair.key.unflatten(0, (-1, len(pair.query)))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows [local_batch, dim] of all workers, or their keys [num_views, local_batch, dim] view by view."""
    if parts[0].ndim == 2:
        return torch.cat(list(parts))
    return torch.cat(list(parts), dim=1).flatten(0, 1)


def _generator(rows: Tensor) -> Any:
    """Return the module with the state of the generator that draws the masks of these rows."""
    return torch.cuda if rows.is_cuda else torch


def has_dropout(state: TrainState) -> bool:
    """Whether a network of a run drops anything in training."""
    return _has(state, _DropoutNd)


def _networks(state: TrainState) -> list[nn.Module]:
    return [each for each in (state.tower, state.prediction_head, state.momentum_encoder) if each is not None]


def _has(state: TrainState, kind: type[nn.Module]) -> bool:
    layers = (layer for network in _networks(state) for layer in network.modules())
    return any(isinstance(each, kind) and getattr(each, "p", 1.0) > 0 for each in layers)
