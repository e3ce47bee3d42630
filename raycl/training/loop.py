"""The training loop of one worker: epochs of steps, with evaluations and checkpoints between them."""

import contextlib
import gc
import threading
from dataclasses import replace
from typing import final

import ray
import ray.train
import ray.train.torch
import torch

from raycl.data.windows import reader_environment
from raycl.distributed import gather_detached, num_workers, rank, use_shared_memory
from raycl.errors import CollapseError, DataError, NonFiniteLossError
from raycl.gpus import available_cores
from raycl.models.build import save_towers
from raycl.training.checkpoint import (
    Checkpointer,
    Restored,
    load_checkpoint,
    load_healthy_checkpoint,
)
from raycl.training.collapse_monitor import CollapseMonitor
from raycl.training.controller import Finished, Outcome, ResizeRequested, Stopped
from raycl.training.coordinator import send_heartbeats
from raycl.training.evaluators import build_evaluator, build_snapshot_writer
from raycl.training.job import Job
from raycl.training.metrics_logger import MetricsLogger
from raycl.training.process import prepare_process
from raycl.training.run_chain import RunChain
from raycl.training.stages import Position, next_hinge_step
from raycl.training.standby import stand_by, stand_by_elsewhere
from raycl.training.step import StepOutput
from raycl.training.step_runner import StepRunner
from raycl.training.views import Views


def run_worker(settings: dict[str, ray.ObjectRef]) -> Outcome | None:
    """Train on this worker; return the outcome of the group, which the first worker reports."""
    gc.freeze()  # the modules, which stay
    job: Job = ray.get(settings["job"])
    prepare_process(_num_threads(job.config.cpus_per_worker))
    _keep_standbys(job)
    # Ray Train replaces all workers if one of them dies, so the first one sends heartbeats for all.
    heartbeats = (
        send_heartbeats(job.coordinator) if rank() == 0 else contextlib.nullcontext(threading.Event())
    )
    with use_shared_memory(), heartbeats as stop_requested:
        restored = load_checkpoint()
        workers = job.workers_at(0 if restored is None else restored.position.stage)
        if workers != job.workers:
            return ResizeRequested(*workers)
        trainer = Trainer(job, restored, ray.train.torch.get_device(), stop_requested)
        del restored  # a copy of the weights, moments and rows, which training would hold to its end
        return trainer.run()


def _num_threads(cpus_per_worker: float | None) -> int:
    """Return this worker's share of the node's cores, at most the CPUs that the user reserved for it."""
    cores = available_cores() // ray.train.get_context().get_local_world_size()
    return max(1, cores if cpus_per_worker is None else min(cores, int(cpus_per_worker)))


def _keep_standbys(job: Job) -> None:
    """Start standby processes that replace lost processes of this group."""
    job.coordinator.add_standby_node.remote(ray.get_runtime_context().get_node_id())
    context = ray.train.get_context()
    # After the controller, if it is on this node.
    stand_by(began=job.began, turn=1 + context.get_local_rank())
    if rank() == 0:
        readers = [] if job.stream is None else [reader_environment()]
        for env_vars in readers:
            stand_by(began=job.began, turn=1 + context.get_local_world_size(), env_vars=env_vars)
        stand_by_elsewhere(job.coordinator, workers=num_workers(), began=job.began, actors=readers)


