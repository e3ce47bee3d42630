"""A trial of Ray Tune: one run in each rung, with a learning rate schedule of the run's own length."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import ray
from ray import tune

from raycl.config import RunConfig
from raycl.data.sources import Source
from raycl.errors import DataError, RayclError
from raycl.ray_runtime import unwrap_ray_errors
from raycl.records import NOT_EVALUATED, read_metrics
from raycl.storage import Place
from raycl.tuning.plan import ETA, Measured, trial_config


@final
@dataclass(frozen=True, kw_only=True)
class Runner:
    """Makes the runs of all trials on the same data, in folders below ``output``."""

    config: RunConfig
    sources: Sequence[Source]
    output: str

    def run(self, settings: Mapping[str, Any], samples: int, name: str) -> Measured:
        """Train the recipe with changed settings; raises raycl's errors."""
        output = (Place(self.output) / name).uri
        config = trial_config(self.config, settings, samples, output)
        # A task, since Ray uses its process again: only the first one imports torch. Outside the resources of the
        # trial, which has none.
        task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy="DEFAULT")(_train)  # pyright: ignore
        with unwrap_ray_errors():
            return ray.get(task.remote(config, output, self.sources))


def number_of(trial_id: str) -> int:
    """Return the number of a trial in the order of Ray Tune; the recipe is number 0."""
    return int(trial_id.rpartition("_")[2])


def changed_settings(trial_id: str, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a trial changes, with three digits; none for the recipe."""
    if number_of(trial_id) == 0:
        return {}
    return {path: value if isinstance(value, int) else float(f"{value:.3g}") for path, value in drawn.items()}


def run_trial(drawn: dict[str, Any], *, runner: Runner, rungs: Sequence[int]) -> None:
    """Train in each rung and report the score, until the scheduler ends the trial; a failed run scores 0."""
    trial_id = tune.get_context().get_trial_id()
    settings = changed_settings(trial_id, drawn)
    for rung, samples in enumerate(rungs):
        score, error = 0.0, ""
        try:
            score = runner.run(settings, samples, f"{number_of(trial_id)}-{rung + 1}").score
        except RayclError as failure:
            error = str(failure)
        tune.report({"score": score, "length": ETA**rung, "error": error})


def _train(config: RunConfig, output: str, sources: Sequence[Source]) -> Measured:
    from raycl.training.launch import train  # which imports torch

    began, data = time.monotonic(), [source.uri for source in sources]
    result = train(config, output=output, data=data, sources=sources, quiet=True)
    if config.evaluation_metric not in result.final:
        reasons = (
            "; ".join(each for each in result.notices if NOT_EVALUATED in each)
            or "the run reported no reason"
        )
        needed = "pairs" if config.has_two_towers else "rows with labels of several classes"
        raise DataError(
            f"the run measured no {config.evaluation_metric} to compare trials by: {reasons}; "
            f"give more {needed}"
        )
    seconds = time.monotonic() - began
    *_, rate = (line["samples_per_second"] for line in read_metrics(Place(output)) if "loss" in line)
    overhead_s = max(0.0, seconds - result.seconds * result.samples_per_second / rate)
    return Measured(result.final[config.evaluation_metric], overhead_s, rate)
