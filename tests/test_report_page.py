"""The report page in a real browser: on desktop and phone, light and dark."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from raycl.records import ROLLBACK
from raycl.report.writer import write_comparison, write_report
from tests.outputs import evaluation, line_of, thumbnail, write_run, write_snapshots

CHROMIUM = shutil.which("chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--no-first-run"]
FORMS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
LONG_WORD = "antidisestablishmentarianism" * 12

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (on Debian: apt install chromium)"),
    # Playwright leaves sockets open until garbage collection.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of every kind, with long words in all user text."""
    root = tmp_path_factory.mktemp("pages")
    images = write_run(root / "images")
    write_snapshots(images)
    texts = write_run(
        root / LONG_WORD[:120],
        _eventful(),
        method="moco_v2",
        result={"status": "failed", "error": f"it broke at {LONG_WORD}"},
    )
    words = [f"{LONG_WORD} {number}" for number in range(40)]
    write_snapshots(texts, num_samples=40, query=words, document=words)
    captions = write_run(root / "captions")
    pictures = [thumbnail(number, "JPEG") for number in range(30)]
    write_snapshots(captions, num_samples=30, labeled=False, image=pictures)
    empty = write_run(root / "empty", [], result={"status": "running"})
    found = {}
    for name, folder in {"images": images, "texts": texts, "unlabeled": captions, "empty": empty}.items():
        found[name] = root / f"{name}.html"
        write_report(str(folder), str(found[name]))
    found["comparison"] = root / "comparison.html"
    write_comparison([str(images), str(texts), str(empty)], str(found["comparison"]))
    return found


def _eventful() -> list[dict[str, Any]]:
    """A run of two stages with a collapse, a rollback, a lost worker and a NaN."""
    lines = [
        line_of(step, negatives_age_mean=step / 2, negatives_age_max=step) for step in range(10, 101, 10)
    ]
    lines.append({"step": 100, "event": "collapse", "text": LONG_WORD})
    lines.append({"step": 50, "event": ROLLBACK, "text": "went back from step 100"})
    lines += [line_of(step, stage=1, workers=1) for step in range(60, 200, 10)]
    return [
        *lines,
        line_of(200, loss=float("nan"), stage=1),
        evaluation(200, recall_at_10=0.5, recall_at_1=0.2),
    ]


def opened(browser: Browser, path: Path, width: int, scheme: Any) -> tuple[Page, list[str], list[str]]:
    """Return the page, its console messages, and the requested addresses."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    return page, said, asked


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        *[("images", *form) for form in FORMS],
        *[(name, 390, "dark") for name in ("texts", "unlabeled", "empty", "comparison")],
        *[(name, 1280, "light") for name in ("texts", "comparison")],
    ],
)
def test_the_page_logs_nothing_fits_the_screen_and_is_accessible(
    browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    path = pages[name]
    assert path.stat().st_size < 3 * 2**20
    page, said, asked = opened(browser, path, width, scheme)
    if name != "comparison":
        page.locator("summary").click()  # all settings
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    heights = "[...document.querySelectorAll('svg text')].map(text => text.getBoundingClientRect().height)"
    assert min(page.evaluate(heights), default=20) >= 9  # pixels: the smallest readable size
    found = Axe().run(page).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in serious] == []
    page.context.close()


def test_the_tables_of_a_comparison_fit_a_desktop(browser: Browser, tmp_path: Path) -> None:
    lines = [line_of(100), evaluation(100, recall_at_10=0.5, recall_at_1=0.2)]
    runs = [write_run(tmp_path / f"run-of-{seed}", lines, settings={"seed": seed}) for seed in range(6)]
    write_comparison(list(map(str, runs)), str(tmp_path / "both.html"))
    page, _, _ = opened(browser, tmp_path / "both.html", 1440, "light")
    hidden = "[...document.querySelectorAll('.scroll')].map(each => each.scrollWidth - each.clientWidth)"
    assert page.evaluate(hidden) == [0, 0]
    page.context.close()


def test_drawings_follow_light_and_dark(browser: Browser, pages: dict[str, Path]) -> None:
    inks = []
    for scheme in ("light", "dark"):
        page, _, _ = opened(browser, pages["images"], 1280, scheme)
        color = "getComputedStyle(document.querySelector('svg text')).fill"
        paper = "getComputedStyle(document.querySelector('figure')).backgroundColor"
        inks.append((page.evaluate(color), page.evaluate(paper)))
        page.context.close()
    assert inks[0][0] != inks[1][0]
    assert inks[0][1] == "rgb(255, 255, 255)"
    assert inks[1][1] != "rgb(255, 255, 255)"


def test_the_printed_page_is_light(browser: Browser, pages: dict[str, Path]) -> None:
    page, _, _ = opened(browser, pages["images"], 1280, "dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
    page.context.close()
