"""What learns: the tower, the encoder that follows it, and all that a step changes but the store."""

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raycl.batchnorm import encode_shuffled, leakage
from raycl.distributed import all_sum, num_workers
from raycl.losses import NormalizingConstant
from raycl.models.momentum import MomentumEncoder
from raycl.models.towers import Tower
from raycl.training.parallel import average_buffers, average_gradients
from raycl.training.views import Views


@final
class Learner:
    """Embed views on this worker's side of the run; its state is what a checkpoint keeps."""

    def __init__(
        self,
        tower: Tower,
        optimizer: Optimizer,
        *,
        momentum_encoder: MomentumEncoder | None = None,
        normalizer: NormalizingConstant | None = None,
        shuffled: bool = False,
        group_size: int = 0,
        seed: int = 0,
    ) -> None:
        """``shuffled`` encodes the momentum encoder's keys in random company, drawn by ``seed``.

        ``group_size`` rows share their BatchNorm statistics with some negatives and not with others;
        0 if there are none of that kind.
        """
        self.tower, self.optimizer = tower, optimizer
        self.momentum_encoder, self.normalizer = momentum_encoder, normalizer
        self._shuffled, self._group_size, self._seed = shuffled, group_size, seed
        self._parallel: nn.Module = tower

    def connect(self, device: torch.device) -> None:
        """Average gradients with the other workers from now on; collective."""
        self._parallel = average_gradients(self.tower, device)

    def embed(self, views: Views, *, step: int) -> tuple[Tensor, Tensor | None]:
        """Return queries and keys [local_batch, dim]; no keys where they are slots of a bank."""
        if self.momentum_encoder is not None:
            # Before the queries: DDP's backward pass then follows its own forward pass.
            key = self._encode_keys(self.momentum_encoder, views, step)
            return self._parallel(views.view_a), key
        if views.view_b is None:
            return self._parallel(views.view_a), None
        query, key = self._parallel(views.both()).chunk(2)
        return query, key

    def follow(self, momentum: float) -> None:
        """Let the momentum encoder, if there is one, follow the tower."""
        if self.momentum_encoder is not None:
            self.momentum_encoder.update(self.tower, momentum)

    def average_statistics(self) -> None:
        """Give all workers the mean of their BatchNorms' running statistics; collective.

        Training never reads them. So every worker judges the same encoder, and the one that is
        saved has seen the rows of all.
        """
        average_buffers(self.tower)
        if self.momentum_encoder is not None:
            average_buffers(self.momentum_encoder)

    def leakage(self, views: Views, *, seed: int) -> dict[str, float]:
        """Return what BatchNorm gives away of the keys, if it can; collective."""
        group_size = min(self._group_size, len(views) // 2)
        if views.view_b is None or group_size < 2:
            return {}
        found = leakage(
            self.tower,
            self.tower if self.momentum_encoder is None else self.momentum_encoder,
            views.view_a,
            views.view_b,
            group_size=group_size,
            num_groupings=2,
            seed=seed,
        )
        advantage = torch.tensor(found.advantage, device=views.view_a.device)
        return {"leakage": float(all_sum(advantage)) / num_workers()}

    def is_finite(self) -> bool:
        """Whether all weights are numbers."""
        return all(bool(each.isfinite().all()) for each in self.tower.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return all state by name."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _encode_keys(self, encoder: MomentumEncoder, views: Views, step: int) -> Tensor:
        assert views.view_b is not None, "a momentum encoder's keys are views"
        if not self._shuffled:
            return encoder(views.view_b)
        return encode_shuffled(encoder, views.view_b, seed=self._seed, step=step)

    def _parts(self) -> dict[str, Any]:
        parts = {
            "tower": self.tower,
            "optimizer": self.optimizer,
            "momentum_encoder": self.momentum_encoder,
            "normalizer": self.normalizer,
        }
        return {name: part for name, part in parts.items() if part is not None}
