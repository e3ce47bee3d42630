"""A batch that grows in stages (after Smith et al., 2018) beside a small and a large one."""

from dataclasses import replace
from typing import Any

from claims.figure import KNN, ClaimFigure, Panel, Setting, settings
from claims.results import Results
from claims.rules import NARROW, NON_INFERIOR, Claim, SeedValues, all_hold, exceeds, non_inferior

SMALL, GROWN, LARGE = "small", "grown", "large"


def _settings(epochs: int, sizes: tuple[int, int, int]) -> tuple[Setting, ...]:
    """Return three runs over equally many images: the smallest batch, three stages, the largest batch."""
    grown: dict[str, Any] = {}
    for stage, size in enumerate(sizes):
        grown |= {f"stages.{stage}.epochs": epochs // 3, f"stages.{stage}.batch_size": size}
    small, large = (
        {"stages.0.epochs": epochs, "stages.0.batch_size": size} for size in (sizes[0], sizes[-1])
    )
    return settings(
        "simclr",
        (SMALL, f"{sizes[0]:,}", small),
        (GROWN, ", ".join(f"{size:,}" for size in sizes), grown),
        (LARGE, f"{sizes[-1]:,}", large),
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
    panels=(
        Panel(kind="curves", values="knn_top1", x="images seen, thousands", y="kNN top-1 on held-out images"),
        replace(KNN, y="batch size"),
    ),
    size=(10.0, 3.7),
    note="One cosine over the images of the whole run; the learning rate follows the batch linearly.",
)
