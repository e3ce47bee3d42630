"""Accuracy against the number of negatives: end to end, memory bank, MoCo (He et al., 2020, figure 3)."""

from collections.abc import Callable, Sequence
from typing import Any

from claims.figure import ClaimFigure, Panel, Setting
from claims.results import Results
from claims.rules import NARROW, NON_INFERIOR, SEEDS, Claim, SeedValues, all_hold, exceeds, non_inferior

END_TO_END, BANK, MOCO = "end to end", "memory bank", "MoCo"
LINES = (END_TO_END, BANK, MOCO)

# The three lines share everything but the source of their keys.
SHARED: dict[str, Any] = {
    "augment.brightness": 0.4,
    "augment.contrast": 0.4,
    "augment.saturation": 0.4,
    "augment.hue": 0.1,
    "augment.jitter": 0.8,
    "projection_head.num_layers": 2,
    "projection_head.batchnorm": False,
    "optimizer.weight_decay": 5e-4,
    "stages.0.loss": "info_nce",
    "stages.0.temperature": 0.1,
    "stages.0.learning_rate": 0.06,
    "stages.0.learning_rate_schedule": "cosine",
}
# The most rows each line can normalize together: a queue leaks unless keys are shuffled.
BATCHNORM = {
    END_TO_END: {"batchnorm": "synchronized"},
    BANK: {"batchnorm": "synchronized"},
    # The fewest groups of shuffled BatchNorm, and so the most rows per group.
    MOCO: {"batchnorm": "shuffled", "batchnorm_groups": 2},
}


def _settings(batch_size: int, in_batch: Sequence[int], stored: Sequence[int]) -> tuple[Setting, ...]:
    """Return the points: batch sizes end to end, else sizes of the store at one batch size."""
    lines = (
        (END_TO_END, "end-to-end", "simclr", "stages.0.batch_size", in_batch),
        (BANK, "bank", "instance_discrimination", "negatives.num_negatives", stored),
        (MOCO, "moco", "moco_v2", "negatives.capacity", stored),
    )
    return tuple(
        Setting(
            name=f"{short}-{count}",
            label=f"{line}, {count:,}",
            recipe=recipe,
            overrides={"stages.0.batch_size": batch_size, **BATCHNORM[line], key: count},
            line=line,
            x=count,
        )
        for line, short, recipe, key, counts in lines
        for count in counts
    )


def claims(results: Results) -> list[Claim]:
    verdicts, evidence = [], []
    for line in LINES:
        points = results.points(line, "knn_top1")
        if len(points) < 2:
            verdicts.append(None)
            continue
        low, high = min(points), max(points)
        verdicts.append(exceeds(points[high], points[low]))
        evidence.append(f"{line} from {points[low]:.3f} at {low:,g} to {points[high]:.3f} at {high:,g}")
    return [
        Claim(
            text="All three gain from more negatives",
            rule="the median at the most negatives exceeds the median at the fewest by more than the spread, for each",
            held=all_hold(verdicts),
            evidence=", ".join(evidence) or "no curve has two points",
        ),
        _comparison(
            results,
            "MoCo is better than the memory bank at as many negatives",
            BANK,
            exceeds,
            rule="its median exceeds the bank's by more than the spread",
        ),
        _comparison(
            results,
            "MoCo is no worse than end to end at as many negatives",
            END_TO_END,
            non_inferior,
            rule=NON_INFERIOR,
            takes=NARROW,
        ),
    ]


def _comparison(
    results: Results,
    text: str,
    other: str,
    compare: Callable[[SeedValues, SeedValues], bool | None],
    *,
    rule: str,
    takes: str = SEEDS,
) -> Claim:
    ours, theirs = results.points(MOCO, "knn_top1"), results.points(other, "knn_top1")
    common = sorted(set(ours) & set(theirs))
    return Claim(
        text=text,
        rule=f"{rule}, everywhere both have a point",
        held=all_hold(compare(ours[x], theirs[x]) for x in common),
        evidence=", ".join(f"{MOCO} {ours[x]:.3f}, {other} {theirs[x]:.3f} at {x:,g}" for x in common)
        or "they have no point in common",
        takes=takes,
    )


FIGURE = ClaimFigure(
    name="negatives",
    title="More negatives help, and a queue can have them",
    source="He et al., 2020, figure 3",
    settings={
        "cpu": _settings(128, (128, 512, 1_024), (128, 512, 2_048, 8_192)),
        "gpu": _settings(256, (256, 512, 1_024, 2_048), (256, 1_024, 4_096, 16_384)),
    },
    shared={
        "cpu": {**SHARED, "stages.0.epochs": 6, "stages.0.warmup_epochs": 0.5},
        "gpu": {**SHARED, "stages.0.epochs": 200, "stages.0.warmup_epochs": 5.0},
    },
    columns={"knn_top1": "kNN top-1", "loss": "last loss", "steps": "steps", "seconds": "seconds"},
    claims=claims,
    panels=(
        Panel(
            kind="lines",
            values="knn_top1",
            x="negatives of a query (end to end: rows of the batch), logarithmic",
            y="kNN top-1 on the test images",
        ),
    ),
    size=(7.6, 4.2),
    note=(
        "The paper's figure is of ImageNet with ResNet-50 and a linear classifier, to 65,536 negatives. End to end "
        "the batch holds the negatives, so that at equal epochs more of them are fewer steps, at a learning rate that "
        "grows with the batch. Loss, temperature, views, head and optimizer are the same for all three. The remaining "
        "differences: BatchNorm covers both views of the whole batch end to end, one view of the whole batch "
        "for the bank, and shuffled halves of it for MoCo, whose keys must be shuffled. The bank starts from "
        "embeddings of the untrained encoder, the queue is empty. MoCo's queue holds float16."
    ),
)
