"""The epochs of a run: the views of one after the other."""

from collections.abc import Iterator
from typing import final

from torch import Tensor

from raycl.data.prefetch import Prefetched
from raycl.data.sampler import BatchShard, InMemorySampler
from raycl.data.streaming import StreamingSampler
from raycl.training.checkpoint import Position
from raycl.training.stages import StagePlan
from raycl.training.views import ViewMaker, Views


@final
class Epochs:
    """Draw the views of a worker's batches; a stream reads the rows of the next epoch ahead.

    Rows are fetched in the background. Views are not: on a CPU a second thread of torch would fight the
    step for the same cores, on an accelerator they are drawn there.
    """

    def __init__(self, batches: StreamingSampler | InMemorySampler, maker: ViewMaker) -> None:
        self._batches, self._maker = batches, maker
        self._used_up: int | None = None  # the epoch that was drawn to its end, if it is the last one

    def plain(self, share: BatchShard) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of the first epoch without any randomness, and their ids."""
        yield from map(self._maker.plain, Prefetched(self._batches.epoch_batches(share, epoch=0)))

    def views(self, position: Position, plan: StagePlan, share: BatchShard) -> Iterator[Views]:
        """Yield the views that are left of the epoch that the position is in."""
        follows = self._used_up == position.epoch - 1 and position.epoch_step == 0
        self._used_up = None
        batches = self._batches.epoch_batches(
            share,
            epoch=position.epoch,
            start=position.epoch_step,
            follows=follows,
            another=_has_another(position, plan),
        )
        yield from self._maker.views(Prefetched(batches))
        self._used_up = position.epoch


def _has_another(position: Position, plan: StagePlan) -> bool:
    """Whether the stage goes on behind the epoch that the position is in."""
    steps_left = max(0, plan.steps_per_epoch - position.epoch_step)
    return not plan.is_over(steps=position.stage_step + steps_left, epochs=position.stage_epoch + 1)
