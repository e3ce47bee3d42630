"""Runs in Weights & Biases."""

import tempfile
from collections.abc import Sequence
from typing import final

import wandb

from raycl.config import RunConfig, active_settings
from raycl.storage import Place
from raycl.tracking.base import MetricsRecord, known_run, remember_run


@final
class WandbRun:
    """Log metrics with ``step`` as their axis; a resumed run continues its run, and logs some steps twice.

    W&B's own step must not decrease, so it cannot be the axis.
    """

    def __init__(self, config: RunConfig, output: Place) -> None:
        """Create a run with the settings as its configuration, or continue the run of the output."""
        project = config.tracking.wandb
        assert project is not None, "set by tracking.wandb"
        entity, _, name = project.rpartition("/")
        known = known_run(output, "wandb", project)
        self._run = wandb.init(
            entity=entity or None,
            project=name,
            id=known,
            resume="allow",
            name=output.name,
            config=active_settings(config),
            allow_val_change=True,
            dir=output.resolve()[1] if output.is_local else tempfile.gettempdir(),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )
        if known is None:
            remember_run(output, "wandb", project, self._run.id)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, records: Sequence[MetricsRecord]) -> None:
        """Log the metrics of all records."""
        for record in records:
            if record.metrics:
                self._run.log({**record.metrics, "step": record.step})

    def flush(self) -> None:
        """Do nothing: W&B's own process uploads the metrics."""

    def close(self, *, finished: bool) -> None:
        """Wait for the upload, and report the status of the run."""
        self._run.finish(exit_code=0 if finished else 1)
