"""(e) A batch that grows in stages (after Smith et al., 2018) beside a small and a large one."""

from typing import Any

from matplotlib.figure import Figure as Picture

from raycl.reproduction.claims import NARROW, NO_WORSE, Claim, Sample, above, every, no_worse
from raycl.reproduction.figure import Figure, Setting
from raycl.reproduction.outcomes import Results
from raycl.reproduction.panels import draw_curves, draw_dots, prepare

SMALL, GROWN, LARGE = "small", "grown", "large"


def _settings(epochs: int, sizes: tuple[int, int, int]) -> tuple[Setting, ...]:
    """Return three runs over equally many images: at the least batch, in three stages, at the greatest."""
    grown: dict[str, Any] = {}
    for stage, size in enumerate(sizes):
        grown |= {f"stages.{stage}.epochs": epochs // 3, f"stages.{stage}.batch_size": size}
    table = (
        (SMALL, f"{sizes[0]:,}", {"stages.0.batch_size": sizes[0]}),
        (GROWN, ", ".join(f"{size:,}" for size in sizes), grown),
        (LARGE, f"{sizes[-1]:,}", {"stages.0.batch_size": sizes[-1]}),
    )
    return tuple(
        Setting(name=name, label=label, recipe="simclr", overrides={"stages.0.epochs": epochs, **overrides})
        for name, label, overrides in table
    )


def claims(results: Results) -> list[Claim]:
    """Judge growth against the large batch, and against the small one that takes more steps."""
    knn, steps = (
        {name: results.sample(name, number) for name in results.labels} for number in ("knn_top1", "steps")
    )
    return [
        Claim(
            text="At equal images a batch that grows is better than one that is large from the start",
            rule="its median is above the large batch's by more than the spread",
            held=above(knn[GROWN], knn[LARGE]),
            evidence=f"kNN {knn[GROWN]:.3f} and {knn[LARGE]:.3f}",
        ),
        Claim(
            text="A batch that grows loses nothing to a small one, in fewer steps",
            rule=f"{NO_WORSE}, and each of its runs takes fewer steps",
            held=every([no_worse(knn[GROWN], knn[SMALL]), _fewer(steps[GROWN], steps[SMALL])]),
            evidence=f"kNN {knn[GROWN]:.3f} after {steps[GROWN]:,.0f} steps and "
            f"{knn[SMALL]:.3f} after {steps[SMALL]:,.0f}",
            takes=NARROW,
        ),
    ]


def _fewer(ours: Sample, theirs: Sample) -> bool | None:
    """Whether ours are fewer; no spread is asked for, since steps follow from the configuration."""
    return ours.most < theirs.least if ours.values and theirs.values else None


def draw(results: Results, picture: Picture) -> None:
    """Draw kNN on the way, on held-out training images, and at the end, on the test images."""
    picture.set_size_inches(10.0, 3.7)
    left, right = picture.subplots(1, 2, width_ratios=(1.15, 1.0))
    prepare(
        left,
        x="images seen, thousands",
        y="kNN top-1 on held-out images",
        title="median, band: least to most",
    )
    left.xaxis.set_major_formatter(lambda x, _: f"{x / 1e3:g}")
    draw_curves(left, results.curves_by_label("knn_top1"))
    prepare(right, x="kNN top-1 on the test images", y="rows of a batch", title="a dot a seed, bar: median")
    draw_dots(right, results.samples("knn_top1"), floor=results.floor)


def _shared(every_epochs: int) -> dict[str, Any]:
    return {
        "stages.0.learning_rate_over": "run",
        "stages.0.learning_rate": 0.12,
        "evaluation.every_epochs": every_epochs,
        "evaluation.num_test": 1_000,
    }


FIGURE = Figure(
    name="stages",
    title="A batch that grows in stages",
    source="Smith et al., 2018, of supervised learning",
    settings={"cpu": _settings(9, (64, 256, 1_024)), "gpu": _settings(150, (256, 1_024, 4_096))},
    shared={"cpu": {**_shared(3), "stages.0.warmup_epochs": 0.5}, "gpu": _shared(25)},
    columns={"knn_top1": "kNN top-1", "steps": "steps", "seconds": "seconds"},
    claims=claims,
    draw=draw,
    note="One cosine over the images of the whole run; the learning rate follows the batch linearly.",
)
