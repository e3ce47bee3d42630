"""The loop that every worker runs: epochs of steps, records, judgments and checkpoints."""

import contextlib
import threading
from dataclasses import replace
from typing import Any, final

import ray
import ray.train
import ray.train.torch
import torch

from raycl.data.coordinator import rows_in
from raycl.data.in_memory import InMemoryDataset
from raycl.data.sampler import BatchShard, InMemorySampler
from raycl.distributed import check_equal, gather_detached, num_workers, rank, use_shared_memory
from raycl.errors import CollapseError, DataError, NonFiniteLossError
from raycl.records import ROLLBACK
from raycl.training import build
from raycl.training.checkpoint import (
    Checkpointer,
    Restored,
    restore_checkpoint,
    restore_healthy_checkpoint,
    save_towers,
)
from raycl.training.evaluators import Evaluator, KnnEvaluator, RetrievalEvaluator
from raycl.training.heartbeat import heartbeat
from raycl.training.job import Finished, Job, Outcome, ResizeRequested, Stopped
from raycl.training.metrics_logger import Clock, MetricsLogger
from raycl.training.objectives import Objective
from raycl.training.process import autocast, available_cores, prepare_device, prepare_process
from raycl.training.snapshot_writer import open_snapshot_writer
from raycl.training.stages import Position, momentum_schedule, stage_plans
from raycl.training.step import StepOutput, train_step
from raycl.training.stores import BankStore, Store
from raycl.training.views import Epochs, Transform, Views
from raycl.training.watch import Watch


