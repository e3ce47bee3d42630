"""The bank of a run, which outlives its worker groups: of a store of negatives, or of a miner's documents."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import ray
from numpy.typing import NDArray

from raycl.errors import ConfigError, StorageError
from raycl.negatives.bank import Bank
from raycl.negatives.start import start_bank
from raycl.storage import Place
from raycl.training.checkpoint import saved_steps
from raycl.training.driver import Printer, encoders_that_fit
from raycl.training.job import Job
from raycl.training.mining import read_corpus, start_miner
from raycl.training.stores import bank_spec


@contextlib.contextmanager
def open_bank(job: Job, report: Printer) -> Iterator[Bank | None]:
    """Start the actors of the store of negatives, if configured, and stop them afterwards."""
    config, negatives = job.config, job.config.negatives
    num_samples = job.num_samples if negatives.store == "memory_bank" else None
    if num_samples is not None and negatives.num_negatives > num_samples:
        raise ConfigError(
            f"negatives.num_negatives {negatives.num_negatives} is more than the {num_samples} samples "
            "of the memory bank; set it lower"
        )
    if negatives.store == "none" or config.bank.location == "worker":
        yield None
        return
    with _started(job, job.load_sample_ids(), report) as bank:
        yield bank
        try:
            bank.prune(sorted(saved_steps(job.output)))  # Ray Train has deleted checkpoints since
        except StorageError as error:
            report(f"old snapshots of the bank were not deleted: {error}")


@contextlib.contextmanager
def open_miner(job: Job, report: Printer) -> Iterator[Job]:
    """Start the miner of hard negatives and the bank of its documents, if configured, and stop them afterwards.

    Yields the job with them.
    """
    config, mined = job.config, job.config.negatives.mined
    if mined.num == 0:
        yield job
        return
    corpus = matches = None
    if job.stream is None:
        report("collecting the queries and documents to mine")
        corpus, matches, document_ids = read_corpus(job)
    else:  # the documents are not known yet: a slot for each row
        document_ids = job.load_sample_ids()
        assert document_ids is not None, "a mined stream has the ids of its rows"
    if mined.candidates >= len(document_ids):
        raise ConfigError(
            f"negatives.mined.candidates {mined.candidates} are not fewer than the {len(document_ids)} distinct "
            "documents to train on; set it lower, or give more data"
        )
    with _started(job, document_ids, report) as bank:
        job = replace(job, corpus=corpus)
        actors = encoders_that_fit(config, mined, streamed=job.stream is not None)
        with start_miner(job, matches, bank, document_ids, actors=actors) as (miner, pool):
            yield replace(job, miner=miner, mining_pool=pool)


@contextlib.contextmanager
def _started(job: Job, sample_id: NDArray[np.int64] | None, report: Printer) -> Iterator[Bank]:
    """Start the run's bank of these samples, if not a queue, and stop it afterwards unless it is detached."""
    num_samples = None if sample_id is None else len(sample_id)
    spec = bank_spec(job.config, output=job.output.uri, name=_bank_name(job.output), num_samples=num_samples)
    bank = start_bank(spec, sample_id, cluster_grows=job.config.autoscaling)
    name, address = spec.name, ray.get_runtime_context().gcs_address
    report(f"bank: {name} (raycl bank stats {name} --address {address})")
    try:
        yield bank
    finally:
        if not spec.detached:
            bank.stop()


def _bank_name(output: Place) -> str:
    """Return the last part of the output's address, without characters that are invalid in a name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", output.name).lstrip("-._") or "bank"
