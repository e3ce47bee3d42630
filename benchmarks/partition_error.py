"""Compare SogCLR's stored partition functions with the true ones over all rows, at checkpoints of runs.

    python benchmarks/partition_error.py --runs RUN [RUN ...] --data train.parquet --output docs/images/partition.png
        [--rows 2000] [--checkpoints 8] [--json FILE]

RUN is the local output of recipe ``sogclr`` with ``bank.location=worker``, whose checkpoints hold the stored u. For each
checkpoint its network embeds both views of all stored samples, in training mode: views of an epoch that was not begun,
drawn by (seed, epoch, sample, view) as in the run, in batches of the run's size, in a random order without an
incomplete last batch, with the BatchNorm statistics of each batch. The true partition function of a sample is the mean
of exp(z.n / temperature) over both views n of all other samples, averaged over its own two views z.

The picture has the error log(estimate) - log(true) of ``rows`` random samples: of the stored u, of the mean over the
negatives of the sample's batch, and of both, which is the u after a step: momentum * stored + (1 - momentum) * batch.
Samples that no step has stored yet are counted and not drawn.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from measuring import Line, make_parser, report, table
from numpy.typing import NDArray
from pictures import BLUE, GREEN, ORANGE, panels, save
from torch import Tensor

from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml
from raycl.data.in_memory import InMemoryDataset
from raycl.errors import ConfigError
from raycl.inference.reading import read_images
from raycl.losses import gcl
from raycl.losses.gcl import moved_log_partition
from raycl.models.build import build_towers
from raycl.models.encoder_io import load_state
from raycl.records import CHECKPOINTS, CONFIG, STATE
from raycl.training.process import autocast
from raycl.training.transforms import ImageTransform, image_format

COLORS = {"stored": BLUE, "batch": ORANGE, "both": GREEN}
QUANTILES = (0.16, 0.5, 0.84)
_ORDER = 7  # keeps the order of rows apart from those of the run
COLUMNS = {
    "run": "run",
    "step": "step",
    "side": "estimate",
    "bias": "median error",
    "low": "16%",
    "high": "84%",
    "unknown": "not stored yet",
}


def errors(
    view_a: Tensor,
    view_b: Tensor,
    stored: Tensor,
    *,
    batch_size: int,
    temperature: float,
    momentum: float,
) -> dict[str, Tensor]:
    """Return log(estimate) - log(true) of the first samples, those with a ``stored`` log u [num, 1], by estimate.

    ``view_a`` and ``view_b`` [num_samples, dim] are the embeddings of all samples, batch after batch.
    """
    settings: dict[str, Any] = {"temperature": temperature, "momentum": 0.0, "num_samples": len(view_a)}
    unknown, num = view_a.new_full((len(view_a), 1), -math.inf), len(stored)
    everyone: dict[str, Any] = {"gathered_a": view_a, "gathered_b": view_b}
    _, true = gcl(view_a[:num], view_b[:num], log_partition=unknown[:num], **settings, **everyone)
    batches = zip(*(each.split(batch_size) for each in (view_a, view_b, unknown)), strict=True)
    of_batch = torch.cat([gcl(a, b, log_partition=log, **settings)[1] for a, b, log in batches])[:num]
    moved = moved_log_partition(stored, of_batch, momentum)
    found = {"stored": stored, "batch": of_batch, "both": moved}
    return {name: (each - true)[:, 0] for name, each in found.items()}


def embed(
    config: RunConfig, weights: dict[str, Tensor], rows: InMemoryDataset, order: NDArray[np.int64], epoch: int
) -> tuple[Tensor, Tensor]:
    """Return the embeddings of both views [len(order), dim], with the BatchNorm statistics of each batch."""
    tower, transform, cpu = build_towers(config), ImageTransform.of(config), torch.device("cpu")
    tower.load_state_dict(weights)
    tower.train()
    found = []
    for positions in np.split(order, len(order) // config.stages[0].batch_size):
        batch = rows.take(positions, epoch=epoch)
        views = torch.cat([transform.view(batch, number).on(cpu) for number in (0, 1)])
        with torch.no_grad(), autocast(config.tower_precision, cpu):
            found.append(torch.stack(tower(views).chunk(2)))
    view_a, view_b = torch.cat(found, dim=1)
    return view_a, view_b


def measure(run: Path, data: str, *, num_rows: int, num_checkpoints: int) -> Iterator[Line]:
    """Yield the quantiles of the errors at checkpoints of a run."""
    config = config_from_yaml((run / CONFIG).read_text(), name=str(run / CONFIG))
    if config.negatives.store != "partition" or config.bank.location != "worker":
        raise ConfigError(
            f"{run} has no partition functions in its checkpoints; train sogclr with bank.location=worker"
        )
    files = sorted((run / CHECKPOINTS).glob(f"step-*/{STATE}"))
    chosen = np.unique(np.linspace(0, len(files) - 1, min(num_checkpoints, len(files))).round().astype(int))
    rows, size = read_images(data, image_format(config)), config.stages[0].batch_size
    for file in (files[each] for each in chosen):
        state = load_state(file.read_bytes(), str(file))
        position, store = state["position"], state["store"]
        known = np.flatnonzero(np.isin(rows.sample_id, store["sample_id"].numpy()))
        order = np.random.default_rng((_ORDER, position["step"])).permutation(known)[
            : len(known) // size * size
        ]
        place = np.searchsorted(store["sample_id"].numpy(), rows.sample_id[order[:num_rows]])
        view_a, view_b = embed(config, state["learner"]["tower"], rows, order, position["epoch"] + 1)
        found = errors(
            view_a,
            view_b,
            store["rows"][place].float(),
            batch_size=size,
            temperature=config.stages[0].temperature,
            momentum=config.negatives.bank_momentum,
        )
        is_stored = found["stored"].isfinite()
        if not is_stored.any():
            raise ConfigError(f"{file} has no partition function of {num_rows} random samples; raise --rows")
        for name, each in found.items():
            low, median, high = each[is_stored].quantile(torch.tensor(QUANTILES)).tolist()
            line: Line = {"run": run.name, "step": position["step"], "side": name}
            yield line | {"low": low, "bias": median, "high": high, "unknown": int((~is_stored).sum())}


def draw(lines: list[Line]) -> Figure:
    """Draw the median error and the range from 16% to 84% over the steps, in a panel for each run."""
    runs = list(dict.fromkeys(line["run"] for line in lines))
    figure, grid = panels(1, len(runs), 4.2 * len(runs), 3.4, sharey=True)
    for axes, run in zip(grid, runs, strict=True):
        for name, color in COLORS.items():
            own = [line for line in lines if (line["run"], line["side"]) == (run, name)]
            steps = [line["step"] for line in own]
            axes.plot(steps, [line["bias"] for line in own], "o-", color=color, ms=3, label=name)
            low, high = ([line[side] for line in own] for side in ("low", "high"))
            axes.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
        axes.axhline(0.0, color="black", lw=0.7)
        axes.set_title(run, fontsize=9)
        axes.set_xlabel("steps")
    grid[0].set_ylabel("log(estimate) - log(true)")
    grid[0].legend(fontsize=8)
    return figure


def main() -> None:
    parser = make_parser(__doc__, data=str, output=Path("partition.png"), rows=2_000, checkpoints=8)
    parser.add_argument("--runs", nargs="+", type=Path, required=True)
    options = parser.parse_args()
    how = {"num_rows": options.rows, "num_checkpoints": options.checkpoints}
    lines = [line for run in options.runs for line in measure(run, options.data, **how)]
    save(draw(lines), options.output)
    report(options, lines, table(lines, **COLUMNS))


if __name__ == "__main__":
    main()
