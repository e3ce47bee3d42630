"""Pictures of a run for the documentation: ``python benchmarks/run_pictures.py RUN``.

Writes ``docs/images/report.png`` and ``explorer.png`` (a desktop, light), and ``report-phone.png`` and
``explorer-phone.png`` (a phone, dark) of the report and the explorer of a run on images, such as ``raycl demo``.
Needs Chromium.
"""

import io
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measuring import FOLDER, make_parser
from PIL import Image

from raycl.report.writer import write_report

IMAGES = FOLDER.parent / "docs" / "images"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
NUM_COLORS = 96  # enough for a page of lines and text; a third of the bytes


def main() -> None:
    """Write the report, open the explorer, and save two screenshots of each."""
    parser = make_parser(__doc__, reports=False)
    parser.add_argument("run", help="the --output of a run")
    run = parser.parse_args().run
    from playwright.sync_api import sync_playwright

    with (
        tempfile.TemporaryDirectory() as folder,
        explorer(run) as explored,
        sync_playwright() as playwright,
    ):
        report = Path(folder) / "report.html"
        write_report(run, str(report))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        shots = {
            "report.png": shot(browser, report.as_uri(), 1_200, 1_250, "light", begin="h1"),
            "report-phone.png": shot(browser, report.as_uri(), 390, 1_300, "dark", begin="#similarities"),
            "explorer.png": shot(browser, explored, 1_280, 800, "light", begin="body"),
            "explorer-phone.png": shot(browser, explored, 390, 844, "dark", begin="body"),
        }
        browser.close()
    for name, picture in shots.items():
        picture.quantize(NUM_COLORS, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)
        print(f"{IMAGES / name}: {(IMAGES / name).stat().st_size:,} bytes")


@contextmanager
def explorer(run: str) -> Iterator[str]:
    """Yield the address of the explorer of a run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "raycl", "explore", run], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def shot(browser: Any, url: str, width: int, height: int, scheme: Any, *, begin: str) -> Image.Image:
    """Return a screenshot of this size, scrolled to an element; of the explorer, the neighbors of its first sample."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab = context.new_page()
    tab.goto(url)
    if url.startswith("http"):
        tab.get_by_text("Choose one to see its neighbors").wait_for()
        tab.get_by_role("button", name="Find neighbors", exact=True).click()
        tab.get_by_text("have its label").wait_for()
    tab.locator(begin).first.evaluate("element => window.scrollTo(0, element.offsetTop - 24)")
    content = tab.screenshot()
    context.close()
    return Image.open(io.BytesIO(content)).convert("RGB")


if __name__ == "__main__":
    main()
