"""The miner: an actor that searches hard negatives with the newest weights while the workers train (Xiong et al., 2021).

A pool of encoders embeds all documents into a bank, and the bank searches the nearest documents of each
query. The death of any of them costs fresh negatives, never the run: Ray restarts it, and the workers keep the last table.
"""

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, NamedTuple, final

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

from raycl.config import RunConfig
from raycl.config.schema import MinedConfig
from raycl.data.in_memory import Batch
from raycl.data.matches import Matches
from raycl.data.texts import Tokens
from raycl.errors import last_line
from raycl.evaluation.embed import embed
from raycl.models.build import build_towers
from raycl.models.registry import SideName
from raycl.models.towers import Tower, TwoTowers
from raycl.negatives.bank import Bank
from raycl.negatives.search import Neighbors
from raycl.tokenization import Vocabulary
from raycl.training.corpus import Corpus, GrowingCorpus, Images
from raycl.training.encoder_pool import Encoded, EncoderPool, Request, Weights
from raycl.training.mined import MinedTable
from raycl.training.pools import prepare_encoder
from raycl.training.transforms import ImageTransform

Numbers = NDArray[np.int64]

TEXTS_TOGETHER = 256  # that a tower embeds
# Rows that an encoder embeds in one request, with the same weights. It must answer in time, on a single CPU too.
_BLOCK, _BLOCK_TOKENS = 1_024, 32_768
_QUERIES_TOGETHER = 64  # that are searched, as in a call to a shard of the bank
_RETRY_S, _MAX_RETRY_S = 0.5, 30.0  # after a failure; longer after each of several without an encoder


class Published(NamedTuple):
    """The weights of a step; ``group`` names the worker group, whose steps may precede an earlier group's."""

    group: str
    step: int
    weights: Weights


class CorpusUpdate(NamedTuple):
    """The corpus of a stream: its rows as ``GrowingCorpus.to_bytes``, and itself as ``Corpus.to_bytes``."""

    rows: bytes
    corpus: bytes


class MinerUpdate(NamedTuple):
    """Answer of a miner: its process, its newest table, and that table's corpus of a stream, unless the caller has them.

    ``num_rows`` is the number of rows of the corpus of a stream.
    """

    incarnation: str
    table: MinedTable | None
    corpus_update: CorpusUpdate | None = None
    num_rows: int = 0


class _OutdatedError(Exception):
    """Another worker group began: the weights in use are not in its past."""


Rows = Tokens | Batch  # texts or images
# Embeds blocks of rows in order, of queries or documents (``key``).
EncodeBlocks = Callable[[SideName, Iterator[Rows]], Iterator[Encoded]]


@final
class CorpusEncoder:
    """The towers of a run in evaluation mode, in an actor of the pool; images are whole, as in the evaluation."""

    def __init__(self, config: RunConfig, vocabulary: Vocabulary, network: nn.Module | None = None) -> None:
        """Build the towers, on the GPU if this process has one."""
        config, self._device = prepare_encoder(config, config.negatives.mined)
        self._precision = config.tower_precision if self._device.type == "cuda" else "float32"
        self._towers = build_towers(config, vocabulary, network).to(self._device).eval()
        self._images = ImageTransform.of(config) if config.data.kind == "image_text" else None

    def load(self, weights: Weights) -> None:
        """Use these weights from now on."""
        self._towers.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def encode(self, rows: Rows, *, side: SideName) -> NDArray[np.float32]:
        """Return the embeddings [num_rows, dim] of queries or documents."""
        tower = self._towers
        if isinstance(tower, TwoTowers):
            tower = tower.query if side == "query" else tower.key_tower
        if isinstance(rows, Tokens):
            return self._encode_texts(tower, rows)
        assert self._images is not None, "only captioned images have images"
        images = self._images.plain(rows).on(self._device)
        return embed(tower, [images], precision=self._precision).numpy()

    def _encode_texts(self, tower: Tower, texts: Tokens) -> NDArray[np.float32]:
        order = np.argsort(texts.lengths, kind="stable")  # texts of similar lengths need less padding
        batches = (
            torch.from_numpy(texts.take(order[start : start + TEXTS_TOGETHER]).padded()).to(self._device)
            for start in range(0, len(order), TEXTS_TOGETHER)
        )
        found = embed(tower, batches, precision=self._precision).numpy()
        rows = np.empty_like(found)
        rows[order] = found
        return rows


