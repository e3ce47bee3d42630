"""Decode images: encoded bytes, or the files that hold them, to a square of uint8 pixels and the aspect ratio."""

import io
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from raycl.data.codecs import bytes_of_text, to_numpy
from raycl.errors import InvalidValueError, StorageError
from raycl.storage import Place

Image.MAX_IMAGE_PIXELS = None  # ImageFormat.max_pixels refuses large images before they are decoded

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff"})

_MIN_PIXELS_FOR_TORCH = 2**16  # smaller images are resized without an import of torch
_MAX_TORCH_SHRINK = 4  # factor per side

_PROGRAMS = frozenset({"EPS"})  # PostScript: Pillow would run it in Ghostscript


# A path in a dataset must not choose an endpoint ("?") or bring a key ("@").
_ABSOLUTE = re.compile(r"(s3://[A-Za-z0-9._-]+|)/(.+)", re.DOTALL)
# No path of so many characters without a dot is likely.
_BASE64 = re.compile(r"(data:image/[^,]*,)?[A-Za-z0-9+/=_\s-]{200,}")
_BYTES = (pa.null(), pa.binary(), pa.large_binary())
_PATHS = (pa.null(), pa.string(), pa.large_string())


class InvalidImageError(InvalidValueError):
    """An image that cannot be used."""


@final
@dataclass(frozen=True)
class Pixels:
    """Decoded images [batch, size, size, channels] as uint8, and their original aspect ratios [batch]."""

    images: NDArray[np.uint8]
    aspect: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.aspect)


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

    @property
    def num_bytes(self) -> int:
        """The size of a decoded image."""
        return self.size**2 * self.channels

    def decode(self, content: Any) -> tuple[NDArray[np.uint8], float]:
        """Return pixels [size, size, channels] and the aspect ratio; raises ``InvalidImageError``.

        ``content`` is an encoded image, an array, a Pillow image, or the error of a failed read.
        """
        if isinstance(content, InvalidImageError):
            raise content
        if not isinstance(content, bytes | np.ndarray | Image.Image):
            raise InvalidImageError("no image bytes" if content is not None else "missing value")
        try:
            image, aspect = self._open(content)
        except UnidentifiedImageError:
            raise InvalidImageError("not an image") from None
        except InvalidImageError:
            raise
        # Pillow's formats report damage by many kinds of errors; one image must not stop a run.
        except Exception as error:
            truncated = "truncated" in str(error) or isinstance(error, EOFError)
            raise InvalidImageError("truncated image" if truncated else "undecodable image") from None
        return _resized(image, self.size).reshape(self.size, self.size, self.channels), aspect

    def decode_all(self, values: Sequence[Any]) -> list[tuple[NDArray[np.uint8], float] | InvalidImageError]:
        """Return each decoded value, or its error."""
        return [self._decoded_or_error(value) for value in values]

    def store(self, decoded: Sequence[tuple[NDArray[np.uint8], float]]) -> dict[str, pa.Array]:
        """Return the columns ``pixels`` (bytes) and ``aspect``."""
        return {
            "pixels": pa.array([image.tobytes() for image, _ in decoded], pa.binary(self.num_bytes)),
            "aspect": pa.array([aspect for _, aspect in decoded], pa.float32()),
        }

    def read(self, columns: Mapping[str, Any]) -> Pixels:
        """Return the images of these columns."""
        pixels = columns["pixels"]
        flat = np.frombuffer(
            pixels.buffers()[1],
            np.uint8,
            count=len(pixels) * self.num_bytes,
            offset=pixels.offset * self.num_bytes,
        )
        images = flat.reshape(len(pixels), self.size, self.size, self.channels)
        return Pixels(images, to_numpy(columns["aspect"]))

    def _decoded_or_error(self, value: Any) -> tuple[NDArray[np.uint8], float] | InvalidImageError:
        try:
            return self.decode(value)
        except InvalidImageError as error:
            return error

    def _open(self, content: bytes | NDArray[Any] | Image.Image) -> tuple[Image.Image, float]:
        """Return the decoded image with the right number of channels, and its aspect ratio."""
        if isinstance(content, np.ndarray):
            return self._with_aspect(_from_array(content))
        if isinstance(content, Image.Image):
            content.load()  # Pillow reads the pixels of an opened file only when they are used
            return self._with_aspect(content)
        with Image.open(io.BytesIO(content)) as image:
            if image.format in _PROGRAMS:
                raise InvalidImageError("a PostScript program instead of an image")
            if image.width * image.height > self.max_pixels:
                raise InvalidImageError(f"more than {self.max_pixels:,} pixels")
            # JPEG decodes directly at 1/2, 1/4 or 1/8 where that is still large enough.
            image.draft(None, (self.size, self.size))
            image.load()
            return self._with_aspect(image)

    def _with_aspect(self, image: Image.Image) -> tuple[Image.Image, float]:
        if 0 in image.size:
            raise InvalidImageError("no pixels")
        return _converted(image, "L" if self.channels == 1 else "RGB"), image.width / image.height


