"""The probe of BatchNorm's leak on a finished MoCo run: the pretext task with shared and with other statistics."""

import io

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raycl.batchnorm.leakage_probe import Leakage, leakage
from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml
from raycl.errors import ConfigError
from raycl.inference.checkpoint_encoder import last_checkpoint
from raycl.models.momentum import MomentumEncoder
from raycl.storage import Place
from raycl.training import build
from raycl.training.modality import ImageTowerBuilder
from raycl.training.resume import CONFIG


def load_pair(run: Place) -> tuple[RunConfig, nn.Module, nn.Module]:
    """Return configuration, tower and momentum encoder of the last checkpoint.

    Raises ``ConfigError`` for a run without a momentum encoder.
    """
    config = config_from_yaml((run / CONFIG).read_text(), name=(run / CONFIG).uri)
    if config.key != "momentum_encoder":
        raise ConfigError(f"{run} has no momentum encoder, key is {config.key}; give runs of MoCo")
    content = (run / "checkpoints" / last_checkpoint(run) / "state.pt").read_bytes()
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)["learner"]
    tower = build.towers(config, build.modality(config))
    follower = MomentumEncoder(tower)
    tower.load_state_dict(state["tower"])
    follower.load_state_dict(state["momentum_encoder"])
    return config, tower, follower


def probe_run(
    run: Place, images: Tensor, ids: NDArray, *, group_size: int, num_groupings: int = 16
) -> Leakage:
    """Measure the leak on images uint8 [num, height, width, channels], ``group_size`` rows normalized together."""
    config, tower, follower = load_pair(run)
    draw = ImageTowerBuilder(config).drawing().augmentation
    view_a, view_b = (draw(images, ids, seed=0, epoch=0, view=view) for view in (0, 1))
    return leakage(tower, follower, view_a, view_b, group_size=group_size, num_groupings=num_groupings)
