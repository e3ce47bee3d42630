"""Keys from a pool of actors: batches go there ahead of their use, and keys return with the step of their weights."""

import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import nn

from raycl.batchnorm import split_batchnorm
from raycl.config import RunConfig, Stage
from raycl.data.images import Pixels
from raycl.data.in_memory import Batch, pixels_of
from raycl.distributed import all_agree, num_workers, rank
from raycl.distributed.device_copy import StateDownload, upload, use_channels_last
from raycl.gradient_cache import embed_in_chunks
from raycl.models.build import build_towers
from raycl.tokenization import Vocabulary
from raycl.training.encoder_pool import EncoderPool, Request, Weights
from raycl.training.pools import prepare_encoder
from raycl.training.process import autocast
from raycl.training.train_state import EmbedConfig
from raycl.training.transforms import build_transform
from raycl.training.views import PoolKeys, stacked

MIXED_BATCHES = 4  # whose rows share the requests to the pool, if rows share BatchNorm statistics
_PURPOSE = 0x6B657973  # separates these draws from the orders of epochs, which hash (seed, epoch)


@final
class KeyEncoder:
    """The momentum encoder in an actor of the pool."""

    def __init__(self, config: RunConfig, vocabulary: Vocabulary | None, network: nn.Module | None) -> None:
        # Rows arrive in the object store's memory, which is read-only.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._config, self._device = prepare_encoder(config, config.momentum_encoder)
        self._transform = build_transform(config, None if vocabulary is None else vocabulary.tokenizer)
        self._tower = build_towers(config, vocabulary, network).requires_grad_(False).to(self._device)
        use_channels_last(self._tower)

    def load(self, weights: Weights) -> None:
        """Use these weights from now on."""
        self._tower.load_state_dict({name: torch.tensor(each) for name, each in weights.items()})

    @torch.no_grad()
    def encode(
        self,
        batch: Batch,
        *,
        views: Sequence[int],
        seed: int,
        image_size: int | None,
        rows_per_group: int | None,
        chunk_size: int | None,
    ) -> NDArray[np.float32]:
        """Return keys [num_views, batch, dim] of these views, as a worker encodes them.

        ``seed`` draws the dropout. The other arguments are settings of the stage.
        """
        transform = self._transform if image_size is None else self._transform.with_image_size(image_size)
        rows = stacked(*(transform.view(batch, number).on(self._device) for number in views))
        if rows_per_group is not None:
            split_batchnorm(self._tower, rows_per_group)
        torch.manual_seed(seed)
        with autocast(self._config.tower_precision, self._device):
            keys = (
                self._tower(rows)
                if chunk_size is None
                else embed_in_chunks(self._tower, rows, chunk_size=chunk_size)
            )
        return keys.unflatten(0, (len(views), -1)).cpu().numpy()


class _Part(NamedTuple):
    """Rows of a batch in a request: their places there, and in the batch."""

    request: Request
    in_request: NDArray[np.int64]
    in_batch: NDArray[np.int64]


