"""The start of a miner by the driver, and the workers' exchange with it: weights for tables of hard negatives."""

import contextlib
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayError
from torch import Tensor

from raycl.data.in_memory import InMemoryDataset
from raycl.distributed import all_sum, rank
from raycl.models.towers import Towers
from raycl.negatives.bank import Bank
from raycl.ray_runtime import helper_actor, kill_actors, without_stderr
from raycl.training.corpus import Corpus, GrowingCorpus, corpus_of_run, table_of_bytes, unknown
from raycl.training.encoder_pool import EncoderPool, start_pool
from raycl.training.job import Job
from raycl.training.mined import MinedNegatives, MinedTable
from raycl.training.miner import CorpusEncoder, CorpusUpdate, Miner, MinerUpdate

_ASK_EVERY_S = 0.5
_SHARED_BYTES = 64 * 2**20


def read_corpus(job: Job) -> tuple[ray.ObjectRef, ray.ObjectRef, NDArray[np.int64]]:
    """Return references to the corpus of the run's training rows and to its matches, and the ids of its documents."""

    def build(job: Job) -> tuple[Any, Any, NDArray[np.int64]]:
        assert job.tokenizer is not None, "documents are texts, which have a tokenizer"
        load = partial(_training_rows, job)
        built = corpus_of_run(job.config, job.tokenizer, load, load())
        for line in built.matches.notices() if job.config.data.kind == "pairs" else []:
            job.coordinator.add_notice.remote(line)
        return built.corpus, built.matches, built.corpus.bank_id

    task: Any = ray.remote(num_cpus=0, num_returns=3)(build)
    corpus, matches, ids = task.remote(job)
    return corpus, matches, ray.get(ids)


def _training_rows(job: Job) -> InMemoryDataset:
    return job.load_rows()[0].where(job.holdout.is_train)


@contextlib.contextmanager
def start_miner(
    job: Job,
    matches: ray.ObjectRef | None,
    bank: Bank,
    bank_id: NDArray[np.int64],
    *,
    actors: tuple[int, int],
) -> Iterator[tuple[Any, EncoderPool]]:
    """Start the miner, which Ray restarts if it dies, and its pool of encoders, and end them afterwards.

    ``bank_id`` are the ids in the bank; the job's corpus and its ``matches`` are None for a stream. The pool has the
    fewest and the most ``actors``.
    """
    mined, coordinator = job.config.negatives.mined, job.coordinator
    assert job.vocabulary is not None, "documents are texts, which have a vocabulary"
    build = partial(CorpusEncoder, job.config, job.vocabulary, job.network)
    with start_pool(build, mined, lambda text: coordinator.add_notice.remote(text), actors=actors) as pool:
        actor = helper_actor(Miner, max_restarts=-1)
        stream = None if job.stream is None else GrowingCorpus(*job.stream_corpus())
        # Ray's core prints that arguments with references must live: they do, as long as this driver.
        with without_stderr():
            miner = actor.remote(mined, job.corpus, matches, bank, bank_id, pool, coordinator, stream)
        try:
            yield miner, pool
        finally:
            kill_actors(miner)


