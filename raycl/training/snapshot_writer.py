"""Embedding snapshots of a run for its report: embeddings and similarities of some samples.

The samples are held-out rows or, without any, training rows. A streamed run without evaluation
keeps no rows in memory and writes no snapshot.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from raycl.data.images import Pixels
from raycl.data.in_memory import Batch, InMemoryDataset
from raycl.data.texts import TokenLists, Tokens
from raycl.distributed import gather_detached, num_workers, rank
from raycl.embedding_snapshot import (
    FIRST,
    LATEST,
    EmbeddingSnapshot,
    ProbeSet,
    Similarities,
    count_cosines,
    write_probe_set,
    write_snapshot,
)
from raycl.evaluation.embed import embed
from raycl.models.towers import Tower, Towers, TwoTowers
from raycl.storage import Place
from raycl.tokenization import Vocabulary
from raycl.training.job import Job
from raycl.training.views import Draft, Transform

BATCH_SIZE = 256
NUM_COMPARED = 400  # samples whose views are compared, each with all others
THUMBNAIL = 64  # pixels of the longer side


@final
@dataclass(frozen=True, kw_only=True)
class SnapshotWriter:
    """Embeds the rows at ``positions``; all workers call it together, and the first one writes."""

    rows: InMemoryDataset
    positions: NDArray[np.int64]
    drawing: Transform
    output: Place
    vocabulary: Vocabulary | None
    held_out: bool
    seed: int

    def write(self, towers: Towers, device: torch.device, *, step: int) -> None:
        """Write the snapshot before the first step, or replace the latest one; raises ``StorageError``."""
        number = len(self.positions)
        if isinstance(towers, TwoTowers):
            embedding, key = self._both(towers, number, device)
            compared, key_id = (embedding, key), self._key_ids(number, device)
        else:
            inputs = self._inputs(self.drawing.plain, number, device)
            embedding, key = self._gather(embed(towers.encoder, inputs), number, device), None
            few = min(NUM_COMPARED, number)
            compared, key_id = self._two_views(towers, few, device), self._key_ids(few, device)
        if rank() != 0:
            return
        if step == 0:
            write_probe_set(self.output, self._probe_set())
        snapshot = EmbeddingSnapshot(
            step=step,
            embedding=embedding.half().numpy(),
            key=None if key is None else key.half().numpy(),
            similarities=_similarities(*compared, key_id),
        )
        write_snapshot(self.output, FIRST if step == 0 else LATEST, snapshot)

    def _both(self, towers: TwoTowers, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the embeddings of the queries and of their keys."""
        query = embed(towers.query, self._inputs(self.drawing.plain, number, device))
        key = embed(towers.key_tower, self._inputs(self.drawing.plain_key, number, device))
        return self._gather(query, number, device), self._gather(key, number, device)

    def _two_views(self, tower: Tower, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the embeddings of two views, as in the loss except that BatchNorm uses its running statistics."""
        torch.manual_seed(hash((self.seed, rank())) % 2**63)  # views may differ by dropout alone
        with torch.no_grad(), _eval_with_dropout(tower):
            first, second = (
                torch.cat(
                    [tower(inputs) for inputs in self._inputs(partial(self._view, which), number, device)]
                )
                for which in (0, 1)
            )
        return self._gather(first, number, device), self._gather(second, number, device)

    def _view(self, which: int, batch: Batch) -> Draft:
        return self.drawing.view(batch, which)

    def _inputs(self, draw: Callable[[Batch], Draft], number: int, device: torch.device) -> Iterator[Tensor]:
        """Make the inputs of this worker's share of the first rows."""
        return (draw(batch).on(device) for batch in self._share(number))

    def _share(self, number: int) -> Iterator[Batch]:
        """Yield this worker's share of the first rows, equally many on each worker: the last may wrap around."""
        share = np.arange(-(-number // num_workers())) * num_workers() + rank()
        for start in range(0, len(share), BATCH_SIZE):
            chosen = share[start : start + BATCH_SIZE] % number
            yield self.rows.take(self.positions[chosen])

    def _gather(self, rows: Tensor, number: int, device: torch.device) -> Tensor:
        """Return the unit rows [number, dim] of all shares on the CPU, in the order of the samples."""
        return self._in_order(F.normalize(rows.float(), dim=1).to(device), number)

    def _key_ids(self, number: int, device: torch.device) -> Tensor:
        own = torch.cat(list(map(self.drawing.plain_key_id, self._share(number))))
        return self._in_order(own.to(device), number)

    def _in_order(self, own: Tensor, number: int) -> Tensor:
        shares = gather_detached(own).unflatten(0, (num_workers(), -1))
        return shares.transpose(0, 1).flatten(0, 1)[:number].cpu()

    def _probe_set(self) -> ProbeSet:
        batch = self.rows.take(self.positions)
        contents: dict[str, list[bytes] | list[str]] = {}
        for role, content in batch.contents.items():
            if isinstance(content, Pixels):
                pictures = zip(content.images, content.aspect, strict=True)
                contents[role] = [_thumbnail(pixels, float(aspect)) for pixels, aspect in pictures]
            elif self.vocabulary is not None and role in ("text", "caption", "query", "document"):
                contents[role] = self.vocabulary.tokenizer.decode(_first_texts(content))
        return ProbeSet(
            sample_id=batch.sample_id, label=batch.label, contents=contents, held_out=self.held_out
        )


def open_snapshot_writer(job: Job, rows: InMemoryDataset, drawing: Transform) -> SnapshotWriter | None:
    """Choose the samples, the same on all workers; None if the run wants no snapshot or keeps no rows in memory."""
    held_out = rows.where(job.holdout.is_test)
    is_held_out = len(held_out) >= 2
    shown = held_out if is_held_out else rows.where(job.holdout.is_train)
    if not job.config.has_two_towers and len(labeled := shown.labeled()) >= 2:
        shown = labeled
    number = min(job.config.evaluation.num_snapshot_samples, len(shown))
    if number < 2:
        return None
    # Rows are sorted by id, which may be the order of their classes.
    positions = np.random.default_rng(job.config.seed).permutation(len(shown))[:number]
    return SnapshotWriter(
        rows=shown,
        positions=positions,
        drawing=drawing,
        output=job.output,
        vocabulary=job.vocabulary,
        held_out=is_held_out,
        seed=job.config.seed,
    )


@contextlib.contextmanager
def _eval_with_dropout(network: nn.Module) -> Iterator[None]:
    """Switch a network to evaluation mode, which leaves its state unchanged, except for its dropout."""
    modes = {module: module.training for module in network.modules()}
    for module in modes:
        module.training = isinstance(module, _DropoutNd)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _similarities(query: Tensor, key: Tensor, key_id: Tensor) -> Similarities:
    """Count the cosines of queries with their own keys, and with other keys that differ from these."""
    cosines = query @ key.T
    others = key_id[:, None] != key_id[None, :]
    return Similarities(
        positives=count_cosines(cosines.diagonal().numpy()), negatives=count_cosines(cosines[others].numpy())
    )


def _first_texts(content: object) -> list[NDArray[np.int32]]:
    if isinstance(content, TokenLists):
        content = content.picked(np.zeros(len(content), np.int64))
    assert isinstance(content, Tokens), "the column has texts"
    return np.split(content.values, np.cumsum(content.lengths)[:-1])


def _thumbnail(pixels: NDArray[np.uint8], aspect: float) -> bytes:
    """Return a small image with the proportions of the original."""
    side = min(THUMBNAIL, len(pixels))
    size = (side, max(1, round(side / aspect))) if aspect > 1 else (max(1, round(side * aspect)), side)
    picture = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
    if picture.size != size:
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    if side <= THUMBNAIL // 2:
        picture.save(stream, "PNG")  # lossless, since every pixel is visible
    else:
        picture.save(stream, "JPEG", quality=85)
    return stream.getvalue()
