"""Encoder specs: the content of ``encoder.json``, which builds an encoder again."""

from abc import ABC, abstractmethod
from typing import Any, Literal, Self, final

from pydantic import BaseModel, ConfigDict
from torch import nn

from raycl.data.images import ImageFormat
from raycl.models.image import Stem, build_image_encoder
from raycl.models.registry import SideName
from raycl.models.text import build_text_encoder


@final
class HeadSpec(BaseModel):
    """The projection head of a tower whose embeddings are the result, as for pairs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int
    hidden_dim: int | None = None
    dim: int
    batchnorm: bool | Literal["all"] = True


class EncoderSpec(BaseModel, ABC):
    """The fields that encoders of images and of texts share.

    ``norm`` names the normalization in place of BatchNorm. ``projection_head`` is set where the head is
    a part of the encoder.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arguments: dict[str, Any] = {}
    representation_dim: int
    norm: Literal["batch", "layer", "group"] = "batch"
    projection_head: HeadSpec | None = None

    @abstractmethod
    def build(self, section: str = "encoder") -> nn.Module:
        """Build the encoder, untrained; errors name the ``section`` of its settings."""

    def for_side(self, side: SideName) -> Self:
        """Return the spec of a side; two sides that share an encoder differ in the prompt."""
        return self


@final
class ImageEncoderSpec(EncoderSpec):
    """An image encoder and how its images are prepared; ``whitened`` adds a last linear layer."""

    kind: Literal["image"] = "image"
    image_size: int
    channels: int
    stored_size: int
    max_pixels: int = 64_000_000
    stem: Stem = "auto"
    width: float = 1.0
    whitened: bool = False
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def build(self, section: str = "encoder") -> nn.Module:
        """Build the encoder, untrained; images have one section."""
        return build_image_encoder(
            self.name,
            image_size=self.image_size,
            channels=self.channels,
            stem=self.stem,
            width=self.width,
            arguments=self.arguments,
            whitened_dim=self.representation_dim if self.whitened else None,
        )

    def image_format(self) -> ImageFormat:
        """Return how its images are decoded."""
        return ImageFormat(size=self.stored_size, channels=self.channels, max_pixels=self.max_pixels)


@final
class TextEncoderSpec(EncoderSpec):
    """A text encoder and the fingerprint of its ``tokenizer``.

    ``cut_at`` is the number of tokens that texts are cut at, if training used fewer than ``max_length``.
    ``padding`` is the padding id in the tokenizer's file, None in specs of older runs. ``prompts`` are the
    texts before each text of a side; the encoder applies the prompt of ``side``.
    """

    kind: Literal["text"] = "text"
    num_tokens: int
    max_length: int
    cut_at: int | None = None
    tokenizer: str
    padding: int | None = None
    prompts: dict[SideName, str] = {}
    side: SideName = "query"

    @property
    def max_tokens(self) -> int:
        """The number of tokens that texts are cut at."""
        return self.cut_at or self.max_length

    @property
    def prompt(self) -> str:
        """The text before each text of its side, empty if there is none."""
        return self.prompts.get(self.side, "")

    def for_side(self, side: SideName) -> Self:
        """Return the spec with the prompt of this side."""
        return self.model_copy(update={"side": side})

    def build(self, section: str = "encoder") -> nn.Module:
        """Build the encoder, untrained; errors name the ``section`` of its settings."""
        return build_text_encoder(
            self.name,
            num_tokens=self.num_tokens,
            max_length=self.max_length,
            padding=self.padding,
            arguments=self.arguments,
            section=section,
        )
