"""Accuracy against the negatives of a memory bank, on images of many classes (Wu et al., 2018; He et al., 2020)."""

from dataclasses import replace
from typing import Any

from claims.figure import KNN, ClaimFigure, settings
from claims.negatives import BANK, BATCHNORM, SHARED
from claims.results import Results
from claims.rules import Claim, exceeds

FEWEST, MOST = 32, 512
# A range grows with the number of seeds. The order of two times five equal settings is one of 252.
SEPARATE_SEEDS = 5
_SETTINGS = settings(
    "instance_discrimination",
    *(
        (f"bank-{count}", f"{count} negatives", {"negatives.num_negatives": count})
        for count in (FEWEST, 128, MOST)
    ),
)


def claims(results: Results) -> list[Claim]:
    knn = results.by_setting("knn_top1")
    fewest, most = knn[f"bank-{FEWEST}"], knn[f"bank-{MOST}"]
    is_enough = min(len(fewest.values), len(most.values)) >= SEPARATE_SEEDS
    return [
        Claim(
            text="A memory bank gains from more negatives where classes are many",
            rule=f"the median at {MOST} negatives exceeds the median at {FEWEST} by more than the spread",
            held=exceeds(most, fewest),
            evidence=f"kNN {fewest} at {FEWEST} and {most} at {MOST}",
        ),
        Claim(
            text="A memory bank gains from more negatives where classes are many, in every seed",
            rule=f"of {SEPARATE_SEEDS} seeds or more, the lowest at {MOST} is above the highest at {FEWEST}: of equal settings, "
            "one in 252 trials is",
            held=most.min > fewest.max if is_enough else None,
            evidence=f"kNN at least {most.min:.3f} at {MOST}, at most {fewest.max:.3f} at {FEWEST}",
            takes=f"{SEPARATE_SEEDS} seeds of both",
        ),
    ]


def _shared(epochs: int) -> dict[str, Any]:
    # The views of small gray images: glyphs are not flipped, but rotated.
    views = {"augment.flip": 0.0, "augment.rotation": 15.0}
    length = {"stages.0.epochs": epochs, "stages.0.warmup_epochs": 0.5, "stages.0.batch_size": FEWEST}
    # One core for each run, so that two runs can share two cores.
    return {**SHARED, **BATCHNORM[BANK], **views, **length, "cpus_per_worker": 1}


FIGURE = ClaimFigure(
    name="bank",
    title="More negatives of a memory bank",
    source="Wu et al., 2018; He et al., 2020, figure 3",
    settings={"cpu": _SETTINGS, "gpu": _SETTINGS},
    shared={"cpu": _shared(40), "gpu": _shared(200)},
    columns={"knn_top1": "kNN top-1", "loss": "last loss", "steps": "steps", "seconds": "seconds"},
    claims=claims,
    panels=(replace(KNN, y="negatives of a query"),),
    size=(7.6, 3.2),
    note=(
        "For images of many classes, such as characters. ImageNet has 1,000 classes, so that one of 1,000 negatives is of "
        "the query's class; with the ten classes of CIFAR-10 it is one of ten, and more negatives hold more of them. "
        "Only the number of negatives differs: batch, steps, loss, views and network are the same."
    ),
)
