"""What came of the runs of a figure: a record a run, kept beside it, and all of them together."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

from raycl.errors import ConfigError
from raycl.records import ROLLBACK, read_metrics
from raycl.reproduction.claims import Sample
from raycl.storage import Place

OUTCOME = "outcome.json"


@final
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run's numbers; ``failed`` says why a run came to nothing, which may be what a figure shows.

    ``data`` and ``test`` are the addresses of the images, ``machine`` is what it ran on.
    """

    setting: str
    seed: int
    numbers: Mapping[str, float]
    machine: Mapping[str, Any]
    data: str
    test: str
    failed: str | None = None

    def write(self, run: Place) -> None:
        """Keep the record below the run; raises ``StorageError``."""
        (run / OUTCOME).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_outcome(run: Place) -> Outcome | None:
    """Return the record of a run that is over, if it is one; raises ``ConfigError`` for a file that is none."""
    place = run / OUTCOME
    if not place.exists():
        return None
    try:
        return Outcome(**json.loads(place.read_text()))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{place} is no record of a run: {error}; delete it, and the run is judged again"
        ) from None


@final
@dataclass(frozen=True, kw_only=True)
class Curve:
    """One figure of one run over the samples that it saw; ``attempt`` counts its rollbacks."""

    setting: str
    seed: int
    attempt: int
    samples: Sequence[float]
    steps: Sequence[float]
    values: Sequence[float]


@final
@dataclass(frozen=True, kw_only=True)
class Results:
    """All that is there of a figure; ``runs`` are the folders of the outcomes, ``missing`` the names of the rest."""

    labels: Mapping[str, str]  # of the settings, in the order of the table
    lines: Mapping[str, tuple[str | None, float | None]]  # the curve that a setting is a point of, and where
    outcomes: Sequence[Outcome]
    curves: Mapping[str, Sequence[Curve]] = field(default_factory=dict)  # by figure of metrics.jsonl
    missing: Sequence[str] = ()

    @property
    def floor(self) -> float | None:
        """The kNN top-1 of raw pixels, if a run has measured it."""
        return next((each.numbers["pixels"] for each in self.outcomes if "pixels" in each.numbers), None)

    def sample(self, setting: str, number: str) -> Sample:
        """Return a number of a setting over its seeds; runs without it are left out."""
        found = [each.numbers.get(number) for each in self.outcomes if each.setting == setting]
        return Sample(tuple(value for value in found if value is not None))

    def samples(self, number: str) -> dict[str, Sample]:
        """Return a number of all settings, by label."""
        return {label: self.sample(name, number) for name, label in self.labels.items()}

    def points(self, line: str, number: str) -> dict[float, Sample]:
        """Return a number by place along a curve, where there is any."""
        places = {x: name for name, (own, x) in self.lines.items() if own == line and x is not None}
        samples = {x: self.sample(places[x], number) for x in sorted(places)}
        return {x: sample for x, sample in samples.items() if sample.values}

    def curves_by_label(self, metric: str) -> dict[str, list[Curve]]:
        """Return the curves of all settings."""
        return {label: self.curves_of(name, metric) for name, label in self.labels.items()}

    def curves_of(self, setting: str, metric: str) -> list[Curve]:
        """Return the curves of a setting, one a seed and attempt."""
        return [curve for curve in self.curves.get(metric, ()) if curve.setting == setting]


def read_curves(run: Place, outcome: Outcome, metrics: Sequence[str]) -> dict[str, list[Curve]]:
    """Return curves by metric from a run's ``metrics.jsonl``, cut where it was rolled back."""
    attempts: list[list[dict[str, Any]]] = [[]]
    for line in read_metrics(run):
        if line.get("event") == ROLLBACK:
            attempts.append([])
        else:
            attempts[-1].append(line)
    found: dict[str, list[Curve]] = {metric: [] for metric in metrics}
    for number, lines in enumerate(attempts):
        for metric in metrics:
            known = [line for line in lines if line.get(metric) is not None]
            if known:
                found[metric].append(
                    Curve(
                        setting=outcome.setting,
                        seed=outcome.seed,
                        attempt=number,
                        samples=[line["samples"] for line in known],
                        steps=[line["step"] for line in known],
                        values=[line[metric] for line in known],
                    )
                )
    return found
