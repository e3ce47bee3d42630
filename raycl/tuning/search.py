"""The search: measure the pace of a run, plan the rungs, and let Ray Tune run and halve the trials."""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from raycl.config import RunConfig
from raycl.config.conditions import leaves, why_inactive
from raycl.config.overrides import config_to_yaml, override
from raycl.data.sources import Source
from raycl.display import Displayable, Table
from raycl.errors import ConfigError, RunError
from raycl.models.registry import TOKENIZER
from raycl.ray_runtime import connect_cluster, unwrap_ray_errors
from raycl.records import DATA, read_object
from raycl.storage import Place
from raycl.training.controller import remove_leaked_placement_groups
from raycl.training.preflight import validate_run
from raycl.tuning.plan import (
    CLOSING_S,
    ETA,
    PACE_LAP,
    PACE_STEPS,
    Trial,
    Values,
    best_trial,
    plan_rungs,
    search_space,
)
from raycl.tuning.trial import Runner, changed_settings, number_of, run_trial

TUNED = "tuned.yaml"
_UNKNOWN = "unknown: the time ended before the recipe's last rung, so nothing was compared; raise --minutes"


@final
@dataclass(frozen=True, kw_only=True)
class TuneResult(Displayable):
    """The result of a search: the file with the best settings, the metric, and the trials, the recipe first.

    ``config`` is the content of the file. ``rungs`` are the samples of a run in each rung. ``best`` is the recipe if
    no trial was better in the last rung.
    """

    output: str
    config: RunConfig
    metric: str
    rungs: tuple[int, ...]
    recipe: RunConfig
    trials: tuple[Trial, ...]
    best: Trial

    @property
    def gain(self) -> float:
        """The metric of the best trial less the recipe's, in the last rung; 0 if the best one is the recipe.

        It is also 0 if the time ended before the recipe's last rung.
        """
        return self.best.scores[-1] - self.trials[0].scores[-1] if self.best.number else 0.0

    def to_table(self) -> Table:
        """Show the settings of each trial, and its score in each rung."""
        paths = list(dict.fromkeys(path for trial in self.trials for path in trial.settings))
        own, rows = leaves(self.recipe), []
        is_compared = len(self.trials[0].scores) == len(self.rungs)
        for trial in self.trials:
            scores = [*trial.scores, *[None] * (len(self.rungs) - len(trial.scores))]
            name = str(trial.number) if trial.number else "recipe"
            note = "failed" if trial.error else "best" if is_compared and trial == self.best else ""
            rows.append((name, *({**own, **trial.settings}[path] for path in paths), *scores, note))
        names = [path.removeprefix("stages.0.") for path in paths]
        return Table(
            title=f"{self.metric} on held-out rows, by the samples of a run",
            facts={"gain over the recipe": self.gain if is_compared else _UNKNOWN, "settings": self.output},
            columns=("trial", *names, *(f"{samples:,}" for samples in self.rungs), ""),
            rows=rows,
        )


@final
class KeepingRecipe(ASHAScheduler):
    """Asynchronous successive halving (Li et al., 2020) that never ends the recipe before the last rung."""

    def __init__(self, num_rungs: int) -> None:
        self._last = ETA ** (num_rungs - 1)
        super().__init__("length", "score", "max", max_t=self._last, reduction_factor=ETA)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Record the result; return whether the trial continues."""
        decision = super().on_trial_result(tune_controller, trial, result)
        is_kept = number_of(trial.trial_id) == 0 and result["length"] < self._last
        return self.CONTINUE if is_kept else decision


@final
class Recorder(tune.Callback, tune.Stopper):
    """Keep the scores of the trials, and write the best settings so far after each one.

    A failed trial is ended, and the search with it if the recipe fails.
    """

    def __init__(
        self, config: RunConfig, place: Place, rungs: tuple[int, ...], report: Callable[[str], None]
    ) -> None:
        self._config, self._file, self._rungs, self._report = config, place / TUNED, rungs, report
        self._trials = {0: Trial(number=0, settings={})}
        self._write()

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether the trial failed."""
        return bool(result.get("error"))

    def stop_all(self) -> bool:
        """Whether the recipe failed: no trial can be compared with it."""
        return bool(self._trials[0].error)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        """Add the score of a trial in its next rung; Ray Tune calls it."""
        number, settings = number_of(trial.trial_id), changed_settings(trial.trial_id, trial.config)
        before = self._trials.get(number, Trial(number=number, settings=settings))
        score, error = result["score"], result["error"]
        changed = self._trials[number] = replace(before, scores=(*before.scores, score), error=error)
        self._write()
        values = ", ".join(f"{path.removeprefix('stages.0.')}={value:g}" for path, value in settings.items())
        name = f"trial {number} ({values})" if number else "recipe"
        outcome = f"failed: {error}" if error else f"{self._config.evaluation_metric} {score:.4f}"
        self._report(f"{name}: {outcome} after {self._rungs[len(changed.scores) - 1]:,} samples")

    def result(self) -> TuneResult:
        """Return the trials so far, and the best one."""
        trials = tuple(self._trials[number] for number in sorted(self._trials))
        best = best_trial(trials, len(self._rungs))
        return TuneResult(
            output=self._file.uri,
            config=override(self._config, best.settings),
            metric=self._config.evaluation_metric,
            rungs=self._rungs,
            recipe=self._config,
            trials=trials,
            best=best,
        )

    def _write(self) -> None:
        self._file.write_text(config_to_yaml(self.result().config))


