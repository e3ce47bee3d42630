"""``raycl bank serve`` in a real browser during training: page, access control and cleanup."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright
from ray._private import state as ray_state

import raycl
from raycl.config.overrides import config_to_yaml
from raycl.negatives.bank import Bank, connect_bank, list_banks
from raycl.negatives.client import QueueClient
from raycl.negatives.spec import BankSpec
from raycl.negatives.start import start_bank
from tests.cluster.test_security import family, is_loopback, listening
from tests.images import digit_files, write_digits
from tests.ports import free_ports

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

ROOT = Path(__file__).parent.parent.parent
MAIN = "from raycl.cli.main import main; main()"
TOKEN = "token-of-the-tests"
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
SWITCHES += ["--disable-sync", "--no-first-run"]
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
ATTACK = "<script>window.attacked = true</script><img src=x onerror='window.attacked = true'>"
DIM = 8


def command(*arguments: object) -> list[str]:
    return [
        sys.executable,
        "-c",
        MAIN,
        *map(str, arguments),
        "--address",
        ray.get_runtime_context().gcs_address,
    ]


def start(*arguments: object, errors: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)


def wait_until(what: Callable[[], Any], seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def end(process: subprocess.Popen[str], how: int) -> tuple[int, str, str]:
    """Stop a process with a signal; return its status and output."""
    process.send_signal(how)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


# ---- the job and the explorers


@dataclass(frozen=True)
class Job:
    process: subprocess.Popen[str]
    data: Path
    output: Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Start a MoCo run on digits that lasts until it is killed."""
    folder = tmp_path_factory.mktemp("explorer") / "runs"  # as displayed on the page
    folder.mkdir()
    data, output = write_digits(folder / "digits.parquet", 1_700), folder / "digits"
    settings = {
        "data.image_size": 16,
        "data.channels": 1,
        "cpus_per_worker": 0.5,
        "encoder.name": "tests.cluster.networks:slow",
        "encoder.kwargs": json.dumps({"channels": 1, "marker": str(folder / "never"), "seconds": 0.2}),
        "stages.0.batch_size": 32,
        "negatives.capacity": 8_192,
        "checkpoints.every_steps": 8,
        "evaluation.every_epochs": 0,
        "data.cache": "materialize",
    }
    flags = [each for key, value in settings.items() for each in ("--set", f"{key}={value}")]
    run = ["train", "moco_v2", "--data", data, "--output", output, "--workers", 1, "--epochs", 1_000]
    with (folder / "errors").open("w") as errors:
        process = start(*run, *flags, errors=errors)
        yield Job(process, data, output)
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@dataclass(frozen=True)
class Explored:
    process: subprocess.Popen[str]
    url: str

    def api(self, path: str, token: str | None = TOKEN) -> tuple[int, Any]:
        """Return status and JSON of a call."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(f"{self.url}api/{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


def serve(name: str, port: int, *flags: object) -> Explored:
    process = start("bank", "serve", name, "--port", port, "--token", TOKEN, *flags)
    assert process.stdout is not None
    # Ray prints warnings to every driver in its cluster.
    line = next((line for line in process.stdout if "#token=" in line), None)
    if line is None:
        pytest.fail(process.communicate()[1])
    url, _, token = line.split()[-1].partition("#token=")
    assert token == TOKEN
    return Explored(process, url)


@pytest.fixture(scope="module")
def texts_plan(tmp_path_factory: pytest.TempPathFactory) -> BankSpec:
    """Return the plan of a bank of texts, one of which is an attack if displayed as HTML."""
    output = tmp_path_factory.mktemp("texts")
    texts = [f"text number {number}" for number in range(20)]
    texts[3] = ATTACK
    pq.write_table(pa.table({"text": texts}), output / "texts.parquet")
    (output / "config.yaml").write_text(config_to_yaml(raycl.recipe("simcse")))
    return BankSpec(name="texts", kind="queue", dim=DIM, capacity=64, output=str(output), timeout_s=20.0)


def start_texts(plan: BankSpec) -> Bank:
    bank = start_bank(plan)
    client = QueueClient(bank)
    client.push(np.random.default_rng(0).standard_normal((20, DIM)).astype(np.float32), np.arange(20), 1)
    client.flush()
    return bank


@pytest.fixture(scope="module")
def kept() -> list[Bank]:
    """Keep the handles of banks alive: a bank ends with its last handle."""
    return []


@pytest.fixture(scope="module")
def texts(job: Job, kept: list[Bank], texts_plan: BankSpec, port: int) -> Iterator[Explored]:
    """Explore the texts with the first explorer, which starts Ray Serve while the job is starting."""
    kept.append(start_texts(texts_plan))
    explored = serve("texts", port, "--data", f"{texts_plan.output}/texts.parquet")
    yield explored
    explored.process.kill()
    kept[-1].stop()


@pytest.fixture(scope="module")
def digits(job: Job, texts: Explored, port: int) -> Iterator[Explored]:
    """Explore the job's queue with a second explorer."""
    wait_until(lambda: "digits" in list_banks() or job.process.poll() is not None)
    if job.process.poll() is not None:
        pytest.fail((job.data.parent / "errors").read_text())
    explored = serve("digits", port, "--data", job.data)
    wait_until(lambda: connect_bank("digits").stats().filled or job.process.poll() is not None)
    # On a busy machine the first answer, for which the explorer connects to the bank, may take longer than a page waits.
    wait_until(lambda: explored.api("stats")[0] == 200 or job.process.poll() is not None)
    yield explored
    explored.process.kill()


