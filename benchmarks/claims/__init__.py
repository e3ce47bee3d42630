"""Published figures to reproduce: ``python jobs/reproduce.py FIGURE``. A figure is one file here."""

from claims import accumulation, bank_size, collapse, global_loss, leak, momentum, negatives, stages, views
from claims.figure import ClaimFigure
from raycl.errors import ConfigError

FIGURES: dict[str, ClaimFigure] = {
    module.FIGURE.name: module.FIGURE
    for module in (negatives, bank_size, momentum, leak, collapse, stages, accumulation, views, global_loss)
}


def find_figure(name: str) -> ClaimFigure:
    """Return a figure; raises ``ConfigError`` naming the known ones."""
    if name not in FIGURES:
        raise ConfigError(f"unknown figure {name!r}; choose {', '.join(FIGURES)}")
    return FIGURES[name]
