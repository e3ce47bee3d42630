"""Steps of every recipe in plain torch: one worker, float64, the full batch and all pairs at once.

Only the random draws (noise slots, the order of shuffled rows) and the encoder layers come from raycl,
so that a wiring mistake in raycl is not repeated here.
"""

import copy
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.batchnorm.shuffled import permutation
from raycl.config import RunConfig
from raycl.losses.example_ids import ExampleIds
from raycl.negatives.memory_bank import draw_slots
from raycl.training.views import Views
from tests.plain_losses import (
    plain_bidirectional,
    plain_dcl,
    plain_gcl,
    plain_gcl_of_pairs,
    plain_hinge,
    plain_info_nce,
    plain_nce,
    plain_nnclr,
    plain_nt_xent,
    plain_poly_view,
    plain_siglip,
    plain_supcon,
    weighted_mean,
)


@final
class PlainBatchNorm(nn.Module):
    """Batch normalization by its formula, over groups of consecutive rows; 0 means the full batch."""

    def __init__(self, layer: _BatchNorm, group_size: int) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.eps, self.group_size = layer.eps, group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(0, (-1, self.group_size or len(x)))
        over = [1, *range(3, groups.ndim)]
        centered = groups - groups.mean(over, keepdim=True)
        normal = centered / (centered.square().mean(over, keepdim=True) + self.eps).sqrt()
        shape = (1, -1) + (1,) * (x.ndim - 2)
        return normal.flatten(0, 1) * self.weight.view(shape) + self.bias.view(shape)


@final
class PlainLars(torch.optim.Optimizer):
    """LARS by its formula (You et al., 2017), for matrices; vectors get plain momentum."""

    def __init__(self, groups: list[dict[str, Any]], momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0})
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                change = weight.grad + group["weight_decay"] * weight
                if weight.ndim > 1:
                    change = change * 1e-3 * weight.norm() / change.norm()
                velocity = self.state[weight].get("velocity", torch.zeros_like(weight))
                velocity = self.momentum * velocity + change
                self.state[weight]["velocity"] = velocity
                weight -= group["lr"] * velocity


@final
class PlainMuon(torch.optim.Optimizer):
    """Muon by the singular values of each matrix's momentum (Jordan et al., 2024); vectors get AdamW."""

    def __init__(self, groups: list[dict[str, Any]], momentum: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 0.0})
        self.momentum = momentum
        self.vectors = torch.optim.AdamW(groups[1]["params"], betas=betas, weight_decay=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        matrices, vectors = self.param_groups
        self.vectors.param_groups[0]["lr"] = vectors["lr"]
        self.vectors.step()
        for weight in matrices["params"]:
            mean = self.state[weight].get("mean", torch.zeros_like(weight))
            mean = self.state[weight]["mean"] = self.momentum * mean + (1 - self.momentum) * weight.grad
            ahead = self.momentum * mean + (1 - self.momentum) * weight.grad
            left, values, right = torch.linalg.svd(ahead.flatten(1), full_matrices=False)
            values = values / values.norm()
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            change = 0.2 * max(len(weight), weight[0].numel()) ** 0.5 * (left * values @ right)
            weight *= 1 - matrices["lr"] * matrices["weight_decay"]
            weight -= matrices["lr"] * change.view_as(weight)


def plain_network(network: nn.Module, group_size: int) -> nn.Module:
    """Copy a network, with BatchNorm layers replaced by formulas."""
    network = copy.deepcopy(network).double()
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm):
                setattr(parent, name, PlainBatchNorm(child, group_size))
    return network


