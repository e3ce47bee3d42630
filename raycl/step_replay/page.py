"""The page of a replayed step: one HTML file that loads nothing from elsewhere."""

from typing import TYPE_CHECKING

from raycl.report.render import render_template

if TYPE_CHECKING:
    from raycl.step_replay.step import ReplayedStep

NUM_QUERIES = 24


def render_step(found: "ReplayedStep") -> str:
    """Return the page of a step."""
    logged = "not logged" if found.logged_loss is None else f"logged {found.logged_loss:.6g}"
    if found.relative_difference is not None:
        logged += f", differs by {found.relative_difference:.1e}"
    queries = found.queries
    headline = [
        ("loss", f"{found.loss:.6g}", logged),
        ("largest loss of a query", f"{queries[0].loss:.4g}", f"of {len(queries):,} queries"),
        ("temperature", f"{found.temperature:.4g}", found.objective),
        ("learning rate", f"{found.learning_rate:.4g}", f"epoch {found.epoch}, stage {found.stage}"),
    ]
    return render_template(
        "replay.html.jinja",
        command="replay",
        title=f"step {found.step:,} of {found.run}",
        found=found,
        headline=headline,
        queries=queries[:NUM_QUERIES],
    )
