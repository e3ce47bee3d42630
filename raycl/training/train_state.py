"""The state that training changes, except the store: towers and their averages, heads, optimizer, temperature."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from raycl.batchnorm import encode_shuffled, leakage, split_batchnorm
from raycl.config import RunConfig, Stage
from raycl.distributed import all_sum, average_, num_workers
from raycl.distributed.ddp import average_buffers, average_gradients
from raycl.distributed.step_timer import phase
from raycl.errors import ConfigError, one_line
from raycl.gradient_cache import checkpoint_activations, embed_in_chunks
from raycl.loss_specs import LOSSES
from raycl.losses import NormalizingConstant
from raycl.losses.logq import Frequencies
from raycl.losses.objective import Matryoshka, Objective, ViewPair, build_objective, pair_views
from raycl.models.blocks import learning_rate_scales, residual_blocks
from raycl.models.build import build_prediction_head
from raycl.models.momentum import MomentumEncoder
from raycl.models.towers import LearnedTemperature, Tower, Towers, TwoTowers
from raycl.optim import build_optimizer, clip_gradient, take_step
from raycl.training.views import TakeKeys, Views, stacked

PROBED_ROWS = 1_024  # rows of a batch for the leakage probe, which compares all of them


@final
@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """How a stage embeds its batches.

    ``chunk_size`` limits the views with a graph at the same time. ``cached_chunks`` is an argument of
    :func:`~raycl.gradient_cache.embed_in_chunks`, and ``activation_checkpoint_every`` of
    :func:`~raycl.gradient_cache.checkpoint_activations` too.
    Shuffled BatchNorm normalizes random groups of ``rows_per_group`` rows: keys, or all views of a single
    tower. ``leak_group_size`` is the number of rows normalized together, for the leakage probe; 0 if
    BatchNorm cannot leak. ``by_view`` embeds each view on its own. ``all_views`` compares all views of a sample
    at once instead of pairs of them.
    """

    chunk_size: int | None = None
    cached_chunks: int = 1
    activation_checkpoint_every: int | None = None
    rows_per_group: int | None = None
    leak_group_size: int = 0
    by_view: bool = False
    all_views: bool = False

    @classmethod
    def of(cls, config: RunConfig, stage: Stage) -> "EmbedConfig":
        """Return the settings of a stage."""
        rows_per_group = config.rows_per_group(stage)
        in_batch_only = config.negatives.store in ("none", "partition") or LOSSES[stage.loss].neighbors
        local_size = config.local_batch_size(stage)
        leak_group_sizes = {
            "synchronized": 0 if in_batch_only else stage.batch_size,
            "local": 0 if in_batch_only and config.workers_of(stage) == 1 else local_size,
            "local_view": 0 if in_batch_only and config.workers_of(stage) == 1 else local_size,
            "shuffled": rows_per_group,
        }
        return cls(
            chunk_size=stage.chunk_size,
            cached_chunks=stage.cached_chunks,
            activation_checkpoint_every=stage.activation_checkpoint_every,
            rows_per_group=rows_per_group if config.batchnorm == "shuffled" else None,
            by_view=config.batchnorm == "local_view",
            all_views=LOSSES[stage.loss].all_views,
            leak_group_size=leak_group_sizes.get(config.batchnorm, 0),
        )


class Embedded(NamedTuple):
    """Queries and keys [local_batch, dim], and negatives [n, dim]; no keys if these are slots of a bank.

    ``pairs`` are the queries and keys to compare if there are more than one of each; the first query and key are
    ``query`` and ``key``. ``key_step`` are the steps of the weights of keys from a pool, int64 [local_batch].
    """

    query: Tensor
    key: Tensor | None
    negatives: Tensor | None = None
    pairs: Sequence[ViewPair] = ()
    key_step: Tensor | None = None


@final
class TrainState:
    """Towers, momentum encoder, optimizer and temperature of this worker, and the embedding of batches."""

    def __init__(
        self,
        tower: Towers,
        optimizer: Optimizer,
        *,
        temperature: LearnedTemperature | None = None,
        prediction_head: Tower | None = None,
        momentum_encoder: MomentumEncoder | None = None,
        ema_decay: float | None = None,
        normalizer: NormalizingConstant | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        """``seed`` draws the groups of shuffled BatchNorm; ``ema_decay`` averages the weights."""
        self.tower, self.optimizer, self.temperature = tower, optimizer, temperature
        self.prediction_head, self.normalizer = prediction_head, normalizer
        self.momentum_encoder = momentum_encoder
        self._ema_decay = ema_decay
        self.ema = None if ema_decay is None else MomentumEncoder(tower).eval()
        self.max_grad_norm = max_grad_norm
        self._seed, self._embed_config = seed, EmbedConfig()
        self._parallel: nn.Module = tower
        self._used: Sequence[nn.Parameter] = ()  # the tower's parameters in its output, of several workers

    @classmethod
    def build(cls, config: RunConfig, towers: Towers, *, num_samples: int | None) -> "TrainState":
        """Build the state of a run; ``num_samples`` is the number of slots of a memory bank, if any."""
        normalizer = temperature = None
        if num_samples is not None:  # for every loss: a stage of NCE may be appended to a finished run
            normalizer = NormalizingConstant(num_samples, momentum=config.negatives.normalizer_momentum)
        device = next(towers.parameters()).device
        prediction_head = build_prediction_head(config)
        if prediction_head is not None:
            prediction_head.to(device)
        if config.learn_temperature:
            temperature = LearnedTemperature(config.stages[0].temperature, bias=config.first_bias).to(device)
        learned = nn.ModuleList(filter(None, (towers, prediction_head, temperature)))
        settings = config.optimizer.model_dump(exclude={"max_grad_norm", "layer_decay"})
        return cls(
            towers,
            build_optimizer(module=learned, **settings, learning_rate_scales=_scales(config, towers)),
            temperature=temperature,
            prediction_head=prediction_head,
            momentum_encoder=MomentumEncoder(towers) if config.key == "momentum_encoder" else None,
            ema_decay=config.ema_decay,
            normalizer=normalizer,
            max_grad_norm=config.optimizer.max_grad_norm,
            seed=config.seed,
        )

    def objective(
        self,
        config: RunConfig,
        stage: Stage,
        *,
        hinge_weight: float,
        num_samples: int | None = None,
        frequencies: Frequencies | None = None,
    ) -> Objective:
        """Return the loss over all workers, in which the hinge has the weight ``hinge_weight``."""
        learned = self.temperature
        temperature = stage.temperature if learned is None else learned()
        bias = stage.bias if learned is None or learned.bias is None else learned.bias
        correction = stage.logq_correction
        assert correction == "none" or frequencies is not None, "documents are counted before the first step"
        objective = build_objective(
            stage.loss,
            hinge_weight=hinge_weight,
            temperature=temperature,
            bias=bias,
            margin=stage.margin,
            hardest=stage.hardest_negative,
            in_batch=config.negatives.in_batch and config.key != "memory_bank",
            pairs=config.has_two_towers,
            # Keys of a momentum encoder or a bank have no gradient.
            learns_keys=config.key == "tower",
            view_mean=stage.view_mean,
            num_views=config.num_views,
            teacher_temperature=stage.teacher_temperature,
            teacher_keys=stage.teacher_keys,
            proximal_weight=stage.proximal_weight,
            log_frequency=None if correction == "none" else frequencies,
            refines_logq=correction == "refined",
            normalizer=self.normalizer,
            num_samples=num_samples,
            bank_momentum=config.negatives.bank_momentum,
        )
        if stage.matryoshka_dims is None:
            return objective
        weights = stage.matryoshka_weights or [1.0] * len(stage.matryoshka_dims)
        return Matryoshka(objective=objective, dims=stage.matryoshka_dims, weights=weights)

    def wrap_ddp(self, device: torch.device, *, unused: Set[nn.Parameter] = frozenset()) -> None:
        """Average gradients with the other workers from now on; collective. ``unused`` parameters have no gradient."""
        self._parallel = average_gradients(self.tower, device, leaves_unused=bool(unused))
        if num_workers() > 1:
            self._used = [
                each for each in self.tower.parameters() if each.requires_grad and each not in unused
            ]

    def set_embed_config(self, config: EmbedConfig) -> None:
        """Use this configuration from now on; raises ``ConfigError`` if no activations can be recomputed."""
        self._embed_config = config
        every, size = config.activation_checkpoint_every, config.chunk_size
        acts = [
            checkpoint_activations(each, residual_blocks(each.encoder), every=every, chunk_size=size)
            for each in self.tower.towers
        ]
        if every is not None and not any(acts):
            raise ConfigError(
                "activation_checkpoint_every needs the blocks of a ResNet, a ViT or a transformer, got none; remove it"
            )
        if config.rows_per_group is not None:
            for network in filter(None, (self.tower, self.prediction_head, self.momentum_encoder)):
                split_batchnorm(network, config.rows_per_group)

    def embed(self, views: Views, *, step: int, take_keys: TakeKeys | None = None) -> Embedded:
        """Return the embeddings of a batch; ``take_keys`` takes keys from a pool of actors."""
        if isinstance(self.tower, TwoTowers):
            return self._embed_pairs(self.tower, views)
        if self.prediction_head is not None:
            return self._embed_predicted(self.prediction_head, views, step, take_keys)
        if self.momentum_encoder is not None:
            # Before the queries, so that DDP's backward pass follows its own forward pass.
            (key,), key_step = self._find_keys(self.momentum_encoder, views.key_views, step, take_keys)
            query, *others = self._encode_by_size(views.view_a, *views.further, *views.crops)
            pairs = [ViewPair(each, key) for each in (query, *others)] if others else ()
            return Embedded(query, key, pairs=pairs, key_step=key_step)
        if views.view_b is None:
            return Embedded(self.encode(views.view_a), None)
        if self._embed_config.rows_per_group is not None:
            query, key = self._encode_shuffled(self.encode, (views.view_a, views.view_b), step)
            return Embedded(query, key)
        if views.negatives is not None:
            query, key, negatives = self._encode_by_size(views.view_a, views.view_b, views.negatives)
            return Embedded(query, key, negatives)
        full = (views.view_a, views.view_b, *views.further)
        embeddings = self._encode_by_size(*full, *views.crops)
        query, key = embeddings[:2]
        if len(embeddings) == 2:
            return Embedded(query, key)
        if self._embed_config.all_views:
            return Embedded(query, key, pairs=[ViewPair(query, torch.cat(embeddings[1:]))])
        pairs = pair_views(embeddings[: len(full)], embeddings[len(full) :])
        return Embedded(query, key, pairs=pairs)

    def encode(self, rows: Tensor) -> Tensor:
        """Embed rows with the tower, in chunks if ``chunk_size`` is set."""
        if self._embed_config.chunk_size is None:
            return self._parallel(rows)
        return self._in_chunks(self.tower, rows)

    def backward(self, loss: Tensor) -> None:
        """Store the gradient of the mean loss over all workers in the parameters; collective."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        # Workers that skip layers at random skip different ones, and all must send equal lists.
        for parameter in self._used if self._embed_config.chunk_size is not None else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        average_(parameter.grad for parameter in self._not_averaged() if parameter.grad is not None)

    def update(self) -> Tensor | None:
        """Make the optimizer step; return the norm of the gradient before clipping, None without clipping."""
        limit = self.max_grad_norm
        grad_norm = None if limit is None else clip_gradient(self.optimizer, limit)
        take_step(self.optimizer)
        if self.temperature is not None:
            self.temperature.clamp_()
        return grad_norm

    def update_momentum_encoder(self, momentum: float) -> None:
        """Move the momentum encoder, if any, towards the tower."""
        if self.momentum_encoder is not None:
            self.momentum_encoder.update(self.tower, momentum)

    def update_ema(self, *, step: int) -> None:
        """Move the average of the weights, if any, towards the tower; ``step`` counts from 0.

        The decay rises from 0.1, or the initial weights would count for 1 / (1 - decay) steps.
        """
        if self.ema is not None and self._ema_decay is not None:
            self.ema.update(self.tower, min(self._ema_decay, (1 + step) / (10 + step)))

    @property
    def evaluated(self) -> Towers:
        """The towers to evaluate and save: with ``ema_decay`` their average over the steps."""
        return self.tower if self.ema is None else cast("Towers", self.ema.tower)

    def average_statistics(self) -> None:
        """Give all workers the mean of their running statistics, of BatchNorm and whitening; collective.

        Training never reads them. With the mean, all workers evaluate the same encoder, and the saved
        one has statistics of all rows.
        """
        for network in filter(None, (self.tower, self.prediction_head, self.momentum_encoder, self.ema)):
            average_buffers(network)

    def leakage(self, views: Views, *, seed: int) -> dict[str, float]:
        """Measure the leakage of BatchNorm, if the tower has such layers and they can leak; collective."""
        num_rows = min(len(views), PROBED_ROWS)
        group_size = min(self._embed_config.leak_group_size, num_rows // 2)
        has_batchnorm = any(isinstance(layer, _BatchNorm) for layer in self.tower.modules())
        if group_size < 2 or isinstance(self.tower, TwoTowers) or not has_batchnorm:
            return {}
        view_b = views.second_view()
        if view_b is None:
            return {}
        found = leakage(
            self.tower,
            self.tower if self.momentum_encoder is None else self.momentum_encoder,
            views.view_a[:num_rows],
            view_b[:num_rows],
            group_size=group_size,
            num_groupings=2,
            seed=seed,
        )
        advantage = torch.tensor(found.advantage, device=views.view_a.device)
        return {"batchnorm_leakage": float(all_sum(advantage)) / num_workers()}

    def is_finite(self) -> bool:
        """Whether all weights are finite."""
        modules = filter(None, (self.tower, self.prediction_head, self.temperature))
        return all(bool(each.isfinite().all()) for module in modules for each in module.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return all state by name."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned; raises ``ConfigError`` if the optimizer had other groups of parameters."""
        for name, part in self._parts().items():
            try:
                part.load_state_dict(state[name])
            except ValueError as error:
                raise ConfigError(
                    f"the {name} of the checkpoint does not fit ({one_line(error)}), as after optimizer.layer_decay in an "
                    "earlier version; use that version of raycl for this run, or begin another"
                ) from error

    def _not_averaged(self) -> Iterator[nn.Parameter]:
        """Yield the parameters whose gradient is only this worker's after the backward pass."""
        if self._embed_config.chunk_size is not None:
            yield from self.tower.parameters()
        for each in filter(None, (self.prediction_head, self.temperature)):
            yield from each.parameters()

    def _embed_pairs(self, towers: TwoTowers, views: Views) -> Embedded:
        if self._embed_config.chunk_size is None:
            query, keys = self._parallel(views.view_a, views.keys())
        else:
            query = self._in_chunks(towers.query, views.view_a)
            keys = self._in_chunks(towers.key_tower, views.keys())
        # Keep an empty tensor if this batch has no negatives, since other workers may have some.
        negatives = keys[len(views) :] if views.example_ids.negative is not None else None
        return Embedded(query, keys[: len(views)], negatives)

    def _embed_predicted(
        self, prediction_head: Tower, views: Views, step: int, take_keys: TakeKeys | None
    ) -> Embedded:
        """Embed all views as queries, and views of full size as keys of the others."""
        assert views.view_b is not None, "keys that are views need two views"
        full = (views.view_a, views.view_b, *views.further)
        keys: Sequence[Tensor] = ()
        key_step = None
        if self.momentum_encoder is not None:
            keys, key_step = self._find_keys(self.momentum_encoder, lambda: full, step, take_keys)
        if self.momentum_encoder is None and self._embed_config.rows_per_group is not None:
            projected = self._encode_shuffled(self.encode, full, step)
        else:
            projected = self._encode_by_size(*full, *views.crops)
        queries = prediction_head(torch.cat(projected)).chunk(len(projected))
        keys = [normalize(each, dim=1) for each in keys or projected[: len(full)]]
        pairs = [
            ViewPair(query, key)
            for view, query in enumerate(queries)
            for other, key in enumerate(keys)
            if other != view
        ]
        return Embedded(queries[0], keys[1], pairs=pairs, key_step=key_step)

    def _encode_by_size(self, *views: Tensor) -> list[Tensor]:
        """Embed views [local_batch, ...]: all views of one size in one call, or each in its own (``by_view``)."""
        by_view, by_size = self._embed_config.by_view, dict[tuple[Any, ...], list[int]]()
        for number, view in enumerate(views):
            by_size.setdefault((number if by_view else None, view.shape[2:]), []).append(number)
        embeddings: dict[int, Tensor] = {}
        for numbers in by_size.values():
            rows = self.encode(stacked(*(views[number] for number in numbers)))
            sizes = [len(views[number]) for number in numbers]
            embeddings.update(zip(numbers, rows.split(sizes), strict=True))
        return [embeddings[number] for number in range(len(views))]

    def _encode_shuffled(
        self, encode: Callable[[Tensor], Tensor], views: Sequence[Tensor], step: int
    ) -> tuple[Tensor, ...]:
        """Embed views in random groups; interleaving keeps their order for any number of workers."""
        rows = torch.stack(list(views), dim=1).flatten(0, 1)
        embeddings = encode_shuffled(encode, rows, seed=self._seed, step=step)
        return embeddings.unflatten(0, (-1, len(views))).unbind(1)

    def _find_keys(
        self,
        encoder: MomentumEncoder,
        views: Callable[[], Sequence[Tensor]],
        step: int,
        take_keys: TakeKeys | None,
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """Return the keys of views, from the pool or encoded here, and with a pool the steps of their weights."""
        with phase("keys"):
            found = None if take_keys is None else take_keys(step)
            if found is not None:
                return found.keys.unbind(), found.step
            keys = self._encode_keys(encoder, views(), step)
        key_step = None
        if take_keys is not None:
            key_step = torch.full((len(keys[0]),), step, device=keys[0].device)
        return keys, key_step

    @torch.no_grad()
    def _encode_keys(self, encoder: MomentumEncoder, views: Sequence[Tensor], step: int) -> Sequence[Tensor]:
        encode = encoder if self._embed_config.chunk_size is None else partial(self._in_chunks, encoder)
        if self._embed_config.rows_per_group is None:
            return encode(stacked(*views)).chunk(len(views))
        return self._encode_shuffled(encode, views, step)

    def _in_chunks(self, network: nn.Module, rows: Tensor) -> Tensor:
        config = self._embed_config
        assert config.chunk_size is not None, "only a batch with a chunk_size is split"
        return embed_in_chunks(
            network,
            rows,
            chunk_size=config.chunk_size,
            cached_chunks=config.cached_chunks,
            activation_checkpoint_every=config.activation_checkpoint_every,
        )

    def _parts(self) -> dict[str, Any]:
        parts = {
            "tower": self.tower,
            "optimizer": self.optimizer,
            "temperature": self.temperature,
            "prediction_head": self.prediction_head,
            "momentum_encoder": self.momentum_encoder,
            "ema": self.ema,
            "normalizer": self.normalizer,
        }
        return {name: part for name, part in parts.items() if part is not None}


def _scales(config: RunConfig, towers: Towers) -> dict[nn.Parameter, float]:
    """Return the factors of the learning rate; raises ``ConfigError`` if no encoder has blocks for them."""
    decay = config.optimizer.layer_decay
    if decay is None:
        return {}
    scales: dict[nn.Parameter, float] = {}
    for tower in towers.towers:
        scales |= learning_rate_scales(tower.encoder, decay)
    if not scales:
        raise ConfigError(
            "optimizer.layer_decay needs the blocks of a ViT or a transformer, got none; remove it"
        )
    return scales