def search(
    config: RunConfig,
    *,
    output: str,
    sources: Sequence[Source],
    deadline: float,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> TuneResult:
    """Search until ``deadline``, by ``time.monotonic``; raises as ``raycl.tune`` does."""

    def report(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    def left_s() -> float:
        return deadline - time.monotonic() - CLOSING_S

    data = [source.uri for source in sources]
    with validate_run(
        config, output=output, resume=False, data=data, sources=sources, address=address
    ) as run:
        if (run.output / TUNED).exists():
            raise ConfigError(f"{run.output} holds an earlier search; give another --output")
        config = run.config
        connect_cluster(address, debug=debug)
        trials = run.output / "trials"
        runner = Runner(config=config, sources=run.sources, output=trials.uri)
        # Named by the time, since a search that is refused may be repeated.
        name = f"pace-{time.time():.0f}"
        short = {"log_every_steps": PACE_LAP}, PACE_STEPS * config.stages[0].batch_size
        pace = runner.run(*short, name)
        # A run counts the pairs of a click log, not its rows.
        described = read_object(trials / name / DATA)
        rows = described.get("rows_per_data_set", [described["num_rows"]])
        if why_inactive(config, "text.vocabulary_size") is None:
            # Each trial would train the same tokenizer.
            shared = config if config.counts_tokens else override(config, {"text.corpus": None})
            shared = override(shared, {"text.tokenizer": (trials / name / TOKENIZER).uri})
            runner = replace(runner, config=shared)
            # A trial does not train it.
            pace = runner.run(*short, f"{name}-again")
        rungs = plan_rungs(config, sum(rows), pace, left_s())
        report(
            f"a run takes {pace.overhead_s:.0f} s and trains on {pace.samples_per_second:,.0f} samples/s; rungs of "
            f"{', '.join(f'{samples:,}' for samples in rungs)} samples, each for the best third of the one before"
        )
        recorder = Recorder(config, run.output, rungs, report)
        tune_trials(runner, rungs, search_space(config, min(rows)), recorder, seconds=left_s(), debug=debug)
        result = recorder.result()
        if error := result.trials[0].error:
            raise RunError(f"the recipe failed: {error}")
        if left_s() > 0:  # otherwise, Ray Tune returns before the end after Ctrl-C only
            report(f"interrupted; the best settings so far are in {run.output / TUNED}")
            raise KeyboardInterrupt
        return result


def tune_trials(
    runner: Runner,
    rungs: tuple[int, ...],
    space: Mapping[str, Values],
    recorder: Recorder,
    *,
    seconds: float,
    debug: bool,
) -> None:
    """Let Ray Tune start trials until the time is over."""
    config, own = runner.config, leaves(runner.config)
    if not debug:
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}
    # A run on the CPU uses all cores.
    num_gpus = ray.cluster_resources().get("GPU", 0.0) if config.gpu else 0.0
    filesystem, path = Place(runner.output).resolve()
    trainable = tune.with_parameters(run_trial, runner=runner, rungs=rungs)
    tuner = tune.Tuner(
        # Ray Tune requires a resource, so a byte of memory: CPUs and GPUs are for the runs.
        tune.with_resources(trainable, tune.PlacementGroupFactory([{"CPU": 0, "memory": 1}])),
        param_space={
            name: tune.choice(values) if isinstance(values, list) else tune.loguniform(*values)
            for name, values in space.items()
        },
        tune_config=tune.TuneConfig(
            num_samples=-1,
            time_budget_s=seconds,
            reuse_actors=True,
            scheduler=KeepingRecipe(len(rungs)),
            search_alg=BasicVariantGenerator(
                points_to_evaluate=[{name: own[name] for name in space}],
                max_concurrent=max(1, int(num_gpus) // config.workers_of(config.stages[0])),
                random_state=config.seed,
            ),
        ),
        run_config=tune.RunConfig(
            name="ray_tune",
            storage_path=path,
            storage_filesystem=filesystem,
            callbacks=[recorder],
            stop=recorder,
            verbose=0,
        ),
    )
    try:
        with unwrap_ray_errors():
            tuner.fit()
    finally:
        remove_leaked_placement_groups()