def run_worker(settings: dict[str, ray.ObjectRef]) -> Outcome | None:
    """Train on this worker; return the final metrics, or the number of workers to go on with.

    Only what the first worker returns counts.
    """
    job: Job = ray.get(settings["job"])
    workers_here = ray.train.get_context().get_local_world_size()
    prepare_process(max(1, available_cores() // workers_here))
    # The first worker's process answers for the group: where another one dies, all are replaced.
    living = heartbeat(job.logbook) if rank() == 0 else contextlib.nullcontext(threading.Event())
    with use_shared_memory(), living as asked_to_stop:
        return _Loop(job, ray.train.torch.get_device(), asked_to_stop).run()


@final
class _Loop:
    def __init__(self, job: Job, device: torch.device, asked_to_stop: threading.Event) -> None:
        asked = job.config.settled(num_workers())
        self._job, self._config, self._device = job, prepare_device(asked, device), device
        self._is_writer = rank() == 0
        if self._is_writer and self._config.tower_precision != asked.tower_precision:
            job.logbook.add_notice.remote("a GPU here has no bfloat16: the run computes in float32")
        self._asked_to_stop, self._is_to_stop = asked_to_stop, False
        self._modality = job.modality()
        rows = InMemoryDataset(ray.get(list(job.blocks)), self._modality.formats(job.columns))
        train_rows = rows.where(job.holdout.is_train)
        self._plans = stage_plans(self._config, num_train=job.num_train)
        self._num_steps = sum(plan.num_steps for plan in self._plans)
        self._momentum = momentum_schedule(self._config, self._plans)
        maker = build.view_maker(self._config, self._modality, device)
        self._epochs = Epochs(job.stream or self._shuffled(train_rows), maker)
        self._judge = self._build_judge(rows, maker.drawing)
        self._portrayer = open_snapshot_writer(job, rows, maker.drawing)
        self._towers = build.towers(self._config, self._modality, job.network).to(device)
        self._towers.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self._frequencies = build.frequencies(self._config, train_rows)
        self._learner = build.learner(self._config, self._towers, num_samples=job.num_samples)
        check_equal(len(train_rows), "the number of training rows")

    def run(self) -> Outcome | None:
        restored = restore_checkpoint(self._learner)
        position = Position() if restored is None else restored.position
        self._metrics = {} if restored is None else dict(restored.metrics)
        if self._asked_for(position) != self._job.workers:
            return ResizeRequested(*self._asked_for(position))
        self._store = self._open_store(restored)
        self._enter_stage(position)
        self._learner.connect(self._device)
        self._last_views: Views | None = None
        self._watch = Watch(
            build.monitor(self._config), state=None if restored is None else restored.watch_state
        )
        self._clock = Clock(position, on_accelerator=self._device.type == "cuda")
        self._recorder = MetricsLogger(
            self._job, position, self._clock, num_steps=self._num_steps, is_writer=self._is_writer
        )
        self._saver = Checkpointer(self._job, self._learner, self._watch, self._clock, self._recorder)
        self._saver.begin_at(position)
        outcome = None
        try:
            with self._clock.counting():
                outcome = self._train(position, is_new=restored is None)
        finally:
            self._recorder.close(finished=isinstance(outcome, Finished))
        return outcome

    def _train(self, position: Position, *, is_new: bool) -> Outcome | None:
        """Make steps until the end, or until another group of workers must go on."""
        if is_new:
            self._begin(position)
        while self._asked_for(position) == self._job.workers:
            if self._is_to_stop:
                self._save(position)
                return Stopped(position.step)
            if not self._is_done(position):
                position = self._run_epoch(position)
            elif position.stage == len(self._plans) - 1:
                return self._finish(position)
            else:
                position = self._end_stage(position)
        return ResizeRequested(*self._asked_for(position))

    def _asked_for(self, position: Position) -> tuple[int, int]:
        """Return how many workers the stage asks for; if others were asked for, the driver starts anew."""
        return self._job.config.worker_range(self._plans[position.stage].stage)

    def _begin(self, position: Position) -> None:
        """Do what comes before the first step."""
        self._judge_now(position)
        self._fill_store()
        if self._config.monitor.on_collapse == "rollback":
            self._save(position, always=True)

    def _save(self, position: Position, *, judged: bool = False, always: bool = False) -> None:
        self._saver.save(position, self._store, self._metrics, judged=judged, always=always)

    def _run_epoch(self, position: Position) -> Position:
        self._towers.train()
        for views in self._epochs.views(position, self._plan, self._share):
            # Dropout must not depend on what ran before, or a resumed run would differ.
            torch.manual_seed(hash((self._config.seed, position.step, rank())) % 2**63)
            stepped = self._step(views, position)
            position = position.next_step(batch_size=self._share.batch_size)
            position = replace(position, seconds=self._clock.seconds())
            self._is_to_stop = stepped.is_to_stop
            if collapse := self._record(position, stepped):
                return self._answer(collapse, position)
            if position.stage_step == self._plan.stage.steps:
                return position
            if self._is_to_stop:
                return position
            if self._saver.is_due(position, self._device):
                self._save(position)
        if position.epoch_step == 0:
            raise DataError(
                f"epoch {position.epoch} gave worker {rank()} not one batch of {self._share.local_batch_size} rows; "
                "lower --batch-size or give more data"
            )
        position = position.next_epoch()
        if self._look_is_due(position):
            if self._judge is not None:
                self._save(position, judged=self._judge_now(position))
            elif self._portrayer is not None:
                self._learner.average_statistics()
                self._portray(position)
        return position

    def _is_done(self, position: Position) -> bool:
        return self._plan.is_over(steps=position.stage_step, epochs=position.stage_epoch)

    def _enter_stage(self, position: Position) -> None:
        """Take up the batch size, the schedules and the loss of the stage that the position is in."""
        self._plan = self._plans[position.stage]
        stage = self._plan.stage
        self._share = BatchShard(batch_size=stage.batch_size, rank=rank(), num_workers=num_workers())
        self._learner.enter(build.manner(self._config, stage))

    def _end_stage(self, position: Position) -> Position:
        """Judge and keep what the stage came to; return the beginning of the next one."""
        judged = self._judge_now(position)
        position = position.next_stage()
        self._save(position, judged=judged, always=True)
        self._enter_stage(position)
        return position

    def _contrast(self, position: Position) -> Objective:
        """Return the loss of the next step."""
        stage, hinge_weight = self._plan.stage, self._plan.hinge_weight(position.stage_step)
        if position.step < position.cross_entropy_until:
            stage, hinge_weight = build.without_hinge(self._config, stage), 0.0
        return build.contrast(
            self._config,
            stage,
            self._learner,
            hinge_weight=hinge_weight,
            num_samples=self._job.num_samples,
            frequencies=self._frequencies,
        )

    def _open_store(self, restored: Restored | None) -> Store:
        """Return the store as it was at the checkpoint, if there is one; a bank is set back to it."""
        if self._job.bank is not None:
            if self._is_writer:
                self._job.bank.restore(0 if restored is None else restored.position.step)
            build.meet(self._device)
        sample_id: Any = None if self._job.sample_id is None else ray.get(self._job.sample_id)
        store = build.store(self._config, self._job.bank, sample_id, self._device)
        if restored is not None:
            store.load_state_dict(restored.store_state)
        return store

    @torch.no_grad()
    def _fill_store(self) -> None:
        """Let the slots of a memory bank begin at what the untrained tower makes of their samples.

        The rows that make no whole batch keep random ones.
        """
        if not isinstance(self._store, BankStore) or self._config.negatives.first_rows == "random":
            return
        self._towers.train()
        torch.manual_seed(hash((self._config.seed, rank())) % 2**63)
        for samples, sample_id in self._epochs.plain(self._share):
            with autocast(self._config.tower_precision, self._device):
                rows = self._learner.encode(samples)
            self._store.initialize(rows, sample_id)
        # Nobody reads before all have written; and a shard that dies comes back with these rows.
        self._store.save(step=0)

    def _step(self, views: Views, position: Position) -> StepOutput:
        try:
            self._last_views = views
            return train_step(
                self._learner,
                self._store,
                self._contrast(position),
                views,
                step=position.step,
                learning_rate=self._plan.learning_rate(position.stage_step),
                momentum=self._momentum(position.step),
                precision=self._config.tower_precision,
                is_to_stop=self._asked_to_stop.is_set(),
                is_watched=self._is_logged(position.step + 1),
            )
        except NonFiniteLossError as error:
            ids = gather_detached(views.sample_id).tolist()
            shown = ", ".join(map(str, ids[:8]))
            self._recorder.flush()
            raise NonFiniteLossError(
                f"{error} at step {position.step + 1} (epoch {position.epoch}), on the batch of sample ids "
                f"{shown}{', ...' if len(ids) > 8 else ''}; the last checkpoint (step {self._saver.step}) is kept: "
                f"look at these samples, or lower stages.{position.stage}.learning_rate"
            ) from None

    def _is_logged(self, step: int) -> bool:
        return step % self._config.log_every_steps == 0 or step == self._num_steps

    def _record(self, position: Position, stepped: StepOutput) -> str | None:
        """Write down what the step came to, if it is one to be logged; return why the run has collapsed."""
        collapse = None
        if self._is_logged(position.step):
            measures, collapse = self._watch.look(stepped, step=position.step)
            lap = self._clock.lap(position.samples)
            self._recorder.write(
                position,
                {
                    "loss": stepped.loss,
                    "learning_rate": self._plan.learning_rate(position.stage_step - 1),
                    **lap.metrics(),
                    **measures,
                    **self._store.metrics(step=position.step - 1, seconds=lap.seconds),
                },
            )
            if self._is_writer:
                self._check_broken_rows()
        self._recorder.show(position, {"loss": stepped.loss})
        return collapse

    def _answer(self, collapse: str, position: Position) -> Position:
        """Do what the configuration says about a collapse; return where the run goes on."""
        monitor = self._config.monitor
        self._metrics["collapsed_at_step"] = position.step
        self._recorder.notify(position, "collapse", collapse)
        if monitor.on_collapse == "warn":
            return position
        if monitor.on_collapse == "rollback" and self._plan.stage.has_hinge:
            if position.rollbacks < monitor.max_rollbacks:
                return self._roll_back(position)
            collapse = f"{collapse}; {position.rollbacks} rollbacks did not help"
        raise CollapseError(
            f"{collapse}; the last checkpoint (step {self._saver.step}) is kept: lower the learning rate, begin "
            "with a cross-entropy, or set monitor.on_collapse to warn"
        )

    def _roll_back(self, position: Position) -> Position:
        """Go back to the last checkpoint that was made in health, and take cross-entropy for a while."""
        restored = restore_healthy_checkpoint(self._learner)
        if restored is None:
            raise CollapseError(
                f"no checkpoint from before the collapse of step {position.step} is left to roll back to; "
                "set checkpoints.keep higher"
            )
        back = replace(
            restored.position,
            seconds=position.seconds,
            rollbacks=position.rollbacks + 1,
            cross_entropy_until=restored.position.step + self._config.monitor.cross_entropy_steps,
        )
        self._recorder.notify(
            back,
            ROLLBACK,
            f"went back from step {position.step}; cross-entropy until step {back.cross_entropy_until}",
        )
        self._metrics |= {"rollbacks": back.rollbacks}
        self._store = self._open_store(restored)
        self._watch.begin_anew()
        self._enter_stage(back)
        self._clock.lap(back.samples)  # or the next lap would count from where the run was
        self._save(back, always=True)  # or a worker that is lost would take all back to the collapse
        return back

    def _check_broken_rows(self) -> None:
        if self._job.stream is not None:
            rows_in(self._job.logbook).check(
                self._config.data.max_bad_fraction, min_rows=min(1_000, self._job.num_train)
            )

    def _shuffled(self, rows: InMemoryDataset) -> InMemorySampler:
        return InMemorySampler(
            rows=rows, seed=self._config.seed, length_buckets=self._config.text.length_buckets
        )

    def _build_judge(self, rows: InMemoryDataset, drawing: Transform) -> Evaluator | None:
        if not self._job.judged:
            return None
        settings, holdout = self._config.evaluation, self._job.holdout
        bank, test = rows.where(holdout.is_bank), rows.where(holdout.is_test)
        if not self._config.has_two_towers:
            bank, test = bank.labeled(), test.labeled()
        if min(len(bank), len(test)) < num_workers():
            return None  # too few to share out
        if self._config.has_two_towers:
            return RetrievalEvaluator(
                bank=bank, test=test, drawing=drawing, precision=self._config.tower_precision
            )
        return KnnEvaluator(
            bank=bank,
            test=test,
            prepare=drawing.plain,
            k=settings.k,
            temperature=settings.temperature,
            precision=self._config.tower_precision,
        )

    def _look_is_due(self, position: Position) -> bool:
        if self._is_done(position):
            return False
        num_epochs = max(1, round(sum(plan.num_steps / max(1, plan.steps_per_epoch) for plan in self._plans)))
        every = self._config.evaluation.every_epochs or max(1, num_epochs // 10)
        return position.epoch % every == 0

    def _judge_now(self, position: Position) -> bool:
        """Judge the encoder and measure what BatchNorm leaks; whether there was a judge for it."""
        measured: dict[str, float] = {}
        with self._clock.paused():
            self._learner.average_statistics()
            if self._judge is not None:
                measured |= self._judge.measure(self._towers, self._device)
            if self._last_views is not None:
                measured |= self._learner.leakage(self._last_views, seed=self._config.seed)
        self._metrics |= measured
        if measured:
            self._recorder.write(position, measured)
            self._recorder.show(position, measured, now=True)
        self._portray(position)
        return self._judge is not None

    def _portray(self, position: Position) -> None:
        if self._portrayer is not None:
            with self._clock.paused():
                self._portrayer.write(self._towers, self._device, step=position.step)

    def _finish(self, position: Position) -> Finished | None:
        already_saved = position.step == self._saver.step
        judged = self._judge_now(position)
        self._save(position, judged=judged and not already_saved)
        if not self._is_writer:
            return None
        self._recorder.flush()
        save_towers(self._towers, self._job, self._modality)
        num_epochs = position.epoch + (position.epoch_step >= self._plan.steps_per_epoch)
        counted = {"step": position.step, "samples": position.samples, "epoch": num_epochs}
        return Finished({**counted, "seconds": position.seconds, **self._metrics})
