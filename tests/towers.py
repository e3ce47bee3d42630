"""Towers with non-initial weights, saved as in a run."""

import shutil
from pathlib import Path

import torch

from raycl.config import RunConfig
from raycl.models.build import build_towers, save_towers
from raycl.models.towers import Towers
from raycl.storage import Place
from tests.pairs import vocabulary


def trained(config: RunConfig, *, seed: int = 0) -> Towers:
    """Return towers with non-initial weights and running statistics, in evaluation mode."""
    towers = build_towers(config, vocabulary())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in [*towers.parameters(), *towers.buffers()]:
            if value.is_floating_point():
                value += 0.3 * torch.rand(value.shape, generator=generator)
    return towers.eval()


def save(config: RunConfig, output: Path) -> Towers:
    """Save towers as in a run, and return them."""
    towers = trained(config)
    save_towers(towers, config, vocabulary().tokenizer, Place(str(output)))
    return towers


def without_encoder(run: Path, copy: Path) -> Path:
    """Copy a finished run to its state before the encoder was saved."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("encoder.*", "projection_head.*"))
    return copy
