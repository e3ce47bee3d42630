"""The figures that there are."""

from raycl.errors import ConfigError
from raycl.reproduction import accumulation, collapse, leak, momentum, negatives, stages
from raycl.reproduction.figure import Figure

FIGURES: dict[str, Figure] = {
    module.FIGURE.name: module.FIGURE
    for module in (negatives, momentum, leak, collapse, stages, accumulation)
}


def find_figure(name: str) -> Figure:
    """Return a figure; raises ``ConfigError`` naming those that there are."""
    if name not in FIGURES:
        raise ConfigError(f"unknown figure {name!r}; there are {', '.join(FIGURES)}")
    return FIGURES[name]
