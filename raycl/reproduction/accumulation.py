"""(f) A batch in chunks takes the steps of the whole one (Gao et al., 2021)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Picture

from raycl.reproduction.claims import SEEDS, Claim, Sample
from raycl.reproduction.figure import Figure, Setting
from raycl.reproduction.outcomes import Curve, Results
from raycl.reproduction.panels import COLORS, draw_curves, prepare

WHOLE, CHUNKS, WORKERS, BY_CHUNK = "whole", "chunks", "workers", "by-chunk"
EARLY = 5  # steps; later ones make any rounding large
ROUNDING = 10.0  # times what another order of sums does: so far rounding alone may lead
EXACT = 1e-5  # relative: losses are written down with six digits
LIMIT = 1e-3  # relative: where two workers are further off, something else than rounding is at work


def _settings(batch_size: int) -> tuple[Setting, ...]:
    table: tuple[tuple[str, str, dict[str, Any]], ...] = (
        (WHOLE, "whole batch", {}),
        (CHUNKS, f"chunks of {batch_size // 4:,}", {"stages.0.chunk_size": batch_size // 4}),
        (WORKERS, "whole, two workers", {"workers": 2}),
        (
            BY_CHUNK,
            "BatchNorm by chunk",
            {"stages.0.chunk_size": batch_size // 4, "batchnorm": "shuffled", "batchnorm_groups": 4},
        ),
    )
    return tuple(
        Setting(name=name, label=label, recipe="simclr", overrides=overrides)
        for name, label, overrides in table
    )


def differences(results: Results, name: str) -> list[Curve]:
    """Return how far the loss is from the whole batch's of the same seed, relative, at each step."""
    whole = {curve.seed: curve for curve in results.curves_of(WHOLE, "loss")}
    return [
        _difference(curve, whole[curve.seed])
        for curve in results.curves_of(name, "loss")
        if curve.seed in whole
    ]


def _difference(curve: Curve, whole: Curve) -> Curve:
    expected = dict(zip(whole.steps, whole.values, strict=True))
    chosen = [at for at, step in enumerate(curve.steps) if step in expected]
    steps = [curve.steps[at] for at in chosen]
    return Curve(
        setting=curve.setting,
        seed=curve.seed,
        attempt=0,
        samples=[curve.samples[at] for at in chosen],
        steps=steps,
        values=[abs(curve.values[at] / expected[step] - 1.0) for at, step in zip(chosen, steps, strict=True)],
    )


def claims(results: Results) -> list[Claim]:
    """Judge the chunks by what another order of sums does to the whole batch."""
    early = {name: _early(differences(results, name)) for name in (CHUNKS, WORKERS, BY_CHUNK)}
    chunks, workers = early[CHUNKS], early[WORKERS]
    knn = {name: results.sample(name, "knn_top1") for name in (CHUNKS, WHOLE)}
    allowed = max(EXACT, min(ROUNDING * workers.median, LIMIT))
    # A rule that cannot tell BatchNorm by chunk, which is another run, says nothing of chunks either.
    can_tell = all(sample.is_enough for sample in early.values()) and early[BY_CHUNK].least > allowed
    return [
        Claim(
            text="A batch in chunks takes the steps of the whole batch",
            rule=(
                f"the greatest relative difference of the loss to the whole batch's in the first {EARLY} steps, median "
                f"over seeds, is at most {ROUNDING:g} times that of two workers, who add the same numbers in another "
                f"order, but no more than {LIMIT:g}, or {EXACT:g}; where BatchNorm goes by chunk it is more in every seed"
            ),
            held=chunks.median <= allowed if can_tell else None,
            evidence=f"difference {chunks:.1e} in chunks, {workers:.1e} with two workers, {early[BY_CHUNK]:.1e} "
            f"where BatchNorm goes by chunk; kNN at the end {knn[CHUNKS]:.3f} in chunks and {knn[WHOLE]:.3f} whole",
            takes=f"{SEEDS}, and a rule that tells BatchNorm by chunk from the whole batch",
        )
    ]


def _early(curves: Sequence[Curve]) -> Sample:
    """Return the greatest value of each curve in its first steps."""
    parts = [
        [value for step, value in zip(curve.steps, curve.values, strict=True) if step <= EARLY]
        for curve in curves
    ]
    return Sample(tuple(max(part) for part in parts if part))


def draw(results: Results, picture: Picture) -> None:
    """Draw the losses over one another, and their differences."""
    picture.set_size_inches(10.4, 3.8)
    left, right = picture.subplots(1, 2)
    labels = results.labels
    prepare(left, x="steps", y="loss (NT-Xent)", title="the losses, one over the other (first seed)")
    styles = {
        WHOLE: ("#BBBBBB", 5.0, "-"),
        CHUNKS: (COLORS[0], 1.2, "-"),
        WORKERS: (COLORS[1], 1.4, ":"),
        BY_CHUNK: (COLORS[2], 1.4, "--"),
    }
    for name, (color, width, style) in styles.items():
        for curve in results.curves_of(name, "loss")[:1]:
            left.plot(curve.steps, curve.values, style, color=color, lw=width, label=labels[name])
    if left.lines:
        left.legend(fontsize=8.5, frameon=False)
    prepare(
        right, x="steps", y="difference to the whole batch, relative", title="median, band: least to most"
    )
    apart = {labels[name]: _floored(differences(results, name)) for name in (CHUNKS, WORKERS, BY_CHUNK)}
    right.set_yscale("log")
    draw_curves(right, apart, over="steps")


def _floored(curves: Sequence[Curve], least: float = 1e-7) -> list[Curve]:
    """Return curves that a logarithmic axis can show: losses are written down with six digits."""
    return [
        Curve(**{**vars(curve), "values": np.maximum(np.asarray(curve.values), least).tolist()})
        for curve in curves
    ]


def _shared(steps: int, batch_size: int) -> dict[str, Any]:
    return {
        "precision": "float32",
        "stages.0.epochs": None,
        "stages.0.steps": steps,
        "stages.0.batch_size": batch_size,
        "stages.0.learning_rate": 0.03,
        "stages.0.warmup_epochs": 0.5,
        "log_every_steps": 1,
    }


FIGURE = Figure(
    name="accumulation",
    title="A batch in chunks is the whole batch",
    source="Gao et al., 2021; BatchNorm over the whole batch beyond them",
    settings={"cpu": _settings(256), "gpu": _settings(4_096)},
    shared={"cpu": _shared(60, 256), "gpu": _shared(400, 4_096)},
    columns={"loss": "last loss", "knn_top1": "kNN top-1", "seconds": "seconds"},
    claims=claims,
    draw=draw,
    note=(
        "In float32, with BatchNorm over the whole batch but for the last setting. What is left is rounding, which every "
        "step of training makes larger: two workers show how much. BatchNorm by chunk is what is usual, and another run."
    ),
)
