"""More views and small crops at equal compute (multi-crop: Caron et al., 2020; many views: Shidani et al., 2024)."""

from typing import Any

from claims.figure import KNN, ClaimFigure, Setting, settings
from claims.results import Results
from claims.rules import Claim, exceeds

TWO, FOUR, EIGHT, CROPS = "two", "four", "eight", "crops"
BETTER = "its median exceeds the other's by more than the spread"


def _settings(epochs: int, image_size: int) -> tuple[Setting, ...]:
    """Return runs that encode equally many pixels; a crop of half the side has a quarter of the pixels."""
    crops = {"count": 4, "size": image_size // 2, "crop_scale": [0.05, 0.4]}
    rows: tuple[tuple[str, str, float, list[dict[str, Any]]], ...] = (
        (TWO, "2 views", 2, [{"count": 2}]),
        (FOUR, "4 views", 4, [{"count": 4}]),
        (EIGHT, "8 views", 8, [{"count": 8}]),
        (CROPS, "2 views, 4 small crops", 3, [{"count": 2}, crops]),
    )
    return settings(
        "simclr",
        *(
            (name, label, {"augment.views": views, "stages.0.epochs": round(2 * epochs / cost)})
            for name, label, cost, views in rows
        ),
    )


def claims(results: Results) -> list[Claim]:
    knn = results.by_setting("knn_top1")
    return [
        Claim(
            text=f"{text} at equal compute",
            rule=BETTER,
            held=exceeds(knn[better], knn[worse]),
            evidence=f"kNN {knn[better]} and {knn[worse]}",
        )
        for text, better, worse in (
            ("Four small crops beside two views are better than two views", CROPS, TWO),
            ("Four views are better than two", FOUR, TWO),
            ("Eight views are better than two", EIGHT, TWO),
        )
    ]


def _shared(batch_size: int) -> dict[str, Any]:
    return {"stages.0.batch_size": batch_size, "stages.0.warmup_epochs": 0.5}


FIGURE = ClaimFigure(
    name="views",
    title="More views and small crops at equal compute",
    source="Caron et al., 2020, section 3.2; Shidani et al., 2024",
    settings={"cpu": _settings(24, 24), "gpu": _settings(300, 32)},
    shared={"cpu": _shared(128), "gpu": _shared(256)},
    columns={"knn_top1": "kNN top-1", "loss": "last loss", "steps": "steps", "seconds": "seconds"},
    claims=claims,
    panels=(KNN,),
    size=(7.6, 3.0),
    note=(
        "All runs encode equally many pixels, so that more views take fewer epochs and steps; batch, learning rate and "
        "warmup are the same. The loss is NT-Xent, as the mean over pairs of views. Small crops have half the side and "
        "cover 5% to 40% of the image. The losses and the views themselves are not counted as compute; the seconds "
        "include them."
    ),
)
