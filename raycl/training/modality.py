"""The kinds of samples, and the formats, views and towers of each kind."""

from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import nn

from raycl.augment.images import ImageAugmentation
from raycl.config import RunConfig
from raycl.data.codecs import Formats
from raycl.data.columns import ColumnNames
from raycl.data.images import ImageFormat
from raycl.models.image import build_image_encoder, representation_dim
from raycl.models.registry import OWN
from raycl.models.specs import EncoderSpec, ImageEncoderSpec
from raycl.training.views import ImageTransform, Transform


class TowerBuilder(Protocol):
    """The input format and the encoder of one tower."""

    def encoder(self) -> nn.Module:
        """Return the untrained encoder; equal seeds give equal weights."""
        ...

    def representation_dim(self, encoder: nn.Module) -> int:
        """Return the width of an encoder's output; raises ``ConfigError`` if it rejects such samples."""
        ...

    def spec(self, encoder: nn.Module, *, own: bool) -> EncoderSpec:
        """Return the spec that loads the encoder; ``own`` if it cannot be built by name."""
        ...


class Modality(Protocol):
    """One kind of samples: formats, views and towers."""

    @property
    def sides(self) -> tuple[TowerBuilder, ...]:
        """The builder of the only tower, or of the query and key towers."""
        ...

    def formats(self, columns: ColumnNames) -> Formats:
        """Return the formats of these columns, by role."""
        ...

    def drawing(self) -> Transform:
        """Return the transform from rows to views; raises ``ConfigError`` for invalid settings."""
        ...


@final
@dataclass(frozen=True)
class ImageTowerBuilder:
    """Images: torchvision's networks."""

    config: RunConfig

    def encoder(self) -> nn.Module:
        """Return a torchvision network, or the user's own by name."""
        torch.manual_seed(self.config.seed)
        settings, data = self.config.encoder, self.config.data
        return build_image_encoder(
            settings.name,
            image_size=data.image_size,
            channels=data.channels,
            stem=settings.stem,
            width=settings.width,
            arguments=settings.kwargs,
        )

    def representation_dim(self, encoder: nn.Module) -> int:
        """Return the width of the encoder's output for one image."""
        data = self.config.data
        return representation_dim(encoder, image_size=data.image_size, channels=data.channels)

    def spec(self, encoder: nn.Module, *, own: bool) -> ImageEncoderSpec:
        """Return the encoder's name and image preparation."""
        config = self.config
        mean, std = config.normalization
        data = config.data
        return ImageEncoderSpec(
            name=OWN if own else config.encoder.name,
            stem=config.encoder.stem,
            width=config.encoder.width,
            arguments=config.encoder.kwargs,
            image_size=data.image_size,
            channels=data.channels,
            stored_size=data.resolved_decode_size,
            max_pixels=data.max_pixels,
            mean=mean,
            std=std,
            representation_dim=self.representation_dim(encoder),
            norm=config.batchnorm if config.batchnorm in ("layer", "group") else "batch",
        )

    def image_format(self) -> ImageFormat:
        """Return the format of decoded images."""
        data = self.config.data
        return ImageFormat(size=data.resolved_decode_size, channels=data.channels, max_pixels=data.max_pixels)

    def drawing(self) -> ImageTransform:
        """Return random crops and colors, or whole images."""
        config = self.config
        mean, std = config.normalization
        augmentation = ImageAugmentation(
            size=config.data.image_size,
            channels=config.data.channels,
            mean=mean,
            std=std,
            **config.augment.model_dump(exclude={"mean", "std"}),
        )
        return ImageTransform(augmentation=augmentation, seed=config.seed)


@final
@dataclass(frozen=True)
class ImageModality:
    """Images: squares of pixels, random crops and colors."""

    side: ImageTowerBuilder

    @property
    def sides(self) -> tuple[TowerBuilder, ...]:
        """The builder of the only tower."""
        return (self.side,)

    def formats(self, columns: ColumnNames) -> Formats:
        """Return the format of the role ``image``."""
        return {"image": self.side.image_format()}

    def drawing(self) -> Transform:
        """Return random crops and colors, or whole images."""
        return self.side.drawing()
