"""Decoding: encoded bytes in, a square of uint8 pixels and the original aspect out."""

import io
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

Image.MAX_IMAGE_PIXELS = None  # ImageFormat.max_pixels refuses large pictures, before they are decoded

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"})


class BrokenImageError(ValueError):
    """One image cannot be used; the text is its cause, the same for all images of that kind."""


@final
@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """What decoded images look like: squares of ``size`` pixels with 1 or 3 ``channels``.

    An image is squashed to the square; its aspect (width / height) travels along, so that crops
    are still drawn in the original geometry.
    """

    size: int
    channels: int = 3
    max_pixels: int = 64_000_000

    def decode(self, content: Any) -> tuple[NDArray[np.uint8], float]:
        """Return pixels [size, size, channels] and the aspect; raises ``BrokenImageError``.

        ``content`` is an encoded image, an array, or the error that came in the image's place.
        """
        if isinstance(content, BrokenImageError):
            raise content
        if not isinstance(content, bytes | np.ndarray):
            raise BrokenImageError("no image bytes" if content is not None else "missing value")
        try:
            if isinstance(content, np.ndarray):
                return self._fit(_from_array(content))
            with Image.open(io.BytesIO(content)) as image:
                if image.width * image.height > self.max_pixels:
                    raise BrokenImageError(f"more than {self.max_pixels:,} pixels")
                # A JPEG decodes at 1/2, 1/4 or 1/8 at once where that is still large enough.
                image.draft(None, (self.size, self.size))
                return self._fit(image)
        except UnidentifiedImageError:
            raise BrokenImageError("not an image") from None
        except BrokenImageError:
            raise
        # Each of Pillow's formats reports damage by other errors; one image must not stop a run.
        except Exception as error:
            truncated = "truncated" in str(error) or isinstance(error, EOFError)
            raise BrokenImageError("truncated image" if truncated else "undecodable image") from None

    def _fit(self, image: Image.Image) -> tuple[NDArray[np.uint8], float]:
        aspect = image.width / image.height
        image = _flatten(image, "L" if self.channels == 1 else "RGB")
        if image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, reducing_gap=3.0)
        return np.asarray(image).reshape(self.size, self.size, self.channels), aspect


def image_sides(content: Any) -> tuple[int, int]:
    """Return (width, height) in pixels without decoding; raises ``BrokenImageError``."""
    if isinstance(content, np.ndarray) and content.ndim >= 2:
        return content.shape[1], content.shape[0]
    try:
        with Image.open(io.BytesIO(bytes(content))) as image:
            return image.size
    except (UnidentifiedImageError, OSError, TypeError, ValueError):
        raise BrokenImageError("not an image") from None


def _flatten(image: Image.Image, mode: str) -> Image.Image:
    """Convert to gray or RGB; what is transparent becomes white, 16 bits become 8."""
    if image.mode == mode:
        return image
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in {"RGBA", "LA", "PA", "La", "RGBa"} or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert(mode)


def _from_array(pixels: NDArray[Any]) -> Image.Image:
    if pixels.dtype != np.uint8 or pixels.ndim not in {2, 3}:
        raise BrokenImageError("an array that is not uint8 [height, width, channels]")
    if pixels.ndim == 3 and pixels.shape[2] not in {1, 3, 4}:
        raise BrokenImageError("an array with neither 1, 3 nor 4 channels")
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
