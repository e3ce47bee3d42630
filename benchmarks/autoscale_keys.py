"""A pool of key encoders that grows and shrinks with its demand: nodes, actors and waits over time.

    python benchmarks/autoscale_keys.py [--actors 3] [--steps 700 78] [--boot-s 5]
        [--output docs/images/autoscale_keys.png]

Starts the growing cluster of ``autoscale.py``. One worker trains ``moco_v2`` on copies of the demo's digits, with keys
from 1 to ``--actors`` actors, each on a node of its own. An actor sleeps for 0.15 s in each batch, and the worker for 1 ms
an image, as if each waited for a device of its own. The first of two stages has small batches, whose keys one actor
cannot encode in time; the second has batches of 16 times as many rows, for which one actor is enough. Drawn are
nodes, the ``key_encoders`` that are ready, and ``keys_fraction``, the part of the time in which the worker waited for keys
or encoded them. Beside the picture lies a JSON file of the same name with every number in it.
"""

import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from autoscale import SETTINGS, watch
from measuring import describe_machine, make_parser, write_json
from pictures import BLUE, ORANGE, panels, save

from raycl.demo.digits import write_digits
from raycl.storage import Place
from tests.growing_cluster import growing_cluster

KEY_S, IMAGE_S = 0.15, 0.001
NETWORK = {
    "name": "tests.cluster.networks:slow_keys",
    "kwargs.seconds": KEY_S,
    "kwargs.image_seconds": IMAGE_S,
}
NETWORK |= {"kwargs.image_size": 32, "kwargs.stem": "half", "kwargs.width": 0.25}
BATCH_SIZES = (32, 512)
COPIES = 8


def many_digits(folder: Path) -> str:
    """Write the demo's digits eight times, so that no stage reaches the end of its epoch, where the worker waits for keys."""
    data, _ = write_digits(Place(str(folder / "few")))
    table = pq.read_table(data)
    pq.write_table(pa.concat_tables([table] * COPIES), folder / "many.parquet")
    return str(folder / "many.parquet")


def settings_of(actors: int, steps: list[int]) -> dict[str, Any]:
    """Return the settings of the run."""
    settings = {key: value for key, value in SETTINGS.items() if not key.startswith("encoder.")}
    settings |= {f"encoder.{key}": value for key, value in NETWORK.items()}
    pool = {"location": "actors", "actors": actors, "min_actors": 1, "ahead": 4, "max_age": 10**6}
    settings |= {f"momentum_encoder.{key}": value for key, value in pool.items()}
    settings |= {"checkpoints.interval_s": 600, "log_every_steps": 10, "data.image_size": 32}
    settings |= {"data.cache": "materialize"}
    for number, (length, size) in enumerate(zip(steps, BATCH_SIZES, strict=True)):
        settings |= {f"stages.{number}.steps": length, f"stages.{number}.batch_size": size}
    return settings | {"stages.0.epochs": "null", "stages.1.epochs": "null", "stages.1.loss": "info_nce"}


def draw(seen: dict[str, Any], path: Path) -> None:
    """Draw nodes and actors over the time, and below them the part of the time spent on keys."""
    figure, (numbers, waits) = panels(2, 1, 8.6, 4.4, sharex=True)
    times, nodes, _ = zip(*seen["nodes"], strict=True)
    grounds = {"step": "post", "color": "#b8b8b8", "alpha": 0.55, "lw": 0}
    numbers.fill_between(times, nodes, label="nodes besides the head", **grounds)
    at, actors, fractions, stages = zip(*seen["lines"], strict=True)
    numbers.step(at, actors, where="post", color=BLUE, lw=2.5, label="key encoders that are ready")
    waits.plot(at, [100 * each for each in fractions], color=ORANGE, lw=1.2)
    change = at[stages.index(1)]
    for axes in (numbers, waits):
        axes.axvline(change, color="black", lw=0.7, ls=":")
    waits.text(
        change, 95, f" batches of {BATCH_SIZES[1]} instead of {BATCH_SIZES[0]} rows", fontsize=9, va="top"
    )
    numbers.set(yticks=range(max(nodes) + 1), ylim=(0, max(nodes) + 0.3))
    numbers.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.2), ncols=2, fontsize=9)
    waits.set(xlabel="seconds since the run was submitted", ylabel="% of time on keys", ylim=(0, 100))
    save(figure, path)


def main() -> None:
    flags: dict[str, Any] = {
        "actors": 3,
        "steps": [700, 78],
        "boot_s": 5.0,
        "output": "autoscale_keys.png",
    }
    options = make_parser(__doc__, reports=False, **flags).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is ended first
    settings = settings_of(options.actors, options.steps)
    with growing_cluster(max_nodes=options.actors + 1, boot_s=options.boot_s) as cluster:
        fields = ("key_encoders", "keys_fraction", "stage")
        flags = {"--data": many_digits(cluster.folder), "--workers": 1}
        seen = watch(cluster, "moco_v2", flags, settings, *fields)
    picture = Path(options.output)
    draw(seen, picture)
    write_json(
        picture.with_suffix(".json"), seen | {"command": " ".join(sys.argv), "machine": describe_machine()}
    )
    before = None
    for at, actors, fraction, stage in seen["lines"]:
        if (actors, stage) != before:
            print(
                f"{at:6.0f} s  stage {stage}: {actors:.0f} key encoders, {fraction:.0%} of the time on keys"
            )
        before = actors, stage


if __name__ == "__main__":
    main()
