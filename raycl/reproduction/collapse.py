"""(d) The hinge on the hardest negative collapses from scratch, and its cures (Faghri et al., 2018)."""

from typing import Any

from matplotlib.figure import Figure as Picture

from raycl.reproduction.claims import Claim, Sample, above, every
from raycl.reproduction.figure import Figure, Setting
from raycl.reproduction.outcomes import Results
from raycl.reproduction.panels import draw_curves, draw_dots, prepare

COLLAPSED = 0.1  # spread below which embeddings are nearly one point, as for the monitor
HINGE = "hinge"
CURES = ("entropy-first", "mixed", "rollback", "slow")
_LOSS: dict[str, Any] = {"stages.0.loss": "hinge", "stages.0.hardest_negative": True}


def _settings(epochs: int, learning_rate: float) -> tuple[Setting, ...]:
    halves = {"stages.0.epochs": epochs // 2, "stages.1.epochs": epochs - epochs // 2}
    hardest = {**halves, "stages.1.hardest_negative": True}
    table: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("entropy", "cross-entropy alone", {}),
        (HINGE, "hinge", _LOSS),
        ("slow", "hinge, rate / 16", {**_LOSS, "stages.0.learning_rate": learning_rate / 16}),
        ("entropy-first", "cross-entropy, then hinge", {**hardest, "stages.1.loss": "hinge"}),
        ("mixed", "cross-entropy, then half hinge", {**hardest, "stages.1.final_hinge_weight": 0.5}),
        ("rollback", "hinge, rolled back", {**_LOSS, "monitor.on_collapse": "rollback"}),
    )
    return tuple(
        Setting(name=name, label=label, recipe="simclr", overrides=overrides)
        for name, label, overrides in table
    )


def claims(results: Results) -> list[Claim]:
    """Judge the collapse, and each cure by itself."""
    labels = results.labels
    spread = {name: results.sample(name, "spread") for name in labels}
    knn = {name: results.sample(name, "knn_top1") for name in labels}
    collapse = Claim(
        text="The hinge on the hardest negative collapses from scratch",
        rule=f"the spread of its embeddings ends below {COLLAPSED:g} in every seed",
        held=None if not spread[HINGE].is_enough else spread[HINGE].most < COLLAPSED,
        evidence=f"spread {spread[HINGE]}, kNN {knn[HINGE]:.3f}",
    )
    return [collapse, *(_cure(labels[name], spread[name], knn[name], knn[HINGE]) for name in CURES)]


def _cure(label: str, spread: Sample, knn: Sample, without: Sample) -> Claim:
    stays = spread.least >= COLLAPSED if spread.is_enough else None
    return Claim(
        text=f"A cure: {label}",
        rule=f"the spread ends at {COLLAPSED:g} or more in every seed, and kNN is above the hinge's by more than the spread",
        held=every([stays, above(knn, without)]),
        evidence=f"spread {spread}, kNN {knn:.3f} beside {without:.3f}",
    )


def draw(results: Results, picture: Picture) -> None:
    """Draw the spread on the way, and kNN at the end."""
    picture.set_size_inches(10.4, 4.2)
    left, right = picture.subplots(1, 2, width_ratios=(1.15, 1.0))
    prepare(
        left,
        x="steps",
        y="spread of the embeddings (1: even, 0: a point)",
        title="median over seeds, band: least to most; thin: rolled back",
    )
    left.axhline(COLLAPSED, color="#666666", lw=0.8, ls=":")
    draw_curves(left, results.curves_by_label("spread"), over="steps")
    prepare(right, x="kNN top-1 on the test images", title="a dot a seed, bar: median")
    draw_dots(right, results.samples("knn_top1"), floor=results.floor)


_RATE = {"cpu": 0.24, "gpu": 0.24}

FIGURE = Figure(
    name="collapse",
    title="The hinge on the hardest negative collapses from scratch, and what helps",
    source="Faghri et al., 2018; Xuan et al., 2020",
    settings={"cpu": _settings(6, _RATE["cpu"]), "gpu": _settings(100, _RATE["gpu"])},
    shared={
        "cpu": {
            "stages.0.epochs": 6,
            "stages.0.batch_size": 128,
            "stages.0.learning_rate": _RATE["cpu"],
            "stages.0.warmup_epochs": 0.5,
            "projection_head.batchnorm": False,
            "log_every_steps": 5,
            "monitor.cross_entropy_steps": 200,
            "monitor.grace": 10,
        },
        "gpu": {
            "stages.0.epochs": 100,
            "stages.0.batch_size": 256,
            "stages.0.learning_rate": _RATE["gpu"],
            "projection_head.batchnorm": False,
            "monitor.cross_entropy_steps": 5_000,
        },
    },
    columns={
        "spread": "spread",
        "knn_top1": "kNN top-1",
        "collapsed": "collapses told",
        "rollbacks": "rollbacks",
        "seconds": "seconds",
    },
    claims=claims,
    draw=draw,
    note="SimCLR's towers and views, with a head without BatchNorm. A cure that keeps the embeddings apart is none if the encoder is worth no more.",
)
