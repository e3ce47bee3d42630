"""Reproduce a figure by name: train the missing runs, evaluate them, and draw the finished ones."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from claims import find_figure
from claims.figure import SCALES, ClaimFigure, ScaleName
from claims.images import training_subset
from claims.markdown import Page
from claims.results import METRICS, MetricCurve, Outcome, Results, read_curves
from claims.runs import Images, PlannedRun, outcome_of, perform, plan_runs
from raycl.errors import ConfigError
from raycl.ray_runtime import connect_cluster
from raycl.storage import Place, absolute


@final
@dataclass(frozen=True, kw_only=True)
class ReproduceRequest:
    """The arguments of the command; ``settings`` are the ``--set`` of all runs."""

    figure: str
    output: str
    data: str | None = None
    test: str | None = None
    scale: ScaleName = "cpu"
    num_seeds: int = 3
    first_seed: int = 0
    workers: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def command(self) -> str:
        """Return the command that gives the same figure, for a page of results."""
        flags = {
            "data": self.data,
            "test": self.test,
            "output": self.output,
            "scale": self.scale,
            "seeds": self.num_seeds,
            "first-seed": self.first_seed or None,
            "workers": self.workers,
        }
        words = [f"--{name} {shlex.quote(str(value))}" for name, value in flags.items() if value is not None]
        words += [
            f"--set {shlex.quote(f'{key}={json.dumps(value)}')}" for key, value in self.settings.items()
        ]
        return " ".join(["python jobs/reproduce.py", self.figure, *words])


def reproduce(
    request: ReproduceRequest,
    *,
    draw_only: bool = False,
    notify: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    address: str | None = None,
    debug: bool = False,
) -> Page:
    """Perform the missing runs of a figure, and write its picture, numbers and paragraph.

    ``draw_only`` trains nothing and draws the finished runs. Raises ``ConfigError`` if the output holds
    runs with other settings, or nothing to draw, and the errors of ``raycl.train``.
    """
    figure, output = find_figure(request.figure), Place(absolute(request.output))
    runs = plan_runs(
        figure,
        request.scale,
        output,
        num_seeds=request.num_seeds,
        first_seed=request.first_seed,
        workers=request.workers,
        overrides=request.settings,
    )
    outcomes = [outcome_of(run) for run in runs]
    if not draw_only:
        _check_images(request, outcomes)
        if None in outcomes:
            _perform_missing(request, runs, outcomes, notify=notify, address=address, debug=debug)
    finished = [outcome for outcome in outcomes if outcome is not None]
    if not finished:
        raise ConfigError(f"no run of {figure.name} is finished below {request.output}; omit --draw-only")
    given = replace(request, data=request.data or finished[0].data, test=request.test or finished[0].test)
    page = Page(command=given.command(), results=collect_results(figure, request.scale, runs, outcomes))
    written = page.write(output)
    for claim in page.results.claims:
        notify(claim.sentence())
    notify(f"{figure.name}: {', '.join(written.values())}")
    return page


def collect_results(
    figure: ClaimFigure, scale: ScaleName, runs: Sequence[PlannedRun], outcomes: Sequence[Outcome | None]
) -> Results:
    """Return the outcomes and curves of the finished runs, and the names of the missing ones."""
    curves: dict[str, list[MetricCurve]] = {metric: [] for metric in METRICS}
    finished, missing = [], []
    for run, outcome in zip(runs, outcomes, strict=True):
        if outcome is None:
            missing.append(run.name)
            continue
        finished.append(outcome)
        for metric, found in read_curves(run.place, outcome).items():
            curves[metric] += found
    return Results(
        figure=figure,
        scale=scale,
        configs=[run.config for run in runs],
        outcomes=finished,
        curves=curves,
        missing=missing,
    )


def _check_images(request: ReproduceRequest, outcomes: Sequence[Outcome | None]) -> None:
    """Raise ``ConfigError`` unless --data and --test are given, differ, and are those of earlier runs."""
    data, test = request.data, request.test
    if data is None or test is None:
        raise ConfigError("give --data and --test, the images for training and evaluation, or --draw-only")
    if absolute(data) == absolute(test):
        raise ConfigError(
            f"--data and --test are both {test}, and training images cannot evaluate; give --test other images"
        )
    for outcome in filter(None, outcomes):
        for flag, before, now in (("--data", outcome.data, data), ("--test", outcome.test, test)):
            if absolute(before) != absolute(now):
                raise ConfigError(
                    f"{flag} is {now}, and runs at the output saw {before}; repeat it, or give another --output"
                )


def _perform_missing(
    request: ReproduceRequest,
    runs: Sequence[PlannedRun],
    outcomes: list[Outcome | None],
    *,
    notify: Callable[[str], None],
    address: str | None,
    debug: bool,
) -> None:
    """Perform the runs without an outcome on one Ray, and replace each None by its outcome."""
    assert request.data is not None and request.test is not None, "checked before"
    connect_cluster(address, debug=debug)
    subset = training_subset(request.data, SCALES[request.scale].num_train, Place(absolute(request.output)))
    images = Images(data=request.data, train=subset, test=request.test)
    start = time.monotonic()
    todo = [position for position, outcome in enumerate(outcomes) if outcome is None]
    for done, position in enumerate(todo):
        run, left = runs[position], ""
        if done:
            minutes = (time.monotonic() - start) * (len(todo) - done) / done / 60
            left = f", about {minutes:.0f} minutes left"
        title = f"run {position + 1} of {len(runs)} ({run.setting.label}, seed {run.seed})"
        notify(f"{run.figure.name}: {title}{left}")
        # Long runs show their own progress; short ones end before anyone can read it.
        quiet = request.scale == "cpu" and not debug
        outcomes[position] = perform(run, images, address=address, quiet=quiet, debug=debug)
