"""Two random views of each image of a batch, in plain torch (SimCLR: Chen et al., 2020)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from raycl.augment.checks import (
    check_images,
    check_length,
    check_normalization,
    check_number,
    check_range,
    check_shape,
)
from raycl.augment.color import blur, color_transform, recolor
from raycl.augment.crop import NUM_BOX_DRAWS, draw_boxes, resample, rotate
from raycl.augment.rng import uniforms
from raycl.distributed.device_copy import constant
from raycl.errors import ConfigError

DRAWN_PIXELS = 2**25  # of images whose views a GPU draws together; each needs about 40 bytes

# One column of uniforms each; the columns of the crop box follow, then the rotation.
# Append only: another order would change the views of every earlier run.
_DRAWS = (
    "flip", "jitter", "brightness", "contrast", "saturation", "hue", "grayscale", "blur", "sigma",
)  # fmt: skip
_ROTATION = len(_DRAWS) + NUM_BOX_DRAWS


@final
@dataclass(frozen=True, kw_only=True)
class ImageAugmentation:
    """Random crop, flip, rotation, color jitter, grayscale and blur, with torchvision's distributions.

    Color jitter differs: it has one order, rotates the hue, and clips once (``raycl.augment.color``).
    ``size`` is the side of a view in pixels. ``crop_scale`` bounds the crop's fraction of the original area,
    ``crop_ratio`` its width over height. ``flip``, ``jitter``, ``grayscale`` and ``blur`` are
    probabilities; ``brightness``, ``contrast`` and ``saturation`` are the s of a factor, uniform in
    [max(0, 1 - s), 1 + s]; ``hue`` is the largest shift, in turns; ``blur_sigma`` is in pixels.
    ``rotation`` is the largest angle to either side, in degrees; uncovered corners are black.
    ``mean`` and ``std`` normalize pixels in [0, 1], one number per channel.

    Raises ``ConfigError`` for a setting out of its range.
    """

    size: int
    channels: int = 3
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    rotation: float = 0.0
    jitter: float = 0.8
    brightness: float = 0.8
    contrast: float = 0.8
    saturation: float = 0.8
    hue: float = 0.2
    grayscale: float = 0.2
    blur: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        check_shape(size=self.size, channels=self.channels)
        check_normalization(self.mean, self.std, channels=self.channels)
        for name in ("flip", "jitter", "grayscale", "blur"):
            check_number(name, getattr(self, name), maximum=1.0)
        for name in ("brightness", "contrast", "saturation"):
            check_number(name, getattr(self, name), maximum=math.inf)
        check_number("hue", self.hue, maximum=0.5)
        check_number("rotation", self.rotation, maximum=180.0)
        check_range("crop_scale", self.crop_scale, maximum=1.0)
        check_range("crop_ratio", self.crop_ratio, maximum=math.inf)
        check_range("blur_sigma", self.blur_sigma, maximum=math.inf)

    def __call__(
        self,
        images: Tensor | np.ndarray,
        sample_id: Tensor | np.ndarray,
        *,
        seed: int,
        epoch: int | Tensor | np.ndarray,
        view: int,
        aspect: Tensor | np.ndarray | None = None,
    ) -> Tensor:
        """Return one view of each image; float32 [n, channels, size, size], channels last.

        ``images`` is uint8 [n, height, width, channels]; ``sample_id`` int64 [n]; ``aspect`` float
        [n] the original width over height of each image, before it was resized to the stored shape
        (default: the stored shape). A view depends on its own image, ``seed``, ``epoch``, ``sample_id``
        and ``view``, and on no other row.

        Raises ``ConfigError`` for arrays of a wrong type or shape.
        """
        check_images(images, channels=self.channels)
        check_length("sample_id", len(sample_id), len(images))
        drawn = self.draw(
            sample_id, shape=images.shape[1:3], seed=seed, epoch=epoch, view=view, aspect=aspect
        )
        return self.apply(images, drawn.to(images.device) if isinstance(images, Tensor) else drawn)

    def draw(
        self,
        sample_id: Tensor | np.ndarray,
        *,
        shape: Sequence[int],
        seed: int,
        epoch: int | Tensor | np.ndarray,
        view: int,
        aspect: Tensor | np.ndarray | None = None,
    ) -> Tensor:
        """Draw the parameters of a view of each image, for :meth:`apply`; float32 [n, 8 + channels**2] on the host.

        ``shape`` is the height and width of the stored images. The parameters do not depend on the device.
        """
        with full_precision("cpu"):
            draws = uniforms(sample_id, seed=seed, epoch=epoch, view=view, num=_ROTATION + 1)
            height, width = shape
            boxes = draw_boxes(
                draws[:, len(_DRAWS) : _ROTATION],
                height=height,
                width=width,
                aspect=_aspect(aspect, num_images=len(draws), default=width / height),
                scale=self.crop_scale,
                ratio=self.crop_ratio,
            )
            named: dict[str, Tensor] = dict(zip(_DRAWS, draws.unbind(1), strict=False))
            matrix, gray_share = self._colors(named)
            low, high = self.blur_sigma
            sigma = torch.where(named["blur"] < self.blur, low + (high - low) * named["sigma"], 0.0)
            degrees = (2 * draws[:, _ROTATION] - 1) * self.rotation
            others = torch.stack([named["flip"] < self.flip, degrees, sigma, gray_share], dim=1)
            return torch.cat([boxes, others, matrix.flatten(1)], dim=1)

    def apply(self, images: Tensor | np.ndarray, drawn: Tensor) -> Tensor:
        """Return the drawn views of images on the same device; shapes as in a call."""
        views = _empty_views(images, size=self.size)
        with full_precision(views.device):
            for rows in _chunks(images, size=self.size):
                box, others, matrix = drawn[rows].split([4, 4, self.channels**2], dim=1)
                flip, degrees, sigma, gray_share = others.unbind(1)
                pixels = resample(as_tensor(images[rows]), box, flip > 0, size=self.size)
                if self.rotation:
                    pixels = rotate(pixels, degrees)
                matrix = matrix.unflatten(1, (self.channels, self.channels))
                pixels = recolor(pixels, matrix, gray_share, mean=self.mean, std=self.std)
                if self.blur:
                    # Blur is a weighted mean, so it commutes with normalization.
                    pixels = blur(pixels, sigma)
                views[rows] = pixels
        return views

    def _colors(self, draws: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Turn uniforms into the color matrix and the gray share of every image."""
        jittered = draws["jitter"] < self.jitter

        def factor(name: str, strength: float) -> Tensor:
            low, high = max(0.0, 1 - strength), 1 + strength
            return torch.where(jittered, low + (high - low) * draws[name], 1.0)

        return color_transform(
            brightness=factor("brightness", self.brightness),
            contrast=factor("contrast", self.contrast),
            saturation=factor("saturation", self.saturation),
            hue=torch.where(jittered, (2 * draws["hue"] - 1) * self.hue, 0.0),
            grayscale=draws["grayscale"] < self.grayscale,
            channels=self.channels,
        )


