"""(a) Accuracy against the number of negatives: end to end, memory bank, MoCo (He et al., 2020, figure 3)."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FuncFormatter, NullLocator

from raycl.reproduction.claims import NARROW, NO_WORSE, SEEDS, Claim, Sample, above, every, no_worse
from raycl.reproduction.figure import Figure, Setting
from raycl.reproduction.outcomes import Results
from raycl.reproduction.panels import draw_lines, prepare

END_TO_END, BANK, MOCO = "end to end", "memory bank", "MoCo"
LINES = (END_TO_END, BANK, MOCO)

# All but the place where the keys come from is the same for the three.
_ALIKE: dict[str, Any] = {
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
    "batchnorm_groups": 2,  # of shuffled BatchNorm the fewest, and so the most rows a group
}
# Each over as many rows as it can: a queue leaks unless keys are shuffled, which slots cannot be.
_BATCHNORM = {END_TO_END: "synchronized", BANK: "synchronized", MOCO: "shuffled"}


def _settings(batch_size: int, in_batch: Sequence[int], stored: Sequence[int]) -> tuple[Setting, ...]:
    """Return the points: end to end a batch of so many rows, else a store of so many at one batch size."""
    points = [(END_TO_END, "end-to-end", "simclr", "stages.0.batch_size", count) for count in in_batch]
    points += [
        (BANK, "bank", "instance_discrimination", "negatives.num_negatives", count) for count in stored
    ]
    points += [(MOCO, "moco", "moco_v2", "negatives.capacity", count) for count in stored]
    return tuple(
        Setting(
            name=f"{short}-{count}",
            label=f"{line}, {count:,}",
            recipe=recipe,
            overrides={"stages.0.batch_size": batch_size, "batchnorm": _BATCHNORM[line], key: count},
            line=line,
            x=count,
        )
        for line, short, recipe, key, count in points
    )


def claims(results: Results) -> list[Claim]:
    """Judge the three statements that the paper's figure makes."""
    lines = {line: results.points(line, "knn_top1") for line in LINES}
    ends = {
        line: (points[min(points)], points[max(points)]) for line, points in lines.items() if len(points) > 1
    }
    gained = ", ".join(
        f"{line} from {fewest:.3f} at {min(lines[line]):,g} to {most:.3f} at {max(lines[line]):,g}"
        for line, (fewest, most) in ends.items()
    )
    more = [above(most, fewest) for fewest, most in ends.values()] + [None] * (len(LINES) - len(ends))
    return [
        Claim(
            text="All three gain from more negatives",
            rule="the median at the most negatives is above that at the fewest by more than the spread, for each",
            held=every(more),
            evidence=gained or "no curve has two points",
        ),
        _comparison(
            results,
            "MoCo is better than the memory bank at as many negatives",
            BANK,
            above,
            rule="its median is above the bank's by more than the spread",
        ),
        _comparison(
            results,
            "MoCo is no worse than end to end at as many negatives",
            END_TO_END,
            no_worse,
            rule=NO_WORSE,
            takes=NARROW,
        ),
    ]


def _comparison(
    results: Results,
    text: str,
    other: str,
    judge: Callable[[Sample, Sample], bool | None],
    *,
    rule: str,
    takes: str = SEEDS,
) -> Claim:
    ours, theirs = results.points(MOCO, "knn_top1"), results.points(other, "knn_top1")
    common = sorted(set(ours) & set(theirs))
    return Claim(
        text=text,
        rule=f"{rule}, everywhere both have a point",
        held=every(judge(ours[x], theirs[x]) for x in common),
        evidence=", ".join(f"{MOCO} {ours[x]:.3f}, {other} {theirs[x]:.3f} at {x:,g}" for x in common)
        or "they have no point in common",
        takes=takes,
    )


def draw(results: Results, picture: Picture) -> None:
    """Draw the three curves."""
    picture.set_size_inches(7.6, 4.2)
    axes = picture.add_subplot()
    prepare(
        axes,
        x="negatives of a query (end to end: rows of the batch), logarithmic",
        y="kNN top-1 on the test images",
        title="median over seeds, bars from least to most",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sorted({x for _, x in results.lines.values() if x is not None}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.tick_params(axis="x", labelrotation=30)
    draw_lines(axes, {line: results.points(line, "knn_top1") for line in LINES}, floor=results.floor)


FIGURE = Figure(
    name="negatives",
    title="More negatives help, and a queue can have them",
    source="He et al., 2020, figure 3",
    settings={
        "cpu": _settings(128, (128, 512, 1_024), (128, 512, 2_048, 8_192)),
        "gpu": _settings(256, (256, 512, 1_024, 2_048), (256, 1_024, 4_096, 16_384)),
    },
    shared={
        "cpu": {**_ALIKE, "stages.0.epochs": 6, "stages.0.warmup_epochs": 0.5},
        "gpu": {**_ALIKE, "stages.0.epochs": 200, "stages.0.warmup_epochs": 5.0},
    },
    columns={"knn_top1": "kNN top-1", "loss": "last loss", "steps": "steps", "seconds": "seconds"},
    claims=claims,
    draw=draw,
    note=(
        "The paper's figure is of ImageNet with ResNet-50 and a linear classifier, to 65,536 negatives. End to end "
        "the batch holds the negatives, so that at equal epochs more of them are fewer steps, at a learning rate that "
        "grows with the batch. Loss, temperature, views, head and optimizer are the same for all three. What still "
        "differs: BatchNorm goes over both views of the whole batch end to end, over the one view of the whole batch "
        "for the bank, and for MoCo over shuffled halves of it, since its keys must be shuffled. The bank begins at "
        "embeddings of the untrained encoder, the queue is empty. MoCo's queue holds float16."
    ),
)
