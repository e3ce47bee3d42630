"""Runs that are trained in test processes, without Ray, with the output of a real run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import raycl
from raycl.config import RunConfig
from raycl.data.discovery import find_source
from raycl.data.fingerprint import fingerprint
from raycl.data.read_stats import ReadStats
from raycl.negatives.actor import QueueActor
from raycl.records import CHECKPOINT_LIST, CHECKPOINTS, READ_ROWS, MetricsLog, write_result
from raycl.step_replay.record import read_record
from raycl.step_replay.restore import coming_views
from raycl.step_replay.rows import RunRows, read_rows
from raycl.storage import Place
from raycl.training.coordinator import RunCoordinator
from raycl.training.data_set import read_vocabulary
from raycl.training.preflight import column_names, describe_data, find_corpus, save_run_files
from raycl.training.run_chain import RunChain
from raycl.training.step_runner import StepRunner
from raycl.training.stores import bank_spec
from tests.settings import override_active
from tests.workers.processes import run_workers

SMALL: dict[str, Any] = {
    "data.channels": 1,
    "data.cache": "materialize",
    "encoder.name": "tests.cluster.networks:small",
    "encoder.kwargs": {"channels": 1},
    "text.max_length": 10,
    "text.max_document_length": 14,
    "text.vocabulary_size": 400,
    "projection_head.dim": 16,
    "bank.location": "worker",
    "negatives.capacity": 96,
    "negatives.num_negatives": 40,
    "evaluation.num_test": 16,
    "log_every_steps": 1,
    "stages.0.batch_size": 32,
    "stages.0.epochs": None,
    "stages.0.steps": 10,
}


def small_config(method: str, settings: Mapping[str, Any]) -> RunConfig:
    """Return a recipe with a tiny network with dropout and ten steps of 32 samples."""
    return override_active(raycl.recipe(method, image_size=16), SMALL, settings)


def record_run(
    config: RunConfig, data: Path | Sequence[Path], output: Path, *, checkpoints: tuple[int, ...] = ()
) -> Path:
    """Train with the workers of the configuration, and write what a run writes; return the output.

    Checkpoints are saved after the steps ``checkpoints``. The file ``ids.json`` lists the sample ids of each step.
    """
    place, paths = Place(str(output)), [data] if isinstance(data, Path) else data
    sources = [find_source(str(path), column_names(config)) for path in paths]
    vocabulary = None
    if config.has_texts:
        vocabulary, _ = read_vocabulary(
            config.text, None, sources[0].columns, sources, corpus=find_corpus(config), counted=True
        )
    described = describe_data(
        [source.uri for source in sources],
        [source.num_rows for source in sources],
        sources[0].classes,
        streamed=config.data.cache == "stream",
    )
    save_run_files(place, config, described, vocabulary)
    by_worker = run_workers(train, config.workers, str(output), checkpoints)
    ids = [list(chain(*of_step)) for of_step in zip(*(each for _, each in by_worker), strict=True)]
    (place / "ids.json").write_text(json.dumps(ids))
    head = by_worker[0][0]
    write_result(place, {"status": "finished", "steps": len(ids), "final": {}, "chain": head})
    return output


def train(
    rank: int, num_workers: int, output: str, checkpoints: tuple[int, ...]
) -> tuple[str, list[list[int]]]:
    """Make all steps on one worker; the first one saves checkpoints, the log and the chain.

    Returns the hash of the last link, and the sample ids of each step.
    """
    rows, device = read_rows(read_record(output)), torch.device("cpu")
    job = rows.with_counted_tokens()
    blocks: Any = [table for tables in job.blocks for table in tables]
    if job.stream is None:
        job = replace(job, fingerprint=fingerprint(*blocks))
    if job.config.text.corpus is not None:
        job = replace(job, corpus_fingerprint=rows.corpus_fingerprint())
    runner = StepRunner(job, None, device)
    runner.initialize_bank()
    log = MetricsLog(Place(output))
    links = RunChain(job, job.config, log.head, runner.position, None, device)
    ids: list[list[int]] = []
    coordinator = counted(rows)
    for views in coming_views(runner):
        before = runner.position
        loss = runner.step(views).loss
        links.step(views, before, loss)
        line = {"step": before.step + 1, "epoch": before.epoch, "stage": before.stage, "workers": num_workers}
        line |= {"loss": loss, "learning_rate": runner.plan.learning_rate(before.stage_step)}
        log.write(line | ({"data_set": views.data_set} if before.data_set_steps else {}))
        ids.append(views.ids.tolist())
        if runner.position.step in checkpoints:
            links.sum_draws()
            if rank == 0:
                coordinator.save_rows(rows.run.output / READ_ROWS)
                save_checkpoint(runner, links, Path(output) / CHECKPOINTS)
    links.sum_draws()
    if rank != 0:
        return "", ids
    log.flush()
    coordinator.save_rows(rows.run.output / READ_ROWS)
    return links.end(runner.position, {}), ids


def counted(rows: RunRows) -> RunCoordinator:
    """Return a coordinator with the fingerprints of a stream's fragments, as the tasks that decode them report them."""
    coordinator = RunCoordinator()
    for fragment in rows.sources[0].fragments if rows.run.streamed else ():
        stats = ReadStats(fingerprint=rows.fingerprints[fragment.first_id])
        coordinator.add_rows(fragment.name, stats)
    return coordinator


def save_checkpoint(runner: StepRunner, links: RunChain, folder: Path) -> None:
    """Write a checkpoint as the trainer does, and add it to the list; a queue in an actor has its own snapshot."""
    name = f"step-{runner.position.step:08d}"
    has_actor = runner.config.negatives.store == "queue" and runner.config.bank.location == "actor"
    if has_actor:
        spec = bank_spec(runner.config, output=str(folder.parent), name="bank", num_samples=None)
        actor = QueueActor(spec)
        actor.store.load_state_dict(runner.store._queue.state_dict())  # pyright: ignore[reportAttributeAccessIssue]
        actor.save(runner.position.step, 0)
    (folder / name).mkdir(parents=True)
    state = {
        "learner": runner.state.state_dict(),
        "store": {} if has_actor else runner.store.state_dict(),
        "mined": {},
        "watch": {},
        "chain": links.state_dict() | {"checkpoint": name},
        "position": vars(runner.position),
        "metrics": {},
    }
    torch.save(state, folder / name / "state.pt")
    links.checkpoint(name, runner.position, folder / name / "state.pt")
    names = sorted(path.name for path in folder.glob("step-*"))
    listed = {"checkpoint_results": [{"checkpoint_dir_name": each} for each in names]}
    (folder / CHECKPOINT_LIST).write_text(json.dumps(listed))
