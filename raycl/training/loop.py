"""The training loop of one worker: epochs of steps, with evaluations and checkpoints between them."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, final

import ray
import ray.train
import ray.train.torch
import torch

from raycl.data.sampler import BatchShard
from raycl.distributed import check_equal, gather_detached, num_workers, rank, use_shared_memory
from raycl.errors import CollapseError, DataError, NonFiniteLossError
from raycl.models.build import build_towers
from raycl.training.checkpoint import (
    Checkpointer,
    Restored,
    load_checkpoint,
    load_healthy_checkpoint,
    save_towers,
)
from raycl.training.collapse_monitor import CollapseMonitor
from raycl.training.controller import Finished, Outcome, ResizeRequested, Stopped
from raycl.training.coordinator import send_heartbeats
from raycl.training.evaluators import build_evaluator, build_snapshot_writer
from raycl.training.job import Job
from raycl.training.key_encoders import KeyClient, StageSettings
from raycl.training.metrics_logger import MetricsLogger
from raycl.training.mining import MinerClient
from raycl.training.process import autocast, available_cores, prepare_device, prepare_process
from raycl.training.stages import Position, StagePlan, momentum_schedule, stage_plans
from raycl.training.step import StepOutput, train_step
from raycl.training.stores import BankStore, Store, build_store, wait_for_all
from raycl.training.train_state import EmbedConfig, TrainState
from raycl.training.transforms import build_transform, count_documents
from raycl.training.views import Epochs, ViewMaker, Views, build_sampler


def run_worker(settings: dict[str, ray.ObjectRef]) -> Outcome | None:
    """Train on this worker; return the outcome of the group, which the first worker reports."""
    job: Job = ray.get(settings["job"])
    prepare_process(max(1, available_cores() // ray.train.get_context().get_local_world_size()))
    # Ray Train replaces all workers if one of them dies, so the first one sends heartbeats for all.
    heartbeats = (
        send_heartbeats(job.coordinator) if rank() == 0 else contextlib.nullcontext(threading.Event())
    )
    with use_shared_memory(), heartbeats as stop_requested:
        restored = load_checkpoint()
        workers = job.workers_at(0 if restored is None else restored.position.stage)
        if workers != job.workers:
            return ResizeRequested(*workers)
        return Trainer(job, restored, ray.train.torch.get_device(), stop_requested).run()


@final
class Trainer:
    """Train on one worker; all workers make the same collective calls in the same order."""

    def __init__(
        self, job: Job, restored: Restored | None, device: torch.device, stop_requested: threading.Event
    ) -> None:
        requested = job.config.settled(num_workers())
        config = prepare_device(requested, device)
        if rank() == 0 and config.tower_precision != requested.tower_precision:
            job.coordinator.add_notice.remote("a GPU has no bfloat16: the run computes in float32")
        self._job, self._config, self._device = job, config, device
        self._stop_requested, self._is_stopping = stop_requested, False
        self._is_new = restored is None
        num_sets = len(job.num_train)
        begin = Position(data_set_steps=(0,) * num_sets if num_sets > 1 else ())
        self._position = begin if restored is None else restored.position
        self._metrics = {} if restored is None else dict(restored.metrics)

        rows, data_sets = job.load_rows()
        train_rows = [each.where(job.holdout.is_train) for each in data_sets]
        check_equal(sum(map(len, train_rows)), "the number of training rows")
        guide = None if job.guide is None else ray.get(job.guide)
        self._mined = job.mined_negatives()
        transform = build_transform(config, job.tokenizer, guide, self._mined)
        sampler = job.open_stream(self._mined) or build_sampler(config, train_rows)
        self._epochs = Epochs(sampler, ViewMaker.of(config, transform, device))
        self._last_views: Views | None = None
        self._frequencies = [count_documents(config, each, device) for each in train_rows]
        self._evaluator = build_evaluator(config, rows, job.holdout, transform, wanted=job.is_evaluated)
        self._snapshots = build_snapshot_writer(job, rows, transform)

        self._plans = stage_plans(config, num_train=job.num_train)
        self._num_steps = sum(plan.num_steps for plan in self._plans)
        self._momentum = momentum_schedule(config, self._plans)

        self._towers = build_towers(config, job.vocabulary, job.network).to(device)
        self._towers.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self._state = TrainState.build(config, self._towers, num_samples=job.num_samples)
        self._monitor = CollapseMonitor(
            patience=config.monitor.patience, initial_patience=config.monitor.initial_patience
        )
        if restored is not None:
            self._state.load_state_dict(restored.train_state)
            self._monitor.load_state_dict(restored.monitor_state)
        self._store = self._open_store(restored)
        self._miner = self._join_miner(restored)
        self._state.set_embed_config(EmbedConfig.of(config, self._plan.stage))
        self._state.wrap_ddp(device)
        self._keys = self._join_key_pool()
        self._logger = MetricsLogger(
            job, self._position, num_steps=self._num_steps, on_accelerator=device.type == "cuda"
        )
        self._checkpointer = Checkpointer(
            job, self._state, self._monitor, self._logger, self._position, self._mined, device
        )

    def run(self) -> Outcome | None:
        """Train until the end of the run, a stop, or a stage with another number of workers."""
        outcome = None
        try:
            with self._logger.clock.counting():
                outcome = self._train()
        finally:
            self._logger.close(finished=isinstance(outcome, Finished))
        return outcome

    def _train(self) -> Outcome | None:
        if self._is_new:
            self._prepare_first_step()
        while (workers := self._job.workers_at(self._position.stage)) == self._job.workers:
            if self._is_stopping:
                self._save()
                return Stopped(self._position.step)
            if not self._is_stage_over():
                self._run_epoch()
            elif self._position.stage == len(self._plans) - 1:
                return self._finish()
            else:
                self._end_stage()
        return ResizeRequested(*workers)

    def _prepare_first_step(self) -> None:
        self._evaluate()
        self._initialize_bank()
        if self._config.monitor.on_collapse == "rollback":
            self._save(always=True)

    def _run_epoch(self) -> None:
        """Make the remaining steps of the epoch, unless the stage or the group ends before."""
        self._towers.train()
        for views in self._epoch_views():
            # Dropout must not depend on earlier steps, or a resumed run would differ.
            torch.manual_seed(hash((self._config.seed, self._position.step, rank())) % 2**63)
            output = self._step(views)
            position = self._position.next_step(
                batch_size=self._plan.stage.batch_size, data_set=views.data_set
            )
            self._position = replace(position, seconds=self._logger.clock.seconds())
            self._is_stopping = output.stop_requested
            if self._miner is not None:
                self._miner.after_step(position.step, self._towers)
            if collapse := self._record(output):
                return self._handle_collapse(collapse)
            if self._is_stopping or self._position.stage_step == self._plan.stage.steps:
                return None
            if self._checkpointer.is_due(self._position):
                self._save()
        return self._end_epoch()

    def _epoch_views(self) -> Iterator[Views]:
        position, plan = self._position, self._plan
        sent_ahead = None
        if self._keys is not None:
            sent_ahead = partial(
                self._keys.sent_ahead,
                settings=StageSettings.of(self._config, plan.stage),
                epoch=position.epoch,
                start=position.epoch_step,
            )
        return self._epochs.views(
            self._shard,
            epoch=position.epoch,
            start=position.epoch_step,
            has_next=plan.has_epoch_after(position),
            image_size=plan.stage.image_size,
            passing=sent_ahead or iter,
        )

    def _step(self, views: Views) -> StepOutput:
        position, plan, stage = self._position, self._plan, self._plan.stage
        self._last_views = views
        hinge_weight = plan.hinge_weight(position.stage_step)
        if position.step < position.cross_entropy_until:
            stage, hinge_weight = self._config.without_hinge(stage), 0.0
        objective = self._state.objective(
            self._config,
            stage,
            hinge_weight=hinge_weight,
            num_samples=self._job.num_samples,
            frequencies=self._frequencies[views.data_set] if self._frequencies else None,
        )
        try:
            output = train_step(
                self._state,
                self._store,
                objective,
                views,
                step=position.step,
                learning_rate=plan.learning_rate(position.stage_step),
                momentum=self._momentum(position.step),
                precision=self._config.tower_precision,
                stop_requested=self._stop_requested.is_set(),
                is_watched=self._is_logged(position.step + 1),
                take_keys=None if self._keys is None else self._keys.take,
            )
        except NonFiniteLossError as error:
            ids = gather_detached(views.sample_id).tolist()
            shown = ", ".join(map(str, ids[:8]))
            self._logger.flush()
            raise NonFiniteLossError(
                f"{error} at step {position.step + 1} (epoch {position.epoch}), on the batch of sample ids "
                f"{shown}{', ...' if len(ids) > 8 else ''}; the last checkpoint (step "
                f"{self._checkpointer.saved_step}) is kept: check these samples, or lower "
                f"stages.{position.stage}.learning_rate"
            ) from None
        if self._keys is not None and self._state.momentum_encoder is not None:
            self._keys.publish(self._state.momentum_encoder.tower, step=position.step + 1)
        return output

    def _join_key_pool(self) -> KeyClient | None:
        """Replace all weights of the pool, if there is one, before any worker sends it a batch."""
        if self._job.encoder_pool is None or self._state.momentum_encoder is None:
            return None
        client = KeyClient(self._job.encoder_pool, self._config, self._device)
        client.begin(self._state.momentum_encoder.tower, step=self._position.step)
        wait_for_all(self._device)
        return client

    def _record(self, output: StepOutput) -> str | None:
        """Log the step if it is due; return the reason if the run has collapsed."""
        position, collapse = self._position, None
        self._logger.write_failure()
        if self._is_logged(position.step):
            measures = output.measure()
            collapse = self._monitor.update(
                step=position.step,
                measures=measures,
                loss=output.loss,
                collapsed_loss=output.collapsed_loss,
            )
            seconds, timing = self._logger.clock.lap(position.samples)
            metrics = {
                "loss": output.loss,
                **self._data_set(),
                "learning_rate": self._plan.learning_rate(position.stage_step - 1),
                **timing,
                **measures,
                **self._epochs.metrics(),
                **self._store.metrics(step=position.step - 1, seconds=seconds),
                **({} if self._miner is None else self._miner.metrics(step=position.step)),
                **({} if self._keys is None else self._keys.metrics()),
            }
            self._logger.write(position, metrics)
            if rank() == 0:
                self._job.check_streamed_rows()
        self._logger.show_progress(position, output.loss)
        return collapse

    def _data_set(self) -> dict[str, int]:
        """Return the data set of the step as a metric, if there are several."""
        views = self._last_views
        return {"data_set": views.data_set} if views and self._position.data_set_steps else {}

    def _handle_collapse(self, collapse: str) -> None:
        """Continue, roll back or raise ``CollapseError``, depending on ``monitor.on_collapse``."""
        monitor, position = self._config.monitor, self._position
        self._metrics["collapsed_at_step"] = position.step
        self._logger.notify(position, "collapse", collapse)
        if monitor.on_collapse == "warn":
            return
        if monitor.on_collapse == "rollback" and self._plan.stage.has_hinge:
            if position.rollbacks < monitor.max_rollbacks:
                self._roll_back()
                return
            collapse = f"{collapse}; {position.rollbacks} rollbacks did not help"
        raise CollapseError(
            f"{collapse}; the last checkpoint (step {self._checkpointer.saved_step}) is kept: lower the learning "
            "rate, begin with a cross-entropy, or set monitor.on_collapse to warn"
        )

    def _roll_back(self) -> None:
        """Return to the last healthy checkpoint and train with cross-entropy for some steps."""
        position = self._position
        restored = load_healthy_checkpoint()
        if restored is None:
            raise CollapseError(
                f"no checkpoint from before the collapse of step {position.step} is left to roll back to; "
                "set checkpoints.keep higher"
            )
        self._state.load_state_dict(restored.train_state)
        self._position = replace(
            restored.position,
            seconds=position.seconds,
            rollbacks=position.rollbacks + 1,
            cross_entropy_until=restored.position.step + self._config.monitor.cross_entropy_steps,
        )
        until = self._position.cross_entropy_until
        text = f"rolled back from step {position.step}; cross-entropy until step {until}"
        self._logger.roll_back(self._position, text)
        self._metrics["rollbacks"] = self._position.rollbacks
        self._store = self._open_store(restored)
        self._miner = self._join_miner(restored)
        self._keys = self._join_key_pool()
        self._monitor.reset()
        self._state.set_embed_config(EmbedConfig.of(self._config, self._plan.stage))
        self._logger.clock.lap(self._position.samples)  # or the next lap would count negative samples
        self._save(always=True)  # or a lost worker would resume from the collapse

    def _end_epoch(self) -> None:
        if self._position.epoch_step == 0:
            raise DataError(
                f"epoch {self._position.epoch} gave worker {rank()} no batch of {self._shard.local_batch_size} rows; "
                "lower --batch-size or give more data"
            )
        self._position = self._position.next_epoch()
        if not self._is_evaluation_due():
            return
        if self._evaluator is not None:
            self._save(evaluated=self._evaluate())
        elif self._snapshots is not None:
            self._state.average_statistics()
            self._write_snapshot()

    def _end_stage(self) -> None:
        evaluated = self._evaluate()
        self._position = self._position.next_stage()
        self._save(evaluated=evaluated, always=True)
        self._state.set_embed_config(EmbedConfig.of(self._config, self._plan.stage))

    def _finish(self) -> Finished | None:
        position = self._position
        already_saved = position.step == self._checkpointer.saved_step
        evaluated = self._evaluate()
        self._save(evaluated=evaluated and not already_saved)
        if rank() != 0:
            return None
        self._logger.write_failure()
        self._logger.flush()
        save_towers(self._state.evaluated, self._job)
        num_epochs = position.epoch + (position.epoch_step >= self._plan.steps_per_epoch)
        totals = {"step": position.step, "samples": position.samples, "epoch": num_epochs}
        totals |= {"seconds": position.seconds, "data_set_steps": position.data_set_steps}
        return Finished({**totals, **self._metrics, "goodput": self._logger.goodput()})

    def _evaluate(self) -> bool:
        """Evaluate the towers and measure the leakage of BatchNorm; return whether there is an evaluator."""
        measured: dict[str, float] = {}
        with self._logger.clock.paused():
            self._state.average_statistics()
            if self._evaluator is not None:
                measured |= self._evaluator.measure(self._state.evaluated, self._device)
            if self._last_views is not None:
                measured |= self._state.leakage(self._last_views, seed=self._config.seed)
        self._metrics |= measured
        if measured:
            self._logger.write_evaluation(self._position, measured)
        self._write_snapshot()
        return self._evaluator is not None

    def _write_snapshot(self) -> None:
        if self._snapshots is not None:
            with self._logger.clock.paused():
                self._snapshots.write(self._state.evaluated, self._device, step=self._position.step)

    def _save(self, *, evaluated: bool = False, always: bool = False) -> None:
        self._checkpointer.save(
            self._position, self._store, self._metrics, evaluated=evaluated, always=always
        )

    def _open_store(self, restored: Restored | None) -> Store:
        """Open the store in the state of the checkpoint, and restore a bank in actors to it."""
        if self._job.bank is not None:
            if rank() == 0:
                self._job.bank.restore(0 if restored is None else restored.position.step)
            wait_for_all(self._device)
        sample_id: Any = None if self._job.sample_id is None else ray.get(self._job.sample_id)
        store = build_store(self._config, self._job.bank, sample_id, self._device)
        if restored is not None:
            store.load_state_dict(restored.store_state)
        return store

    def _join_miner(self, restored: Restored | None) -> MinerClient | None:
        """Restore the table of the checkpoint, and let the miner begin with the weights as they are now."""
        if self._mined is None:
            return None
        if restored is not None:
            self._mined.load_state_dict(restored.mined_state)
        refresh = self._config.negatives.mined.refresh
        client = MinerClient(self._job.miner, self._mined, refresh=refresh, device=self._device)
        client.begin(self._position.step, self._towers)
        return client

    @torch.no_grad()
    def _initialize_bank(self) -> None:
        """Fill the slots of a memory bank with the embeddings of the untrained tower.

        Samples after the last complete batch keep random rows.
        """
        if not isinstance(self._store, BankStore) or self._config.negatives.bank_init == "random":
            return
        self._towers.train()
        torch.manual_seed(hash((self._config.seed, rank())) % 2**63)
        for samples, sample_id in self._epochs.plain(self._shard):
            with autocast(self._config.tower_precision, self._device):
                rows = self._state.encode(samples)
            self._store.initialize(rows, sample_id)
        # All workers must write before any reads, and a restarted shard needs these rows.
        self._store.save(step=0)

    @property
    def _plan(self) -> StagePlan:
        return self._plans[self._position.stage]

    @property
    def _shard(self) -> BatchShard:
        stage = self._plan.stage
        return BatchShard(batch_size=stage.batch_size, rank=rank(), num_workers=num_workers())

    def _is_stage_over(self) -> bool:
        return self._plan.is_over(steps=self._position.stage_step, epochs=self._position.stage_epoch)

    def _is_logged(self, step: int) -> bool:
        return step % self._config.log_every_steps == 0 or step == self._num_steps

    def _is_evaluation_due(self) -> bool:
        if self._is_stage_over():
            return False
        num_epochs = max(1, round(sum(plan.num_steps / max(1, plan.steps_per_epoch) for plan in self._plans)))
        every = self._config.evaluation.every_epochs or max(1, num_epochs // 10)
        return self._position.epoch % every == 0
