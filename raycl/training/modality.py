"""What the samples of a run are, and what is built for such samples."""

from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import nn

from raycl.augment.images import ImageAugmentation
from raycl.config import RunConfig
from raycl.data.formats import Formats
from raycl.data.images import ImageFormat
from raycl.models.images import build_image_encoder, representation_dim
from raycl.models.saved import OWN, EncoderSpec
from raycl.training.views import Drawing, ImageDrawing


class Modality(Protocol):
    """One kind of samples: how they are read and drawn, and which encoder takes them."""

    def formats(self) -> Formats:
        """Return what the rows hold, by role."""
        ...

    def drawing(self, device: torch.device) -> Drawing:
        """Return what turns rows into views; raises ``ConfigError`` for impossible ones."""
        ...

    def encoder(self) -> nn.Module:
        """Return the encoder, untrained, the same for the same seed."""
        ...

    def representation_dim(self, encoder: nn.Module) -> int:
        """Return the width of an encoder's output; raises ``ConfigError`` if it does not take such samples."""
        ...

    def spec(self, encoder: nn.Module, *, own: bool) -> EncoderSpec:
        """Return what must be known to load the encoder again; ``own`` if it cannot be built by name."""
        ...


@final
@dataclass(frozen=True)
class ImageModality:
    """Images: squares of pixels, random crops and colors, torchvision's networks."""

    config: RunConfig

    def image_format(self) -> ImageFormat:
        """Return how images are decoded and stored."""
        data = self.config.data
        return ImageFormat(size=data.decoded_size, channels=data.channels, max_pixels=data.max_pixels)

    def formats(self) -> Formats:
        """Return that of the role ``image``."""
        return {"image": self.image_format()}

    def augmentation(self) -> ImageAugmentation:
        """Return the random view."""
        config = self.config
        mean, std = config.normalization
        return ImageAugmentation(
            size=config.data.image_size,
            channels=config.data.channels,
            mean=mean,
            std=std,
            **config.augment.model_dump(exclude={"mean", "std"}),
        )

    def drawing(self, device: torch.device) -> Drawing:
        """Return random crops and colors, or whole images."""
        return ImageDrawing(augmentation=self.augmentation(), seed=self.config.seed, device=device)

    def encoder(self) -> nn.Module:
        """Return a network of torchvision's, or the user's own by its name."""
        torch.manual_seed(self.config.seed)
        settings, data = self.config.encoder, self.config.data
        return build_image_encoder(
            settings.name,
            image_size=data.image_size,
            channels=data.channels,
            stem=settings.stem,
            width=settings.width,
            arguments=settings.arguments,
        )

    def representation_dim(self, encoder: nn.Module) -> int:
        """Return the width of its output for one image."""
        data = self.config.data
        return representation_dim(encoder, image_size=data.image_size, channels=data.channels)

    def spec(self, encoder: nn.Module, *, own: bool) -> EncoderSpec:
        """Return its name and how its images are prepared."""
        config = self.config
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
            representation_dim=self.representation_dim(encoder),
            norm=config.batchnorm if config.batchnorm in ("layer", "group") else "batch",
        )
