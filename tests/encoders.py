"""Saved image encoders for tests that need no training."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from raycl.batchnorm import replace_batchnorm
from raycl.models.encoder_io import ImageEncoder, save_encoder
from raycl.models.specs import HeadSpec, ImageEncoderSpec
from raycl.models.towers import build_projection_head
from raycl.storage import Place
from tests.pairs import small_network


def perturbed(module: nn.Module, seed: int = 0) -> nn.Module:
    """Change weights and running statistics from their initial values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        for value in module.buffers():
            if value.is_floating_point():
                value += 0.2 * torch.rand(value.shape, generator=generator)
    return module


def image_encoder() -> ImageEncoder:
    """Return an untrained encoder of gray images of 8 pixels."""
    spec = ImageEncoderSpec(
        name="tests.pairs:small_network",
        image_size=8,
        stored_size=8,
        channels=1,
        mean=(0.5,),
        std=(0.5,),
        representation_dim=32,
    )
    return ImageEncoder(small_network(), spec).eval()


def write_images_run(output: Path | str, name: str, *, head: HeadSpec | None = None, **values: Any) -> str:
    """Write the files of a trained image encoder; return their folder."""
    channels = values.get("channels", 3)
    spec = ImageEncoderSpec(
        **{"image_size": 32, "stored_size": 32, "channels": 3, "representation_dim": 512} | values,
        name=name, mean=(0.5,) * channels, std=(0.25,) * channels, projection_head=head,
    )  # fmt: skip
    torch.manual_seed(0)
    encoder = perturbed(spec.build())
    if spec.norm != "batch":
        encoder = replace_batchnorm(encoder, spec.norm)
    projection = head and perturbed(build_projection_head(spec.representation_dim, **head.model_dump()))
    save_encoder(encoder, spec, Place(str(output)), projection_head=projection)
    return str(output)