def plain_optimizer(config: RunConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Weight decay applies to matrices and filters, not to biases, normalization or the temperature."""
    settings = config.optimizer
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if settings.name == "lars":
        return PlainLars(groups, settings.momentum)
    if settings.name == "muon":
        return PlainMuon(groups, settings.momentum, settings.betas)
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, betas=settings.betas)
    return torch.optim.SGD(groups, momentum=settings.momentum)


def plain_ids(rows: list[list[int]], *, shared: bool) -> list[int]:
    """Number distinct items: rows that share an id are one, in any column with ``shared``."""
    numbers = list(range(len(rows)))
    for i, row in enumerate(rows):
        for j, other in enumerate(rows[:i]):
            pairs = [(a, b) for a in row for b in other] if shared else zip(row, other, strict=True)
            if any(a == b for a, b in pairs):
                numbers = [numbers[j] if each == numbers[i] else each for each in numbers]
    return numbers


@final
class PlainRun:
    """A run of one worker: its networks, its store of negatives, its optimizer."""

    def __init__(
        self,
        config: RunConfig,
        tower: nn.Module,
        *,
        prediction_head: nn.Module | None = None,
        slots: Tensor | None = None,
        count: Mapping[int, int] | None = None,
        num_samples: int = 0,
    ) -> None:
        """Start from the weights of ``tower`` and initial ``slots``; ``count`` is the frequency of each key."""
        self.num_samples = num_samples
        self.config, self.stage = config, config.stages[0]
        groups = config.batchnorm_groups if config.batchnorm == "shuffled" else 1
        self.tower: Any = plain_network(tower, 0 if groups == 1 else self.stage.batch_size // groups)
        self.momentum_tower: Any = copy.deepcopy(self.tower)
        self.prediction_head: Any = None
        if prediction_head is not None:
            self.prediction_head = plain_network(
                prediction_head, 0 if groups == 1 else self.stage.batch_size // groups
            )
        self.average = [each.detach().clone() for each in self.tower.parameters()]
        learned = torch.tensor(
            math.log(self.stage.temperature),
            dtype=torch.float32 if config.learn_temperature else torch.float64,
        )
        self.log_temperature = nn.Parameter(learned.double())
        self.bias = nn.Parameter(torch.tensor(self.stage.bias, dtype=torch.float64))
        scalars = [self.log_temperature, *([self.bias] if self.stage.loss == "siglip" else [])]
        self.optimizer = plain_optimizer(config, [*self.weights(), *scalars])
        dtype = getattr(torch, config.bank.dtype)
        self.queue, self.queue_names = torch.empty(0, config.projection_head.dim, dtype=dtype), list[int]()
        self.slots = None if slots is None else slots.double()
        self.count = {} if count is None else count
        self.normalizer: float | None = None
        self.partitions, self.of_batch = dict[int, list[float]](), torch.empty(0)

    def step(
        self, views: Views, names: ExampleIds, step: int, *, learning_rate: float, momentum: float
    ) -> float:
        """Run a step with these views and row names, and return its loss."""
        self.names = names
        if self.prediction_head is not None:
            loss, query, key = self.predicted_loss(views, step)
        elif views.further or views.crops:
            key, loss = self.embed_and_compare_many(views, step)
            query = key
        else:
            query, key, negatives = self.embed(views, step)
            loss = self.loss(query, key, negatives, views, step)
        self.optimizer.zero_grad()
        loss.backward()
        self.grad_norm = self.clip_gradient()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        with torch.no_grad():
            self.log_temperature.clamp_(min=math.log(0.01))
            decay = min(self.config.ema_decay or 0.0, (1 + step) / (10 + step))
            for average, leads in zip(self.average, self.tower.parameters(), strict=True):
                average.copy_(decay * average + (1 - decay) * leads)
            for follows, leads in zip(self.momentum_tower.parameters(), self.tower.parameters(), strict=True):
                follows.copy_(momentum * follows + (1 - momentum) * leads)
        self.store(query.detach() if key is None else key.detach(), views)
        return loss.item()

    def weights(self) -> list[nn.Parameter]:
        """Return the weights of the tower and the prediction head."""
        head = [] if self.prediction_head is None else self.prediction_head.parameters()
        return [*self.tower.parameters(), *head]

    def clip_gradient(self) -> float:
        """Limit the gradient of all parameters to the length in the settings; return its length before."""
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        gradients = [each.grad for each in parameters if each.grad is not None]
        length = math.sqrt(sum(float(each.square().sum()) for each in gradients))
        limit = self.config.optimizer.max_grad_norm
        for each in gradients if limit is not None and length > limit else ():
            each *= limit / (length + 1e-6)  # as torch
        return length

    def embed(self, views: Views, step: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return queries, keys (None where they are slots) and explicit negatives."""
        a, b, config = views.view_a, views.view_b, self.config
        nothing = torch.empty(0, config.projection_head.dim, dtype=torch.float64)
        if b is None:
            return self.encode(self.tower, a), None, nothing
        if config.has_two_towers:
            query = self.encode(self.tower.query, a)
            keys = self.encode(self.tower.key_tower, views.keys())
            return query, keys[: len(a)], keys[len(a) :]
        if config.key == "momentum_encoder":
            with torch.no_grad():
                key = self.encode_shuffled(self.momentum_tower, b, step)
            return self.encode(self.tower, a), key, nothing
        rows = torch.stack([a, b], 1).flatten(0, 1)  # by sample: a0, b0, a1, b1, ...
        if config.batchnorm == "shuffled":
            pairs = self.encode_shuffled(self.tower, rows, step).unflatten(0, (-1, 2))
            return pairs[:, 0], pairs[:, 1], nothing
        query, key = self.encode(self.tower, torch.cat([a, b])).chunk(2)
        return query, key, nothing

    def embed_and_compare_many(self, views: Views, step: int) -> tuple[Tensor, Tensor]:
        """Return the keys of view b, and the mean loss over all keys of full size and all other views."""
        assert views.view_b is not None
        full = [views.view_a, views.view_b, *views.further]
        nothing = torch.empty(0, self.config.projection_head.dim, dtype=torch.float64)
        if self.config.key == "momentum_encoder":
            with torch.no_grad():
                key = self.encode_shuffled(self.momentum_tower, views.view_b, step)
            queries = self.encode_by_size([full[0], *full[2:], *views.crops])
            losses = [self.loss(query, key, nothing, views, step) for query in queries]
            return key, torch.stack(losses).mean()
        embedded = self.encode_by_size([*full, *views.crops])
        if self.stage.loss == "poly_view":
            others = torch.cat(embedded[1:])
            return embedded[1], self.loss(embedded[0], others, nothing, views, step)
        losses = []
        for k in range(len(full)):
            for v in range(len(embedded)):
                if v != k:
                    query, key = (v, k) if v >= len(full) else sorted((v, k))
                    losses.append(self.loss(embedded[query], embedded[key], nothing, views, step))
        return embedded[1], torch.stack(losses).mean()

    def encode_by_size(self, views: list[Tensor]) -> list[Tensor]:
        """Encode views; BatchNorm spans all views of one size."""
        sizes = sorted({each.shape[-1] for each in views})
        rows = {size: torch.cat([each for each in views if each.shape[-1] == size]) for size in sizes}
        parts = {size: iter(self.encode(self.tower, rows[size]).split(len(views[0]))) for size in sizes}
        return [next(parts[each.shape[-1]]) for each in views]

    def predicted_loss(self, views: Views, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean loss of q1 among k2 and q2 among k1, as in the pseudo code of MoCo v3; also q1 and k2.

        Further views are queries among the keys of the two views; these are the only ones of full size.
        """
        z1, z2 = self.project(self.tower, views, step).chunk(2)
        k1, k2 = z1, z2
        if self.config.key == "momentum_encoder":
            with torch.no_grad():
                k1, k2 = self.project(self.momentum_tower, views, step).chunk(2)
        k1, k2 = F.normalize(k1, dim=1), F.normalize(k2, dim=1)
        crops = [self.tower.projection_head(self.tower.encoder(each)) for each in views.crops]
        q1, q2, *others = self.encode(self.prediction_head, torch.cat([z1, z2, *crops])).split(len(z1))
        none = torch.empty(0, self.config.projection_head.dim, dtype=torch.float64)
        pairs = [(q1, k2), (q2, k1), *((q, k) for q in others for k in (k1, k2))]
        losses = [self.loss(query, key, none, views, step) for query, key in pairs]
        return torch.stack(losses).mean(), q1, k2

    def project(self, tower: nn.Module, views: Views, step: int) -> Tensor:
        """Return the projections of both views before normalization."""
        assert views.view_b is not None
        rows = torch.cat([views.view_a, views.view_b])
        if self.config.batchnorm != "shuffled" or (
            self.config.key == "momentum_encoder" and tower is self.tower
        ):
            return tower.projection_head(tower.encoder(rows))
        mixed = torch.stack(rows.chunk(2), 1).flatten(0, 1)  # by sample: a0, b0, a1, b1, ...
        order = permutation(len(mixed), seed=self.config.seed, step=step)
        found = tower.projection_head(tower.encoder(mixed[order]))[order.argsort()]
        return torch.cat([found[::2], found[1::2]])

    def encode_shuffled(self, tower: nn.Module, rows: Tensor, step: int) -> Tensor:
        """Encode rows in the random order of shuffled BatchNorm, if it is used."""
        if self.config.batchnorm != "shuffled":
            return self.encode(tower, rows)
        order = permutation(len(rows), seed=self.config.seed, step=step)
        return self.encode(tower, rows[order])[order.argsort()]

    def encode(self, tower: nn.Module, rows: Tensor) -> Tensor:
        """Encode rows; in chunks if rows are independent, because dropout is drawn per chunk."""
        has_batchnorm = any(isinstance(each, PlainBatchNorm) for each in tower.modules())
        size = len(rows) if has_batchnorm else self.stage.chunk_size or len(rows)
        parts = [tower.projection_head(tower.encoder(part)) for part in rows.split(size)]
        return F.normalize(torch.cat(parts), dim=1)

    def loss(self, query: Tensor, key: Tensor | None, negatives: Tensor, views: Views, step: int) -> Tensor:
        """Return the loss of the stage: the weighted cross-entropy and hinge, plus the proximal term."""
        stage, own = self.stage, None
        if self.slots is None:
            query_id, key_id, other_id = self.number(views)
            others = torch.cat([negatives, self.queue.double()])
        else:
            own, query_id, key_id = self.slots[views.sample_id], views.sample_id, views.sample_id
            drawn = self.config.negatives.num_negatives
            other_id = torch.from_numpy(draw_slots(len(self.slots), drawn, seed=self.config.seed, step=step))
            others = self.slots[other_id]
        positive = own if key is None else key
        in_batch = self.config.negatives.in_batch and key is not None
        assert positive is not None
        loss_of = partial(self.loss_of, ids=(query_id, key_id, other_id), views=views, in_batch=in_batch)
        if stage.matryoshka_dims is None:
            return loss_of(query, positive, others)
        loss = torch.zeros((), dtype=torch.float64)
        for dim, weight in zip(stage.matryoshka_dims, stage.matryoshka_weights, strict=True):
            loss = loss + weight * loss_of(
                *(F.normalize(each[:, :dim], dim=1) for each in (query, positive, others))
            )
        return loss

    def loss_of(
        self,
        query: Tensor,
        positive: Tensor,
        others: Tensor,
        *,
        ids: tuple[Tensor, Tensor, Tensor],
        views: Views,
        in_batch: bool,
    ) -> Tensor:
        """Return the loss of these embeddings."""
        stage, (query_id, key_id, other_id) = self.stage, ids
        share = 1.0 if stage.loss == "hinge" else stage.hinge_weight
        loss = torch.zeros((), dtype=torch.float64)
        if share:
            loss = loss + share * plain_hinge(
                query,
                positive,
                others,
                margin=stage.margin,
                hardest=stage.hardest_negative,
                bidirectional=in_batch and self.config.key == "tower",
                in_batch=in_batch,
                pair_ids=(query_id, key_id),
                negative_id=other_id,
            )
        if share < 1:
            loss = loss + (1 - share) * self.entropy(query, positive, others, ids, views)
        if self.slots is not None:
            distance = (query - positive).square().sum(1)
            loss = loss + stage.proximal_weight * weighted_mean(distance, self.names.weight)
        return loss

    def of_views(self, query: Tensor, positive: Tensor, temperature: Tensor, query_id: Tensor) -> Tensor:
        """Return a cross-entropy of the views of each sample."""
        weight = self.names.weight
        if self.stage.loss == "nt_xent":
            return plain_nt_xent(query, positive, temperature, ids=(query_id, query_id), weight=weight)
        if self.stage.loss in ("dcl", "dclw"):
            sigma = 0.5 if self.stage.loss == "dclw" else None
            return plain_dcl(
                query, positive, temperature, sigma=sigma, ids=(query_id, query_id), weight=weight
            )
        if self.stage.loss == "poly_view":
            of_sample = query, *positive.split(len(query))
            return plain_poly_view(
                of_sample, temperature, mean=self.stage.view_mean, ids=query_id, weight=weight
            )
        assert self.names.label is not None
        weight, label = None if weight is None else weight.repeat(2), self.names.label.repeat(2)
        return plain_supcon(torch.cat([query, positive]), label, temperature, weight=weight)

    def entropy(
        self,
        query: Tensor,
        positive: Tensor,
        others: Tensor,
        ids: tuple[Tensor, Tensor, Tensor],
        views: Views,
    ) -> Tensor:
        """Return the cross-entropy of the stage."""
        query_id, key_id, other_id = ids
        temperature = self.log_temperature.exp()
        temperature = temperature if self.config.learn_temperature else temperature.detach()
        if self.stage.loss == "gcl":
            return self.of_data(query, positive, temperature, (query_id, key_id), views)
        if self.stage.loss in ("nt_xent", "dcl", "dclw", "supcon", "poly_view"):
            return self.of_views(query, positive, temperature, query_id)
        if self.stage.loss == "nce":
            masked = query_id[:, None] == other_id
            logits = (query @ others.T / temperature).detach()[~masked]
            estimate = len(self.slots) * logits.exp().mean().item()
            held = self.config.negatives.normalizer_momentum
            if self.normalizer is None:
                self.normalizer = estimate
            elif held is not None:
                self.normalizer = held * self.normalizer + (1 - held) * estimate
            log_normalizer = math.log(self.normalizer)
            return plain_nce(query, positive, others, temperature, len(self.slots), log_normalizer, masked)
        if self.stage.loss == "nnclr":
            return plain_nnclr(query, positive, others, temperature, ids=query_id, weight=self.names.weight)
        if self.stage.loss == "siglip":
            bias = self.bias if self.config.learn_temperature else self.bias.detach()
            return plain_siglip(
                query, positive, temperature, bias, pair_ids=(query_id, key_id), weight=self.names.weight
            )
        if self.stage.loss == "info_nce":
            pairs = (query_id, key_id) if self.config.has_two_towers else None
            return plain_info_nce(
                query,
                positive,
                temperature,
                others,
                in_batch=self.config.negatives.in_batch and self.slots is None,
                ids=None if pairs else (query_id, query_id),
                negative_id=other_id,
                pair_ids=pairs,
                weight=self.names.weight,
            )
        frequency: list[Tensor | None] = [None, None]
        if self.stage.logq_correction != "none":
            texts = [self.names.key[:, 0].tolist(), self.names_of_others(views)]
            share = 1 / sum(self.count.values())
            frequency = [torch.tensor([share * self.count[text] for text in each]).log() for each in texts]
        return plain_bidirectional(
            query,
            positive,
            temperature,
            others,
            query_id=query_id,
            key_id=key_id,
            negative_id=other_id,
            key_log_frequency=frequency[0],
            negative_log_frequency=frequency[1],
            refines_logq=self.stage.logq_correction == "refined",
            weight=self.names.weight,
        )

    def of_data(
        self,
        query: Tensor,
        key: Tensor,
        temperature: Tensor,
        ids: tuple[Tensor, Tensor],
        views: Views,
    ) -> Tensor:
        """Return the global loss; keep the batch's partition functions, one or two of each sample."""
        settings: dict[str, Any] = {
            "momentum": self.config.negatives.bank_momentum,
            "num_samples": self.num_samples,
            "weight": self.names.weight,
        }
        none = [0.0, 0.0] if self.config.has_two_towers else [0.0]
        stored = torch.tensor([self.partitions.get(each, none) for each in views.sample_id.tolist()]).double()
        if self.config.has_two_towers:
            loss, self.of_batch = plain_gcl_of_pairs(
                query, key, temperature, stored=stored, ids=ids, **settings
            )
            return loss
        loss, of_batch = plain_gcl(
            query, key, temperature, stored=stored[:, 0], ids=(ids[0], ids[0]), **settings
        )
        self.of_batch = of_batch[:, None]
        return loss

    def number(self, views: Views) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids of queries, keys, and negatives from outside the batch: explicit and queued."""
        known = self.names
        rows = known.key.tolist() + ([] if known.negative is None else known.negative.tolist())
        numbers = plain_ids(rows, shared=known.shared_id_space)
        names = [row if known.shared_id_space else row[:1] for row in rows]
        queued = [
            next((n for n, own in zip(numbers, names, strict=True) if name in own), -1)
            for name in self.queue_names
        ]
        query = plain_ids(known.query.tolist(), shared=known.shared_id_space)
        key, other = numbers[: len(query)], numbers[len(query) :] + queued
        return torch.tensor(query), torch.tensor(key), torch.tensor(other, dtype=torch.int64)

    def names_of_others(self, views: Views) -> list[int]:
        """Return the names of the negatives from outside the batch."""
        negative = self.names.negative
        return ([] if negative is None else negative[:, 0].tolist()) + self.queue_names

    def store(self, embeddings: Tensor, views: Views) -> None:
        """Keep the newest keys of the queue, or update the slots of the batch."""
        negatives = self.config.negatives
        if negatives.store == "queue":
            # torch's cast would round twice: to float32, then to float16.
            rows = torch.from_numpy(embeddings.numpy().astype(self.config.bank.dtype))
            self.queue = torch.cat([self.queue, rows])[-negatives.capacity :]
            self.queue_names = (self.queue_names + self.names.key[:, 0].tolist())[-negatives.capacity :]
        if negatives.store == "partition":
            kept = negatives.bank_momentum
            for sample, of_batch in zip(views.sample_id.tolist(), self.of_batch.tolist(), strict=True):
                held = self.partitions.get(sample, of_batch)
                self.partitions[sample] = [
                    kept * old + (1 - kept) * new for old, new in zip(held, of_batch, strict=True)
                ]
        if self.slots is not None:
            ids, kept = views.sample_id, negatives.bank_momentum
            self.slots[ids] = F.normalize(kept * self.slots[ids] + (1 - kept) * embeddings, dim=1)
