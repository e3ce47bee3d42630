"""Saved encoders: ``encoder.safetensors`` holds the weights, ``encoder.json`` the spec.

An encoder of texts adds its ``tokenizer.json``. If the embeddings are the result, as with two towers,
``projection_head.safetensors`` holds the head. The folder ``key`` holds a second tower.
"""

import copy
import io
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from raycl.arguments import check_type
from raycl.augment.checks import check_images
from raycl.augment.images import as_tensor, center_view
from raycl.batchnorm import replace_batchnorm
from raycl.data.images import ImageFormat, InvalidImageError
from raycl.distributed.device_copy import device_of
from raycl.errors import ConfigError, DataError, StorageError, one_line
from raycl.models.custom import output_dim
from raycl.models.image import image_example, last_layer
from raycl.models.registry import (
    HEAD_WEIGHTS,
    KEY,
    OWN,
    SPEC,
    TOKENIZER,
    WEIGHTS,
    SideName,
    check_side,
    check_trusted,
)
from raycl.models.specs import EncoderSpec, ImageEncoderSpec, TextEncoderSpec
from raycl.models.text import text_example
from raycl.models.towers import build_projection_head
from raycl.models.whitening import Whitening
from raycl.storage import Place
from raycl.tokenization import InvalidTextError, Tokenizer, padded_rows, read_text

Spec = TypeVar("Spec", bound=EncoderSpec)


@final
class ImageEncoder(nn.Module):
    """An encoder and its preprocessing: decoded images to representations."""

    def __init__(self, network: nn.Module, spec: ImageEncoderSpec) -> None:
        super().__init__()
        self.network = network
        self.spec = spec

    def forward(self, images: Tensor) -> Tensor:
        """Encode prepared images [batch, channels, size, size] to [batch, representation_dim]."""
        return self.network(images)

    def prepare(self, images: Tensor | NDArray[Any] | Sequence[Any]) -> Tensor:
        """Resize and normalize uint8 images [batch, height, width, channels], or a list as in ``encode``."""
        pixels = images if isinstance(images, Tensor | np.ndarray) else self._decode(images, 0)
        check_images(pixels, channels=self.spec.channels)
        rows = as_tensor(pixels).to(device_of(self))
        return center_view(rows, size=self.spec.image_size, mean=self.spec.mean, std=self.spec.std)

    @torch.no_grad()
    def encode(self, images: Tensor | NDArray[Any] | Sequence[Any], *, batch_size: int = 256) -> Tensor:
        """Encode images to float32 representations [num_images, representation_dim].

        ``images`` are uint8 [num_images, height, width, channels], or a list that may mix paths (local or
        ``s3://``), encoded bytes, Pillow images, and uint8 arrays [height, width, channels] or
        [height, width]. A list is decoded as ``raycl embed`` does: resized to the run's ``stored_size`` and then to its
        ``image_size``. One array or tensor is resized only once, so the same images may give slightly other
        representations. ``batch_size`` images are encoded at a time.
        Raises ``DataError`` for an image that cannot be used, and ``ConfigError`` for an array of a wrong type or shape, or
        a ``batch_size`` below 1.
        """
        images = _listed(images, "images", (str, bytes, os.PathLike, Image.Image))
        _check_batch_size(batch_size)
        dtype = next((each.dtype for each in self.parameters()), torch.float32)
        parts: list[Tensor] = []
        for start in range(0, len(images), batch_size):
            some = images[start : start + batch_size]
            decoded = some if isinstance(some, Tensor | np.ndarray) else self._decode(some, start)
            parts.append(self.network(self.prepare(decoded).to(dtype)).float())
        return torch.cat([torch.empty(0, self.spec.representation_dim, device=device_of(self)), *parts])

    def _decode(self, images: Sequence[Any], first: int) -> NDArray[np.uint8]:
        """Decode images of any supported type; ``first`` is the position of the first one in the list."""
        image_format = self.spec.image_format()
        if len(images) == 0:  # a pandas Series has no truth value
            size = image_format.size
            return np.empty((0, size, size, image_format.channels), np.uint8)
        return np.stack([_decode(image, image_format, first + place) for place, image in enumerate(images)])


