"""What must be known to build an encoder again, and to prepare what it takes."""

from typing import Any, Literal, Protocol, final

from pydantic import BaseModel, ConfigDict
from torch import nn

from raycl.data.images import ImageFormat
from raycl.models.images import Stem, build_image_encoder
from raycl.models.text import build_text_encoder


class HeadSpec(BaseModel):
    """The projection head that is a part of a tower of pairs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int
    hidden_dim: int | None = None
    dim: int
    batchnorm: bool = True


class EncoderSpec(Protocol):
    """What is common to encoders of all kinds."""

    @property
    def name(self) -> str:
        """Its name, or that it is a network of the user's own."""
        ...

    @property
    def representation_dim(self) -> int:
        """The width of its output."""
        ...

    @property
    def norm(self) -> Literal["batch", "layer", "group"]:
        """What normalizes where its name says BatchNorm."""
        ...

    @property
    def projection_head(self) -> HeadSpec | None:
        """The head behind it, where that belongs to the result."""
        ...

    def build(self) -> nn.Module:
        """Build the encoder, untrained."""
        ...

    def model_copy(self, *, update: dict[str, Any]) -> "EncoderSpec":
        """Return a copy with other values."""
        ...

    def model_dump_json(self, *, indent: int) -> str:
        """Return it as text."""
        ...


@final
class ImageEncoderSpec(BaseModel):
    """What an encoder of images is and how its images are prepared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["image"] = "image"
    name: str
    image_size: int
    channels: int
    stored_size: int
    max_pixels: int = 64_000_000
    stem: Stem = "auto"
    width: float = 1.0
    arguments: dict[str, Any] = {}
    mean: tuple[float, ...]
    std: tuple[float, ...]
    representation_dim: int
    norm: Literal["batch", "layer", "group"] = "batch"
    projection_head: HeadSpec | None = None

    def build(self) -> nn.Module:
        """Build the encoder, untrained."""
        return build_image_encoder(
            self.name,
            image_size=self.image_size,
            channels=self.channels,
            stem=self.stem,
            width=self.width,
            arguments=self.arguments,
        )

    def image_format(self) -> ImageFormat:
        """Return how its images are decoded."""
        return ImageFormat(size=self.stored_size, channels=self.channels, max_pixels=self.max_pixels)


@final
class TextEncoderSpec(BaseModel):
    """What an encoder of texts is, and the fingerprint of its ``tokenizer``.

    Texts are cut at ``cut_at`` tokens where it was trained on shorter ones than the network takes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["text"] = "text"
    name: str
    arguments: dict[str, Any] = {}
    num_tokens: int
    max_length: int
    cut_at: int | None = None
    tokenizer: str
    representation_dim: int
    norm: Literal["batch", "layer", "group"] = "batch"
    projection_head: HeadSpec | None = None

    def build(self) -> nn.Module:
        """Build the encoder, untrained."""
        return build_text_encoder(
            self.name, num_tokens=self.num_tokens, max_length=self.max_length, arguments=self.arguments
        )
