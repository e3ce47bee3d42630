"""The watch over a run's embeddings: measured now and then over all workers, judged by the monitor."""

from collections.abc import Mapping
from typing import Any, final

from raycl.distributed import mean_over_workers
from raycl.embedding_metrics import measure
from raycl.training.collapse_monitor import CollapseMonitor
from raycl.training.step import StepOutput


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

    def look(self, stepped: StepOutput, *, step: int) -> tuple[dict[str, float], str | None]:
        """Return the measures, and what is wrong the first time that the run counts as collapsed; collective."""
        assert stepped.watched is not None, "the step was to be watched"
        own = measure(*stepped.watched.arrived()).known()
        # Rounded otherwise on another machine, one worker might find a collapse that others do not.
        measures = dict(zip(own, mean_over_workers(list(own.values())), strict=True))
        why = self._monitor.look(
            step=step, measures=measures, loss=stepped.loss, collapsed_loss=stepped.collapsed_loss
        )
        return measures, why

    def begin_anew(self) -> None:
        """Forget what was seen: the run went back."""
        self._monitor.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return self._monitor.state_dict()
