"""Accuracy against the negatives of a memory bank, on images of many classes (Wu et al., 2018; He et al., 2020)."""

from dataclasses import replace
from typing import Any

from claims.figure import KNN, ClaimFigure, settings
from claims.negatives import BANK, BATCHNORM, SHARED
from claims.results import Results
from claims.rules import Claim, SeedValues, exceeds

FEWEST, MOST = 32, 512
PAIRED_SEEDS = 5
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
    gains = _gains(results)
    return [
        Claim(
            text="A memory bank gains from more negatives where classes are many",
            rule=f"the median at {MOST} negatives exceeds the median at {FEWEST} by more than the spread",
            held=exceeds(most, fewest),
            evidence=f"kNN {fewest} at {FEWEST} and {most} at {MOST}",
        ),
        Claim(
            text="A memory bank gains from more negatives where classes are many, seed by seed",
            rule=f"of {PAIRED_SEEDS} seeds or more, each is better at {MOST} than at {FEWEST}; of equal settings, this happens once "
            "in 32 times",
            held=min(gains) > 0 if len(gains) >= PAIRED_SEEDS else None,
            evidence=f"kNN is higher at {MOST} by {SeedValues(tuple(gains))}",
            takes=f"{PAIRED_SEEDS} seeds of both",
        ),
    ]


def _gains(results: Results) -> list[float]:
    """Return what the most negatives gain over the fewest with the same seed: initial weights, order and views are the same."""
    knn = {(each.setting, each.seed): each.numbers["knn_top1"] for each in results.outcomes}
    both = sorted(
        seed for setting, seed in knn if setting == f"bank-{MOST}" and (f"bank-{FEWEST}", seed) in knn
    )
    return [knn[f"bank-{MOST}", seed] - knn[f"bank-{FEWEST}", seed] for seed in both]


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
