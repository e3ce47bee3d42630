"""The loop that every worker runs: epochs of steps, records, judgments and checkpoints."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, final

import ray
import ray.train
import ray.train.torch
import torch

from raycl.augment.images import center_view
from raycl.data.logbook import rows_in
from raycl.data.order import Share, Shuffled
from raycl.data.prefetch import prefetch
from raycl.data.rows import Rows
from raycl.distributed import all_sum, check_equal, gather_detached, num_workers, rank, shared_memory
from raycl.errors import DataError, NonFiniteLossError
from raycl.models.saved import save_encoder
from raycl.records import MetricsLog
from raycl.training import build
from raycl.training.checkpoint import (
    Position,
    Restored,
    restore_checkpoint,
    save_checkpoint,
    saved_steps,
)
from raycl.training.clock import Clock
from raycl.training.job import Job
from raycl.training.judge import Judge
from raycl.training.process import autocast, available_cores, prepare_process
from raycl.training.step import train_step
from raycl.training.stores import BankStore, Store
from raycl.training.views import Views


def run_worker(settings: dict[str, Job]) -> dict[str, Any] | None:
    """Train on this worker; the first one returns the final metrics."""
    job = settings["job"]
    workers_here = ray.train.get_context().get_local_world_size()
    prepare_process(max(1, available_cores() // workers_here))
    with shared_memory():
        return _Loop(job, ray.train.torch.get_device()).run()


@final
class _Loop:
    def __init__(self, job: Job, device: torch.device) -> None:
        self._job, self._config, self._device = job, job.config, device
        self._stage = job.config.stage
        self._is_writer = rank() == 0
        image_format = build.image_format(job.config)
        rows = Rows(ray.get(list(job.blocks)), image_format)
        train_rows = rows.where(job.holdout.is_train)
        self._batches = job.stream or Shuffled(rows=train_rows, seed=job.config.seed)
        self._judge = self._build_judge(rows)
        self._share = Share(batch_size=self._stage.batch_size, rank=rank(), num_workers=num_workers())
        self._steps_per_epoch = job.num_train // self._stage.batch_size
        self._num_steps = build.num_steps(self._stage, self._steps_per_epoch)
        self._learning_rate = build.learning_rate(self._stage, self._steps_per_epoch)
        self._momentum = build.momentum(job.config, self._steps_per_epoch)
        self._views = build.view_maker(job.config, device)
        network = build.encoder(job.config) if job.network is None else job.network
        self._tower = build.tower(job.config, network).to(device).to(memory_format=torch.channels_last)
        self._spec = build.encoder_spec(job.config, self._tower.encoder, own=job.network is not None)
        self._learner = build.learner(job.config, self._tower, num_samples=job.num_samples)
        self._contrast = build.contrast(job.config, self._learner, num_samples=job.num_samples)
        check_equal(len(train_rows), "the number of training rows")

    def run(self) -> dict[str, Any] | None:
        restored = restore_checkpoint(self._learner)
        position, self._metrics = restored.position, dict(restored.metrics)
        self._store = self._open_store(restored)
        self._learner.connect(self._device)
        self._last_views: Views | None = None
        self._log = MetricsLog(self._job.output, resume_step=position.step) if self._is_writer else None
        self._clock = Clock(position)
        self._saved_step, self._saved_at = position.step, time.monotonic()
        if position.step == 0:
            self._judge_now(position)
            self._fill_store()
        while not self._is_done(position):
            position = self._run_epoch(position)
        return self._finish(position)

    def _run_epoch(self, position: Position) -> Position:
        self._tower.train()
        for views in self._epoch_views(position):
            # Dropout must not depend on what ran before, or a resumed run would differ.
            torch.manual_seed(hash((self._config.seed, position.step, rank())) % 2**63)
            loss = self._step(views, position)
            position = replace(position.next_step(), seconds=self._clock.seconds())
            self._record(position, loss)
            if position.step == self._stage.steps:
                return position
            if self._checkpoint_is_due(position):
                self._save(position)
        if position.epoch_step == 0:
            raise DataError(
                f"epoch {position.epoch} gave worker {rank()} not one batch of {self._share.local_batch_size} rows; "
                "lower --batch-size or give more data"
            )
        position = position.next_epoch()
        if self._judgment_is_due(position):
            self._save(position, judged=self._judge_now(position))
        return position

    def _is_done(self, position: Position) -> bool:
        # By epochs and not by their expected steps: a stream tells only at its end what was broken.
        if self._stage.steps is not None:
            return position.step >= self._stage.steps
        return position.epoch >= (self._stage.epochs or 0)

    def _open_store(self, restored: Restored) -> Store:
        """Return the store as it was at the checkpoint; a bank is set back to it."""
        if self._job.bank is not None:
            if self._is_writer:
                self._job.bank.restore(restored.position.step)
            build.meet(self._device)
        sample_id: Any = None if self._job.sample_id is None else ray.get(self._job.sample_id)
        store = build.store(self._config, self._job.bank, sample_id, self._device)
        if restored.store_state is not None:
            store.load_state_dict(restored.store_state)
        return store

    @torch.no_grad()
    def _fill_store(self) -> None:
        """Let the slots of a memory bank begin at what the untrained tower makes of their samples.

        The rows that make no whole batch keep random ones.
        """
        if not isinstance(self._store, BankStore) or self._config.negatives.first_rows == "random":
            return
        self._tower.train()
        torch.manual_seed(hash((self._config.seed, rank())) % 2**63)
        batches = self._batches.epoch_batches(self._share, epoch=0)
        for images, sample_id in map(self._views.plain, prefetch(batches)):
            with autocast(self._config.precision, self._device):
                rows = self._tower(images)
            self._store.fill(rows, sample_id)
        # Nobody reads before all have written; and a shard that dies comes back with these rows.
        self._store.save(step=0)

    def _epoch_views(self, position: Position) -> Iterator[Views]:
        batches = self._batches.epoch_batches(self._share, epoch=position.epoch, start=position.epoch_step)
        # Rows are fetched in the background. Views are not: on a CPU a second thread of torch would
        # fight the step for the same cores, on an accelerator they are drawn there.
        return self._timed(self._views.views(prefetch(batches)))

    def _timed(self, items: Iterator[Views]) -> Iterator[Views]:
        """Count the time that the step waits for data."""
        while True:
            with self._clock.waiting():
                item = next(items, None)
            if item is None:
                return
            yield item

    def _step(self, views: Views, position: Position) -> float:
        try:
            self._last_views = views
            return train_step(
                self._learner,
                self._store,
                self._contrast,
                views,
                step=position.step,
                learning_rate=self._learning_rate(position.step),
                momentum=self._momentum(position.step),
                precision=self._config.precision,
            )
        except NonFiniteLossError as error:
            ids = gather_detached(views.sample_id).tolist()
            shown = ", ".join(map(str, ids[:8]))
            if self._log:
                self._log.flush()
            raise NonFiniteLossError(
                f"{error} at step {position.step + 1} (epoch {position.epoch}), on the batch of sample ids "
                f"{shown}{', ...' if len(ids) > 8 else ''}; the last checkpoint (step {self._saved_step}) is kept: "
                "look at these samples, or lower stages.0.learning_rate"
            ) from None

    def _record(self, position: Position, loss: float) -> None:
        if not self._log:
            return
        progress = {
            "step": position.step,
            "num_steps": self._num_steps,
            "epoch": position.epoch,
            "loss": loss,
        }
        if position.step % self._config.log_every_steps == 0 or position.step == self._num_steps:
            lap = self._clock.lap(position.step, self._stage.batch_size)
            samples_per_second = lap.samples_per_second
            progress["samples_per_second"] = samples_per_second
            self._check_broken_rows()
            self._log.write(
                {
                    "step": position.step,
                    "epoch": position.epoch,
                    "stage": 0,
                    "loss": loss,
                    "learning_rate": self._learning_rate(position.step - 1),
                    "samples_per_second": samples_per_second,
                    "data_wait_fraction": lap.wait_fraction,
                    "seconds": position.seconds,
                    **self._store.metrics(step=position.step - 1, seconds=lap.seconds),
                }
            )
        self._clock.tell(self._job.logbook, progress)

    def _check_broken_rows(self) -> None:
        if self._job.stream is not None:
            rows_in(self._job.logbook).check(
                self._config.data.max_bad_fraction, min_rows=min(1_000, self._job.num_train)
            )

    def _checkpoint_is_due(self, position: Position) -> bool:
        every = self._config.checkpoints.every_steps
        if every is not None and position.step % every == 0:
            return True
        # Clocks differ between workers: the first one decides.
        late = time.monotonic() - self._saved_at > self._config.checkpoints.every_s
        if position.step % self._config.log_every_steps:
            return False
        return bool(all_sum(torch.tensor(int(late and self._is_writer), device=self._device)))

    def _save(self, position: Position, *, judged: bool = False) -> None:
        """Store a checkpoint; its score counts for the best one only if these weights were judged."""
        if position.step == self._saved_step and not judged:
            return
        with self._clock.paused():
            # A finite loss may have had a gradient that is not: never keep what it did.
            if not self._learner.is_finite():
                raise NonFiniteLossError(
                    f"the weights are no numbers after step {position.step}; the last checkpoint "
                    f"(step {self._saved_step}) is kept: lower stages.0.learning_rate"
                )
            if self._log:
                self._log.flush()
            self._learner.average_statistics()
            self._save_bank(position)
            save_checkpoint(
                self._learner,
                self._store,
                position,
                self._metrics,
                judged=judged,
                is_writer=self._is_writer,
            )
        self._saved_step, self._saved_at = position.step, time.monotonic()

    def _save_bank(self, position: Position) -> None:
        """Write the bank's snapshot, before the checkpoint that will need it is there."""
        self._store.save(step=position.step)
        if self._job.bank is not None and self._is_writer:
            self._job.bank.prune([position.step, *saved_steps(self._job.output)])

    def _build_judge(self, rows: Rows) -> Judge | None:
        if not self._job.judged:
            return None
        mean, std = self._config.normalization
        settings = self._config.evaluation
        bank = rows.where(self._job.holdout.is_bank).labeled()
        test = rows.where(self._job.holdout.is_test).labeled()
        if min(len(bank), len(test)) < num_workers():
            return None  # too few to share out
        return Judge(
            bank=bank,
            test=test,
            prepare=lambda images: center_view(images, size=self._config.data.image_size, mean=mean, std=std),
            k=settings.k,
            temperature=settings.temperature,
        )

    def _judgment_is_due(self, position: Position) -> bool:
        if self._judge is None or self._is_done(position):
            return False
        num_epochs = max(1, self._num_steps // max(1, self._steps_per_epoch))
        every = self._config.evaluation.every_epochs or max(1, num_epochs // 10)
        return position.epoch % every == 0

    def _judge_now(self, position: Position) -> bool:
        """Judge the encoder and measure what BatchNorm leaks; whether there was a judge for it."""
        measured: dict[str, float] = {}
        with self._clock.paused():
            self._learner.average_statistics()
            if self._judge is not None:
                measured["knn_top1"] = self._judge.knn_accuracy(self._tower.encoder, self._device)
            if self._last_views is not None:
                measured |= self._learner.leakage(self._last_views, seed=self._config.seed)
        self._metrics |= measured
        if self._log and measured:
            line = {"step": position.step, "epoch": position.epoch, "stage": 0, **measured}
            self._log.write(line | {"seconds": self._clock.seconds()})
            self._job.logbook.add_progress.remote(measured)
        return self._judge is not None

    def _finish(self, position: Position) -> dict[str, Any] | None:
        already_saved = position.step == self._saved_step
        judged = self._judge_now(position)
        self._save(position, judged=judged and not already_saved)
        if self._log is None:
            return None
        self._log.flush()
        save_encoder(self._tower.encoder, self._spec, self._job.output)
        num_epochs = position.epoch + (position.epoch_step >= self._steps_per_epoch)
        return {
            "step": position.step,
            "epoch": num_epochs,
            "seconds": position.seconds,
            **self._metrics,
        }
