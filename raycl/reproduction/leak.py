"""(c) BatchNorm gives the positive away, and each cure (He et al., 2020, section 3.3)."""

from matplotlib.figure import Figure as Picture

from raycl.reproduction.claims import Claim, Sample, above, every
from raycl.reproduction.figure import Figure, Setting
from raycl.reproduction.outcomes import Results
from raycl.reproduction.panels import draw_dots, prepare
from raycl.training.launch import NOTABLE_LEAKAGE

AS_IS, SHUFFLED = "as_is", "shuffled"
CURES = {SHUFFLED: "shuffled", "group": "group norm", "layer": "layer norm"}
_LABELS = {AS_IS: "as it is", "synchronized": "synchronized", **CURES}
ROWS = {"cpu": 32, "gpu": 32}  # normalized together where BatchNorm is as it is, as in the paper


def _settings(rows: int) -> tuple[Setting, ...]:
    overrides = {"stages.0.batch_size": 2 * rows, "batchnorm_groups": 2, "workers": 2}
    return tuple(
        Setting(name=name, label=label, recipe="moco_v2", overrides={**overrides, "batchnorm": name})
        for name, label in _LABELS.items()
    )


def claims(results: Results) -> list[Claim]:
    """Judge that the leak is there, that it costs accuracy, and that each cure stops it."""
    leaked = {name: results.sample(name, "leakage") for name in _LABELS}
    knn = {name: results.sample(name, "knn_top1") for name in _LABELS}
    return [
        Claim(
            text="BatchNorm as it is gives positives away",
            rule=(
                f"the median of the probe's advantage as it is is above {NOTABLE_LEAKAGE:g}, and above that of the "
                "shuffled runs by more than the spread"
            ),
            held=_leaks(leaked[AS_IS], leaked[SHUFFLED]),
            evidence=f"advantage {leaked[AS_IS]:.3f} as it is, {leaked[SHUFFLED]:.3f} shuffled",
        ),
        Claim(
            text="The leak costs accuracy",
            rule="kNN of the shuffled runs is above that as it is by more than the spread",
            held=above(knn[SHUFFLED], knn[AS_IS]),
            evidence=f"kNN {knn[AS_IS]:.3f} as it is, {knn[SHUFFLED]:.3f} shuffled",
        ),
        Claim(
            text="Each cure stops the leak",
            rule=(
                f"the probe's advantage of each cure is at most {NOTABLE_LEAKAGE:g} in every seed, and its median "
                "below that as it is by more than the spread"
            ),
            held=every(_stops(leaked[name], leaked[AS_IS]) for name in CURES),
            evidence=", ".join(f"{label} {leaked[name]}" for name, label in CURES.items()),
        ),
    ]


def _leaks(as_is: Sample, shuffled: Sample) -> bool | None:
    return every([as_is.median > NOTABLE_LEAKAGE if as_is.is_enough else None, above(as_is, shuffled)])


def _stops(cured: Sample, as_is: Sample) -> bool | None:
    """Whether nothing notable is left in any seed of what leaked: to leak less is no cure."""
    return every([cured.most <= NOTABLE_LEAKAGE if cured.is_enough else None, above(as_is, cured)])


def draw(results: Results, picture: Picture) -> None:
    """Draw the probe's advantage, the loss and kNN beside one another."""
    picture.set_size_inches(10.4, 3.7)
    panels = {
        "leakage": ("leak: advantage of shared statistics", "pretext accuracy, shared minus apart"),
        "loss": ("pretext loss at the end", "loss (InfoNCE)"),
        "knn_top1": ("what the encoder is worth", "kNN top-1 on the test images"),
    }
    for place, (axes, (number, (title, x))) in enumerate(
        zip(picture.subplots(1, 3), panels.items(), strict=True)
    ):
        prepare(axes, title=title, x=x, y="BatchNorm" if place == 0 else "")
        floor = results.floor if number == "knn_top1" else None
        draw_dots(axes, results.samples(number), names=place == 0, floor=floor)


def _shared(epochs: int) -> dict[str, object]:
    # A head with BatchNorm: its statistics are of few numbers each, and say most.
    return {"stages.0.epochs": epochs, "stages.0.learning_rate": 0.06, "projection_head.batchnorm": True}


FIGURE = Figure(
    name="leak",
    title="BatchNorm gives positives away; shuffling and other norms do not",
    source="He et al., 2020, section 3.3 and figure A.1",
    settings={"cpu": _settings(ROWS["cpu"]), "gpu": _settings(ROWS["gpu"])},
    shared={"cpu": _shared(6), "gpu": _shared(200)},
    columns={
        "leakage": "advantage",
        "shared": "pretext, shared",
        "apart": "pretext, apart",
        "loss": "last loss",
        "knn_top1": "kNN top-1",
        "seconds": "seconds",
    },
    claims=claims,
    draw=draw,
    note=(
        "MoCo v2 with two workers, a queue of 4,096 and a head with BatchNorm. The probe normalizes 1,024 test images in "
        "groups as large as a worker's, once a key in the company of its query, once in another. Synchronized "
        "BatchNorm is a cure for losses over the batch, and none for a queue: query and key still share their "
        "statistics. Layer and group norm cannot leak by construction: they normalize each image by itself, and stand "
        "beside it for their accuracy. To read the mark is learned, and an epoch of the paper has 5,000 steps."
    ),
    probes_leakage=ROWS,  # pyright: ignore[reportArgumentType]
)
