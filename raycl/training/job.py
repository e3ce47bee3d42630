"""The job that the driver passes to a group of workers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray
from torch import nn

from raycl.config import RunConfig
from raycl.data.codecs import Formats
from raycl.data.columns import ColumnNames
from raycl.data.in_memory import InMemoryDataset
from raycl.data.split import Holdout
from raycl.data.streaming import StreamingSampler
from raycl.errors import DataError
from raycl.lease import Lease
from raycl.negatives.bank import Bank
from raycl.records import READ_ROWS
from raycl.storage import Place
from raycl.tokenization import Tokenizer, Vocabulary
from raycl.training.coordinator import rows_in
from raycl.training.corpus import Built, corpus_of_bytes, corpus_of_run
from raycl.training.encoder_pool import EncoderPool
from raycl.training.mined import MinedNegatives
from raycl.training.transforms import build_formats


@final
@dataclass(frozen=True, kw_only=True)
class Failure:
    """The loss of a group of workers: the last step it reported, with its training time and when it did.

    ``seconds`` counts as :attr:`Position.seconds` does; ``time`` is in seconds since 1970. ``number`` counts the losses
    that this driver has seen, the last one ``after_s`` seconds after its start.
    """

    text: str
    step: int
    seconds: float
    time: float
    number: int = 1
    after_s: float = 0.0


@final
@dataclass(frozen=True, kw_only=True)
class EvaluationRows:
    """The decoded rows of ``evaluation.data``, their columns, and the split into evaluated rows and references.

    There are no references if training rows are.
    """

    blocks: tuple[ray.ObjectRef, ...]
    columns: ColumnNames
    split: Holdout


EVALUATION_PREFIX = "evaluation.data: "  # of the names by which the coordinator counts these rows
_MIN_ROWS_CHECKED = 1_000  # rows of a stream before its invalid fraction is checked


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """One run as its workers see it.

    ``blocks`` hold all decoded rows by data set; for a stream, only the rows for evaluation. They and ``sample_id`` are
    values if this process trains alone, without Ray. ``num_train`` are the training rows of each data set. ``workers``
    is the minimum and the maximum number of workers that were requested. ``bank`` is set if actors hold the negatives.
    ``sample_id`` refers to the ids of the ``num_samples`` samples that a memory bank has slots for, or the bank of a
    stream that is mined. ``fingerprint`` hashes the rows, None for a stream, and ``corpus_fingerprint`` the texts of
    ``text.corpus``, if they were read. ``guide`` refers to the embeddings of a guide, which each node holds once;
    ``corpus`` to the queries and documents of the training rows, if a ``miner``
    searches them and they are not a stream. ``encoder_pool`` is set if a pool of actors encodes keys. ``began`` is when
    the run began, in seconds since 1970, later by the time in which no driver ran. ``failure`` is the last loss of a
    group, also if groups after it have trained since.
    """

    config: RunConfig
    output: Place
    blocks: tuple[tuple[ray.ObjectRef | pa.Table, ...], ...]
    stream: StreamingSampler | None
    num_train: tuple[int, ...]
    holdout: Holdout
    coordinator: Any
    is_evaluated: bool
    columns: ColumnNames
    evaluation: EvaluationRows | None = None
    workers: tuple[int, int] = (1, 1)
    vocabulary: Vocabulary | None = None
    network: nn.Module | None = None
    bank: Bank | None = None
    sample_id: ray.ObjectRef | NDArray[np.int64] | None = None
    num_samples: int | None = None
    fingerprint: int | None = None
    corpus_fingerprint: int | None = None
    guide: ray.ObjectRef | None = None
    corpus: ray.ObjectRef | None = None
    miner: Any = None
    mining_pool: EncoderPool | None = None
    encoder_pool: EncoderPool | None = None
    lease: Lease | None = None
    began: float = 0.0
    failure: Failure | None = None

    def check_lease(self) -> None:
        """Raise ``RunError`` if another process has taken over the output."""
        if self.lease is not None:
            self.lease.check()

    def workers_at(self, stage: int) -> tuple[int, int]:
        """Return the minimum and maximum number of workers of a stage."""
        return self.config.worker_range(self.config.stages[stage])

    @property
    def pools(self) -> list[Any]:
        """The actors of the run's pools of encoders, which import no encoder themselves."""
        return [pool.actor for pool in (self.encoder_pool, self.mining_pool) if pool is not None]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the texts, if any."""
        return None if self.vocabulary is None else self.vocabulary.tokenizer

    def load_rows(self) -> tuple[InMemoryDataset, list[InMemoryDataset]]:
        """Fetch the decoded rows of ``blocks``: of all data sets together, and of each."""
        formats = build_formats(self.config, self.tokenizer, self.columns)
        tables = [_fetched(list(blocks)) for blocks in self.blocks]
        together = InMemoryDataset([table for each in tables for table in each], formats)
        return together, [InMemoryDataset(each, formats) for each in tables]

    def load_evaluation_rows(self, rows: InMemoryDataset) -> tuple[InMemoryDataset, InMemoryDataset]:
        """Return the references of the periodic evaluation, and the rows to evaluate; ``rows`` are the decoded ``blocks``."""
        if self.evaluation is None:
            return rows.where(self.holdout.is_reference), rows.where(self.holdout.is_test)
        split = self.evaluation.split
        formats = build_formats(self.config, self.tokenizer, self.evaluation.columns)
        others = InMemoryDataset(_fetched(list(self.evaluation.blocks)), formats)
        has_references = split.reference > split.test
        bank = others.where(split.is_reference) if has_references else rows.where(self.holdout.is_reference)
        return bank, others.where(split.is_test)

    def load_sample_ids(self) -> NDArray[np.int64] | None:
        """Fetch the ids that ``sample_id`` refers to, if any."""
        return None if self.sample_id is None else _fetched([self.sample_id])[0]

    def mined_negatives(self) -> MinedNegatives | None:
        """Fetch the corpus, unless it is a stream's, and return the negatives mined from it, if a miner searches it."""
        mined, seed = self.config.negatives.mined, self.config.seed
        if mined.num == 0:
            return None
        if self.corpus is not None:
            return MinedNegatives(ray.get(self.corpus), mined, seed=seed)
        return MinedNegatives(
            None, mined, seed=seed, load_rows=partial(corpus_of_bytes, *self.stream_corpus())
        )

    def open_stream(self, mined: MinedNegatives | None) -> StreamingSampler | None:
        """Return the stream, if the data are one; negatives that are ``mined`` keep the rows that pass."""
        if self.stream is None or mined is None:
            return self.stream
        return replace(self.stream, on_rows=mined.passed.append)

    def stream_corpus(self) -> tuple[Formats, Callable[[InMemoryDataset], Built]]:
        """Return the formats of a stream's rows, and the function that makes their corpus."""
        assert self.tokenizer is not None, "documents are texts, which have a tokenizer"
        formats = build_formats(self.config, self.tokenizer, self.columns)
        return formats, partial(corpus_of_run, self.config, self.tokenizer, None)

    def check_streamed_rows(self) -> None:
        """Raise ``DataError`` if too many rows of the stream were invalid so far."""
        if self.stream is None:
            return
        min_rows = min(_MIN_ROWS_CHECKED, sum(self.num_train))
        try:
            read = rows_in(self.coordinator, excluded=EVALUATION_PREFIX)
            read.check(self.config.data.max_invalid_fraction, min_rows=min_rows)
        except DataError:
            (self.output / READ_ROWS).delete()  # a run that resumes on corrected rows counts them again
            raise

    def save_streamed_rows(self) -> None:
        """Save the counts of the stream's rows so far, which a resumed run needs."""
        if self.stream is not None:
            ray.get(self.coordinator.save_rows.remote(self.output / READ_ROWS))


def _fetched(parts: list[Any]) -> list[Any]:
    """Fetch the values that the parts refer to, all at once; values are returned as they are."""
    refers = bool(parts) and isinstance(parts[0], ray.ObjectRef)
    return ray.get(parts) if refers else parts