@final
class TextEncoder(nn.Module):
    """An encoder and its tokenizer: texts to representations."""

    def __init__(self, network: nn.Module, spec: TextEncoderSpec, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.network = network
        self.spec = spec
        self.tokenizer = tokenizer

    def forward(self, tokens: Tensor) -> Tensor:
        """Encode tokens [batch, length], padded with 0, to [batch, representation_dim]."""
        return self.network(tokens)

    def prepare(self, texts: Sequence[str], *, first: int = 0) -> Tensor:
        """Tokenize texts after the prompt to int64 [batch, length]; raises ``DataError`` for an invalid text.

        ``first`` is the position of the first text in a list, for the error.
        """
        prompted = list[str]()
        for place, text in enumerate(texts, first):
            try:
                prompted.append(self.spec.prompt + read_text(text))
            except InvalidTextError as error:
                raise DataError(f"text {place} cannot be used: {error}; remove it") from None
        rows = self.tokenizer.encode(prompted, self.spec.max_tokens)
        return torch.from_numpy(padded_rows(rows)).to(device_of(self))

    @torch.no_grad()
    def encode(self, texts: Sequence[str], *, batch_size: int = 256) -> Tensor:
        """Encode texts after the prompt of the side to float32 [num_texts, representation_dim].

        Raises ``DataError`` for a text that cannot be used, and ``ConfigError`` for a ``batch_size`` below 1.
        """
        texts = _listed(texts, "texts", (str, bytes))
        _check_batch_size(batch_size)
        parts = [
            self.network(self.prepare(texts[start : start + batch_size], first=start)).float()
            for start in range(0, len(texts), batch_size)
        ]
        return torch.cat([torch.empty(0, self.spec.representation_dim, device=device_of(self)), *parts])


@final
@dataclass(frozen=True, kw_only=True)
class SavedEncoder:
    """The content of an encoder's files.

    ``uri`` is the address of the run, ``named_in`` the address of the file that names the network.
    """

    uri: str
    named_in: str
    spec: ImageEncoderSpec | TextEncoderSpec
    weights: dict[str, Tensor]
    head_weights: dict[str, Tensor]
    tokenizer: Tokenizer | None

    @property
    def takes_images(self) -> bool:
        """Whether the encoder takes images; otherwise it takes texts."""
        return isinstance(self.spec, ImageEncoderSpec)

    def check(self, network: nn.Module | None = None, *, trusted: Collection[str] | None = None) -> None:
        """Raise the errors of ``build`` that need no weights: a missing network, or one that may not be used."""
        spec = self.spec
        if network is None:
            if spec.name == OWN:
                raise StorageError(
                    f"the run at {self.uri} trained a network of your own; pass it as network= in Python"
                )
            check_trusted(spec.name, self.named_in, trusted, is_text=isinstance(spec, TextEncoderSpec))
        elif isinstance(spec, ImageEncoderSpec) and spec.whitened:
            raise ConfigError(
                f"the encoder at {self.uri} ends with a layer that whitens, which network= lacks; leave network out"
            )

    def build(
        self, network: nn.Module | None = None, *, trusted: Collection[str] | None = None
    ) -> ImageEncoder | TextEncoder:
        """Build the encoder in evaluation mode; arguments and errors as in ``raycl.load_encoder``."""
        self.check(network, trusted=trusted)
        spec, remedy = self.spec, "pass the same one"
        if network is None:
            remedy = "if the run trained a network of your own, pass it as network= in Python"
            network = spec.build()
            _complete_lazy_layers(network, spec)
        else:
            _complete_lazy_layers(network, spec)
            network = copy.deepcopy(network)  # the weights of another run must not change it
        if spec.norm != "batch":
            network = replace_batchnorm(network, spec.norm)
        _load_weights(network, self.weights, self.uri, remedy)
        if spec.projection_head is not None:
            head = build_projection_head(spec.representation_dim, **spec.projection_head.model_dump())
            head = replace_batchnorm(head, spec.norm) if spec.norm != "batch" else head
            _load_weights(head, self.head_weights, self.uri, remedy)
            network = _Projected(network, head)
            spec = spec.model_copy(update={"representation_dim": spec.projection_head.dim})
        if isinstance(spec, TextEncoderSpec):
            assert self.tokenizer is not None, "an encoder of texts has a tokenizer"
            return TextEncoder(network, spec, self.tokenizer).eval()
        return ImageEncoder(network, spec).eval()


@final
class _Projected(nn.Sequential):
    """An encoder and its projection head, in any precision: the mean over tokens is in float32 at least."""

    def forward(self, input: Tensor) -> Tensor:
        network, head = self
        representation = network(input)
        return head(representation.to(next(head.parameters(), representation).dtype))


def save_encoder(
    encoder: nn.Module,
    spec: EncoderSpec,
    output: Place,
    *,
    projection_head: nn.Module | None = None,
    whitening: Whitening | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write the encoder's files to ``output``; raises ``StorageError``."""
    spec, weights = whitened(spec, encoder.state_dict(), whitening)
    (output / WEIGHTS).write_bytes(_to_bytes(weights))
    if projection_head is not None:
        (output / HEAD_WEIGHTS).write_bytes(_to_bytes(projection_head.state_dict()))
    if tokenizer is not None:
        (output / TOKENIZER).write_text(tokenizer.to_json())
    (output / SPEC).write_text(spec.model_dump_json(indent=2) + "\n")


def whitened(
    spec: Spec, weights: Mapping[str, Tensor], whitening: Whitening | None
) -> tuple[Spec, dict[str, Tensor]]:
    """Return the spec and the weights of an encoder with the layer that whitens its representations, if any."""
    if whitening is None:
        return spec, dict(weights)
    layer = {
        f"{last_layer(spec.name)}.{name}": value for name, value in whitening.layer().state_dict().items()
    }
    return spec.model_copy(update={"whitened": True}), {**weights, **layer}


def read_encoder(uri: str, *, side: SideName = "query") -> SavedEncoder:
    """Read the encoder that a finished run saved at ``uri``.

    Raises ``StorageError`` if it is missing or damaged or has the wrong tokenizer, and ``ConfigError``
    for an unknown side.
    """
    check_side(side)
    output = Place(str(uri))
    if side == "key" and (output / KEY / SPEC).exists():
        output = output / KEY
    if not (output / SPEC).exists():
        raise StorageError(
            f"found no encoder at {uri} (no {SPEC}, no checkpoint); give the --output of a run"
        )
    try:
        spec = _read_spec((output / SPEC).read_text()).for_side(side)
        weights = safetensors.torch.load((output / WEIGHTS).read_bytes())
        has_head = spec.projection_head is not None
        head_weights = safetensors.torch.load((output / HEAD_WEIGHTS).read_bytes()) if has_head else {}
    except (ValidationError, json.JSONDecodeError, RecursionError, safetensors.SafetensorError) as error:
        raise StorageError(f"the encoder at {uri} is damaged: {one_line(error)}; save it again") from error
    return SavedEncoder(
        uri=uri,
        named_in=str(output / SPEC),
        spec=spec,
        weights=weights,
        head_weights=head_weights,
        tokenizer=_read_tokenizer(output, spec) if isinstance(spec, TextEncoderSpec) else None,
    )


def load_state(content: bytes, where: str) -> dict[str, Any]:
    """Load a ``torch.save`` file of tensors and plain values; raises ``StorageError``.

    ``weights_only`` refuses pickles that would call any other function.
    """
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise StorageError(
            f"cannot read {where}: {one_line(error, most=120) or type(error).__name__}; it is damaged, or "
            "holds more than tensors and plain values, which raycl never loads"
        ) from error
    if not isinstance(state, dict):
        raise StorageError(
            f"{where} holds a {type(state).__name__} in place of a state; give one that raycl wrote"
        )
    return state


def example_of(spec: EncoderSpec) -> Tensor:
    """Return the smallest input of an encoder: one image as large as in training, or one token."""
    if isinstance(spec, ImageEncoderSpec):
        return image_example(image_size=spec.image_size, channels=spec.channels)
    return text_example()


def _listed(values: Any, name: str, single: tuple[type, ...]) -> Any:
    """Return sequences, arrays and tensors as they are, the values of a generator as a list."""
    if isinstance(values, (*single, Mapping)) or not isinstance(values, Iterable):
        raise DataError(f"encode takes a list of {name}, came {type(values).__name__}; put it into a list")
    return values if hasattr(values, "__getitem__") else list(values)


def _check_batch_size(batch_size: int) -> None:
    check_type("batch_size", batch_size, int)
    if batch_size < 1:
        raise ConfigError(f"batch_size must be 1 or more, came {batch_size}")


def _decode(image: Any, image_format: ImageFormat, position: int) -> NDArray[np.uint8]:
    path = os.fspath(image) if isinstance(image, str | os.PathLike) else None
    name = f"image {position}" if path is None else f"image {position} ({path})"
    if not isinstance(image, str | os.PathLike | bytes | np.ndarray | Image.Image):
        raise DataError(
            f"{name} is of type {type(image).__name__}; give a path, encoded bytes, an image of Pillow or a "
            "uint8 array"
        )
    try:
        return image_format.decode(image if path is None else Place(str(path)).read_bytes())[0]
    except (InvalidImageError, StorageError) as error:
        raise DataError(f"{name} cannot be used: {error}; fix or remove it") from None


def _read_spec(text: str) -> ImageEncoderSpec | TextEncoderSpec:
    values = json.loads(text)
    is_text = isinstance(values, dict) and values.get("kind") == "text"
    return (TextEncoderSpec if is_text else ImageEncoderSpec).model_validate(values)


def _read_tokenizer(output: Place, spec: TextEncoderSpec) -> Tokenizer:
    try:
        tokenizer = Tokenizer((output / TOKENIZER).read_text())
    except ConfigError as error:
        raise StorageError(f"{output / TOKENIZER} cannot be used: {error}") from error
    if tokenizer.fingerprint != spec.tokenizer:
        raise StorageError(
            f"{output / TOKENIZER} is not the tokenizer of the encoder beside it: its fingerprint is "
            f"{tokenizer.fingerprint}, the encoder's {spec.tokenizer}; restore the tokenizer from training"
        )
    return tokenizer


def _to_bytes(weights: Mapping[str, Tensor]) -> bytes:
    # Copies, since safetensors refuses the weights of a layer that a network has under two names.
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    return safetensors.torch.save(copies)


def _complete_lazy_layers(network: nn.Module, spec: EncoderSpec) -> None:
    """Run a network once if its lazy layers take their sizes, and types, from their input."""
    if any(isinstance(each, LazyModuleMixin) for each in network.modules()):
        output_dim(network, example_of(spec), inputs="the samples of its run")


def _load_weights(network: nn.Module, weights: dict[str, Tensor], uri: str, remedy: str) -> None:
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise StorageError(
            f"the weights at {uri} do not fit the network: {one_line(error)}; {remedy}"
        ) from error
