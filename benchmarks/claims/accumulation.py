"""A batch in chunks takes the steps of the whole batch (Gao et al., 2021)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from claims.figure import ClaimFigure, Panel, Setting, settings
from claims.results import MetricCurve, Results
from claims.rules import SEEDS, Claim, SeedValues

WHOLE, CHUNKS, WORKERS, BY_CHUNK = "whole", "chunks", "workers", "by-chunk"
LAYER = "-layer"  # ending of the settings with layer norm
EARLY_STEPS = 5  # later steps amplify any rounding
ROUNDING = 10.0  # allowed multiple of the difference that another order of sums makes
EXACT = 1e-5  # relative: losses are logged with six digits
LIMIT = 1e-3  # relative: a larger difference of two workers is not rounding


def _settings(batch_size: int) -> tuple[Setting, ...]:
    chunks = {"stages.0.chunk_size": batch_size // 4}
    by_chunk = {**chunks, "batchnorm": "shuffled", "batchnorm_groups": 4}
    ways = (
        (WHOLE, "whole batch", {}),
        (CHUNKS, f"chunks of {batch_size // 4:,}", chunks),
        (WORKERS, "whole, two workers", {"workers": 2}),
    )
    layer = (
        (name + LAYER, f"{label}, layer norm", {**own, "batchnorm": "layer"}) for name, label, own in ways
    )
    return settings("simclr", *ways, (BY_CHUNK, "BatchNorm by chunk", by_chunk), *layer)


def loss_differences(results: Results, name: str) -> list[MetricCurve]:
    """Return the relative difference of the loss to the whole batch's of the same seed and norm, at each step."""
    own = WHOLE + LAYER if name.endswith(LAYER) else WHOLE
    whole = {curve.seed: curve for curve in results.curves_of(own, "loss")}
    found = []
    for curve in results.curves_of(name, "loss"):
        if curve.seed not in whole:
            continue
        expected = dict(zip(whole[curve.seed].steps, whole[curve.seed].values, strict=True))
        values = dict(zip(curve.steps, curve.values, strict=True))
        steps = [step for step in curve.steps if step in expected]
        off = [abs(values[step] / expected[step] - 1.0) for step in steps]
        found.append(replace(curve, attempt=0, samples=steps, steps=steps, values=off))
    return found


def claims(results: Results) -> list[Claim]:
    return [
        _same_steps(results, "A batch in chunks takes the steps of the whole batch, with layer norm", LAYER),
        _same_steps(
            results, "A batch in chunks takes the steps of the whole batch, with BatchNorm over it", ""
        ),
    ]


def _same_steps(results: Results, text: str, norm: str) -> Claim:
    names = (CHUNKS + norm, WORKERS + norm, BY_CHUNK)
    chunks, workers, by_chunk = early = [_early(loss_differences(results, name)) for name in names]
    knn = results.by_setting("knn_top1")
    allowed = max(EXACT, min(ROUNDING * workers.median, LIMIT))
    # A rule that misses BatchNorm by chunk, which is a different run, proves nothing about chunks.
    can_tell = all(values.is_enough for values in early) and by_chunk.min > allowed
    return Claim(
        text=text,
        rule=(
            f"the largest relative difference of the loss to the whole batch's in the first {EARLY_STEPS} steps, "
            f"median over seeds, is at most {ROUNDING:g} times the difference of two workers, who add the same "
            f"numbers in another order, but no more than {LIMIT:g}, or {EXACT:g}; with BatchNorm by chunk it is "
            "larger in every seed"
        ),
        held=chunks.median <= allowed if can_tell else None,
        evidence=f"difference {chunks:.1e} in chunks, {workers:.1e} with two workers, {by_chunk:.1e} with "
        f"BatchNorm by chunk; kNN at the end {knn[CHUNKS + norm]:.3f} in chunks and {knn[WHOLE + norm]:.3f} whole",
        takes=f"{SEEDS}, and a rule that tells BatchNorm by chunk from the whole batch",
    )


def _early(curves: Sequence[MetricCurve]) -> SeedValues:
    """Return the largest value of each curve in its first steps."""
    parts = [
        [value for step, value in zip(curve.steps, curve.values, strict=True) if step <= EARLY_STEPS]
        for curve in curves
    ]
    return SeedValues(tuple(max(part) for part in parts if part))


def _drawn_differences(results: Results) -> dict[str, list[MetricCurve]]:
    # A logarithmic axis has no zero: losses are logged with six digits.
    return {
        results.labels[name]: [
            replace(curve, values=[max(value, 1e-7) for value in curve.values])
            for curve in loss_differences(results, name)
        ]
        for name in (CHUNKS, WORKERS, BY_CHUNK, CHUNKS + LAYER, WORKERS + LAYER)
    }


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


FIGURE = ClaimFigure(
    name="accumulation",
    title="A batch in chunks is the whole batch",
    source="Gao et al., 2021; BatchNorm over the whole batch beyond them",
    settings={"cpu": _settings(256), "gpu": _settings(4_096)},
    shared={"cpu": _shared(60, 256), "gpu": _shared(400, 4_096)},
    columns={"loss": "last loss", "knn_top1": "kNN top-1", "seconds": "seconds"},
    claims=claims,
    panels=(
        Panel(kind="curves", values="loss", x="steps", y="loss (NT-Xent)", over="steps"),
        Panel(
            kind="curves",
            values=_drawn_differences,
            x="steps",
            y="difference to the whole batch, relative",
            over="steps",
            is_log=True,
        ),
    ),
    size=(10.4, 3.8),
    note=(
        "In float32. The networks of the paper have no BatchNorm, so three settings have layer norm instead; the others "
        "have BatchNorm over the whole batch, except for BatchNorm by chunk. The remaining difference is "
        "rounding, which every step of training amplifies: two workers show how much. BatchNorm by chunk is the usual "
        "implementation, and a different run."
    ),
)
