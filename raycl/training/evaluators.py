"""Periodic evaluation during training: kNN on labels, recall on held-out pairs, and embedding snapshots."""

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from raycl.config import RunConfig
from raycl.data.images import Pixels
from raycl.data.in_memory import Batch, InMemoryDataset, ids_of, pixels_of, tokens_of
from raycl.data.matches import DistinctTexts
from raycl.data.texts import TokenLists, Tokens
from raycl.distributed import all_sum, gather_detached, num_workers, rank
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
from raycl.errors import DataError
from raycl.evaluation.embed import BASELINE_SIZE, are_gray, embed, raw_pixels
from raycl.evaluation.knn import knn_predict
from raycl.evaluation.search import Ranking, num_texts, of_documents, search
from raycl.models.towers import Tower, Towers, TwoTowers
from raycl.records import NOT_EVALUATED
from raycl.storage import Place
from raycl.tokenization import Tokenizer
from raycl.training.job import Job
from raycl.training.transforms import Draft, Transform

BATCH_SIZE = 256
MAX_PIXEL_ROWS = 10_000  # of the bank, for the baseline: a row of pixels has thousands of columns
NUM_COMPARED = 400  # samples whose views are compared, each with all others
THUMBNAIL = 64  # pixels of the longer side


@final
@dataclass(frozen=True, kw_only=True)
class KnnEvaluator:
    """Weighted kNN: training rows (``bank``) vote on the labels of held-out rows (``test``).

    The encoder computes in ``precision``; neighbors are found in float32.
    """

    bank: InMemoryDataset
    test: InMemoryDataset
    transform: Transform
    k: int = 200
    temperature: float = 0.07
    precision: str = "float32"

    def measure(self, towers: Towers, device: torch.device) -> dict[str, float]:
        """Return the kNN top-1 accuracy; every worker encodes and classifies its own share."""
        encoder = towers.towers[0].evaluated
        bank, bank_label = self._encode(encoder, self.bank, device)
        test, test_label = self._encode(encoder, self.test, device)
        bank, bank_label = gather_detached(bank), gather_detached(bank_label)
        return {"knn_top1": self._accuracy(test, test_label, bank, bank_label, device)}

    def baseline(self, device: torch.device) -> dict[str, float]:
        """Return the accuracy on raw pixels; every worker classifies its own share. Texts have no such baseline."""
        if "image" not in self.test.take(np.arange(1)).contents:
            return {}
        chosen = np.linspace(0, len(self.bank) - 1, min(len(self.bank), MAX_PIXEL_ROWS)).astype(np.int64)
        bank = self.bank.where(lambda ids: np.isin(np.arange(len(ids)), chosen))
        own = self.test.where(lambda ids: np.arange(len(ids)) % num_workers() == rank())
        _, height, width, channels = pixels_of(self.test.take(np.arange(1))).images.shape
        size = min(BASELINE_SIZE, height, width)
        channels = 1 if are_gray(bank, own) else channels
        pixels, test = (raw_pixels(rows, channels=channels, size=size) for rows in (bank, own))
        mean = pixels.mean(0)
        label, test_label = (torch.from_numpy(rows.label) for rows in (bank, own))
        return {"baseline_knn_top1": self._accuracy(test - mean, test_label, pixels - mean, label, device)}

    def _accuracy(
        self, test: Tensor, test_label: Tensor, bank: Tensor, bank_label: Tensor, device: torch.device
    ) -> float:
        """Return the accuracy over the shares of all workers."""
        predicted = knn_predict(test, bank, bank_label, k=self.k, temperature=self.temperature)
        return _fractions(device, predicted == test_label)[0]

    def _encode(
        self, encoder: nn.Module, rows: InMemoryDataset, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        share = _own_share(len(rows))
        inputs = (self.transform.plain(batch).on(device) for batch in _batches((rows, share)))
        representation = embed(encoder, inputs, precision=self.precision)
        return representation.to(device), torch.from_numpy(rows.label[share]).to(device)


@final
@dataclass(frozen=True, kw_only=True)
class RetrievalEvaluator:
    """Retrieval: each query of ``test`` is compared with the keys of ``test`` and ``bank``.

    Documents with an id in common are one, at the place of the best of its texts.
    """

    bank: InMemoryDataset
    test: InMemoryDataset
    transform: Transform
    tokenizer: Tokenizer | None = None  # decodes the texts of the baseline
    precision: str = "float32"

    def measure(self, towers: Towers, device: torch.device) -> dict[str, float]:
        """Return the fraction of queries whose own key, or one of the same document, is the nearest or among 10."""
        assert isinstance(towers, TwoTowers), "pairs have two towers"
        test, bank = ((rows, _own_share(len(rows))) for rows in (self.test, self.bank))
        query = self._embed(towers.query, self.transform.plain, device, test)
        key = self._embed(towers.key_tower, self.transform.plain_key, device, test, bank)
        key_id = torch.cat([self.transform.plain_key_id(batch) for batch in _batches(test, bank)])
        keys, ids = gather_detached(key.to(device)), gather_detached(key_id.to(device))
        # Keep each document once: duplicates would fill the first ranks.
        order = ids.argsort(stable=True)
        is_new = torch.ones_like(ids, dtype=torch.bool)
        is_new[1:] = ids[order][1:] != ids[order][:-1]
        chosen = order[is_new]
        texts, wanted = ids[chosen].cpu().numpy(), key_id[: len(query)].numpy()
        at_1, at_10 = self._recall(
            lambda k: search(query.to(device), keys[chosen], k=k), texts, wanted, device
        )
        return {"recall_at_10": at_10, "recall_at_1": at_1}

    def baseline(self, device: torch.device) -> dict[str, float]:
        """Return the recall of BM25 on the texts as the encoder sees them; each worker ranks for its own queries."""
        if self.tokenizer is None or "document" not in self.test.take(np.arange(1)).contents:
            return {}
        from raycl.evaluation.lexical_baselines import bm25_search  # which takes a second to import

        everything = [(rows, np.arange(len(rows))) for rows in (self.test, self.bank)]
        documents = Tokens.joined([tokens_of(batch, "document") for batch in _batches(*everything)])
        ids, first = np.unique(documents.text_id, return_index=True)
        own = list(_batches((self.test, _own_share(len(self.test)))))
        queries = Tokens.joined([tokens_of(batch, "query") for batch in own])
        wanted = np.concatenate([tokens_of(batch, "document").text_id for batch in own])
        texts = [self.tokenizer.decode(_first_texts(each)) for each in (queries, documents.take(first))]
        try:
            at_1, at_10 = self._recall(lambda k: bm25_search(*texts, k=k), ids, wanted, device)
        except DataError:  # no document has a word, on all workers alike
            return {}
        return {"baseline_recall_at_10": at_10, "baseline_recall_at_1": at_1}

    def _recall(
        self,
        find: Callable[[int], Ranking],
        texts: NDArray[np.int64],
        wanted: NDArray[np.int64],
        device: torch.device,
    ) -> list[float]:
        """Return the recall at 1 and 10 of the nearest texts; ``texts`` are their distinct ids, ascending."""
        document = np.arange(len(texts))
        if self._documents is not None:
            document = np.array(
                [self._documents.entity[self._documents.number[each]] for each in texts.tolist()]
            )
        # A query that finds too few documents, such as by words, finds -1.
        _, found = of_documents(find(num_texts(document, 10)), document, 10)
        is_right = torch.from_numpy(found == document[np.searchsorted(texts, wanted)][:, None])
        return _fractions(device, is_right[:, 0], is_right.any(1))

    @cached_property
    def _documents(self) -> DistinctTexts[int] | None:
        """The text ids of all documents, joined by the ids of the data; None without any."""
        if ids_of(self.test.take(np.arange(1)), "document_id") is None:
            return None
        sets = self.test, self.bank
        batches = _batches(*((rows.only("document_id"), np.arange(len(rows))) for rows in sets))
        found = [ids_of(batch, "document_id") for batch in batches]
        ids = [each for row in found if row is not None for each in row.tolist()]
        return DistinctTexts([each for rows in sets for each in rows.text_ids("document").tolist()], ids)

    def _embed(
        self, tower: Tower, draw: Callable[[Batch], Draft], device: torch.device, *parts: "_Part"
    ) -> Tensor:
        inputs = (draw(batch).on(device) for batch in _batches(*parts))
        return embed(tower, inputs, precision=self.precision)


def build_evaluator(
    job: Job, config: RunConfig, rows: InMemoryDataset, transform: Transform
) -> KnnEvaluator | RetrievalEvaluator | None:
    """Return the evaluator of the run; None unless the run is evaluated and each worker has a row.

    All workers call its methods together. ``measure`` returns the most important metric first, ``baseline`` the same
    ones without an encoder, if there is such a comparison.
    """
    if not job.is_evaluated:
        return None
    bank, test = job.load_evaluation_rows(rows)
    if not config.has_two_towers:
        bank, test = bank.labeled(), test.labeled()
    if config.data.kind == "pairs":
        test = _without_trained(job, test, rows.where(job.holdout.is_train))
    if reason := _why_not_evaluated(config, bank, test):
        if rank() == 0:
            measure = "recall" if config.has_two_towers else "kNN"
            job.coordinator.add_notice.remote(f"{reason}{NOT_EVALUATED}{measure}", once=True)
        return None
    precision = config.tower_precision
    if config.has_two_towers:
        return RetrievalEvaluator(
            bank=bank, test=test, transform=transform, tokenizer=job.tokenizer, precision=precision
        )
    k, temperature = config.evaluation.k, config.evaluation.temperature
    return KnnEvaluator(
        bank=bank, test=test, transform=transform, k=k, temperature=temperature, precision=precision
    )


def _why_not_evaluated(config: RunConfig, bank: InMemoryDataset, test: InMemoryDataset) -> str:
    """Return why these rows cannot be compared; empty if they can be."""
    if min(len(bank), len(test)) < num_workers():
        rows = "pairs" if config.has_two_towers else "labeled rows"
        workers = f"{num_workers()} worker{'s' if num_workers() > 1 else ''}"
        return (
            f"{len(test):,} held-out {rows} and {len(bank):,} to compare them with are too few for {workers}"
        )
    if not config.has_two_towers and len(classes := np.unique(bank.label)) == 1:
        return f"all labels are {classes[0]} (a negative one is missing)"
    return ""


def _without_trained(job: Job, test: InMemoryDataset, train: InMemoryDataset) -> InMemoryDataset:
    """Return the held-out pairs that are not training pairs, as the encoder sees them."""
    of_test, of_train = (
        np.stack([each.text_ids("query"), each.text_ids("document")], axis=1) for each in (test, train)
    )
    shared = of_train[np.isin(of_train[:, 0], of_test[:, 0])]  # few, so that Python compares them
    trained = set(map(tuple, shared.tolist()))
    is_new = np.array([tuple(pair) not in trained for pair in of_test.tolist()], np.bool_)
    if not is_new.all() and rank() == 0:
        job.coordinator.add_notice.remote(
            f"{(~is_new).sum():,} of {len(test):,} held-out pairs are training pairs as well, and are not evaluated",
            once=True,
        )
    return test.where(lambda _: is_new)


_Part = tuple[InMemoryDataset, NDArray[np.int64]]  # rows and positions in them


def _fractions(device: torch.device, *is_right: Tensor) -> list[float]:
    """Return the fraction of true values of each vector, over all workers; a worker's vectors have one length."""
    counts = torch.stack(
        [*(each.sum() for each in is_right), is_right[0].new_tensor(len(is_right[0]), dtype=torch.int64)]
    )
    *num_right, num_rows = all_sum(counts.to(device)).tolist()
    return [each / num_rows for each in num_right]


def _own_share(num_rows: int) -> NDArray[np.int64]:
    """Return this worker's rows, equally many on each worker, as required by the gather."""
    return np.arange(num_rows // num_workers()) * num_workers() + rank()


def _batches(*parts: _Part) -> Iterator[Batch]:
    for rows, positions in parts:
        for start in range(0, len(positions), BATCH_SIZE):
            yield rows.take(positions[start : start + BATCH_SIZE])


@final
@dataclass(frozen=True, kw_only=True)
class SnapshotWriter:
    """Writes embeddings and similarities of the rows at ``positions`` for the report.

    All workers call it together, and the first one writes.
    """

    rows: InMemoryDataset
    positions: NDArray[np.int64]
    transform: Transform
    output: Place
    tokenizer: Tokenizer | None
    held_out: bool
    seed: int

    def write(self, towers: Towers, device: torch.device, *, step: int) -> None:
        """Write the snapshot before the first step, or replace the latest one; raises ``StorageError``."""
        number = len(self.positions)
        plain, plain_key = self.transform.plain, self.transform.plain_key
        if isinstance(towers, TwoTowers):
            embedding = self._embed(towers.query, plain, number, device)
            key = self._embed(towers.key_tower, plain_key, number, device)
            compared, num_compared = (embedding, key), number
        else:
            embedding, key = self._embed(towers.evaluated, plain, number, device), None
            num_compared = min(NUM_COMPARED, number)
            compared = self._two_views(towers, num_compared, device)
        key_id = torch.cat(list(map(self.transform.plain_key_id, self._share(num_compared))))
        similarities = _similarities(*compared, _in_order(key_id.to(device), num_compared))
        if rank() != 0:
            return
        if step == 0:
            write_probe_set(self.output, self._probe_set())
        snapshot = EmbeddingSnapshot(
            step=step,
            embedding=embedding.half().numpy(),
            key=None if key is None else key.half().numpy(),
            similarities=similarities,
        )
        write_snapshot(self.output, FIRST if step == 0 else LATEST, snapshot)

    def _embed(
        self, encoder: nn.Module, draw: Callable[[Batch], Draft], number: int, device: torch.device
    ) -> Tensor:
        """Return the unit embeddings [number, dim] of the first rows, on the CPU."""
        inputs = (draw(batch).on(device) for batch in self._share(number))
        return _in_order(F.normalize(embed(encoder, inputs), dim=1).to(device), number)

    def _two_views(self, tower: Tower, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the embeddings of two views, as in the loss except that BatchNorm uses its running statistics."""
        torch.manual_seed(hash((self.seed, rank())) % 2**63)  # views may differ by dropout alone
        views = []
        with torch.no_grad(), _eval_with_dropout(tower):
            for which in (0, 1):
                inputs = (self.transform.view(batch, which).on(device) for batch in self._share(number))
                own = torch.cat([tower(each) for each in inputs])
                views.append(_in_order(F.normalize(own.float(), dim=1), number))
        return views[0], views[1]

    def _share(self, number: int) -> Iterator[Batch]:
        """Yield this worker's share of the first rows, equally many on each worker: the last may wrap around."""
        share = np.arange(-(-number // num_workers())) * num_workers() + rank()
        return _batches((self.rows, self.positions[share % number]))

    def _probe_set(self) -> ProbeSet:
        batch = self.rows.take(self.positions)
        contents: dict[str, list[bytes] | list[str]] = {}
        for role, content in batch.contents.items():
            if isinstance(content, Pixels):
                pictures = zip(content.images, content.aspect, strict=True)
                contents[role] = [_thumbnail(pixels, float(aspect)) for pixels, aspect in pictures]
            elif self.tokenizer is not None and role in ("text", "caption", "query", "document"):
                contents[role] = self.tokenizer.decode(_first_texts(content))
        return ProbeSet(
            sample_id=batch.sample_id, label=batch.label, contents=contents, held_out=self.held_out
        )


def build_snapshot_writer(job: Job, rows: InMemoryDataset, transform: Transform) -> SnapshotWriter | None:
    """Choose held-out rows or, without any, training rows, the same on all workers.

    Returns None if the run wants no snapshot or, as a stream without evaluation, keeps no rows in memory.
    """
    _, held_out = job.load_evaluation_rows(rows)
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
        transform=transform,
        output=job.output,
        tokenizer=job.tokenizer,
        held_out=is_held_out,
        seed=job.config.seed,
    )


def _in_order(own: Tensor, number: int) -> Tensor:
    """Return the rows of all workers' shares on the CPU, in the order of the samples."""
    shares = gather_detached(own).unflatten(0, (num_workers(), -1))
    return shares.transpose(0, 1).flatten(0, 1)[:number].cpu()


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