@final
class MinerClient:
    """A worker's exchange with the miner; every worker makes the calls, and rank 0 speaks for all of them.

    It never waits for the miner. All workers take the same table after the same step. Each worker sends the miner the
    rows of a stream that it reads, unless the corpus has them.
    """

    def __init__(self, miner: Any, mined: MinedNegatives, *, refresh: int, device: torch.device) -> None:
        self._miner, self._mined, self._refresh, self._device = miner, mined, refresh, device
        self._adding: ray.ObjectRef | None = None
        self._added = pa.table({})  # the rows that are sent
        self._group = uuid.uuid4().hex
        self._asked: ray.ObjectRef | None = None
        self._asked_at = 0.0
        self._sending: ray.ObjectRef | None = None
        self._newest: MinedTable | None = None
        self._corpus_update: CorpusUpdate | None = None
        self._corpus = mined.corpus  # of a stream, of the newest table
        self._version = self._incarnation = ""
        self._num_restarts = 0

    def begin(self, step: int, towers: Towers) -> None:
        """Send the rows of a stream in the checkpoint, if any, and the weights."""
        self._send_rows()
        self.publish(step, towers)

    def after_step(self, step: int, towers: Towers) -> None:
        """Publish the weights after ``step`` steps and take the newest table, every ``refresh`` steps; collective."""
        self._send_passed()
        if rank() == 0:
            self._ask()
        if step % self._refresh == 0:
            self.publish(step, towers)
            self._share()

    def publish(self, step: int, towers: Towers) -> None:
        """Send the weights, unless the miner has not got the last ones yet; only rank 0 does."""
        if rank() != 0 or (self._sending is not None and not _is_ready(self._sending)):
            return
        weights = {name: value.detach().cpu().numpy() for name, value in towers.state_dict().items()}
        self._sending = self._miner.publish.remote(self._group, step, ray.put(weights))

    def metrics(self, *, step: int) -> dict[str, float]:
        """Return the ages of this worker's mined negatives at this step, and the restarts of the miner."""
        return self._mined.metrics(step=step) | {"miner_restarts": float(self._num_restarts)}

    def _ask(self) -> None:
        """Collect the answer of the miner, if it is there, and ask for a newer table."""
        if self._asked is not None and _is_ready(self._asked):
            with contextlib.suppress(RayError):  # a dead miner: it is asked again
                self._note(ray.get(self._asked))  # pyright: ignore[reportArgumentType]
            self._asked = None
        if self._asked is None and time.monotonic() - self._asked_at > _ASK_EVERY_S:
            self._asked_at = time.monotonic()
            known = (self._corpus.key,) if self._corpus is not None and self._mined.grows else ()
            self._asked = self._miner.update_for.remote(self._group, self._version, *known)

    def _note(self, update: MinerUpdate) -> None:
        if update.incarnation != self._incarnation:
            self._num_restarts += self._incarnation != ""
            self._send_rows()
        self._incarnation = update.incarnation
        if update.table is None:
            return
        self._version = update.table.version
        if update.corpus_update is not None:
            corpus = Corpus.from_bytes(update.corpus_update.corpus)
            if self._corpus is not None and update.num_rows < len(self._corpus.sample_id):
                self._send_rows()  # of a new miner, which has not got all rows yet
                return
            self._corpus_update, self._corpus = update.corpus_update, corpus
        self._newest = update.table

    def _send_rows(self) -> None:
        """Send a miner that may have none the rows of a stream that are known; only rank 0 has them."""
        rows = self._mined.rows if self._corpus_update is None else self._corpus_update.rows
        if rows is not None:
            self._miner.add.remote(table_of_bytes(rows))

    def _send_passed(self) -> None:
        """Send the miner the rows of a stream that passed, unless it has not got the last ones yet."""
        passed = self._mined.passed
        if self._adding is not None:
            if not _is_ready(self._adding):
                return
            try:
                ray.get(self._adding)
            except RayError:  # a dead miner: its successor gets them
                passed.appendleft(self._added)
            self._adding = None
        if not passed:
            return
        corpus = self._mined.corpus
        known = np.empty(0, np.int64) if corpus is None else corpus.sample_id
        rows = unknown(pa.concat_tables([passed.popleft() for _ in range(len(passed))]), known)
        if rows.num_rows:
            self._added, self._adding = rows, self._miner.add.remote(rows)

    def _share(self) -> None:
        """Take the newest table of rank 0, if it has a new one; collective."""
        newest, self._newest = self._newest, None
        corpus_update = None if newest is None else self._corpus_update
        query_step = self._sum_of_first(torch.tensor([-1 if newest is None else newest.query_step]))
        if int(query_step) < 0:
            return
        corpus = self._share_corpus(corpus_update) or self._mined.corpus
        assert corpus is not None, "a table has a corpus"
        shape = 2, len(corpus.positive), self._mined.num_candidates
        both = torch.zeros(shape, dtype=torch.int32)
        if newest is not None:
            both = torch.from_numpy(np.stack([newest.document, newest.step]))
        document, step = self._sum_of_first(both).numpy()
        self._mined.use(MinedTable(document=document, step=step, query_step=int(query_step)), corpus)

    def _share_corpus(self, update: CorpusUpdate | None) -> Corpus | None:
        """Take the corpus of a stream that came with the table of rank 0, if it is another one; collective."""
        if not self._mined.grows:
            return None
        size = int(self._sum_of_first(torch.tensor([0 if update is None else len(update.corpus)])))
        if size == 0:
            return None
        sent = torch.zeros(size, dtype=torch.uint8)
        if update is not None:
            sent = torch.frombuffer(bytearray(update.corpus), dtype=torch.uint8)
            self._mined.rows = update.rows
        self._corpus_update = None
        return Corpus.from_bytes(self._sum_of_first(sent).numpy().tobytes())

    def _sum_of_first(self, value: Tensor) -> Tensor:
        """Return the value of rank 0 on every worker, in the host's memory; the device holds a part of it at a time."""
        first = torch.empty(value.numel(), dtype=value.dtype)
        size = _SHARED_BYTES // value.element_size()
        for part, into in zip(value.reshape(-1).split(size), first.split(size), strict=True):
            own = part if rank() == 0 else torch.zeros_like(part)
            into.copy_(all_sum(own.to(self._device)))
        return first.reshape(value.shape)


def _is_ready(reference: ray.ObjectRef) -> bool:
    return bool(ray.wait([reference], timeout=0, fetch_local=False)[0])
