"""A saved encoder: ``encoder.safetensors`` for the weights, ``encoder.json`` for all else."""

import json
from collections.abc import Sequence
from typing import Any, Literal, final

import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from raycl.augment.images import center_view
from raycl.batchnorm import swap
from raycl.errors import StorageError
from raycl.models.images import Stem, build_image_encoder
from raycl.storage import Place

WEIGHTS = "encoder.safetensors"
SPEC = "encoder.json"
OWN = "a network of the user's own"


@final
class EncoderSpec(BaseModel):
    """What an encoder is and how its images are prepared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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


@final
class ImageEncoder(nn.Module):
    """An encoder with its preparation: give it decoded images, get representations."""

    def __init__(self, network: nn.Module, spec: EncoderSpec) -> None:
        super().__init__()
        self.network = network
        self.spec = spec

    def forward(self, images: Tensor) -> Tensor:
        """Encode prepared images [batch, channels, size, size] to [batch, representation_dim]."""
        return self.network(images)

    def prepare(self, images: Tensor | NDArray[Any] | Sequence[Any]) -> Tensor:
        """Resize and normalize uint8 images [batch, height, width, channels]."""
        device = next(self.network.parameters()).device
        pixels = torch.as_tensor(images).to(device)
        return center_view(pixels, size=self.spec.image_size, mean=self.spec.mean, std=self.spec.std)

    @torch.inference_mode()
    def encode(self, images: Tensor | NDArray[Any] | Sequence[Any]) -> Tensor:
        """Encode uint8 images [batch, height, width, channels] to float32 representations."""
        return self.network(self.prepare(images)).float()


def save_encoder(encoder: nn.Module, spec: EncoderSpec, output: Place) -> None:
    """Write both files below ``output``; raises ``StorageError``."""
    weights = {name: value.detach().cpu().contiguous() for name, value in encoder.state_dict().items()}
    (output / WEIGHTS).write_bytes(safetensors.torch.save(weights))
    (output / SPEC).write_text(spec.model_dump_json(indent=2) + "\n")


def load_encoder(uri: str, *, network: nn.Module | None = None) -> ImageEncoder:
    """Load the encoder of the run at ``uri``, in evaluation mode.

    ``network`` is needed only for an encoder that was passed to ``raycl.train`` as a module and
    so cannot be built from its name. Raises ``StorageError`` if there is none or it is damaged.
    """
    output = Place(str(uri))
    if not (output / SPEC).exists():
        raise StorageError(f"there is no encoder at {uri} (no {SPEC}); give the --output of a finished run")
    try:
        spec = EncoderSpec.model_validate(json.loads((output / SPEC).read_text()))
        weights = safetensors.torch.load((output / WEIGHTS).read_bytes())
    except (ValidationError, json.JSONDecodeError, safetensors.SafetensorError) as error:
        raise StorageError(
            f"the encoder at {uri} is damaged: {' '.join(str(error).split())[:200]}; save it again"
        ) from error
    if network is None:
        if spec.name == OWN:
            raise StorageError(f"the run at {uri} trained a network of your own; pass it as network=")
        network = spec.build()
    if spec.norm != "batch":
        network = swap(network, spec.norm)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise StorageError(
            f"the weights at {uri} do not fit the network: {' '.join(str(error).split())[:200]}; pass the same one"
        ) from error
    return ImageEncoder(network, spec).eval()