@final
class KeyClient:
    """A worker's keys from the pool.

    If rows share BatchNorm statistics, the rows of ``MIXED_BATCHES`` successive batches are mixed at random in as many
    requests, so that keys are normalized with other rows than their queries. The last batches of an epoch are mixed
    among themselves, and a single one is not sent.
    """

    def __init__(self, pool: EncoderPool, config: RunConfig, device: torch.device) -> None:
        """``config`` has the number of workers of this group."""
        settings = config.momentum_encoder
        self._pool, self._config, self._device = pool, config, device
        self._max_age, self._ahead, self._every = settings.max_age, settings.ahead, settings.publish_every
        self._num_mixed = MIXED_BATCHES if config.has_batchnorm else 1
        # Workers that encode a batch together must agree that they do.
        self._agree = config.batchnorm in ("synchronized", "shuffled") and num_workers() > 1
        full_views = config.views[0].count
        self._views = range(full_views) if config.has_prediction_head else (1,)
        self._pending: deque[list[_Part]] = deque()
        self._waited_s, self._num_encoders = 0.0, 0
        self._attempt, self._publication = "", None
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copy: StateDownload | None = None  # of the weights before this step
        self._copied_step = -1
        self._ages: list[NDArray[np.int64]] = []
        self._num_own = 0

    def begin(self, encoder: nn.Module, *, step: int) -> None:
        """Publish the momentum encoder as it is before this step, in place of all weights before; for all workers."""
        if rank() == 0:
            self._attempt = self._pool.begin()
            self._start_copy(encoder, step)
            self._send_copy()

    def publish(self, encoder: nn.Module, *, step: int) -> None:
        """Publish the momentum encoder as it is before this step, if that is due; rank 0 publishes.

        On a GPU the copy to the host continues beside the next step, and its weights are sent after that step.
        """
        if rank() != 0:
            return
        self._send_arrived()
        is_free = self._copy is None and (
            self._publication is None or ray.wait([self._publication], timeout=0)[0]
        )
        if is_free and step - self._copied_step >= self._every:
            self._start_copy(encoder, step)
            self._send_arrived()

    def sent_ahead(
        self, batches: Iterator[Batch], stage: Stage, *, epoch: int, start: int
    ) -> Iterator[Batch]:
        """Yield these batches, from batch ``start`` of an epoch on; each goes to the pool some steps before."""
        embed = EmbedConfig.of(self._config, stage)
        settings = {
            "image_size": stage.image_size,
            "rows_per_group": embed.rows_per_group,
            "chunk_size": embed.chunk_size,
        }
        self._pending.clear()
        drawn: deque[tuple[Batch, list[_Part]]] = deque()
        window: list[Batch] = []
        number = start
        for number, batch in enumerate(batches, start=start):
            window.append(batch)
            if len(window) == self._num_mixed:
                drawn.extend(self._send(window, settings, (epoch, number)))
                window = []
            # A worker draws batches two steps before their use.
            if len(drawn) + len(window) >= self._ahead + self._num_mixed - 2:
                yield self._next(drawn)
        drawn.extend(self._send(window, settings, (epoch, number)))
        while drawn:
            yield self._next(drawn)

    def take(self, step: int) -> PoolKeys | None:
        """Return the keys of the next batch in order, used in this step; None if some are missing or too old."""
        parts = self._pending.popleft()
        found = self._arrived(parts, step)
        if self._agree and not all_agree(found is not None):
            found = None
        if found is None:
            self._num_own += 1
            return None
        self._ages.append(step - found[1])
        keys, stamps = upload([torch.from_numpy(each) for each in found], self._device)
        return PoolKeys(keys, stamps)

    def metrics(self) -> dict[str, float]:
        """Return the ages of this worker's keys since the last call, in steps, and how many it encoded itself."""
        ages, num_own = self._ages, self._num_own
        self._ages, self._num_own = [], 0
        if not ages and not num_own:
            return {}
        # A key that the worker encodes has the age 0.
        return {
            "key_age_mean": float(sum(each.mean() for each in ages)) / (len(ages) + num_own),
            "key_age_max": float(max((each.max() for each in ages), default=0)),
            "own_keys_fraction": num_own / (len(ages) + num_own),
            "key_encoders": float(self._num_encoders),
        }

    def _start_copy(self, encoder: nn.Module, step: int) -> None:
        self._copy, self._copied_step = StateDownload(encoder.state_dict(), self._side_stream), step

    def _send_arrived(self) -> None:
        """Send the weights on their way to the host, if they are there."""
        if self._copy is not None and self._copy.has_arrived():
            self._send_copy()

    def _send_copy(self) -> None:
        assert self._copy is not None, "a copy is started before it is sent"
        weights = {name: each.numpy() for name, each in self._copy.arrived().items()}
        self._publication = self._pool.publish(weights, step=self._copied_step, attempt=self._attempt)
        self._copy = None

    def _next(self, drawn: deque[tuple[Batch, list[_Part]]]) -> Batch:
        batch, parts = drawn.popleft()
        self._pending.append(parts)
        return batch

    def _send(
        self, window: Sequence[Batch], settings: Mapping[str, int | None], position: tuple[int, int]
    ) -> Iterator[tuple[Batch, list[_Part]]]:
        """Send the rows of these batches; yield each batch with its requests, none if it is not sent."""
        if len(window) < min(2, self._num_mixed):
            yield from ((batch, []) for batch in window)
            return
        rng = np.random.default_rng((_PURPOSE, self._config.seed, rank(), *position))
        size = len(window[0])
        order = np.arange(size) if len(window) == 1 else rng.permutation(len(window) * size)
        together = window[0] if len(window) == 1 else mixed(window, order)
        requests = []
        for begin in range(0, len(order), size):
            rows = together if len(window) == 1 else rows_of(together, slice(begin, begin + size))
            seed = int(rng.integers(2**63))
            how = {"views": self._views, "seed": seed, **settings}
            requests.append(self._pool.encode(rows, waited_s=self._waited_s, caller=rank(), **how))
            self._waited_s = 0.0
        place = order.argsort()  # of each row of the window among the requests
        for number, batch in enumerate(window):
            own = place[number * size : (number + 1) * size]
            parts = (_part(request, own, index, size) for index, request in enumerate(requests))
            yield batch, [part for part in parts if len(part.in_batch)]

    def _arrived(
        self, parts: Sequence[_Part], step: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]] | None:
        """Wait for the keys [num_views, local_batch, dim] and their steps [local_batch]."""
        keys: Any = None
        stamps = np.empty(sum(len(part.in_batch) for part in parts), np.int64)
        for part in parts:
            encoded = part.request.encoded
            self._waited_s, part.request.waited_s = self._waited_s + part.request.waited_s, 0.0
            self._num_encoders = 0 if encoded is None else encoded.num_encoders
            if encoded is None or not 0 <= step - encoded.step <= self._max_age:
                return None
            if keys is None:
                num_views, _, dim = encoded.embeddings.shape
                keys = np.empty((num_views, len(stamps), dim), np.float32)
            keys[:, part.in_batch] = encoded.embeddings[:, part.in_request]
            stamps[part.in_batch] = encoded.step
        return None if keys is None else (keys, stamps)


