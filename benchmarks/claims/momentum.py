"""The momentum of the key encoder (He et al., 2020, section 4.1): 0 fails, slow is best."""

import math
from dataclasses import replace

from claims.figure import KNN, ClaimFigure, Panel, settings
from claims.results import Results
from claims.rules import Claim, all_hold, exceeds

SLOW = ("0.99", "0.999")
CAPACITY = 4_096
CHANCE = math.log(1 + CAPACITY)  # the loss of keys that cannot be told apart
_SETTINGS = settings(
    "moco_v2",
    *(
        (f"momentum-{momentum}", momentum, {"momentum_encoder.momentum": float(momentum)})
        for momentum in ("0", "0.9", *SLOW)
    ),
)


def claims(results: Results) -> list[Claim]:
    knn = results.by_label("knn_top1")
    others = [label for label in knn if label != "0"]
    known = [f"{values:.3f} at {label}" for label, values in knn.items() if values.values]
    loss = results.number("momentum-0", "loss")
    is_chance = 0.99 * CHANCE <= loss.min <= loss.max <= 1.01 * CHANCE if loss.is_enough else None
    return [
        Claim(
            text="Without momentum (0) MoCo is worse than with any",
            rule="the median at 0 is below each of the others by more than the spread",
            held=all_hold(exceeds(knn[label], knn["0"]) for label in others),
            evidence=", ".join(known) or "no run has finished",
        ),
        Claim(
            text="A slow key encoder is better than a fast one",
            # Both: by chance the better of two exceeds a third more often than one does.
            rule=f"the medians at {' and '.join(SLOW)} each exceed the median at 0.9 by more than the spread",
            held=all_hold(exceeds(knn[momentum], knn["0.9"]) for momentum in SLOW),
            evidence=", ".join(f"{knn[momentum]:.3f} at {momentum}" for momentum in ("0.9", *SLOW)),
        ),
        Claim(
            text="Without momentum (0) MoCo fails",
            rule=(
                f"its last loss is within 1% of chance, ln {1 + CAPACITY:,} = {CHANCE:.3f}, in every seed, and the medians "
                f"at {' and '.join(SLOW)} each exceed its median by more than the spread"
            ),
            held=all_hold([is_chance, *(exceeds(knn[label], knn["0"]) for label in SLOW)]),
            evidence=f"last loss {loss}; kNN {', '.join(known) or 'of no run'}",
        ),
    ]


_SHARED = {"stages.0.learning_rate": 0.06, "negatives.capacity": CAPACITY}
_CPU = {**_SHARED, "stages.0.epochs": 8, "stages.0.batch_size": 128, "batchnorm_groups": 4}
_GPU = {**_SHARED, "stages.0.epochs": 200, "stages.0.batch_size": 256}
FIGURE = ClaimFigure(
    name="momentum",
    title="The momentum of the key encoder",
    source="He et al., 2020, section 4.1: 0 fails, 0.9 55.2, 0.99 57.8, 0.999 59.0",
    settings={"cpu": _SETTINGS, "gpu": _SETTINGS},
    shared={"cpu": _CPU, "gpu": _GPU},
    columns={
        "knn_top1": "kNN top-1",
        "loss": "last loss",
        "embedding_std": "std of embeddings",
        "seconds": "seconds",
    },
    claims=claims,
    panels=(
        replace(KNN, y="momentum of the key encoder"),
        Panel(kind="curves", values="loss", x="images seen, thousands", y="loss (InfoNCE)"),
    ),
    size=(9.2, 3.7),
    note=(
        f"The queue holds {CAPACITY:,} keys. The paper trains 200 epochs of ImageNet; with a momentum of 0.999 the key "
        "encoder lags by some thousand steps, more than a short run has."
    ),
)