# ---- the browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        yield opened
        opened.close()


Look = Callable[..., Page]


@pytest.fixture
def look(browser: Browser) -> Iterator[Look]:
    """Open a page in a new browser; console errors and requests to other sites fail the test."""
    contexts, wrong = [], []

    def open_(url: str, *, size: Any = None, scheme: Any = "light", allowed: tuple[int, ...] = ()) -> Page:
        context = browser.new_context(viewport=size or DESKTOP, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: note(said.type, said.text))
        page.on("request", lambda asked: None if is_local(asked.url) else wrong.append(asked.url))

        def note(kind: str, text: str) -> None:
            # The browser reports every response with an error status; some are expected.
            if kind in ("error", "warning") and not any(f"status of {each}" in text for each in allowed):
                wrong.append(text)

        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []


def is_local(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("data", "blob") or parts.hostname == "127.0.0.1"


def number(page: Page, name: str) -> int:
    """Return a number from the live panel."""
    value = page.locator("#facts div", has=page.get_by_text(name, exact=True)).locator("dd").inner_text()
    return int(value.replace(",", ""))


def find_neighbors(page: Page) -> None:
    page.get_by_role("button", name="Find neighbors", exact=True).click()
    expect(page.locator("#results-state")).to_contain_text("nearest to", timeout=90_000)


def assert_accessible(page: Page) -> None:
    found = [
        each for each in Axe().run(page).response["violations"] if each["impact"] in ("serious", "critical")
    ]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []


# ---- texts: the first explorer


def test_a_page_without_the_token_shows_nothing_and_reports_a_wrong_token(
    texts: Explored, look: Look
) -> None:
    for token in (None, "another-token-than-that", TOKEN[:-1]):
        assert texts.api("stats", token)[0] == 401
    page = look(f"{texts.url}#token=wrong", allowed=(401,))
    expect(page.get_by_role("alert")).to_contain_text("requires its token")
    expect(page.get_by_label("Token")).to_be_focused()
    assert not page.locator("#main").is_visible()
    assert_accessible(page)
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="texts")).to_be_visible()
    assert (page.url, page.evaluate("sessionStorage.length")) == (texts.url, 1)


def test_html_in_a_text_is_shown_and_not_executed(texts: Explored, look: Look) -> None:
    page = look(f"{texts.url}#token={TOKEN}")
    page.get_by_label("Sample id", exact=True).last.fill("7")
    page.get_by_role("spinbutton").fill("19")
    page.keyboard.press("Enter")
    expect(page.get_by_text(ATTACK)).to_be_visible()
    # The samples that are shown first may have this text as well.
    expect(page.locator("#neighbors li")).to_have_count(19)
    assert page.evaluate("window.attacked") is None


def test_a_lost_bank_is_reported_until_it_returns(
    texts: Explored, texts_plan: BankSpec, kept: list[Bank], look: Look
) -> None:
    page = look(f"{texts.url}#token={TOKEN}", allowed=(503,))
    expect(page.locator("#state-text")).to_have_text("Live")
    connect_bank("texts").stop()
    expect(page.get_by_role("alert")).to_contain_text("The bank is gone", timeout=30_000)
    assert texts.api("nearest?id=7")[0] == 503
    wait_until(lambda: "texts" not in list_banks())
    kept.append(start_texts(texts_plan))
    expect(page.locator("#state-text")).to_have_text("Live", timeout=30_000)
    expect(page.get_by_role("alert")).to_be_hidden()


# ---- digits: a job that trains


