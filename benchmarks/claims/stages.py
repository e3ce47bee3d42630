"""A batch that grows in stages (after Smith et al., 2018) beside a small and a large one."""

from typing import Any

from matplotlib.figure import Figure

from claims.figure import ClaimFigure, Setting
from claims.plots import BAND, DOTS, draw_curves, draw_dots, draw_thousands, prepare
from claims.results import Results
from claims.rules import NARROW, NON_INFERIOR, Claim, SeedValues, all_hold, exceeds, non_inferior

SMALL, GROWN, LARGE = "small", "grown", "large"


def _settings(epochs: int, sizes: tuple[int, int, int]) -> tuple[Setting, ...]:
    """Return three runs over equally many images: the smallest batch, three stages, the largest batch."""
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
    knn, steps = results.by_setting("knn_top1"), results.by_setting("steps")
    return [
        Claim(
            text="At equal images a batch that grows is better than one that is large from the start",
            rule="its median exceeds the large batch's by more than the spread",
            held=exceeds(knn[GROWN], knn[LARGE]),
            evidence=f"kNN {knn[GROWN]:.3f} and {knn[LARGE]:.3f}",
        ),
        Claim(
            text="A batch that grows loses nothing to a small one, in fewer steps",
            rule=f"{NON_INFERIOR}, and each of its runs takes fewer steps",
            held=all_hold([non_inferior(knn[GROWN], knn[SMALL]), _fewer(steps[GROWN], steps[SMALL])]),
            evidence=f"kNN {knn[GROWN]:.3f} after {steps[GROWN]:,.0f} steps and "
            f"{knn[SMALL]:.3f} after {steps[SMALL]:,.0f}",
            takes=NARROW,
        ),
    ]


def _fewer(ours: SeedValues, theirs: SeedValues) -> bool | None:
    """Whether ours are fewer; any number of seeds suffices, since steps follow from the configuration."""
    return ours.max < theirs.min if ours.values and theirs.values else None


def draw(results: Results, picture: Figure) -> None:
    """Draw kNN on held-out training images during training, and on the test images at the end."""
    picture.set_size_inches(10.0, 3.7)
    left, right = picture.subplots(1, 2, width_ratios=(1.15, 1.0))
    prepare(left, x="images seen, thousands", y="kNN top-1 on held-out images", title=BAND)
    draw_thousands(left)
    draw_curves(left, results.curves_by_label("knn_top1"))
    prepare(right, x="kNN top-1 on the test images", y="batch size", title=DOTS)
    draw_dots(right, results.by_label("knn_top1"), baseline=results.baseline)


def _shared(every_epochs: int) -> dict[str, Any]:
    return {
        "stages.0.learning_rate_scope": "run",
        "stages.0.learning_rate": 0.12,
        "evaluation.every_epochs": every_epochs,
        "evaluation.num_test": 1_000,
    }


FIGURE = ClaimFigure(
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