def _part(request: Request, places: NDArray[np.int64], index: int, size: int) -> _Part:
    """Return the rows of a batch, at these places of the window, that are in the request of this index."""
    in_batch = np.flatnonzero(places // size == index)
    return _Part(request, places[in_batch] % size, in_batch)


def mixed(batches: Sequence[Batch], order: NDArray[np.int64]) -> Batch:
    """Return the rows of batches of images in this order, without labels and weights."""
    pixels = [pixels_of(batch) for batch in batches]
    images = np.concatenate([each.images for each in pixels])[order]
    aspect = np.concatenate([each.aspect for each in pixels])[order]
    sample_id = np.concatenate([batch.sample_id for batch in batches])[order]
    label = np.full(len(order), -1)
    epoch = np.concatenate([np.full(len(batch), batch.epoch) for batch in batches])[order]
    contents = {"image": Pixels(images, aspect)}
    return Batch(contents=contents, sample_id=sample_id, label=label, epoch=epoch)


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Return consecutive rows of a batch of images."""
    pixels = pixels_of(batch)
    contents = {"image": Pixels(pixels.images[rows], pixels.aspect[rows])}
    epoch = batch.epoch if isinstance(batch.epoch, int) else batch.epoch[rows]
    return Batch(contents=contents, sample_id=batch.sample_id[rows], label=batch.label[rows], epoch=epoch)
