"""The momentum of the key encoder (He et al., 2020, section 4.1): 0 is worst, slow is good."""

from matplotlib.figure import Figure

from claims.figure import ClaimFigure, Setting
from claims.plots import BAND, DOTS, draw_curves, draw_dots, draw_thousands, prepare
from claims.results import Results
from claims.rules import Claim, all_hold, exceeds

SLOW = ("0.99", "0.999")
_SETTINGS = tuple(
    Setting(
        name=f"momentum-{momentum}",
        label=momentum,
        recipe="moco_v2",
        overrides={"momentum_encoder.momentum": float(momentum)},
    )
    for momentum in ("0", "0.9", *SLOW)
)


def claims(results: Results) -> list[Claim]:
    knn = results.by_label("knn_top1")
    others = [label for label in knn if label != "0"]
    known = [f"{values:.3f} at {label}" for label, values in knn.items() if values.values]
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
    ]


def draw(results: Results, picture: Figure) -> None:
    picture.set_size_inches(9.2, 3.7)
    left, right = picture.subplots(1, 2)
    prepare(left, x="kNN top-1 on the test images", y="momentum of the key encoder", title=DOTS)
    draw_dots(left, results.by_label("knn_top1"), baseline=results.baseline)
    prepare(right, x="images seen, thousands", y="loss (InfoNCE)", title=BAND)
    draw_thousands(right)
    draw_curves(right, results.curves_by_label("loss"))


FIGURE = ClaimFigure(
    name="momentum",
    title="The momentum of the key encoder",
    source="He et al., 2020, section 4.1: 0 fails, 0.9 55.2, 0.99 57.8, 0.999 59.0",
    settings={"cpu": _SETTINGS, "gpu": _SETTINGS},
    shared={
        "cpu": {
            "stages.0.epochs": 8,
            "stages.0.batch_size": 128,
            "stages.0.learning_rate": 0.06,
            "batchnorm_groups": 4,
        },
        "gpu": {"stages.0.epochs": 200, "stages.0.batch_size": 256, "stages.0.learning_rate": 0.06},
    },
    columns={
        "knn_top1": "kNN top-1",
        "loss": "last loss",
        "embedding_std": "std of embeddings",
        "seconds": "seconds",
    },
    claims=claims,
    draw=draw,
    note=(
        "The queue holds 4,096 keys. The paper trains 200 epochs of ImageNet; with a momentum of 0.999 the key "
        "encoder lags by some thousand steps, more than a short run has."
    ),
)
