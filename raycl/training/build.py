"""The one switchboard: from names in a configuration to objects."""

import torch
from torch import nn
from torch.optim import Optimizer

from raycl.augment.images import ImageAugmentation
from raycl.batchnorm import synchronize
from raycl.config import RunConfig, Stage
from raycl.data.images import ImageFormat
from raycl.data.sources import ColumnNames
from raycl.models.heads import build_projection_head
from raycl.models.images import build_image_encoder, representation_dim
from raycl.models.saved import OWN, EncoderSpec
from raycl.models.towers import Tower
from raycl.optimizers import build_optimizer
from raycl.schedules import Schedule, constant, cosine, join, linear


def image_format(config: RunConfig) -> ImageFormat:
    """Return how images are decoded and stored."""
    data = config.data
    return ImageFormat(size=data.decoded_size, channels=data.channels, max_pixels=data.max_pixels)


def column_names(config: RunConfig) -> ColumnNames:
    """Return the columns to read."""
    return ColumnNames(**config.data.columns.model_dump())


def augmentation(config: RunConfig) -> ImageAugmentation:
    """Return the random view."""
    settings = config.augment.model_dump(exclude={"mean", "std"})
    mean, std = config.normalization
    return ImageAugmentation(
        size=config.data.image_size, channels=config.data.channels, mean=mean, std=std, **settings
    )


def encoder(config: RunConfig) -> nn.Module:
    """Return the encoder, untrained, the same for the same seed."""
    torch.manual_seed(config.seed)
    settings = config.encoder
    return build_image_encoder(
        settings.name,
        image_size=config.data.image_size,
        channels=config.data.channels,
        stem=settings.stem,
        width=settings.width,
        arguments=settings.arguments,
    )


def tower(config: RunConfig, network: nn.Module) -> Tower:
    """Return encoder and projection head with the BatchNorm cure in place."""
    torch.manual_seed(config.seed + 1)
    dim = representation_dim(network, image_size=config.data.image_size, channels=config.data.channels)
    head = build_projection_head(dim, **config.projection_head.model_dump())
    whole = Tower(network, head)
    if config.batchnorm == "synchronized":
        synchronize(whole)
    return whole


def encoder_spec(config: RunConfig, network: nn.Module, *, own: bool = False) -> EncoderSpec:
    """Return what must be known to load the encoder again; ``own`` if it cannot be built by name."""
    mean, std = config.normalization
    data = config.data
    return EncoderSpec(
        name=OWN if own else config.encoder.name,
        stem=config.encoder.stem,
        width=config.encoder.width,
        arguments=config.encoder.arguments,
        image_size=data.image_size,
        channels=data.channels,
        stored_size=data.decoded_size,
        max_pixels=data.max_pixels,
        mean=mean,
        std=std,
        representation_dim=representation_dim(network, image_size=data.image_size, channels=data.channels),
    )


def optimizer(config: RunConfig, module: nn.Module) -> Optimizer:
    """Return the optimizer; the loop sets its learning rate at every step."""
    return build_optimizer(module=module, **config.optimizer.model_dump())


def num_steps(stage: Stage, steps_per_epoch: int) -> int:
    """Return the length of a stage in steps."""
    return stage.steps if stage.steps is not None else (stage.epochs or 0) * steps_per_epoch


def learning_rate(stage: Stage, steps_per_epoch: int) -> Schedule:
    """Return the learning rate by step: linear warm-up, then half a cosine or a constant."""
    total = num_steps(stage, steps_per_epoch)
    warmup = min(round(stage.warmup_epochs * steps_per_epoch), total // 10)
    peak = stage.peak_learning_rate
    rest = (
        constant(peak)
        if stage.learning_rate_schedule == "constant"
        else cosine(peak, 0.0, num_steps=total - warmup)
    )
    # The first step is already a step: start a part above zero.
    return join([linear(peak / (warmup + 1), peak, num_steps=warmup), rest], boundaries=[warmup])
