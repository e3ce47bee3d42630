"""The views of a batch, with the ids of the next batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from raycl.config import RunConfig
from raycl.data.in_memory import Batch, InMemoryDataset, weights_of
from raycl.data.prefetch import Prefetched
from raycl.data.sampler import BatchShard, InMemorySampler, MixedSampler
from raycl.data.streaming import StreamingSampler
from raycl.distributed.device_copy import upload
from raycl.distributed.step_timer import phase
from raycl.losses.example_ids import ExampleIds, IdExchange, mean_one
from raycl.training.transforms import Draft, Transform


class PoolKeys(NamedTuple):
    """Keys [num_views, local_batch, dim] from a pool of actors, and the steps of their weights, int64 [local_batch]."""

    keys: Tensor
    step: Tensor


TakeKeys = Callable[[int], PoolKeys | None]  # by step; None if keys are missing or too old


@final
@dataclass(frozen=True, kw_only=True)
class Views:
    """The views [local_batch, ...] of each sample, as encoder inputs, and the sample ids.

    ``view_a``, ``view_b`` and ``further`` are the views of the first entry of ``augment.views``, ``crops`` the views of
    the others. For pairs, ``view_a`` is the query, ``view_b`` the key, and ``negatives`` [num_negatives, ...] are
    the explicit negatives in the order of the queries. ``sample_id`` is on the device of the views, and ``ids``
    is its copy on the host. ``example_ids`` identify duplicates. ``next_ids`` are the
    sample ids of this worker's next two batches, fewer at the end of an epoch. ``data_set`` is the number of the data
    set of all rows. ``draw_key`` draws ``view_b`` if a pool of actors encodes it, so that it is None here.
    """

    view_a: Tensor
    view_b: Tensor | None
    sample_id: Tensor
    ids: NDArray[np.int64]
    example_ids: ExampleIds
    next_ids: tuple[NDArray[np.int64], ...] = ()
    further: tuple[Tensor, ...] = ()
    crops: tuple[Tensor, ...] = ()
    negatives: Tensor | None = None
    data_set: int = 0
    draw_key: Callable[[], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def second_view(self) -> Tensor | None:
        """Return ``view_b``, drawn now if it was not."""
        return self.view_b if self.draw_key is None else self.draw_key()

    def key_views(self) -> list[Tensor]:
        """Return the views that are keys only: the second one."""
        view = self.second_view()
        assert view is not None, "a momentum encoder's keys are views"
        return [view]

    def keys(self) -> Tensor:
        """Return ``view_b`` followed by the negatives."""
        assert self.view_b is not None, "pairs have a key each"
        return self.view_b if self.negatives is None else stacked(self.view_b, self.negatives)


def stacked(*views: Tensor) -> Tensor:
    """Return the rows of all views; tokens [batch, length] are padded to the longest length."""
    if len(views) == 1:
        return views[0]
    if views[0].ndim == 2:
        length = max(each.shape[1] for each in views)
        views = tuple(F.pad(each, (0, length - each.shape[1])) for each in views)
    return torch.cat(views)


@final
@dataclass(frozen=True, kw_only=True)
class ViewMaker:
    """Draw the views of batches on a device: ``num_full`` views of full size first.

    With ``draws_key`` false, the second view is drawn on request only.
    """

    transform: Transform
    num_views: int
    num_full: int
    device: torch.device
    draws_key: bool = True

    @classmethod
    def of(cls, config: RunConfig, transform: Transform, device: torch.device) -> "ViewMaker":
        """Return the maker of a run's views."""
        return cls(
            transform=transform,
            num_views=config.num_views,
            num_full=config.views[0].count,
            device=device,
            # With a prediction head, keys are queries too.
            draws_key=not config.uses_key_pool or config.has_prediction_head,
        )

    def views(self, batches: Iterator[Batch], *, image_size: int | None = None) -> Iterator[Views]:
        """Yield the views of each batch, with the ids of the next two; collective.

        ``image_size`` is the side of the images in pixels, by default ``data.image_size``.
        The next batch is drawn, and its copy to an accelerator started, during the step of this one.
        """
        transform = self.transform if image_size is None else self.transform.with_image_size(image_size)
        coming = [*_next(batches), *_next(batches)]
        sent = self._send(coming[0], transform) if coming else None
        while sent is not None:
            coming = [*coming[1:], *_next(batches)]
            with phase("views"):
                views = self._make(sent, tuple(batch.sample_id for batch in coming))
                sent = self._send(coming[0], transform) if coming else None
            yield views

    def plain(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the rows [local_batch, ...] without augmentation, and their ids."""
        draft = self.transform.plain(batch)
        *moved, sample_id = upload([*draft.tensors, torch.from_numpy(batch.sample_id)], self.device)
        return draft.make(*moved), sample_id

    def _send(self, batch: Batch, transform: Transform) -> "_Sent":
        drafts = [transform.view(batch, number) for number in self._drawn]
        ids, negatives = transform.ids_and_negatives(batch)
        of_rows = [torch.from_numpy(batch.sample_id), negatives]
        of_views = [each for draft in drafts for each in draft.tensors]
        with torch.cuda.stream(self._side_stream):
            moved = upload([*of_rows, *of_views], self.device)
        weight = weights_of(batch)
        names = replace(ids, weight=None if weight is None else torch.from_numpy(weight))
        draw_key = None if self.draws_key else partial(self._draw_key, batch, transform)
        return _Sent(batch, drafts, moved, self._exchange.start(names), draw_key)

    def _make(self, sent: "_Sent", next_ids: tuple[NDArray[np.int64], ...]) -> Views:
        sample_id, negatives, *of_views = sent.moved
        if self._side_stream is not None:
            step = torch.cuda.current_stream(self.device)
            step.wait_stream(self._side_stream)
            sample_id.record_stream(step)  # and all tensors that share its storage
        example_ids = sent.example_ids().on(self.device)
        if example_ids.weight is not None:
            example_ids = replace(example_ids, weight=mean_one(example_ids.weight))
        tensors = iter(of_views)
        made = [draft.make(*(next(tensors) for _ in draft.tensors)) for draft in sent.drafts]
        views = dict(zip(self._drawn, made, strict=True))
        return Views(
            view_a=views[0],
            view_b=views.get(1) if self.num_full > 1 else None,
            further=tuple(views[number] for number in range(2, self.num_full)),
            crops=tuple(views[number] for number in range(self.num_full, self.num_views)),
            sample_id=sample_id,
            ids=sent.batch.sample_id,
            next_ids=next_ids,
            negatives=negatives,
            example_ids=example_ids,
            data_set=sent.batch.data_set,
            draw_key=sent.draw_key,
        )

    @property
    def _drawn(self) -> list[int]:
        """The numbers of the views that are drawn of every batch."""
        return [number for number in range(self.num_views) if number != 1 or self.draws_key]

    def _draw_key(self, batch: Batch, transform: Transform) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):  # the step that asks for it may round
            return transform.view(batch, 1).on(self.device)

    @cached_property
    def _exchange(self) -> IdExchange:
        return IdExchange(self.device)

    @cached_property
    def _side_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None


class _Sent(NamedTuple):
    """A batch on its way to the device."""

    batch: Batch
    drafts: list[Draft]
    moved: list[Any]  # the tensors of its rows, then of its drafts
    example_ids: Callable[[], ExampleIds]
    draw_key: Callable[[], Tensor] | None


def _next(batches: Iterator[Batch]) -> list[Batch]:
    """Return the next batch, or nothing at the end."""
    with phase("data"):
        return list(islice(batches, 1))


def build_sampler(config: RunConfig, data_sets: Sequence[InMemoryDataset]) -> InMemorySampler | MixedSampler:
    """Return the sampler of the training rows of a run's data sets."""

    def sampler(rows: InMemoryDataset, seed: int) -> InMemorySampler:
        return InMemorySampler(
            rows=rows,
            seed=seed,
            length_buckets=config.text.length_buckets,
            samples_per_class=config.data.samples_per_class,
        )

    if len(data_sets) == 1:
        return sampler(data_sets[0], config.seed)
    samplers = [sampler(rows, hash((config.seed, number)) % 2**63) for number, rows in enumerate(data_sets)]
    return MixedSampler(samplers=samplers, seed=config.seed, weights=config.data.weights)


@final
class Epochs:
    """Draw the views of a worker's batches, epoch by epoch.

    Rows are fetched in the background. Views are not: on a CPU, a second thread of torch would compete with
    the step for the same cores; on an accelerator, they are drawn there.
    """

    def __init__(self, sampler: StreamingSampler | InMemorySampler | MixedSampler, maker: ViewMaker) -> None:
        self._sampler, self._maker = sampler, maker
        self._exhausted: int | None = None  # the last epoch, if it was drawn completely

    def metrics(self) -> dict[str, float]:
        """Return the fraction of streamed rows in whole groups of a class, with ``data.samples_per_class``."""
        sampler = self._sampler
        if not isinstance(sampler, StreamingSampler) or sampler.samples_per_class is None:
            return {}
        return {"grouped_fraction": sampler.grouped_fraction}

    def plain(self, shard: BatchShard) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of the first epoch without augmentation, and their ids."""
        yield from map(self._maker.plain, Prefetched(self._sampler.epoch_batches(shard, epoch=0)))

    def views(
        self,
        shard: BatchShard,
        *,
        epoch: int,
        start: int,
        has_next: bool,
        image_size: int | None = None,
        passing: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
    ) -> Iterator[Views]:
        """Yield the views of an epoch from batch ``start`` on.

        ``image_size`` is the side of the images in pixels, by default ``data.image_size``. ``has_next``
        means that another epoch follows: a stream then prefetches its rows. The batches pass through ``passing``, which
        may read some of them ahead.
        """
        continues = self._exhausted == epoch - 1 and start == 0
        self._exhausted = None
        batches = self._sampler.epoch_batches(
            shard, epoch=epoch, start=start, continues=continues, has_next=has_next
        )
        yield from self._maker.views(passing(Prefetched(batches)), image_size=image_size)
        self._exhausted = epoch
