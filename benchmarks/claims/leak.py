"""BatchNorm leaks the positive, and each remedy (He et al., 2020, section 3.3)."""

from dataclasses import replace
from typing import Any

from claims.figure import KNN, ClaimFigure, Panel, settings
from claims.results import Results
from claims.rules import Claim, SeedValues, all_hold, exceeds
from raycl.training.launch import NOTABLE_LEAKAGE

LOCAL, SHUFFLED = "local", "shuffled"
REMEDIES = {SHUFFLED: "shuffled", "group": "group norm", "layer": "layer norm"}
_LABELS = {LOCAL: "local", "synchronized": "synchronized", **REMEDIES}
GROUP_SIZE = 32  # rows normalized together by local BatchNorm, as in the paper
_SHARED: dict[str, Any] = {"stages.0.batch_size": 2 * GROUP_SIZE, "workers": 2}
_GROUPS = {SHUFFLED: {"batchnorm_groups": 2}}
_SETTINGS = settings(
    "moco_v2",
    *(
        (name, label, {"batchnorm": name, **_GROUPS.get(name, {}), **_SHARED})
        for name, label in _LABELS.items()
    ),
)


def claims(results: Results) -> list[Claim]:
    leakage, knn = (
        {name: results.number(name, number) for name in _LABELS}
        for number in ("batchnorm_leakage", "knn_top1")
    )
    local, shuffled = leakage[LOCAL], leakage[SHUFFLED]
    is_notable = local.median > NOTABLE_LEAKAGE if local.is_enough else None
    return [
        Claim(
            text="Local BatchNorm gives positives away",
            rule=(
                f"the median of the probe's advantage is above {NOTABLE_LEAKAGE:g} with local BatchNorm, and exceeds the "
                "shuffled runs' by more than the spread"
            ),
            held=all_hold([is_notable, exceeds(local, shuffled)]),
            evidence=f"advantage {local:.3f} local, {shuffled:.3f} shuffled",
        ),
        Claim(
            text="The leak costs accuracy",
            rule="kNN of the shuffled runs exceeds local BatchNorm's by more than the spread",
            held=exceeds(knn[SHUFFLED], knn[LOCAL]),
            evidence=f"kNN {knn[LOCAL]:.3f} local, {knn[SHUFFLED]:.3f} shuffled",
        ),
        Claim(
            text="Each remedy stops the leak",
            rule=(
                f"the probe's advantage of each remedy is at most {NOTABLE_LEAKAGE:g} in every seed, and its median "
                "below local BatchNorm's by more than the spread"
            ),
            held=all_hold(_stops(leakage[name], local) for name in REMEDIES),
            evidence=", ".join(f"{label} {leakage[name]}" for name, label in REMEDIES.items()),
        ),
    ]


def _stops(remedy: SeedValues, local: SeedValues) -> bool | None:
    """Whether no seed has a notable leak: a smaller leak is still a leak."""
    return all_hold([remedy.max <= NOTABLE_LEAKAGE if remedy.is_enough else None, exceeds(local, remedy)])


def _shared(epochs: int) -> dict[str, object]:
    # A head with BatchNorm: each of its statistics covers few numbers, and leaks most.
    return {"stages.0.epochs": epochs, "stages.0.learning_rate": 0.06, "projection_head.batchnorm": True}


FIGURE = ClaimFigure(
    name="leak",
    title="BatchNorm gives positives away; shuffling and other norms do not",
    source="He et al., 2020, section 3.3 and figure A.1",
    settings={"cpu": _SETTINGS, "gpu": _SETTINGS},
    shared={"cpu": _shared(6), "gpu": _shared(200)},
    columns={
        "batchnorm_leakage": "advantage",
        "shared": "pretext, shared",
        "apart": "pretext, apart",
        "loss": "last loss",
        "knn_top1": "kNN top-1",
        "seconds": "seconds",
    },
    claims=claims,
    panels=(
        Panel(
            kind="dots",
            values="batchnorm_leakage",
            title="leak: advantage of shared statistics",
            x="pretext accuracy, shared minus apart",
            y="BatchNorm",
        ),
        Panel(kind="dots", values="loss", title="pretext loss at the end", x="loss (InfoNCE)"),
        replace(KNN, title="accuracy of the encoder"),
    ),
    size=(10.4, 3.7),
    note=(
        "MoCo v2 with two workers, a queue of 4,096 and a head with BatchNorm. The probe normalizes 1,024 test images in "
        "groups as large as a worker's, each key once with its query and once with others. Synchronized "
        "BatchNorm stops the leak for losses over the batch, but not for a queue: query and key still share their "
        "statistics. Layer and group norm cannot leak by construction: they normalize each image by itself, and are "
        "listed for their accuracy. The network must learn to read the leak, and an epoch of the paper has 5,000 steps."
    ),
    probe_group_size=GROUP_SIZE,
)
