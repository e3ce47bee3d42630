"""The picture, the numbers and the paragraph of a figure, for a page of results."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from measuring import markdown_table

from claims.figure import describe_runs
from claims.plots import draw, write_caption
from claims.results import METRICS, Outcome, Results
from raycl.storage import Place

_FORMS = {"seconds": "{:,.0f}", "steps": "{:,.0f}", "collapsed": "{:g}", "rollbacks": "{:g}"}
_VERDICTS = {True: "Held.", False: "Did not hold.", None: "Open."}


@final
@dataclass(frozen=True, kw_only=True)
class Page:
    """The results of a figure and the command that repeats them."""

    command: str
    results: Results

    def write(self, output: Place) -> dict[str, str]:
        """Write picture, numbers and paragraph below ``output``; return their addresses by kind."""
        contents = {"png": self.picture(), "json": self.numbers().encode(), "md": self.text().encode()}
        places = {kind: output / f"{self.results.figure.name}.{kind}" for kind in contents}
        for kind, place in places.items():
            place.write_bytes(contents[kind])
        return {kind: place.uri for kind, place in places.items()}

    def picture(self) -> bytes:
        """Return the PNG, with the sentences under the panels."""
        results, picture = self.results, Figure(dpi=140)
        FigureCanvasAgg(picture)
        draw(results, picture)
        sentences = [claim.sentence() for claim in results.claims] + self._notes()
        write_caption(picture, results.figure.title, sentences)
        stream = io.BytesIO()
        picture.savefig(stream, format="png")
        return stream.getvalue()

    def numbers(self) -> str:
        """Return every number as JSON: the claims, the runs with their machines, and their curves."""
        results, figure = self.results, self.results.figure
        content = {
            "figure": figure.name,
            "title": figure.title,
            "source": figure.source,
            "scale": results.scale,
            "command": self.command,
            "raw_pixels_knn_top1": results.baseline,
            "claims": [asdict(claim) for claim in results.claims],
            "missing": list(results.missing),
            "settings": results.labels,
            "runs": [asdict(outcome) | {"curves": self._curves(outcome)} for outcome in results.outcomes],
        }
        return json.dumps(content, indent=1) + "\n"

    def text(self) -> str:
        """Return the paragraph as Markdown."""
        results, figure = self.results, self.results.figure
        baseline = "" if results.baseline is None else f" Raw pixels: kNN {results.baseline:.3f}."
        parts = [
            f"## {figure.title}",
            f"{figure.source}. {figure.note}",
            f"```bash\n{self.command}\n```",
            f"{_seeds(results)} on {_machines(results.outcomes)}; {describe_runs(results.scale, results.configs)}. "
            f"Median over the seeds, range in brackets.{baseline}",
            f"![{figure.title}](images/{figure.name}.png)",
            self._table(),
            "\n".join(
                f"- **{_VERDICTS[claim.held]}** {claim.sentence()} Rule: {claim.rule}."
                for claim in results.claims
            ),
            *self._notes(),
        ]
        return "\n\n".join(parts) + "\n"

    def _table(self) -> str:
        columns = self.results.figure.columns
        rows = [
            (label, *(_cell(self.results, name, number) for number in columns))
            for name, label in self.results.labels.items()
        ]
        return markdown_table(["", *columns.values()], rows)

    def _notes(self) -> list[str]:
        """Name the missing runs and the failed ones."""
        missing, failed = self.results.missing, [each for each in self.results.outcomes if each.failed]
        notes = [f"Not finished yet: {', '.join(missing)}."] if missing else []
        if failed:
            names = ", ".join(f"{each.setting} (seed {each.seed})" for each in failed)
            notes.append(f"Ended without an encoder, and counted as guessing: {names}.")
        return notes

    def _curves(self, outcome: Outcome) -> dict[str, Any]:
        keys = ("attempt", "samples", "steps", "values")
        return {
            metric: [
                {key: getattr(curve, key) for key in keys}
                for curve in self.results.curves_of(outcome.setting, metric)
                if curve.seed == outcome.seed
            ]
            for metric in METRICS
        }


def _cell(results: Results, setting: str, number: str) -> str:
    values = results.number(setting, number)
    if not values.values:
        return "-"
    form = _FORMS.get(number, "{:.3f}")
    median, low, high = (form.format(value) for value in (values.median, values.min, values.max))
    return median if low == high else f"{median} ({low}-{high})"


def _seeds(results: Results) -> str:
    seeds = sorted({outcome.seed for outcome in results.outcomes})
    return f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _machines(outcomes: Sequence[Outcome]) -> str:
    """Describe the machines of the runs, each kind once."""
    kinds = {
        f"{(machine := each.machine)['num_cores']} cores ({machine['cpu']}, {machine['capability']})"
        + (f" and {machine['gpu']}" if machine.get("gpu") else "")
        + f", torch {machine['torch']}"
        for each in outcomes
    }
    return " and ".join(sorted(kinds))
