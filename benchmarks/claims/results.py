"""Results of a figure: one record per run, stored in its folder, and the curves of its metrics."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

from claims.figure import ClaimFigure, ScaleName, Setting
from claims.rules import Claim, SeedValues
from raycl.config import RunConfig
from raycl.errors import ConfigError
from raycl.records import ROLLBACK, read_metrics
from raycl.storage import Place

OUTCOME = "outcome.json"
METRICS = ("loss", "embedding_std", "knn_top1")


@final
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run's numbers, the addresses of its images, and its machine.

    ``failed`` says why a run ended without an encoder, which may be the point of a figure.
    """

    setting: str
    seed: int
    numbers: Mapping[str, float]
    machine: Mapping[str, Any]
    data: str
    test: str
    failed: str | None = None

    def write(self, run: Place) -> None:
        """Store the record in the run's folder; raises ``StorageError``."""
        (run / OUTCOME).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_outcome(run: Place) -> Outcome | None:
    """Return the record of a finished run, or None; raises ``ConfigError`` for an invalid file."""
    place = run / OUTCOME
    if not place.exists():
        return None
    try:
        return Outcome(**json.loads(place.read_text()))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{place} is not a record of a run: {error}; delete it to evaluate the run again"
        ) from None


@final
@dataclass(frozen=True, kw_only=True)
class MetricCurve:
    """One metric of one run over its samples; ``attempt`` counts the rollbacks before it."""

    setting: str
    seed: int
    attempt: int
    samples: Sequence[float]
    steps: Sequence[float]
    values: Sequence[float]


def attempts(lines: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the lines of a ``metrics.jsonl`` up to the first rollback, and after each one."""
    found: list[list[dict[str, Any]]] = [[]]
    for line in lines:
        if line.get("event") == ROLLBACK:
            found.append([])
        else:
            found[-1].append(line)
    return found


def read_curves(run: Place, outcome: Outcome) -> dict[str, list[MetricCurve]]:
    """Return curves by metric from a run's ``metrics.jsonl``, split at rollbacks."""
    found: dict[str, list[MetricCurve]] = {metric: [] for metric in METRICS}
    for attempt, lines in enumerate(attempts(read_metrics(run))):
        for metric in METRICS:
            known = [line for line in lines if line.get(metric) is not None]
            if known:
                columns = {"samples": "samples", "steps": "step", "values": metric}
                values = {name: [line[key] for line in known] for name, key in columns.items()}
                found[metric].append(
                    MetricCurve(setting=outcome.setting, seed=outcome.seed, attempt=attempt, **values)
                )
    return found


@final
@dataclass(frozen=True, kw_only=True)
class Results:
    """The outcomes of a figure so far; ``missing`` names the unfinished runs."""

    figure: ClaimFigure
    scale: ScaleName
    configs: Sequence[RunConfig]
    outcomes: Sequence[Outcome]
    curves: Mapping[str, Sequence[MetricCurve]] = field(default_factory=dict)  # by metric
    missing: Sequence[str] = ()

    @property
    def settings(self) -> tuple[Setting, ...]:
        return self.figure.settings[self.scale]

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the settings by name, in the order of the table."""
        return {setting.name: setting.label for setting in self.settings}

    @property
    def claims(self) -> list[Claim]:
        """The claims with their verdicts."""
        return self.figure.claims(self)

    @property
    def baseline(self) -> float | None:
        """The kNN top-1 of raw pixels, if a run has measured it."""
        return next((each.numbers["pixels"] for each in self.outcomes if "pixels" in each.numbers), None)

    def number(self, setting: str, name: str) -> SeedValues:
        """Return a number of a setting over its seeds; runs without it are skipped."""
        found = [each.numbers.get(name) for each in self.outcomes if each.setting == setting]
        return SeedValues(tuple(value for value in found if value is not None))

    def by_setting(self, name: str) -> dict[str, SeedValues]:
        """Return a number of all settings, by their name."""
        return {setting.name: self.number(setting.name, name) for setting in self.settings}

    def by_label(self, name: str) -> dict[str, SeedValues]:
        """Return a number of all settings, by their label."""
        return {setting.label: self.number(setting.name, name) for setting in self.settings}

    def points(self, line: str, name: str) -> dict[float, SeedValues]:
        """Return a number by its place along a curve, without the empty places."""
        places = {each.x: each.name for each in self.settings if each.line == line and each.x is not None}
        found = {x: self.number(places[x], name) for x in sorted(places)}
        return {x: values for x, values in found.items() if values.values}

    def curves_of(self, setting: str, metric: str) -> list[MetricCurve]:
        """Return the curves of a setting, one per seed and attempt."""
        return [curve for curve in self.curves.get(metric, ()) if curve.setting == setting]

    def curves_by_label(self, metric: str) -> dict[str, list[MetricCurve]]:
        """Return the curves of all settings, by their label."""
        return {setting.label: self.curves_of(setting.name, metric) for setting in self.settings}
