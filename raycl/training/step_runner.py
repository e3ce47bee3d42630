"""The steps of a run on one worker, without its logs, evaluations and checkpoints."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import final

import ray
import torch

from raycl.data.sampler import BatchShard
from raycl.distributed import check_equal, num_workers, rank
from raycl.distributed.device_copy import use_channels_last
from raycl.losses.objective import Objective
from raycl.models.build import build_towers, find_unused_parameters
from raycl.training.checkpoint import Restored
from raycl.training.job import Job
from raycl.training.key_encoders import KeyClient
from raycl.training.mining import MinerClient
from raycl.training.process import autocast, prepare_device
from raycl.training.stages import Position, StagePlan, momentum_schedule, stage_plans
from raycl.training.step import StepOutput, train_step
from raycl.training.stores import BankStore, Store, build_store, wait_for_all
from raycl.training.train_state import EmbedConfig, Embedded, TrainState
from raycl.training.transforms import build_transform, count_documents
from raycl.training.views import Epochs, ViewMaker, Views, build_sampler
from raycl.training.virtual_workers import dropout_seed, embedding_of


@final
class StepRunner:
    """Everything that determines the losses of a run: its position, rows, weights, optimizer and store.

    All workers call the methods in the same order.
    """

    def __init__(
        self, job: Job, restored: Restored | None, device: torch.device, *, alone: bool = False
    ) -> None:
        """Begin at the start of the run, or continue from a checkpoint.

        ``alone``, this process makes the steps of all workers that the configuration names, on whole batches. Raises
        ``ConfigError`` if their dropout cannot be repeated.
        """
        self._alone = alone
        self.config = config = prepare_device(job.config.settled(num_workers()), device)
        self._job, self._device = job, device
        self._embed: Callable[..., Embedded] | None = None
        num_sets = len(job.num_train)
        begin = Position(data_set_steps=(0,) * num_sets if num_sets > 1 else ())
        self.position = begin if restored is None else restored.position

        self.rows, data_sets = job.load_rows()
        train_rows = [each.where(job.holdout.is_train) for each in data_sets]
        check_equal(sum(map(len, train_rows)), "the number of training rows")
        guide = None if job.guide is None else ray.get(job.guide)
        self.mined = job.mined_negatives()
        self.transform = build_transform(config, job.tokenizer, guide, self.mined)
        sampler = job.open_stream(self.mined) or build_sampler(config, train_rows)
        self.epochs = Epochs(sampler, ViewMaker.of(config, self.transform, device))
        self._frequencies = [count_documents(config, each, device) for each in train_rows]

        self.plans = stage_plans(config, num_train=job.num_train)
        self.num_steps = sum(plan.num_steps for plan in self.plans)
        self._momentum = momentum_schedule(config, self.plans)

        self.towers = build_towers(config, job.vocabulary, job.network).to(device)
        use_channels_last(self.towers)
        is_alone = num_workers() == 1
        unused = set() if is_alone else find_unused_parameters(config, self.towers, job.vocabulary)
        self.state = TrainState.build(config, self.towers, num_samples=job.num_samples)
        if restored is not None:
            self.state.load_state_dict(restored.train_state)
        self.store = self._open_store(restored)
        self.miner = self._join_miner(restored)
        self._use_embed_config()
        self.state.wrap_ddp(device, unused=unused)
        self.keys = self._join_key_pool()

    @property
    def plan(self) -> StagePlan:
        """The plan of the current stage."""
        return self.plans[self.position.stage]

    @property
    def shard(self) -> BatchShard:
        """This worker's shard of the batches of the current stage."""
        size, workers = self.plan.stage.batch_size, num_workers()
        if self._alone:
            return BatchShard(
                batch_size=size, num_workers=self.config.workers_of(self.plan.stage), is_whole=True
            )
        return BatchShard(batch_size=size, rank=rank(), num_workers=workers)

    def is_stage_over(self) -> bool:
        """Whether the current stage has no step left."""
        return self.plan.is_over(steps=self.position.stage_step, epochs=self.position.stage_epoch)

    def views(self) -> Iterator[Views]:
        """Yield the views of the remaining steps of the epoch."""
        position, plan = self.position, self.plan
        sent_ahead = None
        if self.keys is not None:
            sent_ahead = partial(
                self.keys.sent_ahead, stage=plan.stage, epoch=position.epoch, start=position.epoch_step
            )
        self.towers.train()
        yield from self.epochs.views(
            self.shard,
            epoch=position.epoch,
            start=position.epoch_step,
            has_next=plan.has_epoch_after(position),
            image_size=plan.stage.image_size,
            passing=sent_ahead or iter,
        )

    def step(
        self,
        views: Views,
        *,
        is_watched: bool = False,
        stop_requested: bool = False,
        check_requested: bool = False,
        watch: Callable[[Objective], Objective] | None = None,
    ) -> StepOutput:
        """Make the next step, on these views; ``watch`` may wrap its objective.

        Raises ``NonFiniteLossError`` on every worker before any state changes.
        """
        position, plan, stage = self.position, self.plan, self.plan.stage
        # Dropout must not depend on earlier steps, or a resumed run would differ.
        torch.manual_seed(dropout_seed(self.config.seed, position.step, rank()))
        hinge_weight = plan.hinge_weight(position.stage_step)
        if position.step < position.cross_entropy_until:
            stage, hinge_weight = self.config.without_hinge(stage), 0.0
        if not self.config.uses_guide(stage):
            views = replace(views, example_ids=replace(views.example_ids, guide=None))
        objective = self.state.objective(
            self.config,
            stage,
            hinge_weight=hinge_weight,
            num_samples=self._job.num_samples,
            frequencies=self._frequencies[views.data_set] if self._frequencies else None,
        )
        output = train_step(
            self.state,
            self.store,
            objective if watch is None else watch(objective),
            views,
            step=position.step,
            learning_rate=plan.learning_rate(position.stage_step),
            momentum=self._momentum(position.step),
            precision=self.config.tower_precision,
            stop_requested=stop_requested,
            check_requested=check_requested,
            is_watched=is_watched,
            embed=self._embed if self.keys is None else partial(self.state.embed, take_keys=self.keys.take),
        )
        self.position = position.next_step(batch_size=plan.stage.batch_size, data_set=views.data_set)
        if self.keys is not None and self.state.momentum_encoder is not None:
            self.keys.publish(self.state.momentum_encoder.tower, step=self.position.step)
        if self.miner is not None:
            self.miner.after_step(self.position.step, self.towers)
        return output

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.position = self.position.next_epoch()

    def end_stage(self) -> None:
        """Go to the beginning of the next stage."""
        self.position = self.position.next_stage()
        self._use_embed_config()

    def restore(self, restored: Restored, position: Position) -> None:
        """Return to a checkpoint of this run, at a position that counts the rollback."""
        self.state.load_state_dict(restored.train_state)
        self.position = position
        self.store = self._open_store(restored)
        self.miner = self._join_miner(restored)
        self.keys = self._join_key_pool()
        self._use_embed_config()

    @torch.no_grad()
    def initialize_bank(self) -> bool:
        """Fill the slots of a memory bank with the embeddings of the untrained tower; return whether there are any to fill.

        Samples after the last complete batch keep random rows. The store must be saved before any worker reads.
        """
        if not isinstance(self.store, BankStore) or self.config.negatives.bank_init == "random":
            return False
        self.towers.train()
        torch.manual_seed(hash((self.config.seed, rank())) % 2**63)
        for samples, sample_id in self.epochs.plain(self.shard):
            with autocast(self.config.tower_precision, self._device):
                rows = self.state.encode(samples)
            self.store.initialize(rows, sample_id)
        return True

    def _use_embed_config(self) -> None:
        stage = self.plan.stage
        self.state.set_embed_config(EmbedConfig.of(self.config, stage))
        if self._alone:
            workers = self.config.workers_of(stage)
            self._embed = embedding_of(self.state, self.config, stage, workers)

    def _open_store(self, restored: Restored | None) -> Store:
        """Open the store in the state of the checkpoint, and restore a bank in actors to it."""
        if self._job.bank is not None:
            if rank() == 0:
                self._job.bank.restore(0 if restored is None else restored.position.step)
            wait_for_all(self._device)
        store = build_store(self.config, self._job.bank, self._job.load_sample_ids(), self._device)
        if restored is not None:
            store.load_state_dict(restored.store_state)
        return store

    def _join_miner(self, restored: Restored | None) -> MinerClient | None:
        """Restore the table of the checkpoint, and let the miner begin with the weights as they are now."""
        if self.mined is None:
            return None
        if restored is not None:
            self.mined.load_state_dict(restored.mined_state)
        refresh = self.config.negatives.mined.refresh
        client = MinerClient(self._job.miner, self.mined, refresh=refresh, device=self._device)
        client.begin(self.position.step, self.towers)
        return client

    def _join_key_pool(self) -> KeyClient | None:
        """Replace all weights of the pool, if there is one, before any worker sends it a batch."""
        if self._job.encoder_pool is None or self.state.momentum_encoder is None:
            return None
        client = KeyClient(self._job.encoder_pool, self.config, self._device)
        client.begin(self.state.momentum_encoder.tower, step=self.position.step)
        wait_for_all(self._device)
        return client
