"""The hinge on the hardest negative collapses from scratch, and its remedies (Faghri et al., 2018)."""

from typing import Any

from matplotlib.figure import Figure

from claims.figure import ClaimFigure, Setting
from claims.plots import BAND, DOTS, draw_curves, draw_dots, prepare
from claims.results import Results
from claims.rules import Claim, SeedValues, all_hold, exceeds

COLLAPSED = 0.1  # spread of nearly identical embeddings, the monitor's threshold
HINGE = "hinge"
REMEDIES = ("entropy-first", "mixed", "rollback", "slow")
_RATE = 0.24
_LOSS: dict[str, Any] = {"stages.0.loss": "hinge", "stages.0.hardest_negative": True}


def _settings(epochs: int, cross_entropy_steps: int) -> tuple[Setting, ...]:
    halves = {"stages.0.epochs": epochs // 2, "stages.1.epochs": epochs - epochs // 2}
    rollback = {"monitor.on_collapse": "rollback", "monitor.cross_entropy_steps": cross_entropy_steps}
    hardest = {**halves, "stages.1.hardest_negative": True}
    table: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("entropy", "cross-entropy alone", {}),
        (HINGE, "hinge", _LOSS),
        ("slow", "hinge, rate / 16", {**_LOSS, "stages.0.learning_rate": _RATE / 16}),
        ("entropy-first", "cross-entropy, then hinge", {**hardest, "stages.1.loss": "hinge"}),
        ("mixed", "cross-entropy, then half hinge", {**hardest, "stages.1.final_hinge_weight": 0.5}),
        ("rollback", "hinge, rolled back", {**_LOSS, **rollback}),
    )
    return tuple(
        Setting(name=name, label=label, recipe="simclr", overrides=overrides)
        for name, label, overrides in table
    )


def claims(results: Results) -> list[Claim]:
    spread, knn = results.by_setting("embedding_std"), results.by_setting("knn_top1")
    collapse = Claim(
        text="The hinge on the hardest negative collapses from scratch",
        rule=f"the spread of its embeddings ends below {COLLAPSED:g} in every seed",
        held=spread[HINGE].max < COLLAPSED if spread[HINGE].is_enough else None,
        evidence=f"spread {spread[HINGE]}, kNN {knn[HINGE]:.3f}",
    )
    labels = results.labels
    return [collapse, *(_remedy(labels[name], spread[name], knn[name], knn[HINGE]) for name in REMEDIES)]


def _remedy(label: str, spread: SeedValues, knn: SeedValues, hinge_knn: SeedValues) -> Claim:
    stays = spread.min >= COLLAPSED if spread.is_enough else None
    return Claim(
        text=f"A remedy: {label}",
        rule=f"the spread ends at {COLLAPSED:g} or more in every seed, and kNN exceeds the hinge's by more than the spread",
        held=all_hold([stays, exceeds(knn, hinge_knn)]),
        evidence=f"spread {spread}, kNN {knn:.3f} beside {hinge_knn:.3f}",
    )


def draw(results: Results, picture: Figure) -> None:
    picture.set_size_inches(10.4, 4.2)
    left, right = picture.subplots(1, 2, width_ratios=(1.15, 1.0))
    y = "spread of the embeddings (1: even, 0: a point)"
    prepare(left, x="steps", y=y, title=f"{BAND}; thin: rolled back")
    left.axhline(COLLAPSED, color="#666666", lw=0.8, ls=":")
    draw_curves(left, results.curves_by_label("embedding_std"), over="steps")
    prepare(right, x="kNN top-1 on the test images", title=DOTS)
    draw_dots(right, results.by_label("knn_top1"), baseline=results.baseline)


_SHARED: dict[str, Any] = {"stages.0.learning_rate": _RATE, "projection_head.batchnorm": False}

FIGURE = ClaimFigure(
    name="collapse",
    title="The hinge on the hardest negative collapses from scratch, and its remedies",
    source="Faghri et al., 2018; Xuan et al., 2020",
    settings={"cpu": _settings(6, 200), "gpu": _settings(100, 5_000)},
    shared={
        "cpu": {
            **_SHARED,
            "stages.0.epochs": 6,
            "stages.0.batch_size": 128,
            "stages.0.warmup_epochs": 0.5,
            "log_every_steps": 5,
            "monitor.initial_patience": 10,
        },
        "gpu": {
            **_SHARED,
            "stages.0.epochs": 100,
            "stages.0.batch_size": 256,
        },
    },
    columns={
        "embedding_std": "std of embeddings",
        "knn_top1": "kNN top-1",
        "collapsed": "collapses reported",
        "rollbacks": "rollbacks",
        "seconds": "seconds",
    },
    claims=claims,
    draw=draw,
    note=(
        "SimCLR's towers and views, with a head without BatchNorm. Embeddings that stay apart do not suffice: a remedy "
        "must give a better encoder."
    ),
)
