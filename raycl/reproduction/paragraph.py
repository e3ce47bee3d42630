"""A figure as a picture, as numbers, and as a paragraph for a page of results."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

from raycl.config import RunConfig
from raycl.reproduction.claims import Claim
from raycl.reproduction.figure import Figure
from raycl.reproduction.outcomes import Outcome, Results
from raycl.reproduction.panels import write_caption
from raycl.reproduction.scales import ScaleName, describe_runs
from raycl.storage import Place

_FORMS = {"seconds": "{:,.0f}", "steps": "{:,.0f}", "collapsed": "{:g}", "rollbacks": "{:g}"}
METRICS = ("loss", "spread", "knn_top1")


@final
@dataclass(frozen=True, kw_only=True)
class Page:
    """All that is told of a figure: what it is, at which scale, by which command, which runs, and what came out."""

    figure: Figure
    scale: ScaleName
    command: str
    configs: Sequence[RunConfig]
    results: Results

    @property
    def claims(self) -> list[Claim]:
        """The claims of the figure, judged."""
        return self.figure.claims(self.results)

    def write(self, output: Place) -> dict[str, str]:
        """Write picture, numbers and paragraph below ``output``; return their addresses by kind."""
        name, contents = (
            self.figure.name,
            {"png": self.picture(), "json": self.numbers().encode(), "md": self.text().encode()},
        )
        places = {kind: output / f"{name}.{kind}" for kind in contents}
        for kind, place in places.items():
            place.write_bytes(contents[kind])
        return {kind: place.uri for kind, place in places.items()}

    def picture(self) -> bytes:
        """Return the PNG, with the sentences under the panels."""
        picture = Picture(dpi=140)
        FigureCanvasAgg(picture)
        self.figure.draw(self.results, picture)
        write_caption(
            picture, self.figure.title, [claim.sentence() for claim in self.claims] + self._remarks()
        )
        stream = io.BytesIO()
        picture.savefig(stream, format="png")
        return stream.getvalue()

    def numbers(self) -> str:
        """Return every number as JSON: the claims, the runs with their machines, and their curves."""
        results = self.results
        runs = [asdict(outcome) | {"curves": self._curves(outcome)} for outcome in results.outcomes]
        told = {
            "figure": self.figure.name,
            "title": self.figure.title,
            "source": self.figure.source,
            "scale": self.scale,
            "command": self.command,
            "raw_pixels_knn_top1": self.results.floor,
            "claims": [asdict(claim) for claim in self.claims],
            "missing": list(results.missing),
            "settings": dict(results.labels),
            "runs": runs,
        }
        return json.dumps(told, indent=1) + "\n"

    def text(self) -> str:
        """Return the paragraph as Markdown."""
        figure, results = self.figure, self.results
        rules = "\n".join(
            f"- **{_verdict(claim)}** {claim.sentence()} Rule: {claim.rule}." for claim in self.claims
        )
        parts = [
            f"## {figure.title}",
            f"{figure.source}. {figure.note}",
            f"```bash\n{self.command}\n```",
            f"{_seeds(results)} on {_machines(results.outcomes)}; {describe_runs(self.scale, self.configs)}. Median over "
            "the seeds, least to most in brackets."
            + (f" Raw pixels: kNN {self.results.floor:.3f}." if self.results.floor is not None else ""),
            f"![{figure.title}](images/{figure.name}.png)",
            self._table(),
            rules,
            *self._remarks(),
        ]
        return "\n\n".join(parts) + "\n"

    def _table(self) -> str:
        columns = self.figure.columns
        rows = [
            [label, *(_cell(self.results, name, number) for number in columns)]
            for name, label in self.results.labels.items()
        ]
        head = ["", *columns.values()]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))

    def _remarks(self) -> list[str]:
        """Say what is missing, and which runs came to nothing."""
        missing, failed = self.results.missing, [each for each in self.results.outcomes if each.failed]
        remarks = [f"Not finished yet: {', '.join(missing)}."] if missing else []
        if failed:
            names = ", ".join(f"{each.setting} (seed {each.seed})" for each in failed)
            remarks.append(f"Ended without an encoder, and counted as guessing: {names}.")
        return remarks

    def _curves(self, outcome: Outcome) -> Mapping[str, Any]:
        return {
            metric: [
                {
                    "attempt": curve.attempt,
                    "samples": curve.samples,
                    "steps": curve.steps,
                    "values": curve.values,
                }
                for curve in self.results.curves_of(outcome.setting, metric)
                if curve.seed == outcome.seed
            ]
            for metric in METRICS
        }


def _verdict(claim: Claim) -> str:
    return {True: "Held.", False: "Did not hold.", None: "Open."}[claim.held]


def _cell(results: Results, setting: str, number: str) -> str:
    sample = results.sample(setting, number)
    if not sample.values:
        return "-"
    form = _FORMS.get(number, "{:.3f}")
    median, least, most = (form.format(value) for value in (sample.median, sample.least, sample.most))
    return median if least == most else f"{median} ({least}-{most})"


def _seeds(results: Results) -> str:
    seeds = sorted({outcome.seed for outcome in results.outcomes})
    if not seeds:
        return "No run has finished"
    return f"Seed {seeds[0]}" if len(seeds) == 1 else f"Seeds {', '.join(map(str, seeds))}"


def _machines(outcomes: Sequence[Outcome]) -> str:
    """Return what the runs ran on, each kind of machine once."""
    told = {
        f"{each.machine['num_cores']} cores ({each.machine['cpu']}, {each.machine['capability']})"
        + (f" and {each.machine['gpu']}" if each.machine.get("gpu") else "")
        + f", torch {each.machine['torch']}"
        for each in outcomes
    }
    return " and ".join(sorted(told)) or "no machine"
