"""Pictures of a report for the documentation: ``python benchmarks/report_pictures.py RUN``.

Writes ``docs/images/report.png`` (a desktop, light) and ``report-phone.png`` (a phone, dark) of the page of a run,
such as ``raycl demo``. Needs Chromium.
"""

import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

from measuring import FOLDER, make_parser
from PIL import Image

from raycl.report.writer import write_report

IMAGES = FOLDER.parent / "docs" / "images"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
NUM_COLORS = 96  # enough for a page of lines and text; a third of the bytes


def main() -> None:
    """Write the page, and save two screenshots of it."""
    parser = make_parser(__doc__, reports=False)
    parser.add_argument("run", help="the --output of a run")
    run = parser.parse_args().run
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        write_report(run, str(page))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        shots = {
            "report.png": shot(browser, page, 1_200, 1_250, "light", begin="h1"),
            "report-phone.png": shot(browser, page, 390, 1_300, "dark", begin="#similarities"),
        }
        browser.close()
    for name, picture in shots.items():
        picture.quantize(NUM_COLORS, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)
        print(f"{IMAGES / name}: {(IMAGES / name).stat().st_size:,} bytes")


def shot(browser: Any, page: Path, width: int, height: int, scheme: Any, *, begin: str) -> Image.Image:
    """Return a screenshot of this size, scrolled to an element."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab = context.new_page()
    tab.goto(page.as_uri())
    tab.locator(begin).first.evaluate("element => window.scrollTo(0, element.offsetTop - 24)")
    content = tab.screenshot()
    context.close()
    return Image.open(io.BytesIO(content)).convert("RGB")


if __name__ == "__main__":
    main()
