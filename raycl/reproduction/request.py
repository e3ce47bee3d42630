"""A figure from its name: run what is missing, judge it, and draw what is there."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from raycl.cluster import connect_cluster
from raycl.errors import ConfigError
from raycl.reproduction.catalog import find_figure
from raycl.reproduction.figure import Figure
from raycl.reproduction.images import Evaluator, training_part
from raycl.reproduction.outcomes import Curve, Outcome, Results, read_curves
from raycl.reproduction.paragraph import METRICS, Page
from raycl.reproduction.runs import PlannedRun, outcome_of, perform, plan_runs
from raycl.reproduction.scales import SCALES, ScaleName
from raycl.storage import Place, absolute


@final
@dataclass(frozen=True, kw_only=True)
class Request:
    """What somebody asks for; ``settings`` are those of ``--set``, of all runs."""

    figure: str
    output: str
    data: str | None = None
    test: str | None = None
    scale: ScaleName = "cpu"
    num_seeds: int = 3
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
            "workers": self.workers,
        }
        words = [f"--{name} {shlex.quote(str(value))}" for name, value in flags.items() if value is not None]
        words += [
            f"--set {shlex.quote(f'{key}={json.dumps(value)}')}" for key, value in self.settings.items()
        ]
        return " ".join(["python jobs/reproduce.py", self.figure, *words])


def reproduce(
    request: Request,
    *,
    draw_only: bool = False,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    address: str | None = None,
    debug: bool = False,
) -> Page:
    """Do the runs of a figure that are not done yet, and write picture, numbers and paragraph.

    With ``draw_only`` what is there is drawn. Raises ``ConfigError`` if runs with other settings lie at the
    output, or nothing to draw, and the errors of ``raycl.train``.
    """
    figure, output = find_figure(request.figure), Place(absolute(request.output))
    runs = plan_runs(
        figure,
        request.scale,
        output,
        num_seeds=request.num_seeds,
        workers=request.workers,
        overrides=request.settings,
    )
    outcomes = [outcome_of(run) for run in runs]
    if not draw_only:
        _perform_missing(request, runs, outcomes, tell=tell, address=address, debug=debug)
    if not any(outcomes):
        raise ConfigError(
            f"no run of {figure.name} is finished below {request.output}; leave out --draw-only"
        )
    page = Page(
        figure=figure,
        scale=request.scale,
        command=_completed(request, outcomes).command(),
        configs=[run.config for run in runs],
        results=gather(figure, request.scale, runs, outcomes),
    )
    written = page.write(output)
    for claim in page.claims:
        tell(claim.sentence())
    tell(f"{figure.name}: {', '.join(written.values())}")
    return page


def gather(
    figure: Figure, scale: ScaleName, runs: Sequence[PlannedRun], outcomes: Sequence[Outcome | None]
) -> Results:
    """Return what there is of a figure: numbers, curves, and the names of the runs that are missing."""
    curves: dict[str, list[Curve]] = {metric: [] for metric in METRICS}
    for run, outcome in zip(runs, outcomes, strict=True):
        if outcome is not None:
            for metric, found in read_curves(run.place, outcome, METRICS).items():
                curves[metric] += found
    settings = figure.settings[scale]
    return Results(
        labels={setting.name: setting.label for setting in settings},
        lines={setting.name: (setting.line, setting.x) for setting in settings},
        outcomes=[outcome for outcome in outcomes if outcome is not None],
        curves=curves,
        missing=[run.name for run, outcome in zip(runs, outcomes, strict=True) if outcome is None],
    )


def _perform_missing(
    request: Request,
    runs: Sequence[PlannedRun],
    outcomes: list[Outcome | None],
    *,
    tell: Callable[[str], None],
    address: str | None,
    debug: bool,
) -> None:
    """Do what is not done yet, in place of each None; all runs on one Ray."""
    if request.data is None or request.test is None:
        raise ConfigError("give --data and --test, the images to train and to judge on, or --draw-only")
    if absolute(request.data) == absolute(request.test):
        raise ConfigError(
            f"--data and --test are both {request.test}, and images that were trained on judge nothing; give --test "
            "others"
        )
    _check_same_images(request.data, request.test, outcomes)
    todo = [at for at, outcome in enumerate(outcomes) if outcome is None]
    if not todo:
        return
    connect_cluster(address, debug=debug)
    part = training_part(request.data, SCALES[request.scale].num_train, Place(absolute(request.output)))
    judge = Evaluator(data=request.data, train=part, test=request.test)
    began = time.monotonic()
    for done, at in enumerate(todo):
        seconds = (time.monotonic() - began) * (len(todo) - done) / done if done else None
        tell(_progress(runs[at], at + 1, len(runs), seconds))
        # A long run has a line of its own; a short one would be over before it is read.
        quiet = request.scale == "cpu" and not debug
        outcomes[at] = perform(runs[at], judge, address=address, quiet=quiet, debug=debug)


def _progress(run: PlannedRun, number: int, num_runs: int, seconds: float | None) -> str:
    left = "" if seconds is None else f", about {seconds / 60:.0f} minutes left"
    return f"{run.figure.name}: run {number} of {num_runs} ({run.setting.label}, seed {run.seed}){left}"


def _check_same_images(data: str, test: str, outcomes: Sequence[Outcome | None]) -> None:
    for outcome in filter(None, outcomes):
        for flag, before, now in (("--data", outcome.data, data), ("--test", outcome.test, test)):
            if absolute(before) != absolute(now):
                raise ConfigError(
                    f"{flag} is {now}, and runs at the output saw {before}; repeat it, or give another --output"
                )


def _completed(request: Request, outcomes: Sequence[Outcome | None]) -> Request:
    """Return the request with the addresses that the runs had, where it has none."""
    first = next(filter(None, outcomes))
    return replace(request, data=request.data or first.data, test=request.test or first.test)
