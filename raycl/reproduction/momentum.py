"""(b) The momentum of the key encoder (He et al., 2020, section 4.1): 0 is worst, slow is good."""

from matplotlib.figure import Figure as Picture

from raycl.reproduction.claims import Claim, above, every
from raycl.reproduction.figure import Figure, Setting
from raycl.reproduction.outcomes import Results
from raycl.reproduction.panels import draw_curves, draw_dots, prepare

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
    """Judge that 0 is worst and that slow is better than fast."""
    knn = results.samples("knn_top1")
    others = [label for label in knn if label != "0"]
    return [
        Claim(
            text="Without momentum (0) MoCo is worse than with any",
            rule="the median at 0 is below each of the others by more than the spread",
            held=every(above(knn[label], knn["0"]) for label in others),
            evidence=", ".join(f"{sample:.3f} at {label}" for label, sample in knn.items() if sample.values)
            or "no run has finished",
        ),
        Claim(
            text="A slow key encoder is better than a fast one",
            # Each of them: the better of two is above a third more often than one is.
            rule=f"the medians at {' and '.join(SLOW)} are each above that at 0.9 by more than the spread",
            held=every(above(knn[momentum], knn["0.9"]) for momentum in SLOW),
            evidence=", ".join(f"{knn[momentum]:.3f} at {momentum}" for momentum in ("0.9", *SLOW)),
        ),
    ]


def draw(results: Results, picture: Picture) -> None:
    """Draw kNN by momentum, and the loss on the way."""
    picture.set_size_inches(9.2, 3.7)
    left, right = picture.subplots(1, 2)
    prepare(
        left,
        x="kNN top-1 on the test images",
        y="momentum of the key encoder",
        title="a dot a seed, bar: median",
    )
    draw_dots(left, results.samples("knn_top1"), floor=results.floor)
    prepare(
        right, x="images seen, thousands", y="loss (InfoNCE)", title="median over seeds, band: least to most"
    )
    right.xaxis.set_major_formatter(lambda x, _: f"{x / 1e3:g}")
    draw_curves(right, results.curves_by_label("loss"))


FIGURE = Figure(
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
    columns={"knn_top1": "kNN top-1", "loss": "last loss", "spread": "spread", "seconds": "seconds"},
    claims=claims,
    draw=draw,
    note=(
        "The queue holds 4,096 keys. The paper's runs are 200 epochs of ImageNet; with a momentum of 0.999 the key "
        "encoder is some thousand steps behind, which is more than a short run has."
    ),
)