def is_flat(pixels: NDArray[np.uint8]) -> bool:
    """Whether all pixels [height, width, channels] have the same value."""
    first = pixels[0]
    # Nearly every image varies in its first row, and then only that row is compared.
    return bool((first == first[0]).all() and (pixels == first).all())


def image_sides(content: Any) -> tuple[int, int]:
    """Return (width, height) in pixels without decoding; raises ``InvalidImageError``."""
    if isinstance(content, np.ndarray) and content.ndim >= 2:
        return content.shape[1], content.shape[0]
    try:
        with Image.open(io.BytesIO(bytes(content))) as image:
            return image.size
    except (UnidentifiedImageError, OSError, TypeError, ValueError):
        raise InvalidImageError("not an image") from None


def is_gray(content: Any) -> bool:
    """Whether an image has one channel or three equal ones; raises ``InvalidImageError``."""
    pixels, _ = ImageFormat(size=16).decode(content)  # so small that Pillow resizes, without torch
    return bool((pixels == pixels[..., :1]).all())


def is_image_struct(kind: pa.DataType) -> bool:
    """Whether a column holds images in the format of Hugging Face ``datasets``: ``{bytes, path}``."""
    if not isinstance(kind, pa.StructType):
        return False
    types = {field.name: field.type for field in kind}
    return types.get("bytes") in _BYTES and types.get("path") in _PATHS


def read_image(place: Place) -> bytes | InvalidImageError:
    """Return the content of a file, or its error; raises ``StorageError`` for a failure of the storage.

    S3 denies access per role, not per file, so a denial stops the run and does not count as one invalid row.
    """
    try:
        return place.read_bytes()
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError | PermissionError):
            is_missing = isinstance(error.__cause__, FileNotFoundError)
            return InvalidImageError("file not found" if is_missing else "no permission to read the file")
        raise


def stored_images(
    column: pa.ChunkedArray, folder: Place | None = None
) -> list[bytes | InvalidImageError | None]:
    """Return the bytes of a column of structs or of paths; an image without bytes is read from its path.

    Relative paths lie below ``folder``.
    """
    if is_image_struct(column.type):
        fields = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
        contents, paths = fields["bytes"].to_pylist(), fields["path"]
    else:
        contents, paths = [None] * len(column), column
    names = paths.cast(bytes_of_text(paths.type)).to_pylist()  # text that is not UTF-8 must not stop the read
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda image, name: _bytes_or_file(image, name, folder), contents, names))


def _bytes_or_file(
    image: bytes | None, name: bytes | None, folder: Place | None
) -> bytes | InvalidImageError | None:
    if image is not None or not name:
        return image
    path = name.decode(errors="replace")
    if absolute := _ABSOLUTE.fullmatch(path):
        root, path = absolute.groups()
        folder = Place(root or "/")
    elif "://" in path:
        return InvalidImageError("an address other than s3://bucket/name")
    if ".." in path.split("/") or "\0" in path:
        return InvalidImageError("a path with '..' or a zero byte")
    place = None if folder is None else folder / path
    is_file = place is not None and place.is_local and os.path.isfile(place.uri)
    if not is_file and _BASE64.fullmatch(path):
        return InvalidImageError("base64 text in place of a path; decode it to bytes")
    if place is None:
        return InvalidImageError("a path that is not absolute")
    # A read from a device or a pipe would never end.
    found = read_image(place) if is_file or not place.is_local else InvalidImageError("file not found")
    if isinstance(found, InvalidImageError):
        found.detail = str(place)
    return found


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
    if image.mode == mode and "transparency" not in image.info:
        return image
    # Pillow scales a PGM file of more than 8 bits to 16 bits; how far other files of this mode go is unknown.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        pixels = np.asarray(image)
        is_transparent = pixels == image.info.get("transparency", -1)
        image = Image.fromarray(np.where(is_transparent, 255, pixels >> 8).astype(np.uint8))
    if image.mode in {"I", "F"}:
        _check_levels(np.asarray(image))
    if image.mode in {"RGBA", "LA", "PA", "La", "RGBa"} or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert(mode)


def _check_levels(pixels: NDArray[Any]) -> None:
    """Raise unless gray levels of 32 bits are those of 8 bits: Pillow would make others black or white."""
    _check_finite(pixels)
    least, most = pixels.min(), pixels.max()
    if least < 0 or most > 255 or (pixels.dtype.kind == "f" and 0 < most <= 1):
        raise InvalidImageError("gray levels of 32 bits other than 0 to 255")


def _check_finite(pixels: NDArray[Any]) -> None:
    if not np.isfinite(pixels).all():
        raise InvalidImageError("not finite")


def _from_array(pixels: NDArray[Any]) -> Image.Image:
    if pixels.dtype.kind == "f":
        _check_finite(pixels)
    if pixels.dtype != np.uint8 or pixels.ndim not in {2, 3}:
        raise InvalidImageError("an array other than uint8 [height, width, channels]")
    if pixels.ndim == 3 and pixels.shape[2] not in {1, 3, 4}:
        raise InvalidImageError("an array without 1, 3 or 4 channels")
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
