"""The hinge on the hardest negative collapses from scratch, and its remedies (Faghri et al., 2018)."""

from typing import Any

from claims.figure import KNN, ClaimFigure, Panel, Setting, settings
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
    return settings(
        "simclr",
        ("entropy", "cross-entropy alone", {}),
        (HINGE, "hinge", _LOSS),
        ("slow", "hinge, rate / 16", {**_LOSS, "stages.0.learning_rate": _RATE / 16}),
        ("entropy-first", "cross-entropy, then hinge", {**hardest, "stages.1.loss": "hinge"}),
        ("mixed", "cross-entropy, then half hinge", {**hardest, "stages.1.final_hinge_weight": 0.5}),
        ("rollback", "hinge, rolled back", {**_LOSS, **rollback}),
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


_SHARED: dict[str, Any] = {"stages.0.learning_rate": _RATE, "projection_head.batchnorm": False}
_CPU = {"stages.0.epochs": 6, "stages.0.batch_size": 128, "stages.0.warmup_epochs": 0.5}
_CPU |= {"log_every_steps": 5, "monitor.initial_patience": 10}
FIGURE = ClaimFigure(
    name="collapse",
    title="The hinge on the hardest negative collapses from scratch, and its remedies",
    source="Faghri et al., 2018; Xuan et al., 2020",
    settings={"cpu": _settings(6, 200), "gpu": _settings(100, 5_000)},
    shared={"cpu": _SHARED | _CPU, "gpu": _SHARED | {"stages.0.epochs": 100, "stages.0.batch_size": 256}},
    columns={
        "embedding_std": "std of embeddings",
        "knn_top1": "kNN top-1",
        "collapsed": "collapses reported",
        "rollbacks": "rollbacks",
        "seconds": "seconds",
    },
    claims=claims,
    panels=(
        Panel(
            kind="curves",
            values="embedding_std",
            x="steps",
            y="spread of the embeddings (1: even, 0: a point)",
            title="median over seeds, band: range; thin: rolled back",
            over="steps",
            limit=COLLAPSED,
        ),
        KNN,
    ),
    size=(10.4, 4.2),
    note=(
        "SimCLR's towers and views, with a head without BatchNorm. Embeddings that stay apart do not suffice: a remedy "
        "must give a better encoder."
    ),
)
