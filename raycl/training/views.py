"""The views of a batch: drawn from its rows, with the ids of the batch that comes next."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from raycl.augment.images import ImageAugmentation, center_view
from raycl.data.rows import Batch, pixels_of
from raycl.phases import phase


@final
@dataclass(frozen=True, kw_only=True)
class Known:
    """What queries, keys and explicit negatives are known by, int64 [num_rows, num_names] each.

    Two rows with one name in common, in the same column, are the same thing; or in any column, where
    all names are of one kind (``crosswise``), of queries and of keys. The first name is what a store
    of negatives knows a key by. ``negative`` is None unless negatives come with the batch.
    """

    query: Tensor
    key: Tensor
    negative: Tensor | None = None
    crosswise: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class Views:
    """One or two views [local_batch, ...] of each sample, as its encoder takes them, and the samples' ids.

    Of pairs ``view_a`` is the query, ``view_b`` the key, and ``negatives`` [num_negatives, ...] are what
    came with the queries, in their order. ``sample_id`` lies with the views, ``ids`` are the same on the
    host; ``known`` says what is one thing, which by default is what has one id. ``next_ids`` are
    those of this worker's next batch, or None where the epoch ends.
    """

    view_a: Tensor
    view_b: Tensor | None
    sample_id: Tensor
    ids: NDArray[np.int64]
    next_ids: NDArray[np.int64] | None = None
    negatives: Tensor | None = None
    known: Known = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.known is None:
            names = self.sample_id[:, None]
            object.__setattr__(self, "known", Known(query=names, key=names))

    def __len__(self) -> int:
        return len(self.ids)

    def both(self) -> Tensor:
        """Return all views, [2 * local_batch, ...]: view_a's, then view_b's."""
        assert self.view_b is not None, "a method whose keys are views draws two"
        return stacked(self.view_a, self.view_b)

    def keys(self) -> Tensor:
        """Return view_b's and then the negatives."""
        assert self.view_b is not None, "pairs have a key each"
        return self.view_b if self.negatives is None else stacked(self.view_b, self.negatives)


def stacked(first: Tensor, second: Tensor) -> Tensor:
    """Return the rows of both; tokens [batch, length] are padded to the longer length."""
    if first.ndim == 2:
        length = max(first.shape[1], second.shape[1])
        first, second = (F.pad(each, (0, length - each.shape[1])) for each in (first, second))
    return torch.cat([first, second])


class Drawing(Protocol):
    """How the rows of a batch become what encoders take."""

    def view(self, batch: Batch, number: int) -> Tensor:
        """Return a random view of every row, a function of seed, epoch, sample and ``number``."""
        ...

    def plain(self, batch: Batch) -> Tensor:
        """Return every row without any randomness, as the periodic judge sees it."""
        ...

    def plain_key(self, batch: Batch) -> Tensor:
        """Return the key of every row without any randomness: of pairs their other half."""
        ...

    def plain_key_id(self, batch: Batch) -> Tensor:
        """Return what each of these keys is known by, int64 [batch]: equal ones are the same key."""
        ...

    def negatives(self, batch: Batch) -> Tensor | None:
        """Return the explicit negatives of all rows in their order, if there are any."""
        ...

    def known(self, batch: Batch) -> Known:
        """Return what the samples are known by, on the device."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class ImageDrawing:
    """Images: cropped, colored and blurred at random, or whole."""

    augmentation: ImageAugmentation
    seed: int
    device: torch.device

    def view(self, batch: Batch, number: int) -> Tensor:
        """Return [batch, channels, size, size]."""
        return self.augmentation(
            self._images(batch),
            batch.sample_id,
            seed=self.seed,
            epoch=batch.epoch,
            view=number,
            aspect=pixels_of(batch).aspect,
        )

    def plain(self, batch: Batch) -> Tensor:
        """Return [batch, channels, size, size]."""
        settings = self.augmentation
        return center_view(self._images(batch), size=settings.size, mean=settings.mean, std=settings.std)

    def plain_key(self, batch: Batch) -> Tensor:
        """Return the same."""
        return self.plain(batch)

    def plain_key_id(self, batch: Batch) -> Tensor:
        """Return the samples' ids."""
        return torch.from_numpy(batch.sample_id)

    def negatives(self, batch: Batch) -> Tensor | None:
        """Return None: they have none of their own."""
        return None

    def known(self, batch: Batch) -> Known:
        """Return their ids."""
        names = torch.from_numpy(batch.sample_id).to(self.device)[:, None]
        return Known(query=names, key=names)

    def _images(self, batch: Batch) -> Tensor:
        return torch.from_numpy(pixels_of(batch).images).to(self.device, non_blocking=True)


@final
@dataclass(frozen=True, kw_only=True)
class ViewMaker:
    """Draw the views of batches on a device."""

    drawing: Drawing
    num_views: int
    device: torch.device

    def views(self, batches: Iterator[Batch]) -> Iterator[Views]:
        """Yield the views of each batch, which knows the ids of the next one."""
        batch = _next(batches)
        while batch is not None:
            following = _next(batches)
            with phase("views"):
                views = self._draw(batch, None if following is None else following.sample_id)
            yield views
            batch = following

    def plain(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the rows [local_batch, ...] without any randomness, and their ids."""
        return self.drawing.plain(batch), torch.from_numpy(batch.sample_id).to(self.device)

    def _draw(self, batch: Batch, next_ids: NDArray[np.int64] | None) -> Views:
        drawn = [self.drawing.view(batch, number) for number in range(self.num_views)]
        return Views(
            view_a=drawn[0],
            view_b=drawn[1] if self.num_views == 2 else None,
            sample_id=torch.from_numpy(batch.sample_id).to(self.device),
            ids=batch.sample_id,
            next_ids=next_ids,
            negatives=self.drawing.negatives(batch),
            known=self.drawing.known(batch),
        )


def _next(batches: Iterator[Batch]) -> Batch | None:
    with phase("data"):
        return next(batches, None)
