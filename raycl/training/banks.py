"""The bank of a run, which outlives its worker groups: of a store of negatives, or of a miner's documents."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace

import ray

from raycl.errors import ConfigError, StorageError
from raycl.negatives.bank import Bank
from raycl.negatives.start import start_bank
from raycl.storage import Place
from raycl.training.checkpoint import saved_steps
from raycl.training.driver import Printer, encoders_that_fit
from raycl.training.job import Job
from raycl.training.mining import check_candidates, document_bank_spec, read_corpus, start_miner
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
    name = _bank_name(job.output)
    spec = bank_spec(config, output=job.output.uri, name=name, num_samples=job.num_samples)
    sample_id = job.load_sample_ids()
    bank = start_bank(spec, sample_id, cluster_grows=config.autoscaling)
    _report(bank, report)
    try:
        yield bank
        try:
            bank.prune(sorted(saved_steps(job.output)))  # Ray Train has deleted checkpoints since
        except StorageError as error:
            report(f"old snapshots of the bank were not deleted: {error}")
    finally:
        if not spec.detached:
            bank.stop()


@contextlib.contextmanager
def open_miner(job: Job, report: Printer) -> Iterator[Job]:
    """Start the miner of hard negatives and the bank of its documents, if configured, and stop them afterwards.

    Yields the job with them.
    """
    config = job.config
    if config.negatives.mined.num == 0:
        yield job
        return
    corpus = matches = None
    if job.stream is None:
        report("collecting the queries and documents to mine")
        corpus, matches, document_ids = read_corpus(job)
    else:  # the documents are not known yet: a slot for each row
        document_ids = job.load_sample_ids()
        assert document_ids is not None, "a mined stream has the ids of its rows"
    check_candidates(config, len(document_ids))
    spec = document_bank_spec(
        config, output=job.output.uri, name=_bank_name(job.output), num_documents=len(document_ids)
    )
    bank = start_bank(spec, document_ids, cluster_grows=config.autoscaling)
    _report(bank, report)
    try:
        job = replace(job, corpus=corpus)
        actors = encoders_that_fit(config, config.negatives.mined, streamed=job.stream is not None)
        with start_miner(job, matches, bank, document_ids, actors=actors) as (miner, pool):
            yield replace(job, miner=miner, mining_pool=pool)
    finally:
        if not spec.detached:
            bank.stop()


def _report(bank: Bank, report: Printer) -> None:
    name, address = bank.spec.name, ray.get_runtime_context().gcs_address
    report(f"bank: {name} (raycl bank stats {name} --address {address})")


def _bank_name(output: Place) -> str:
    """Return the last part of the output's address, without characters that are invalid in a name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", output.name).lstrip("-._") or "bank"