@final
class Search:
    """Embed the rows of a corpus and search hard negatives, without Ray except for the shards of ``bank``.

    The slots of the bank are in the order of the ids ``bank_id``.
    """

    def __init__(self, settings: MinedConfig, bank: Bank, bank_id: Numbers, encode: EncodeBlocks) -> None:
        self._settings, self._bank, self._encode = settings, bank, encode
        self._bank_id = np.sort(bank_id)

    def use(self, corpus: Corpus, matches: Matches[int]) -> None:
        """Search this corpus from now on: a larger one of the same stream keeps its rows in the bank."""
        self._corpus, self._matches = corpus, matches
        self._num_near = self._settings.candidates + matches.spare  # documents of each query
        self._slot = np.searchsorted(self._bank_id, corpus.bank_id)  # of each document
        self._pairs_of_query: dict[int, list[int]] = {}
        for pair, query in enumerate(corpus.positive[:, 0].tolist()):
            self._pairs_of_query.setdefault(query, []).append(pair)

    def embed_documents(self) -> None:
        """Replace the rows of all documents in the bank."""
        blocks = list(_in_blocks(np.arange(len(self._slot)), self._corpus.document))
        texts = (self._corpus.document.take(block) for block in blocks)
        for numbers, (rows, step, _) in zip(blocks, self._encode("key", texts), strict=True):
            self._bank.replace(self._slot[numbers], self._corpus.bank_id[numbers], rows, step)

    def mine(self) -> MinedTable:
        """Search the documents near all queries, and return the hard negatives of all pairs."""
        shape = len(self._corpus.positive), self._settings.candidates
        document, step_of = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
        blocks = list(_in_blocks(np.unique(self._corpus.positive[:, 0]), self._corpus.query))
        taken = (self._corpus.query.take(block) for block in blocks)
        steps = []
        for queries, (rows, step, _) in zip(blocks, self._encode("query", taken), strict=True):
            steps.append(step)
            for pair, mined, steps_of_rows in self._mine_block(queries, rows):
                document[pair, : len(mined)], step_of[pair, : len(mined)] = mined, steps_of_rows
        return MinedTable(document=document, step=step_of, query_step=min(steps))

    def _mine_block(
        self, queries: Numbers, rows: NDArray[np.float32]
    ) -> Iterator[tuple[int, list[int], list[int]]]:
        """Yield each pair of these queries, its hard negatives, and the steps of their rows."""
        corpus, settings = self._corpus, self._settings
        matched = [corpus.matches_of(query) for query in queries]
        similarity = self._similarity_of_pairs(queries, rows)
        for place, found in self._nearest(rows, np.array([len(each) for each in matched])):
            query, near, step = queries[place], *self._without(matched[place], found)
            for pair in self._pairs_of_query[query]:
                mined = self._matches.hard_negatives(
                    pair,
                    near,
                    similarity[pair],
                    num_negatives=settings.candidates,
                    max_relative_score=settings.max_relative_score,
                ).mined
                yield pair, mined, [step[place] for place in mined]

    def _nearest(
        self, rows: NDArray[np.float32], num_matches: NDArray[np.int64]
    ) -> Iterator[tuple[int, Neighbors]]:
        """Yield the place of each query and its nearest documents, enough of them without its matches."""
        # A call answers all queries with as many documents: queries of many matches are searched among themselves.
        order = np.argsort(num_matches, kind="stable")
        for start in range(0, len(order), _QUERIES_TOGETHER):
            places = order[start : start + _QUERIES_TOGETHER]
            k = min(self._num_near + int(num_matches[places].max()), len(self._bank_id))
            yield from zip(places, self._bank.nearest(rows[places], k), strict=True)

    def _without(
        self, known: NDArray[np.int64], found: Neighbors
    ) -> tuple[list[tuple[int, float]], dict[int, int]]:
        """Return the nearest documents that are not known matches, with similarities, and the step of each.

        The bank may hold rows of a stream that a miner before this one got: they have no number.
        """
        documents = self._corpus.documents_of(found.sample_id)
        kept = np.flatnonzero((documents >= 0) & ~np.isin(documents, known))[: self._num_near]
        numbers = documents[kept].tolist()
        near = list(zip(numbers, found.similarity[kept].tolist(), strict=True))
        return near, dict(zip(numbers, found.step[kept].tolist(), strict=True))

    def _similarity_of_pairs(self, queries: Numbers, rows: NDArray[np.float32]) -> dict[int, float]:
        """Return the cosine of each pair of these queries; -inf, which no document is below, without its document."""
        pairs = [pair for query in queries for pair in self._pairs_of_query[query]]
        positive = self._corpus.positive[pairs]
        documents, place = np.unique(positive[:, 1], return_inverse=True)
        held = self._bank.get(self._corpus.bank_id[documents])
        query_rows = rows[np.searchsorted(queries, positive[:, 0])]
        cosine = (held.rows[place].astype(np.float32) * query_rows).sum(1)
        cosine[held.step[place] < 0] = -np.inf
        return dict(zip(pairs, cosine.tolist(), strict=True))


