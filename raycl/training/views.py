"""The views of a batch: drawn from its rows, with the ids of the batch that comes next."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycl.augment.images import ImageAugmentation, center_view
from raycl.data.rows import Batch


@final
@dataclass(frozen=True, kw_only=True)
class Views:
    """One or two views [local_batch, channels, size, size] of each image, and the images' ids.

    ``sample_id`` lies with the views, ``ids`` are the same on the host; ``next_ids`` are those of
    this worker's next batch, or None where the epoch ends.
    """

    view_a: Tensor
    view_b: Tensor | None
    sample_id: Tensor
    ids: NDArray[np.int64]
    next_ids: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def both(self) -> Tensor:
        """Return all views, [2 * local_batch, channels, size, size]: view_a's, then view_b's."""
        assert self.view_b is not None, "a method whose keys are views draws two"
        return torch.cat([self.view_a, self.view_b])


@final
@dataclass(frozen=True, kw_only=True)
class ViewMaker:
    """Draw the views of batches on a device; a function of seed, epoch, sample and view."""

    augmentation: ImageAugmentation
    seed: int
    num_views: int
    device: torch.device

    def views(self, batches: Iterator[Batch]) -> Iterator[Views]:
        """Yield the views of each batch, which knows the ids of the next one."""
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            yield self._draw(batch, None if following is None else following.sample_id)
            batch = following

    def plain(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return images [local_batch, channels, size, size] without any randomness, and their ids."""
        images = torch.from_numpy(batch.images).to(self.device, non_blocking=True)
        settings = self.augmentation
        view = center_view(images, size=settings.size, mean=settings.mean, std=settings.std)
        return view, torch.from_numpy(batch.sample_id).to(self.device)

    def _draw(self, batch: Batch, next_ids: NDArray[np.int64] | None) -> Views:
        images = torch.from_numpy(batch.images).to(self.device, non_blocking=True)
        drawn = [self._view(images, batch, number) for number in range(self.num_views)]
        return Views(
            view_a=drawn[0],
            view_b=drawn[1] if self.num_views == 2 else None,
            sample_id=torch.from_numpy(batch.sample_id).to(self.device),
            ids=batch.sample_id,
            next_ids=next_ids,
        )

    def _view(self, images: Tensor, batch: Batch, number: int) -> Tensor:
        return self.augmentation(
            images, batch.sample_id, seed=self.seed, epoch=batch.epoch, view=number, aspect=batch.aspect
        )
