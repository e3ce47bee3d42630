"""A small batch with the global contrastive loss beside a large one with NT-Xent (SogCLR: Yuan et al., 2022)."""

from dataclasses import replace
from typing import Any

from claims.figure import KNN, ClaimFigure, Setting
from claims.results import Results
from claims.rules import MARGIN, NARROW, NON_INFERIOR, Claim, exceeds, non_inferior

GLOBAL, DECOUPLED, SMALL, LARGE = "global", "dcl", "small", "large"
BETTER = "its median exceeds the other's by more than the spread"


def _settings(small: int, large: int) -> tuple[Setting, ...]:
    """Return three losses with a small batch, and NT-Xent with a large one."""
    rows: tuple[tuple[str, str, str, int, dict[str, Any]], ...] = (
        (GLOBAL, "global loss", "sogclr", small, {}),
        (DECOUPLED, "DCL", "simclr", small, {"stages.0.loss": "dcl"}),
        (SMALL, "NT-Xent", "simclr", small, {}),
        (LARGE, "NT-Xent", "simclr", large, {}),
    )
    return tuple(
        Setting(
            name=name,
            label=f"{loss}, {batch_size:,}",
            recipe=recipe,
            overrides={"stages.0.batch_size": batch_size, **own},
        )
        for name, loss, recipe, batch_size, own in rows
    )


def claims(results: Results) -> list[Claim]:
    knn = results.by_setting("knn_top1")
    better = (
        ("The global loss is better than NT-Xent with the same small batch", SMALL),
        ("The global loss is better than DCL, which has the negatives of the batch alone", DECOUPLED),
    )
    return [
        Claim(
            text=f"At equal images a small batch with the global loss is within {100 * MARGIN:g} point of a large one",
            rule=NON_INFERIOR,
            held=non_inferior(knn[GLOBAL], knn[LARGE]),
            evidence=f"kNN {knn[GLOBAL]} and {knn[LARGE]}",
            takes=NARROW,
        ),
        *(
            Claim(
                text=text,
                rule=BETTER,
                held=exceeds(knn[GLOBAL], knn[other]),
                evidence=f"kNN {knn[GLOBAL]} and {knn[other]}",
            )
            for text, other in better
        ),
    ]


def _shared(epochs: int) -> dict[str, Any]:
    return {"stages.0.epochs": epochs, "stages.0.warmup_epochs": 0.5}


FIGURE = ClaimFigure(
    name="global",
    title="The whole data set as negatives of a small batch",
    source="Yuan et al., 2022",
    settings={"cpu": _settings(64, 1_024), "gpu": _settings(64, 1_024)},
    shared={"cpu": _shared(24), "gpu": _shared(200)},
    columns={"knn_top1": "kNN top-1", "loss": "last loss", "steps": "steps", "seconds": "seconds"},
    claims=claims,
    panels=(replace(KNN, y="loss, batch size"),),
    size=(7.6, 3.0),
    note=(
        "Temperature, views, network and optimizer are the same. The learning rate follows the batch linearly. At equal "
        "images the small batch takes 16 times as many steps, which helps all three losses; the runs with the same "
        "batch show the effect of the loss. The global loss sums over the data set, so its value is larger."
    ),
)