def _in_blocks(numbers: Numbers, rows: Tokens | Images) -> Iterator[Numbers]:
    """Yield the numbers of rows in order, in blocks of limited rows and tokens; a longer text is a block."""
    ends, start = np.cumsum(rows.lengths[numbers]), 0
    while start < len(numbers):
        before = ends[start - 1] if start else 0
        fitting = int(np.searchsorted(ends, before + _BLOCK_TOKENS, side="right"))
        stop = min(max(fitting, start + 1), start + _BLOCK)
        yield numbers[start:stop]
        start = stop


@final
class Miner:
    """The actor: a thread mines with the newest weights, as often as there are new ones; a pool embeds.

    The corpus and its matches are fixed, or None for a ``stream``, whose rows come by ``add``. ``bank_id`` are the ids
    in the bank.
    """

    def __init__(
        self,
        settings: MinedConfig,
        corpus: Corpus | None,
        matches: Matches[int] | None,
        bank: Bank,
        bank_id: Numbers,
        pool: EncoderPool,
        coordinator: Any,
        stream: GrowingCorpus | None = None,
    ) -> None:
        self._search, self._stream = Search(settings, bank, bank_id, self._encode), stream
        self._corpus = corpus
        if corpus is not None and matches is not None:
            self._search.use(corpus, matches)
        self._pool, self._num_ahead = pool, 2 * settings.actors
        self._num_candidates = settings.candidates
        self._coordinator = coordinator
        self._incarnation, self._num_tables = uuid.uuid4().hex, 0
        self._published: Published | None = None
        self._in_use: Published | None = None
        self._attempt = ""  # of the pool, for this worker group
        self._table: MinedTable | None = None
        self._corpus_update: CorpusUpdate | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="mining", daemon=True).start()

    def publish(self, group: str, step: int, weights: Weights) -> None:
        """Mine with these weights from now on; a new worker group ends the search for an earlier one."""
        with self._changed:
            if self._published is not None and self._published.group != group:
                self._table = None
            self._published = Published(group, step, weights)
            self._changed.notify_all()

    def add(self, rows: pa.Table) -> None:
        """Add rows of the stream to the corpus of the next search."""
        assert self._stream is not None, "only a stream has further rows"
        self._stream.add(rows)

    def update_for(self, group: str, version: str, corpus_key: int = 0) -> MinerUpdate:
        """Return the newest table for this worker group, unless it is of this version.

        It comes with the corpus of a stream, unless that is the one with ``corpus_key``.
        """
        with self._changed:
            is_for_group = self._published is not None and self._published.group == group
            table = self._table if is_for_group else None
            if table is None or table.version == version:
                return MinerUpdate(self._incarnation, None)
            if self._corpus is None or self._corpus_update is None:
                return MinerUpdate(self._incarnation, table)
            corpus_update = None if self._corpus.key == corpus_key else self._corpus_update
            return MinerUpdate(self._incarnation, table, corpus_update, len(self._corpus.sample_id))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._published is not self._in_use)
            try:
                self._mine()
            except _OutdatedError:
                continue
            # The run must not end with its miner: it reports the failure, and mines with the next weights.
            except Exception as error:
                self._coordinator.add_notice.remote(
                    f"the miner failed and tries again with newer weights: {last_line(error)}"
                )
                time.sleep(_RETRY_S)

    def _mine(self) -> None:
        """Embed all documents, search all queries, and keep the table."""
        published = self._published
        assert published is not None, "the first weights were waited for"
        if self._in_use is None or self._in_use.group != published.group:
            self._attempt = self._pool.begin()
        self._use(published)
        corpus, corpus_update = self._corpus, self._corpus_update
        if self._stream is not None:
            built = self._stream.built()
            if built is None or len(built.corpus.document) <= self._num_candidates:
                return  # until further rows come
            if corpus is None or built.corpus.key != corpus.key:
                corpus = built.corpus
                corpus_update = CorpusUpdate(self._stream.to_bytes(), corpus.to_bytes())
                self._search.use(*built)
        self._search.embed_documents()
        table = self._search.mine()
        with self._changed:
            self._check_group()
            self._num_tables += 1
            self._corpus, self._corpus_update = corpus, corpus_update
            self._table = replace(table, version=f"{self._incarnation}-{self._num_tables}")

    def _use(self, published: Published) -> None:
        """Let the pool embed with these weights."""
        self._in_use = published
        self._pool.publish(published.weights, step=published.step, attempt=self._attempt)

    def _encode(self, side: SideName, blocks: Iterator[Rows]) -> Iterator[Encoded]:
        """Embed the blocks in order with the newest weights, some ahead of the others."""
        requests: deque[tuple[Rows, Request]] = deque()
        waited_s = 0.0
        for rows in chain(blocks, repeat(None, self._num_ahead)):
            published = self._check_group()
            if published is not self._in_use:
                self._use(published)
            if rows is not None:
                requests.append((rows, self._pool.encode(rows, side=side, waited_s=waited_s)))
            if requests and (rows is None or len(requests) > self._num_ahead):
                first, request = requests.popleft()
                encoded = request.encoded
                waited_s = request.waited_s
                yield encoded or self._encode_again(first, side)

    def _encode_again(self, rows: Rows, side: SideName) -> Encoded:
        """Ask until an encoder answers: they start or wait for resources, or the pool has lost all and the weights with them."""
        delay_s = _RETRY_S
        while True:
            with self._changed:
                self._changed.wait_for(self._is_outdated, timeout=delay_s)
            published = self._check_group()
            if delay_s > _RETRY_S:
                self._use(published)
            encoded = self._pool.encode(rows, side=side, waited_s=delay_s).encoded
            if encoded is not None:
                return encoded
            delay_s = min(2 * delay_s, _MAX_RETRY_S)

    def _is_outdated(self) -> bool:
        """Whether the newest weights are of another worker group than those in use."""
        published, in_use = self._published, self._in_use
        return published is None or in_use is None or published.group != in_use.group

    def _check_group(self) -> Published:
        """Return the newest weights; raises ``_OutdatedError`` if they are of another worker group."""
        published = self._published
        if published is None or self._is_outdated():
            raise _OutdatedError
        return published
