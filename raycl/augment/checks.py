"""Checks of settings and arrays: each raises ``ConfigError`` in one line."""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from raycl.errors import ConfigError


def check_images(images: Tensor | np.ndarray, *, channels: int) -> None:
    """Refuse anything but uint8 [n, height, width, channels]."""
    is_bytes = str(images.dtype).removeprefix("torch.") == "uint8"
    if not is_bytes or images.ndim != 4 or images.shape[3] != channels or 0 in images.shape[1:]:
        raise ConfigError(
            f"images of a wrong type or shape, got {images.dtype} {list(images.shape)}; "
            f"give uint8 [n, height, width, {channels}]"
        )


def check_length(name: str, length: int, num_images: int) -> None:
    """Refuse an array without one entry per image."""
    if length != num_images:
        raise ConfigError(
            f"{name} does not fit the images, got {length} for {num_images} images; give one for each image"
        )


def check_shape(*, size: int, channels: int) -> None:
    """Refuse views that are too small or have neither one nor three channels."""
    if not isinstance(size, int) or size < 8:
        raise ConfigError(f"size is too small, got {size!r}; give an integer of 8 pixels or more")
    if channels not in (1, 3):
        raise ConfigError(f"channels is impossible, got {channels!r}; give 1 (gray) or 3 (RGB)")


def check_normalization(mean: Sequence[float], std: Sequence[float], *, channels: int) -> None:
    """Refuse a mean or std that is not one valid number per channel."""
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != channels or not all(math.isfinite(value) for value in values):
            raise ConfigError(f"{name} does not fit, got {tuple(values)}; give {channels} finite number(s)")
    if min(std) <= 0:
        raise ConfigError(f"std must be positive, got {tuple(std)}; give numbers above 0")


def check_number(name: str, value: float, *, maximum: float) -> None:
    """Refuse a number outside [0, maximum]."""
    if not 0 <= value <= maximum or math.isinf(value):
        raise ConfigError(f"{name} is out of range, got {value!r}; give a finite number in [0, {maximum:g}]")


def check_range(name: str, bounds: tuple[float, float], *, maximum: float) -> None:
    """Refuse a pair that is not ascending within (0, maximum]."""
    if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] <= maximum or math.isinf(bounds[1]):
        raise ConfigError(
            f"{name} is not a range, got {tuple(bounds)}; "
            f"give (low, high) with 0 < low <= high <= {maximum:g}, both finite"
        )