@final
class Trainer:
    """Train on one worker; all workers make the same collective calls in the same order."""

    def __init__(
        self, job: Job, restored: Restored | None, device: torch.device, stop_requested: threading.Event
    ) -> None:
        self._job, self._config, self._device = job, job.config.settled(num_workers()), device
        self._stop_requested, self._is_stopping = stop_requested, False
        self._is_new = restored is None
        self._evaluated_step = (
            restored.position.step if restored is not None and restored.is_evaluated else None
        )
        self._metrics = {} if restored is None else dict(restored.metrics)
        self._last_views: Views | None = None
        self._runner = runner = StepRunner(job, restored, device)
        if rank() == 0 and runner.config.tower_precision != self._config.tower_precision:
            text = "a GPU has no bfloat16: the run computes in float32"
            job.coordinator.add_notice.remote(text, once=True)
        self._config = runner.config
        self._evaluator = build_evaluator(job, self._config, runner.rows, runner.transform)
        self._snapshots = build_snapshot_writer(job, runner.rows, runner.transform)
        self._monitor = CollapseMonitor(
            patience=self._config.monitor.patience, initial_patience=self._config.monitor.initial_patience
        )
        if restored is not None:
            self._monitor.load_state_dict(restored.monitor_state)
            if self._config.monitor.on_collapse != "warn":
                self._monitor.report_again()  # only a warning was given before: the other responses end the steps
        self._logger = MetricsLogger(
            job,
            runner.position,
            num_steps=runner.num_steps,
            resumes=restored is not None,
            on_accelerator=device.type == "cuda",
        )
        chain_state = None if restored is None else restored.chain_state
        self._chain = RunChain(job, self._config, self._logger.head, runner.position, chain_state, device)
        self._checkpointer = Checkpointer(
            job, runner.state, self._monitor, self._logger, self._chain, runner.position, runner.mined, device
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
                if not self._is_logged(self._position.step):
                    self._logger.write(self._position, {})  # without a loss: the whole run logs none here
                self._save()
                return Stopped(self._position.step)
            if not self._runner.is_stage_over():
                self._run_epoch()
            elif self._position.stage == len(self._runner.plans) - 1:
                return self._finish()
            else:
                self._end_stage()
        return ResizeRequested(*workers)

    def _prepare_first_step(self) -> None:
        self._evaluate()
        if self._runner.initialize_bank():
            # All workers must write before any reads, and a restarted shard needs these rows.
            self._checkpointer.save_bank(self._position, self._runner.store)
        if self._config.monitor.on_collapse == "rollback":
            self._save(always=True)

    def _run_epoch(self) -> None:
        """Make the remaining steps of the epoch, unless the stage or the group ends before."""
        runner = self._runner
        for views in runner.views():
            output = self._step(views)
            runner.position = position = replace(runner.position, seconds=self._logger.clock.seconds())
            # After the last step nothing is left to stop.
            self._is_stopping = output.stop_requested and position.step != runner.num_steps
            collapse = self._record(output)
            if collapse and self._handle_collapse(collapse):
                return None
            if self._is_stopping or position.stage_step == runner.plan.stage.steps:
                return None
            if self._checkpointer.is_due(position, check=output.check_requested):
                self._save()
        return self._end_epoch()

    def _step(self, views: Views) -> StepOutput:
        self._last_views, position = views, self._position
        try:
            output = self._runner.step(
                views,
                is_watched=self._is_logged(position.step + 1),
                stop_requested=self._stop_requested.is_set(),
                check_requested=self._checkpointer.wants_check(),
            )
            self._chain.step(views, position, output.loss)
            return output
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

    def _record(self, output: StepOutput) -> str | None:
        """Log the step if it is due; return the reason if the run has collapsed."""
        runner, position, collapse = self._runner, self._position, None
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
                "learning_rate": runner.plan.learning_rate(position.stage_step - 1),
                **timing,
                **measures,
                **runner.epochs.metrics(),
                **runner.store.metrics(step=position.step - 1, seconds=seconds),
                **({} if runner.miner is None else runner.miner.metrics(step=position.step)),
                **({} if runner.keys is None else runner.keys.metrics()),
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

    def _handle_collapse(self, collapse: str) -> bool:
        """Warn, roll back or raise ``CollapseError``, depending on ``monitor.on_collapse``; return whether it rolled back."""
        monitor, position = self._config.monitor, self._position
        self._metrics["collapsed_at_step"] = position.step
        self._logger.notify(position, "collapse", collapse)
        if monitor.on_collapse == "warn":
            return False
        if monitor.on_collapse == "rollback" and self._runner.plan.stage.has_hinge:
            if position.rollbacks < monitor.max_rollbacks:
                self._roll_back()
                return True
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
        begin = next_hinge_step(self._runner.plans, restored.position)
        until = begin + self._config.monitor.cross_entropy_steps
        rolled_back = replace(
            restored.position,
            seconds=position.seconds,
            rollbacks=position.rollbacks + 1,
            cross_entropy_until=until,
        )
        text = f"rolled back from step {position.step}; cross-entropy until step {until}"
        self._logger.roll_back(rolled_back, text)
        self._metrics["rollbacks"] = rolled_back.rollbacks
        self._runner.restore(restored, rolled_back)
        self._chain.roll_back(rolled_back, restored.chain_state)
        self._checkpointer.roll_back(rolled_back)
        self._monitor.reset()
        self._logger.clock.lap(self._position.samples)  # or the next lap would count negative samples
        self._save(always=True)  # or a lost worker would resume from the collapse

    def _end_epoch(self) -> None:
        if self._position.epoch_step == 0:
            raise DataError(
                f"epoch {self._position.epoch} gave worker {rank()} no batch of "
                f"{self._runner.shard.local_batch_size} rows; lower --batch-size or give more data"
            )
        self._runner.end_epoch()
        if not self._is_evaluation_due():
            return
        if self._evaluator is not None:
            self._save(evaluated=self._evaluate())
        elif self._snapshots is not None:
            self._checkpointer.check_weights(self._position)
            self._runner.state.average_statistics()
            self._write_snapshot()

    def _end_stage(self) -> None:
        evaluated = self._evaluate()
        self._runner.end_stage()
        self._save(evaluated=evaluated, always=True)

    def _finish(self) -> Finished | None:
        position = self._position
        evaluated = self._evaluate(with_baseline=True)
        # A finished run that is started again has a checkpoint of this name.
        self._save(evaluated=evaluated and position.step != self._evaluated_step)
        self._chain.sum_draws()
        if rank() != 0:
            return None
        self._logger.write_failure()
        self._logger.flush()
        job = self._job
        own = job.network is not None
        save_towers(self._runner.state.evaluated, job.config, job.tokenizer, job.output, own=own)
        head = self._chain.end(position, self._metrics)
        num_epochs = position.epoch + (position.epoch_step >= self._runner.plan.steps_per_epoch)
        totals = {"step": position.step, "samples": position.samples, "epoch": num_epochs}
        totals |= {"seconds": position.seconds, "data_set_steps": position.data_set_steps}
        return Finished({**totals, **self._metrics, "goodput": self._logger.goodput(), "chain": head})

    def _evaluate(self, *, with_baseline: bool = False) -> bool:
        """Evaluate the towers and measure the leakage of BatchNorm; return whether there is an evaluator."""
        measured: dict[str, float] = {}
        with self._logger.clock.paused():
            if self._position.step:  # no step made the weights of a new run
                self._checkpointer.check_weights(self._position)
            self._runner.state.average_statistics()
            if self._evaluator is not None:
                measured |= self._evaluator.measure(self._runner.state.evaluated, self._device)
                measured |= self._evaluator.baseline(self._device) if with_baseline else {}
            if self._last_views is not None:
                measured |= self._runner.state.leakage(self._last_views, seed=self._config.seed)
        self._metrics |= measured
        if measured:
            self._logger.write_evaluation(self._position, measured)
        self._write_snapshot()
        return self._evaluator is not None

    def _write_snapshot(self) -> None:
        if self._snapshots is not None:
            with self._logger.clock.paused():
                self._snapshots.write(self._runner.state.evaluated, self._device, step=self._position.step)

    def _save(self, *, evaluated: bool = False, always: bool = False) -> None:
        self._checkpointer.save(
            self._position, self._runner.store, self._metrics, evaluated=evaluated, always=always
        )

    @property
    def _position(self) -> Position:
        return self._runner.position

    def _is_logged(self, step: int) -> bool:
        return step % self._config.log_every_steps == 0 or step == self._runner.num_steps

    def _is_evaluation_due(self) -> bool:
        if self._runner.is_stage_over():
            return False
        num_epochs = max(
            1, round(sum(plan.num_steps / max(1, plan.steps_per_epoch) for plan in self._runner.plans))
        )
        every = self._config.evaluation.every_epochs or max(1, num_epochs // 10)
        return self._position.epoch % every == 0
