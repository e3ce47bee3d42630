"""Small encoders for tests, which can fail at a chosen step."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
import torch
from torch import Tensor, nn

from raycl.models.image import build_image_encoder
from raycl.models.text import BagOfSubwords


class Small(nn.Module):
    """Two convolutions with BatchNorm and dropout; fails once, at a chosen training step.

    It crashes, returns NaN, returns numbers with a NaN gradient, or returns one point in ``collapsed`` steps.

    After a crash it writes the number of steps since then into the marker.
    """

    def __init__(
        self,
        channels: int = 3,
        die_at: int = 0,
        nan_at: int = 0,
        nan_gradient_at: int = 0,
        collapsed: Sequence[int] = (),
        dropout: float = 0.1,
        marker: str = "",
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self._die_at, self._nan_at, self._marker = die_at, nan_at, marker
        self._nan_gradient_at = nan_gradient_at
        self._collapsed = collapsed
        self._num_steps = 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self._num_steps += 1
            if self._die_at and Path(self._marker).exists():
                Path(self._marker).write_text(str(self._num_steps))
            elif self._num_steps == self._die_at:
                wait_for_checkpoint()
                Path(self._marker).touch()
                os._exit(1)
            if self._num_steps == self._nan_at:
                return self.layers(images) * torch.nan
            if self._num_steps in self._collapsed:
                return 1 + 0 * self.layers(images)
            if self._num_steps == self._nan_gradient_at:
                features = self.layers(images)
                return features + 0 * (0 * features).sqrt()  # the square root has an infinite gradient at 0
        return self.layers(images)


def wait_for_checkpoint() -> None:
    """Wait until Ray Train has listed a checkpoint: a recently reported one may still be missing."""
    for _ in range(100):
        if ray.train.get_all_reported_checkpoints():
            return
        time.sleep(0.2)
    raise TimeoutError("no checkpoint within 20 s")


def small(**arguments: object) -> nn.Module:
    return Small(**arguments)  # type: ignore[arg-type]


def flat(**arguments: object) -> nn.Module:
    """Return the wrong shape."""
    return nn.Conv2d(3, 4, 3)


class Words(nn.Module):
    """A bag of subwords with dropout that crashes once, at a chosen batch."""

    def __init__(
        self, *, num_tokens: int, max_length: int, dim: int = 16, die_at: int = 0, marker: str = ""
    ) -> None:
        super().__init__()
        self.bag = BagOfSubwords(num_tokens=num_tokens, max_length=max_length, dim=dim, hidden_dim=0)
        self._die_at, self._marker, self._num_batches = die_at, marker, 0

    def forward(self, tokens: Tensor) -> Tensor:
        self._num_batches += self.training
        if self._num_batches == self._die_at and not Path(self._marker).exists():
            wait_for_checkpoint()
            Path(self._marker).touch()
            os._exit(1)
        return self.bag(tokens)


def words(**arguments: Any) -> Words:
    return Words(**arguments)


class Recording(Words):
    """Appends the distinct first tokens of each batch of training to a file of its worker in ``folder``."""

    def __init__(self, *, folder: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._folder = folder

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            rank = ray.train.get_context().get_world_rank()
            with (Path(self._folder) / f"{rank}.txt").open("a") as file:
                file.write(f"{tokens[:, 0].unique().tolist()}\n")
        return super().forward(tokens)


def recording(**arguments: Any) -> Recording:
    return Recording(**arguments)


class Headed(Small):
    """Has a classifier that the forward pass leaves out, as ``forward_features`` of a pretrained network does."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.head = nn.Linear(16, 10)


def headed(**arguments: Any) -> nn.Module:
    return Headed(**arguments)


class Mortal(Small):
    """Crashes at the second step after every start."""

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self._num_steps == 1:
            os._exit(1)
        return super().forward(images)


def mortal(**arguments: Any) -> nn.Module:
    return Mortal(**arguments)


class Sized(Small):
    """Appends the side of the images of each batch to a file, with ``train`` or ``eval``."""

    def forward(self, images: Tensor) -> Tensor:
        if len(images) > 1:  # one image alone finds the width of the output
            with Path(self._marker).open("a") as file:
                print("train" if self.training else "eval", images.shape[-1], file=file)
        return super().forward(images)


def sized(**arguments: Any) -> nn.Module:
    return Sized(**arguments)


class Slow(nn.Module):
    """Delays each training batch by ``seconds`` until the marker exists."""

    def __init__(self, network: nn.Module, marker: str, seconds: float = 0.1) -> None:
        super().__init__()
        self.network = network
        self._until, self._seconds = marker, seconds

    def forward(self, batch: Tensor) -> Tensor:
        if self.training and not Path(self._until).exists():
            time.sleep(self._seconds)
        return self.network(batch)


def slow(*, marker: str, seconds: float = 0.1, **arguments: Any) -> nn.Module:
    return Slow(Small(**arguments), marker, seconds)


def slow_words(*, marker: str, **arguments: Any) -> nn.Module:
    return Slow(Words(**arguments), marker)


class SlowKeys(nn.Module):
    """Delays each batch in an actor that encodes keys by ``seconds``, and in a worker by ``image_seconds`` an image.

    As if each had a device of its own, which works so long.
    """

    def __init__(self, network: nn.Module, seconds: float, image_seconds: float) -> None:
        super().__init__()
        self.network, self._seconds, self._image_seconds = network, seconds, image_seconds

    def forward(self, images: Tensor) -> Tensor:
        is_actor = Path("/proc/self/cmdline").read_bytes().startswith(b"ray::EncoderActor")
        if is_actor or self.training:
            time.sleep(self._seconds if is_actor else self._image_seconds * len(images))
        return self.network(images)


def slow_keys(
    *, seconds: float, image_seconds: float = 0.0, name: str = "resnet10", **arguments: Any
) -> nn.Module:
    return SlowKeys(build_image_encoder(name, **arguments), seconds, image_seconds)


class Skipping(nn.Module):
    """Skips a layer for random rows, as stochastic depth does, with numbers that no dropout layer draws."""

    def __init__(self, channels: int = 3, *, batchnorm: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(8) if batchnorm else nn.GroupNorm(2, 8)
        self.first = nn.Sequential(nn.Conv2d(channels, 8, 3, stride=2, padding=1), norm, nn.ReLU())
        self.skipped = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.first(images)
        if self.training:
            kept = torch.rand(len(rows), 1, 1, 1) < 0.7
            rows = rows + self.skipped(rows) * kept
        else:
            rows = rows + 0.7 * self.skipped(rows)
        return rows.mean((2, 3))


def skipping(**arguments: Any) -> nn.Module:
    return Skipping(**arguments)
