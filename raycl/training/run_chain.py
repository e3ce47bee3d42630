"""The links of ``chain.jsonl`` that a group of workers adds, and the sum over all samples that the run has drawn."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch

import raycl
from raycl.chain import (
    CHAIN,
    CHECKPOINT,
    DAMAGED,
    END,
    ROLLBACK,
    START,
    Chain,
    code_hash,
    hash_of_draw,
    sha256_of_files,
    sha256_of_local,
)
from raycl.config import RunConfig
from raycl.distributed import all_sum, num_workers, rank
from raycl.models.registry import ENCODER_FILES, TOKENIZER
from raycl.records import CONFIG, DATA, READ_ROWS
from raycl.training.job import Job
from raycl.training.preflight import hash_of_settings
from raycl.training.stages import Position
from raycl.training.views import Views

_NUM_LOSSES = 2  # after each link: the second one depends on the gradient of the first
_HALF = 2**32


@final
class RunChain:
    """Record the history of a run; all workers call the methods together, the first one writes.

    A checkpoint carries the sum of :func:`~raycl.chain.hash_of_draw` over all batches so far, so that no sample of a
    step that was repeated counts twice.
    """

    def __init__(
        self,
        job: Job,
        config: RunConfig,
        log_head: Callable[[], dict[str, Any]],
        position: Position,
        restored: Mapping[str, Any] | None,
        device: torch.device,
    ) -> None:
        """Begin at the start of the run, or at the checkpoint with the state ``restored``.

        ``config`` is the job's, with the precision of this device. ``log_head`` returns the number of lines of the log and their hash.
        """
        self._output, self._log_head, self._device = job.output, log_head, device
        # None after a checkpoint of a version without a chain.
        self._drawn: int | None = 0 if restored is None else restored.get("drawn")
        self._new = 0  # drawn by this worker since the sum over all workers
        self._losses: dict[str, float] = {}
        self._num_losses = _NUM_LOSSES
        if rank() == 0:
            job.check_lease()
        self._chain = Chain(job.output) if rank() == 0 else None
        if self._chain is not None and self._chain.is_damaged:
            job.coordinator.add_notice.remote(
                f"{CHAIN} is damaged: moved to {DAMAGED}; the run cannot be certified"
            )
        self._add(
            START,
            position,
            checkpoint=None if restored is None else restored.get("checkpoint"),
            workers=num_workers(),
            device=device.type,
            precision=config.tower_precision,
            time=int(time.time()),
            files={} if self._chain is None else sha256_of_files(job.output, (CONFIG, DATA, TOKENIZER)),
            settings=hash_of_settings(config),
            rows=job.fingerprint,
            corpus=job.corpus_fingerprint,
            version=raycl.__version__,
            code=code_hash(),
            torch=torch.__version__,
        )

    def step(self, views: Views, position: Position, loss: float) -> None:
        """Count the samples of a step; ``position`` is the one before it."""
        self._new += hash_of_draw(views.ids, position.epoch)
        if len(self._losses) < self._num_losses:
            self._losses[str(position.step + 1)] = loss

    def sum_draws(self) -> None:
        """Add the draws of all workers since the last call; collective."""
        # In two halves, whose sums do not overflow.
        halves = torch.tensor([self._new % _HALF, self._new % 2**64 // _HALF], device=self._device)
        low, high = all_sum(halves).tolist()
        self._new = 0
        if self._drawn is not None:
            self._drawn = (self._drawn + low + high * _HALF) % 2**64

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as of the last sum."""
        return {"drawn": self._drawn}

    def checkpoint(self, name: str, position: Position, state: Path) -> None:
        """Add the link of a checkpoint that is about to be saved, after ``sum_draws``; on the first worker."""
        files = sha256_of_files(self._output, (READ_ROWS,))
        self._add(
            CHECKPOINT, position, name=name, state=sha256_of_local(state), files=files, **self._progress()
        )

    def roll_back(self, position: Position, restored: Mapping[str, Any]) -> None:
        """Continue from an earlier checkpoint of this run."""
        self._drawn, self._new, self._losses = restored.get("drawn"), 0, {}
        self._add(ROLLBACK, position, checkpoint=restored.get("checkpoint"))

    def end(self, position: Position, final: Mapping[str, Any]) -> str:
        """Add the last link, with the last metrics and the saved encoder, after ``sum_draws``; return its hash."""
        files = sha256_of_files(self._output, (*ENCODER_FILES, READ_ROWS))
        return self._add(END, position, final=dict(final), files=files, **self._progress())

    def _progress(self) -> dict[str, Any]:
        losses, self._losses = self._losses, {}
        return {"drawn": self._drawn, "log": self._log_head(), "losses": losses}

    def _add(self, kind: str, position: Position, **values: Any) -> str:
        if self._chain is None:
            return ""
        place = {"step": position.step, "epoch": position.epoch, "stage": position.stage}
        head = self._chain.add(kind, place | values)
        self._chain.flush()
        return head
