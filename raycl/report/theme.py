"""Colors and type: drawings that follow the page from light to dark.

Matplotlib draws in stand-in colors, which become variables of the page's style: one drawing serves
both. The hues are Okabe's and Ito's, which color-blind people tell apart.
"""

import io
import re
from typing import Any, final

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

NUM_HUES = 8
HUES = tuple(f"#a1b2{number:02x}" for number in range(NUM_HUES))  # stand-ins for --hue-0 to --hue-7
INK, MUTED, LINE, PAPER, BAND, WARNING = (f"#a1b3{number:02x}" for number in range(6))
_VARIABLES = {color: f"--hue-{number}" for number, color in enumerate(HUES)} | {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    PAPER: "--card",
    BAND: "--band",
    WARNING: "--warning",
}
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = "os^Dv<>pP*"
WIDTH, HEIGHT = 380, 236  # of a drawing, in the units of its viewBox: pixels on a phone
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 6),
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 11.5,
    "legend.labelcolor": INK,
}


@final
class Drawing:
    """A figure being drawn; within ``with``, matplotlib takes the page's style."""

    def __init__(self, *, height: int = HEIGHT, width: int = WIDTH) -> None:
        self._size = (width / 72, height / 72)
        self._context = mpl.rc_context(_STYLE)

    def __enter__(self) -> "Drawing":
        self._context.__enter__()
        self.figure = Figure(figsize=self._size, layout="constrained")
        FigureCanvasSVG(self.figure)
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def svg(self, *, label: str) -> Markup:
        """Return the drawing as part of a page; ``label`` is what those hear who do not see it."""
        stream = io.StringIO()
        # The label as salt: shapes that drawings share by name must not be another drawing's.
        with mpl.rc_context({"svg.hashsalt": label}):
            self.figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
        return Markup(_as_part_of_a_page(stream.getvalue(), label))


def _as_part_of_a_page(svg: str, label: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^<>]*>", _restyled, svg)  # tags alone: what stands between them is a user's
    svg = re.sub(r"\n\s*", "\n", svg)
    view = re.search(r'viewBox="([^"]*)"', svg)
    assert view is not None, "matplotlib says how large a drawing is"
    head = f'<svg viewBox="{view[1]}" role="img" aria-label="{escape(label)}" '
    return head + 'xmlns:xlink="http://www.w3.org/1999/xlink"' + svg[svg.index(">") :]


def _restyled(tag: re.Match[str]) -> str:
    text = re.sub(r'<g id="[^"]*"', "<g", tag[0])
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r"font: (?:[a-z0-9]+ )*([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)  # a hundredth of a pixel is enough
    return re.sub(r"#a1b[23][0-9a-f]{2}", lambda found: f"var({_VARIABLES[found[0]]})", text)
