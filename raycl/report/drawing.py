"""SVG drawings whose colors follow the page from light to dark.

Matplotlib draws with placeholder colors, which are replaced by variables of the page's style. The hues are the
palette of Okabe and Ito, which color-blind readers can distinguish.
"""

import io
import re
from typing import Any, final

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

NUM_HUES = 8
HUES = tuple(f"#a1b2{number:02x}" for number in range(NUM_HUES))  # placeholders for --hue-0 to --hue-7
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
SVG_DASHES = ("", "5 2", "1.5 1.5", "6 2 1.5 2")
NUM_STYLES = NUM_HUES * len(DASHES)
MARKERS = "os^Dv<>pP*"
_WIDTH, _HEIGHT = 380, 236  # in the units of the viewBox: pixels on a phone
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
    """A drawing in progress: within ``with``, matplotlib uses the page's style; ``label`` describes it in words."""

    def __init__(self, label: str, *, height: int = _HEIGHT) -> None:
        self._label, self._size = label, (_WIDTH / 72, height / 72)
        # The label is the salt, so that two drawings never share the name of a shape.
        self._context = mpl.rc_context({**_STYLE, "svg.hashsalt": label})

    def __enter__(self) -> "Drawing":
        self._context.__enter__()
        self._figure = Figure(figsize=self._size, layout="constrained")
        FigureCanvasSVG(self._figure)
        self.axes: Axes = self._figure.add_subplot()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def to_svg(self) -> Markup:
        """Return the drawing as an element of a page."""
        stream = io.StringIO()
        self._figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
        svg = stream.getvalue()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", svg, flags=re.DOTALL)
        svg = re.sub(r"<[^<>]*>", _restyled, svg)  # only tags: the text between them is a user's
        svg = re.sub(r"\n\s*", "\n", svg)
        view = re.search(r'viewBox="([^"]*)"', svg)
        assert view is not None, "matplotlib writes the size of a drawing"
        head = f'<svg viewBox="{view[1]}" role="img" aria-label="{escape(self._label)}" '
        return Markup(head + 'xmlns:xlink="http://www.w3.org/1999/xlink"' + svg[svg.index(">") :])


def _restyled(tag: re.Match[str]) -> str:
    text = re.sub(r'<g id="[^"]*"', "<g", tag[0])
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r"font: (?:[a-z0-9]+ )*([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)  # a hundredth of a pixel is enough
    return re.sub(r"#a1b[23][0-9a-f]{2}", lambda found: f"var({_VARIABLES[found[0]]})", text)
