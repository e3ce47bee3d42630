"""The watch over a run's embeddings: measured now and then over all workers, judged by the monitor."""

from collections.abc import Mapping
from typing import Any, final

import torch

from raycl.distributed import all_sum, gather_detached, num_workers
from raycl.measures import MAX_ROWS, measure
from raycl.training.monitor import CollapseMonitor
from raycl.training.step import Stepped


@final
class Watch:
    """Measure the embeddings of a step and say if the run has collapsed; alike on all workers."""

    def __init__(self, monitor: CollapseMonitor, state: Mapping[str, Any] | None = None) -> None:
        """``state`` is what an earlier ``state_dict`` returned."""
        self._monitor = monitor
        if state is not None:
            monitor.load_state_dict(state)

    @property
    def is_healthy(self) -> bool:
        """Whether the last look found nothing bad, so that a checkpoint made now is a good one."""
        return self._monitor.is_healthy

    def look(self, stepped: Stepped, *, step: int) -> tuple[dict[str, float], str | None]:
        """Return the measures, and what is wrong the first time that the run counts as collapsed; collective."""
        # Of each worker's few rows alone, some figures would be chance.
        few = -(-MAX_ROWS // num_workers())
        own = measure(gather_detached(stepped.query[:few]), gather_detached(stepped.key[:few])).known()
        # Rounded otherwise on another machine, one worker might find a collapse that others do not.
        total = all_sum(torch.tensor(list(own.values()), dtype=torch.float64, device=stepped.query.device))
        measures = dict(zip(own, (total / num_workers()).tolist(), strict=True))
        why = self._monitor.look(
            step=step, measures=measures, loss=stepped.loss, trivial_loss=stepped.trivial_loss
        )
        return measures, why

    def begin_anew(self) -> None:
        """Forget what was seen: the run went back."""
        self._monitor.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return self._monitor.state_dict()