def two_views(
    images: Tensor | np.ndarray,
    sample_id: Tensor | np.ndarray,
    *,
    augmentation: ImageAugmentation,
    seed: int,
    epoch: int | Tensor | np.ndarray,
    aspect: Tensor | np.ndarray | None = None,
) -> tuple[Tensor, Tensor]:
    """Return view 0 and view 1 of each image; shapes and errors as ``ImageAugmentation``."""

    def draw(view: int) -> Tensor:
        return augmentation(images, sample_id, seed=seed, epoch=epoch, view=view, aspect=aspect)

    return draw(0), draw(1)


def center_view(
    images: Tensor | np.ndarray, *, size: int, mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """Return the whole image without randomness, for evaluation.

    Takes uint8 [n, height, width, channels]; resizes to ``size``, antialiased when shrinking, and
    normalizes; returns float32 [n, channels, size, size], channels last. Raises ``ConfigError`` as
    ``ImageAugmentation`` does.
    """
    channels = images.shape[-1]
    check_shape(size=size, channels=channels)
    check_normalization(mean, std, channels=channels)
    check_images(images, channels=channels)
    num_images, height, width, _ = images.shape
    views = _empty_views(images, size=size)
    device = views.device
    boxes = constant((0, 0, height, width), device).expand(num_images, 4)
    upright = torch.zeros(num_images, dtype=torch.bool, device=device)
    shift, scale = (constant(tuple(each), device)[:, None, None] for each in (mean, std))
    with full_precision(views.device):
        for rows in _chunks(images, size=size):
            pixels = as_tensor(images[rows])
            if height == width == size:
                pixels = pixels.permute(0, 3, 1, 2)
            else:
                pixels = resample(pixels, boxes[rows], upright[rows], size=size)
            views[rows] = (pixels / 255 - shift) / scale
    return views


def full_precision(device: torch.device | str) -> torch.autocast:
    """Turn autocast off, which would round the views."""
    return torch.autocast(torch.device(device).type, enabled=False)


def _chunks(images: Tensor | np.ndarray, *, size: int) -> Iterator[slice]:
    """Yield slices of rows: a megabyte or two of views on a CPU, so that they stay in its cache; on a GPU, ``DRAWN_PIXELS``."""
    num_images, height, width = images.shape[:3]
    on_cpu = isinstance(images, np.ndarray) or images.device.type == "cpu"
    length = min(64, max(4, 2**17 // size**2)) if on_cpu else max(1, DRAWN_PIXELS // (height * width))
    for start in range(0, num_images, length):
        yield slice(start, start + length)


def _empty_views(images: Tensor | np.ndarray, *, size: int) -> Tensor:
    device = images.device if isinstance(images, Tensor) else "cpu"
    shape = (len(images), images.shape[-1], size, size)
    return torch.empty(shape, device=device, memory_format=torch.channels_last)


def as_tensor(images: Tensor | np.ndarray) -> Tensor:
    """Return images as a tensor; only arrays that torch cannot share are copied."""
    if isinstance(images, Tensor):
        return images
    # Arrays from Arrow are read-only, and reversed channels have a negative stride.
    return torch.from_numpy(np.require(images, requirements=("C", "W")))


def _aspect(aspect: Tensor | np.ndarray | None, *, num_images: int, default: float) -> Tensor:
    if aspect is None:
        return torch.full((num_images,), default)
    values = torch.tensor(aspect) if isinstance(aspect, np.ndarray) else aspect
    values = values.to("cpu", torch.float32)
    check_length("aspect", values.numel(), num_images)
    if not bool(((values > 0) & values.isfinite()).all()):
        raise ConfigError(
            f"aspect must be a positive number, got {values.min().item()} as the smallest; "
            "give the original width divided by the original height"
        )
    return values.view(num_images)
