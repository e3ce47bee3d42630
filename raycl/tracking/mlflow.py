"""Runs in MLflow, on a tracking server or in a folder."""

import os
from collections.abc import Sequence
from typing import Any, final

# By default MLflow retries silently for minutes; BackgroundTracker reports a failure and retries itself.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from raycl.config import RunConfig, active_settings, flat
from raycl.storage import Place
from raycl.tracking.base import MetricsRecord, known_run, remember_run

EXPERIMENT = "raycl"  # unless MLFLOW_EXPERIMENT_NAME says otherwise

# Limits of one request.
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_LENGTH = 1_000, 100, 500


@final
class MlflowRun:
    """Log metrics by step; a resumed run continues its MLflow run, and logs some steps twice."""

    def __init__(self, config: RunConfig, output: Place) -> None:
        """Create a run with the settings as its parameters, or continue the run of the output."""
        address = config.tracking.mlflow
        assert address is not None, "set by tracking.mlflow"
        self._client = MlflowClient(tracking_uri=address)
        known = known_run(output, "mlflow", address)
        if known is None:
            known = self._create(output)
            # At once: an error from here on must not create another run at each attempt.
            remember_run(output, "mlflow", address, known)
        self._run = known
        self._client.update_run(known, status="RUNNING")
        self._add_settings(config)

    def write(self, records: Sequence[MetricsRecord]) -> None:
        """Log the metrics of all records."""
        metrics = [
            Metric(key=name, value=value, timestamp=int(1_000 * record.time), step=record.step)
            for record in records
            for name, value in record.metrics.items()
        ]
        for some in _parts(metrics, _MAX_METRICS):
            self._client.log_batch(self._run, metrics=some)

    def flush(self) -> None:
        """Do nothing: the server has all metrics."""

    def close(self, *, finished: bool) -> None:
        """Mark the run as finished, or as failed until it is resumed, as MLflow does after an exception."""
        self._client.set_terminated(self._run, "FINISHED" if finished else "FAILED")

    def _create(self, output: Place) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = self._client.create_run(experiment_id, run_name=output.name, tags={"output": output.uri})
        return run.info.run_id

    def _add_settings(self, config: RunConfig) -> None:
        """Log the settings that MLflow lacks, such as new stages of a resumed run; it refuses to change others."""
        known, settings = self._client.get_run(self._run).data.params, flat(active_settings(config))
        params = [
            Param(key, str(value)[:_MAX_PARAM_LENGTH]) for key, value in settings.items() if key not in known
        ]
        for some in _parts(params, _MAX_PARAMS):
            self._client.log_batch(self._run, params=some)


def _parts(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
