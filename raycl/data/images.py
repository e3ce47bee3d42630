"""Decode images: encoded bytes to a square of uint8 pixels and the original aspect ratio."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from raycl.errors import BrokenValueError

Image.MAX_IMAGE_PIXELS = None  # ImageFormat.max_pixels refuses large images before they are decoded

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"})

_MIN_PIXELS_FOR_TORCH = 2**16  # smaller images are resized without an import of torch
_MAX_TORCH_SHRINK = 4  # factor per side

_PROGRAMS = frozenset({"EPS"})  # PostScript: Pillow would run it in Ghostscript


class BrokenImageError(BrokenValueError):
    """An image that cannot be used."""


@final
@dataclass(frozen=True)
class Pixels:
    """Decoded images [batch, size, size, channels] as uint8, and their original aspect ratios [batch]."""

    images: NDArray[np.uint8]
    aspect: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.aspect)

    def joined(self, other: Self) -> Self:
        """Return these images followed by the images of ``other``."""
        return type(self)(
            np.concatenate([self.images, other.images]), np.concatenate([self.aspect, other.aspect])
        )


@final
@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """The format of decoded images: squares of ``size`` pixels with 1 or 3 ``channels``.

    Images are resized to the square; their aspect ratio (width / height) is stored, so that crops are
    drawn in the original geometry.
    """

    size: int
    channels: int = 3
    max_pixels: int = 64_000_000

    def decode(self, content: Any) -> tuple[NDArray[np.uint8], float]:
        """Return pixels [size, size, channels] and the aspect ratio; raises ``BrokenImageError``.

        ``content`` is an encoded image, an array, a Pillow image, or the error of a failed read.
        """
        if isinstance(content, BrokenImageError):
            raise content
        if not isinstance(content, bytes | np.ndarray | Image.Image):
            raise BrokenImageError("no image bytes" if content is not None else "missing value")
        try:
            image, aspect = self._open(content)
        except UnidentifiedImageError:
            raise BrokenImageError("not an image") from None
        except BrokenImageError:
            raise
        # Pillow's formats report damage by many kinds of errors; one image must not stop a run.
        except Exception as error:
            truncated = "truncated" in str(error) or isinstance(error, EOFError)
            raise BrokenImageError("truncated image" if truncated else "undecodable image") from None
        return _resized(image, self.size).reshape(self.size, self.size, self.channels), aspect

    def decode_all(self, values: Sequence[Any]) -> list[tuple[NDArray[np.uint8], float] | BrokenImageError]:
        """Return each decoded value, or its error."""
        return [self._decoded_or_error(value) for value in values]

    def store(self, decoded: Sequence[tuple[NDArray[np.uint8], float]]) -> dict[str, pa.Array]:
        """Return the columns ``pixels`` (bytes) and ``aspect``."""
        return {
            "pixels": pa.array([image.tobytes() for image, _ in decoded], pa.binary(self._num_bytes)),
            "aspect": pa.array([aspect for _, aspect in decoded], pa.float32()),
        }

    def read(self, parts: Sequence[pa.RecordBatch], prefix: str) -> "StoredImages":
        """Return the images of these columns, without a copy of their pixels."""
        shape = (self.size, self.size, self.channels)
        return StoredImages(
            pixels=[_pixels(part.column(f"{prefix}pixels"), self._num_bytes, shape) for part in parts],
            aspect=[part.column(f"{prefix}aspect").to_numpy() for part in parts],
            shape=shape,
        )

    @property
    def _num_bytes(self) -> int:
        return self.size**2 * self.channels

    def _decoded_or_error(self, value: Any) -> tuple[NDArray[np.uint8], float] | BrokenImageError:
        try:
            return self.decode(value)
        except BrokenImageError as error:
            return error

    def _open(self, content: bytes | NDArray[Any] | Image.Image) -> tuple[Image.Image, float]:
        """Return the decoded image with the right number of channels, and its aspect ratio."""
        if isinstance(content, np.ndarray):
            return self._with_aspect(_from_array(content))
        if isinstance(content, Image.Image):
            return self._with_aspect(content)
        with Image.open(io.BytesIO(content)) as image:
            if image.format in _PROGRAMS:
                raise BrokenImageError("a PostScript program instead of an image")
            if image.width * image.height > self.max_pixels:
                raise BrokenImageError(f"more than {self.max_pixels:,} pixels")
            # JPEG decodes directly at 1/2, 1/4 or 1/8 where that is still large enough.
            image.draft(None, (self.size, self.size))
            image.load()
            return self._with_aspect(image)

    def _with_aspect(self, image: Image.Image) -> tuple[Image.Image, float]:
        return _converted(image, "L" if self.channels == 1 else "RGB"), image.width / image.height


@final
@dataclass(frozen=True, kw_only=True)
class StoredImages:
    """Images in the object store, as views of its memory; parts are Arrow's record batches."""

    pixels: Sequence[NDArray[np.uint8]]
    aspect: Sequence[NDArray[np.float32]]
    shape: tuple[int, int, int]

    def take(self, part: NDArray[np.int64], row: NDArray[np.int64]) -> Pixels:
        """Copy the images at these rows of these parts."""
        images = np.empty((len(part), *self.shape), np.uint8)
        aspect = np.empty(len(part), np.float32)
        for index, (each, at) in enumerate(zip(part, row, strict=True)):
            images[index], aspect[index] = self.pixels[each][at], self.aspect[each][at]
        return Pixels(images, aspect)

    def num_tokens(self, part: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return 0 for each row: images have no tokens."""
        return np.zeros(len(part), np.int64)


def is_flat(pixels: NDArray[np.uint8]) -> bool:
    """Whether all pixels [height, width, channels] have the same value."""
    first = pixels[0]
    # Nearly every image varies in its first row, and then only that row is compared.
    return bool((first == first[0]).all() and (pixels == first).all())


def _pixels(column: pa.Array, num_bytes: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    data = np.frombuffer(
        column.buffers()[1], np.uint8, count=len(column) * num_bytes, offset=column.offset * num_bytes
    )
    return data.reshape(len(column), *shape)


def image_sides(content: Any) -> tuple[int, int]:
    """Return (width, height) in pixels without decoding; raises ``BrokenImageError``."""
    if isinstance(content, np.ndarray) and content.ndim >= 2:
        return content.shape[1], content.shape[0]
    try:
        with Image.open(io.BytesIO(bytes(content))) as image:
            return image.size
    except (UnidentifiedImageError, OSError, TypeError, ValueError):
        raise BrokenImageError("not an image") from None


def _resized(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """Return the pixels of an image resized to a square of ``size``: bilinear, antialiased when shrinking."""
    if image.size == (size, size):
        return np.asarray(image)
    is_large = image.width * image.height >= _MIN_PIXELS_FOR_TORCH
    # For large factors Pillow first averages over whole pixels, which torch does not.
    if image.mode != "RGB" or not is_large or max(image.size) > _MAX_TORCH_SHRINK * size:
        return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0))
    # torch's kernel rounds like Pillow's in a third of the time; the import takes one second, once.
    import torch

    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    planes = pixels.view(1, image.height, image.width, -1).permute(0, 3, 1, 2)
    planes = torch.nn.functional.interpolate(planes, size=(size, size), mode="bilinear", antialias=True)
    return planes[0].permute(1, 2, 0).numpy()


def _converted(image: Image.Image, mode: str) -> Image.Image:
    """Convert to gray or RGB; transparent pixels become white, 16 bits become 8."""
    if image.mode == mode:
        return image
    if image.mode == "F":
        _check_finite(np.asarray(image))
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in {"RGBA", "LA", "PA", "La", "RGBa"} or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert(mode)


def _check_finite(pixels: NDArray[Any]) -> None:
    if not np.isfinite(pixels).all():
        raise BrokenImageError("not finite")


def _from_array(pixels: NDArray[Any]) -> Image.Image:
    if pixels.dtype.kind == "f":
        _check_finite(pixels)
    if pixels.dtype != np.uint8 or pixels.ndim not in {2, 3}:
        raise BrokenImageError("an array other than uint8 [height, width, channels]")
    if pixels.ndim == 3 and pixels.shape[2] not in {1, 3, 4}:
        raise BrokenImageError("an array without 1, 3 or 4 channels")
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
