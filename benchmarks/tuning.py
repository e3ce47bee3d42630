"""Successive halving beside a grid: the settings that ``raycl tune`` finds in a small part of the grid's time.

    python benchmarks/tuning.py --recipe simclr --data train.parquet --test test.parquet --output FOLDER
        [--epochs 10] [--batch-size 128] [--shares 0.05 0.1] [--seeds 0 1 2] [--set key.path=value] [--json FILE]

The grid has 40 runs: five learning rates and four temperatures, and two crop scales of images or two batch sizes of
pairs, all within the ranges of the search and with the recipe's values among them. Its best run has the highest metric
of held-out training rows. A search gets a share of the seconds that the grid took, and its settings train one more
run of the grid's length. The recipe, the best run of the grid and the tuned runs are compared on the test set. Runs in
the output are not repeated.
"""

import itertools
import json
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring import Line, make_parser, report, table

import raycl
from raycl.config.conditions import leaves
from raycl.config.overrides import config_from_yaml

FACTORS: dict[str, tuple[float, ...]] = {
    "stages.0.learning_rate": (0.25, 0.5, 1, 2, 4),
    "stages.0.temperature": (0.5, 1, 2, 3),
}
THIRD = {"simclr": ("augment.crop_scale.0", (1, 2)), "two_tower": ("stages.0.batch_size", (0.5, 1))}
# As the runs of a search are.
AT_END = {"evaluation.every_epochs": 10**9, "evaluation.num_snapshot_samples": 0}


class Comparison:
    """The runs of the grid and of the searches, in folders below the output."""

    def __init__(self, options: Namespace) -> None:
        self._options, self._output = options, Path(options.output)
        self._output.mkdir(parents=True, exist_ok=True)
        flags = {"epochs": options.epochs, "batch_size": options.batch_size, "workers": options.workers}
        settings = [*options.set, *(f"{path}={value}" for path, value in AT_END.items())]
        self.train("recipe", options.recipe, {**flags, "settings": settings})
        self.recipe = config_from_yaml((self._output / "recipe" / "config.yaml").read_text())
        self.metric = self.recipe.evaluation_metric

    def train(self, name: str, config: Any, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the held-out score of a run and the seconds of the whole call; train it unless it is there."""
        kept, folder = self._output / f"{name}.json", self._output / name
        if not kept.exists():
            began = time.monotonic()
            result = raycl.train(
                config, data=self._options.data, output=folder, resume=folder.exists(), quiet=True, **more
            )
            found = {"final": result.final, "seconds": time.monotonic() - began}
            kept.write_text(json.dumps(found))
            print(name, found["final"], f"{found['seconds']:.0f} s", flush=True)
        return json.loads(kept.read_text())

    def grid(self) -> tuple[str, float]:
        """Return the name of the best run by held-out rows, and the seconds of all 40."""
        third, factors = THIRD[self._options.recipe]
        axes, own = {**FACTORS, third: factors}, leaves(self.recipe)
        found = {}
        for number, cell in enumerate(itertools.product(*axes.values())):
            settings = {path: own[path] * factor for path, factor in zip(axes, cell, strict=True)}
            settings["stages.0.batch_size"] = int(
                settings.get("stages.0.batch_size", own["stages.0.batch_size"])
            )
            found[f"grid-{number}"] = self.train(f"grid-{number}", self.recipe, {"settings": settings})
        best = max(found, key=lambda name: found[name]["final"][self.metric])
        return best, sum(each["seconds"] for each in found.values())

    def search(self, share: float, seed: int, seconds: float) -> tuple[str, float]:
        """Search for a share of the seconds of the grid; return the run with its settings, and the seconds."""
        name, folder = f"tuned-{share:g}-{seed}", self._output / f"search-{share:g}-{seed}"
        kept = Path(f"{folder}.json")
        if not kept.exists():
            began, minutes = time.monotonic(), share * seconds / 60
            raycl.tune(self.recipe, data=self._options.data, output=folder, minutes=minutes, seed=seed)
            kept.write_text(json.dumps(time.monotonic() - began))
        config = config_from_yaml((folder / "tuned.yaml").read_text())
        self.train(name, config, {"seed": self.recipe.seed})
        return name, json.loads(kept.read_text())

    def line(self, side: str, name: str, seconds: float) -> Line:
        """Return the held-out and test metrics of a run, and the minutes until its settings were chosen."""
        kept = self._output / f"{name}.test.json"
        if not kept.exists():
            measure: Any = "retrieval" if self.recipe.has_two_towers else "knn"
            run, train = self._output / name, self._options.neighbors or self._options.data
            found = raycl.evaluate(measure, run=run, train=train, test=self._options.test, quiet=True)
            kept.write_text(json.dumps(dict(found)))
        held_out = json.loads((self._output / f"{name}.json").read_text())["final"][self.metric]
        test = json.loads(kept.read_text())[self._options.metric]
        return {"side": side, "minutes": seconds / 60, "held_out": held_out, "test": test}


def main() -> None:
    """Compare, and print a table."""
    parser = make_parser(
        __doc__,
        recipe=tuple(THIRD),
        data=str,
        test=str,
        output=str,
        epochs=10,
        batch_size=128,
        workers=2,
        shares=[0.05],
        seeds=[0],
        metric=("top1", "ndcg_at_10"),
        neighbors=None,
    )
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs, key.path=value")
    options = parser.parse_args()
    comparison = Comparison(options)
    best, seconds = comparison.grid()
    lines = [comparison.line("recipe", "recipe", 0.0), comparison.line("best of 40 runs", best, seconds)]
    for share, seed in itertools.product(options.shares, options.seeds):
        lines.append(comparison.line(f"raycl tune, seed {seed}", *comparison.search(share, seed, seconds)))
    titles = {"side": "", "minutes": "minutes", "held_out": comparison.metric, "test": "test"}
    report(options, lines, table(lines, **titles))


if __name__ == "__main__":
    main()