def test_the_page_shows_neighbors_with_pictures_and_live_statistics(
    digits: Explored, job: Job, look: Look, tmp_path: Path
) -> None:
    page = look(f"{digits.url}#token={TOKEN}")
    expect(page.get_by_role("heading", name="digits")).to_be_visible()
    assert page.url == digits.url  # without the token
    first = (page.locator("#filled").evaluate("bar => bar.value"), number(page, "Newest step"))
    (content,), _ = digit_files(1)
    (tmp_path / "digit.png").write_bytes(content)
    wait_until(lambda: list(job.output.glob("checkpoints/*/state.pt")))
    page.get_by_role("group").get_by_text("Image").click()
    page.get_by_label("Image, at most 10 MB").set_input_files(tmp_path / "digit.png")
    find_neighbors(page)
    nearest = page.locator("#neighbors li").first
    expect(nearest.get_by_text("cosine")).to_be_visible()
    page.get_by_role("spinbutton").fill("10")
    nearest.get_by_role("button").click()  # it is a button, so the keyboard works as well
    expect(page.locator("#neighbors li")).to_have_count(10)
    picture = page.locator("#neighbors img").first
    expect(picture).to_be_visible()
    assert picture.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [16, 16]
    expect(page.locator("#neighbors .facts-of").first).to_contain_text("age")
    wait_until(lambda: number(page, "Queries answered") >= 2, 10)  # the page refreshes every 2 s
    wait_until(lambda: page.locator("#filled").evaluate("bar => bar.value") > first[0], 20)
    wait_until(lambda: number(page, "Newest step") > first[1], 20)


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_the_page_is_accessible_and_fits_the_screen(
    digits: Explored, look: Look, size: Any, scheme: str
) -> None:
    page = look(f"{digits.url}#token={TOKEN}", size=size, scheme=scheme)
    expect(page.locator("#state-text")).to_have_text("Live", timeout=90_000)
    newest = connect_bank("digits").negatives().sample_id[-1]
    page.get_by_label("Sample id", exact=True).last.fill(str(newest))
    find_neighbors(page)
    page.locator("#neighbors img").last.wait_for()
    assert_accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_the_api_has_a_documentation_page(digits: Explored, look: Look) -> None:
    page = look(f"{digits.url}docs")
    expect(page.locator(".call")).to_have_count(8)
    assert_accessible(page)


def test_the_page_refuses_text_queries_before_the_first_checkpoint(
    digits: Explored, texts: Explored, look: Look
) -> None:
    page = look(f"{texts.url}#token={TOKEN}", allowed=(503,))
    page.get_by_role("group").get_by_text("Text").click()
    page.locator("#text").fill(ATTACK)
    page.get_by_role("button", name="Find neighbors", exact=True).click()
    expect(page.locator("#results-state")).to_contain_text("no checkpoint yet", timeout=90_000)
    assert page.evaluate("window.attacked") is None


# ---- ports and cleanup


def serve_processes() -> dict[int, str]:
    """Return the titles of Ray Serve's processes below this one, by pid."""
    found = {}
    for pid in family(os.getpid()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # the process has ended
        if title.startswith("ray::") and any(
            word in title for word in ("ServeReplica", "ProxyActor", "ServeController")
        ):
            found[pid] = title
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ray_serve_listens_only_on_the_loopback(digits: Explored, port: int) -> None:
    processes = serve_processes()
    assert len(processes) >= 4  # two explorers
    where: list[str] = []
    for pid, title in processes.items():
        own = listening({pid})
        # Each Ray process has an internal port on its node's address.
        assert len([each for each in own if not is_loopback(each)]) <= 1, title
        where += own
    assert f"127.0.0.1 {port}" in where
    assert not [each for each in where if each.split()[1] in ("8000", "9000")]


def test_an_explorer_on_another_port_is_refused_in_one_line(digits: Explored, port: int) -> None:
    process = start("bank", "serve", "digits", "--port", free_ports(1)[0])
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.count("\n")) == (2, 1), errors
    assert f"give --host 127.0.0.1 --port {port}" in errors


def test_after_closing_the_run_continues_and_ray_serve_stops(
    digits: Explored, texts: Explored, job: Job
) -> None:
    assert digits.url.endswith("/digits/") and not texts.url.endswith("/texts/")
    num_dead = len(dead_jobs())
    digits.process.kill()  # it had no time to clean up, so the other explorer does
    wait_until(lambda: len(dead_jobs()) > num_dead)
    assert texts.api("rows/0")[0] == 200
    status, out, errors = end(texts.process, signal.SIGINT)
    assert (status, "closed" in out.splitlines(), errors) == (0, True, "")
    named = ray.util.list_named_actors(all_namespaces=True)
    assert [each for each in named if each["namespace"] == "serve"] == []
    wait_until(lambda: not serve_processes(), 60)
    step = connect_bank("digits").stats().newest_step
    wait_until(lambda: connect_bank("digits").stats().newest_step > step, 30)
    assert job.process.poll() is None


def dead_jobs() -> list[str]:
    return [job["JobID"] for job in ray_state.jobs() if job["IsDead"]]
