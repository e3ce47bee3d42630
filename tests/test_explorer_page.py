"""``raycl explore`` of a finished run in a real browser: random samples, neighbors, labels and the run's curves."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

from tests.images import encode
from tests.outputs import embeddings, write_run
from tests.ports import free_ports

CHROMIUM = shutil.which("chromium")
TOKEN = "token-of-the-tests"
NUM, CLASSES = 30, ("ant", "bee", "<cat>")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (on Debian: apt install chromium)"),
    # Playwright leaves sockets open until garbage collection.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Explore embeddings of 30 pictures of three classes, which are far apart."""
    folder = tmp_path_factory.mktemp("explored")
    labels = np.arange(NUM) % 3
    pictures = [encode(np.full((8, 8), 40 + 7 * number, np.uint8), "PNG") for number in range(NUM)]
    pq.write_table(
        pa.table({"image": pictures, "label": [CLASSES[label] for label in labels]}), folder / "data.parquet"
    )
    rows = embeddings(labels, spread=0.05).astype(np.float32)
    table = pa.table({"sample_id": np.arange(NUM), "label": labels, "representation": list(rows)})
    pq.write_table(table, folder / "embedded.parquet")
    write_run(folder / "run")
    command = [sys.executable, "-m", "raycl", "explore", folder / "run", "--data", folder / "data.parquet"]
    command += [
        "--embeddings",
        folder / "embedded.parquet",
        "--token",
        TOKEN,
        "--port",
        str(free_ports(1)[0]),
    ]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1]
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0].endswith("closed\n")
    assert process.returncode == 0


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (400, "dark")])
def test_the_page_opens_with_samples_and_marks_neighbors_of_the_same_label(
    url: str, width: int, scheme: Any
) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        expect(page.locator("#neighbors img")).to_have_count(12)
        expect(page.locator("#state-text")).to_have_text("Saved")
        expect(page.locator("#loss")).to_contain_text("Loss")
        expect(page.locator("#score")).to_contain_text("kNN top-1 accuracy 20.0% to 70.0%")
        page.locator("#neighbors img").first.click()
        expect(page.locator("#results-state")).to_contain_text("9 of 12 have its label")
        assert page.locator("#neighbors .same").count() == 9
        assert page.locator("#neighbors .other").count() == 3
        expect(page.locator("#neighbors .label").first).to_contain_text("✓")
        assert page.locator("#neighbors .label").last.inner_text().count("✓") == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = [
            each["id"]
            for each in Axe().run(page).response["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        assert (found, said) == ([], [])
        # Also while a query is under way, whose answer is dropped.
        page.evaluate("for (const id of ['find', 'random']) document.getElementById(id).click()")
        expect(page.locator("#results-title")).to_have_text("Random samples")
        expect(page.get_by_role("button", name="Find neighbors", exact=True)).to_be_enabled()
        expect(page.locator("#neighbors .same")).to_have_count(0)
        # A query that is refused keeps the samples; without an id, it is the first of them.
        for typed, words in (("one", "A sample id is a whole number"), ("", "12 nearest to sample ")):
            page.locator("#id").fill(typed)
            page.locator("#find").click()
            expect(page.locator("#results-state")).to_contain_text(words)
            expect(page.locator("#neighbors img")).to_have_count(12)
        first = page.locator("#id").get_attribute("placeholder")
        expect(page.locator("#query")).to_contain_text(f"Sample {first}")
        browser.close()


expect.set_options(timeout=30_000)


def test_labels_are_marked_beside_a_neighbor_that_cannot_be_read(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(url)
        expect(page.locator("#neighbors img")).to_have_count(12)
        page.route("**/api/samples/*", lambda route: route.fulfill(status=500, body="{}"), times=1)
        page.locator("#neighbors img").first.click()
        expect(page.locator("#neighbors .words")).to_have_text("The explorer answered 500.")
        expect(page.locator("#results-state")).to_contain_text(" of 11 have its label")
        browser.close()
