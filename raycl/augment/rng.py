"""Counter-based random numbers: a sample gets the same draws in any batch and on any worker."""

import numpy as np
import torch
from torch import Tensor

from raycl.errors import ConfigError
from raycl.splitmix import FIRST_MULTIPLIER, INCREMENT, SECOND_MULTIPLIER

# Offsets of the seed, one for each kind of draw; images have none. Append only, so that earlier runs can be repeated.
DELETION, INSERTION, COPY, COUNT, REPETITION, SHOWN_TEXT, EXPLICIT, MINED = (
    number << 40 for number in range(1, 9)
)
_MANTISSA_BITS = 24  # a float32 holds every multiple of 2**-24 below 1 exactly


def uniforms(
    sample_id: Tensor | np.ndarray,
    *,
    seed: int,
    epoch: int | Tensor | np.ndarray,
    view: int,
    num: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw ``num`` uniform numbers in [0, 1) for each sample; float32 [n, num] on ``device``.

    Entry [i, k] is a hash of (seed, view, epoch, sample_id[i], k): it depends on no other row, and
    is bit-identical on every device. ``sample_id`` is int64 [n], of any sign; ``epoch``
    is one integer or int64 [n]. Raises ``ConfigError`` for ids or epochs that are not integers or
    differ in length.
    """
    ids = as_integers(sample_id, name="sample_id").to(device)
    epochs = as_integers(epoch, name="epoch").to(device)
    if ids.ndim != 1 or (epochs.ndim and epochs.shape != ids.shape):
        raise ConfigError(
            f"sample_id and epoch do not fit, got shapes {list(ids.shape)} and "
            f"{list(epochs.shape)}; give sample_id [n] and epoch as one integer or [n]"
        )
    bits = torch.full((1,), _signed(seed), device=device)
    for part in (torch.full((1,), _signed(view), device=device), epochs, ids):
        bits = _absorb(bits, part)
    bits = _absorb(bits[:, None], torch.arange(num, device=device))
    return _shift_right(bits, 64 - _MANTISSA_BITS).to(torch.float32) * 2.0**-_MANTISSA_BITS


def _absorb(bits: Tensor, part: Tensor) -> Tensor:
    """Add a word to the hash; a bijection of ``part``, so equal prefixes never collide."""
    return _mix(_mix(bits + _signed(INCREMENT)) ^ part)


def _mix(bits: Tensor) -> Tensor:
    """Let every bit of an int64 change every other, as :func:`raycl.splitmix.mix` does."""
    bits = (bits ^ _shift_right(bits, 30)) * _signed(FIRST_MULTIPLIER)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(SECOND_MULTIPLIER)
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # torch shifts the sign bit in; a hash needs zeros.
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """Wrap any integer into the range of int64."""
    return (int(value) + 2**63) % 2**64 - 2**63


def as_integers(values: int | Tensor | np.ndarray, *, name: str) -> Tensor:
    """Return int64 values; raises ``ConfigError`` for values of another kind, under their ``name``."""
    # A copy: torch warns about read-only arrays from Arrow.
    tensor = torch.tensor(values) if isinstance(values, np.ndarray) else torch.as_tensor(values)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ConfigError(f"{name} must hold integers, got {tensor.dtype}; give int64")
    return tensor.to(torch.int64)
