"""Runs in Weights & Biases."""

import tempfile
from collections.abc import Sequence
from typing import final

import wandb

from raycl.config import RunConfig
from raycl.storage import Place
from raycl.tracking.base import MetricsRecord
from raycl.tracking.run_id import known_run, remember_run


@final
class WandbRun:
    """Log metrics with ``step`` as their axis; a resumed run goes on with its run, and logs some steps once more.

    W&B's own count of calls may not go back, so it cannot be the axis.
    """

    def __init__(self, config: RunConfig, output: Place) -> None:
        """Begin a run with the settings as its configuration, or go on with that of the output."""
        project = config.tracking.wandb
        assert project is not None, "asked for by tracking.wandb"
        entity, _, name = project.rpartition("/")
        known = known_run(output, "wandb", project)
        self._run = wandb.init(
            entity=entity or None,
            project=name,
            id=known,
            resume="allow",
            name=output.name,
            config=config.model_dump(mode="json"),
            allow_val_change=True,
            dir=output.resolve()[1] if output.is_local else tempfile.gettempdir(),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )
        if known is None:
            remember_run(output, "wandb", project, self._run.id)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, points: Sequence[MetricsRecord]) -> None:
        """Log the metrics of all points."""
        for point in points:
            if point.metrics:
                self._run.log({**point.metrics, "step": point.step})

    def flush(self) -> None:
        """Do nothing: a process of W&B's own takes care of it."""

    def close(self, *, finished: bool) -> None:
        """Wait until W&B has all, and say how the run ended."""
        self._run.finish(exit_code=0 if finished else 1)
