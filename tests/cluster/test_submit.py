"""Every recipe as a submitted job, on a separate cluster that requires a token."""

import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycl.recipes import RECIPES
from raycl.records import read_metrics, read_result
from raycl.storage import Place
from tests.cluster.faults import wait_until
from tests.growing_cluster import MARK, end_processes
from tests.images import digit_files, write_digits
from tests.pairs import write_captioned, write_pairs, write_texts
from tests.ports import free_ports

pytestmark = pytest.mark.drill

ROOT = Path(__file__).parent.parent.parent
NUM_ROWS, NUM_STEPS = 300, 3
SUBMIT = ("job", "submit", "--address")
COMMON = ["workers=2", "cpus_per_worker=0.5", "stages.0.batch_size=32", "evaluation.num_test=30"]
IMAGES = ["data.image_size=16", "data.channels=1", "encoder.name=resnet10", "encoder.width=0.125"]
TEXTS = ["text.vocabulary_size=400"]
QUEUE = ["negatives.capacity=128"]
SMALL = {
    "simclr": IMAGES,
    "dcl": IMAGES,
    "sogclr": IMAGES,
    "supcon": IMAGES,
    "moco_v1": IMAGES + QUEUE,
    "moco_v2": IMAGES + QUEUE,
    "moco_v3": IMAGES,
    "nnclr": IMAGES + QUEUE,
    "instance_discrimination": [*IMAGES, "negatives.num_negatives=64"],
    "simcse": TEXTS,
    "esimcse": TEXTS + QUEUE,
    "two_tower": TEXTS,
    "clip": IMAGES + TEXTS,
    "siglip": IMAGES + TEXTS,
}
WRITTEN: dict[str, Callable[[Path, int], Path]] = {
    "simcse": write_texts,
    "esimcse": write_texts,
    "two_tower": write_pairs,
    "clip": write_captioned,
    "siglip": write_captioned,
}


@dataclass(frozen=True)
class Cluster:
    """A head with a dashboard, both on the loopback, and the environment of its users."""

    dashboard: str
    environment: dict[str, str]

    def ray(
        self, *arguments: object, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("ray")), *map(str, arguments)]
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment or self.environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    def submit(self, job: str, *arguments: object, flags: list[str] | None = None) -> tuple[int, str]:
        """Submit ``python jobs/JOB.py ARGUMENTS`` as in docs/cluster.md; return status and log."""
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": "120", "OMP_NUM_THREADS": "1"}
        submitted = self.ray(
            *("job", "submit", "--address", self.dashboard, "--working-dir", ".", *(flags or [])),
            *("--runtime-env-json", json.dumps({"env_vars": variables})),
            *("--", "python", f"jobs/{job}.py", *arguments),
        )
        return submitted.returncode, submitted.stdout + submitted.stderr


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="rcl", dir="/tmp", ignore_cleanup_errors=True) as folder:
        token = Path(folder) / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        port, dashboard = free_ports(2)
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            MARK: folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
        }
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4", f"--temp-dir={folder}/ray"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
            f"--object-store-memory={300 * 2**20}",
        ]
        with (Path(folder) / "log").open("wb") as log:
            head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            found = Cluster(f"http://127.0.0.1:{dashboard}", environment)
            # The agent that starts jobs is up later than the dashboard.
            wait_until(lambda: found.ray(*SUBMIT, found.dashboard, "--", "true").returncode == 0)
            yield found
        finally:
            head.terminate()
            end_processes(Path(folder))
            head.wait(30)


def write_clicks(path: Path) -> Path:
    """Write a log of queries, each with a clicked document and a skipped document."""
    rows = pq.read_table(write_pairs(path, NUM_ROWS)).to_pylist()
    log = [
        {"query": row["query"], "document": document, "label": label}
        for row, other in itertools.pairwise(rows)
        for document, label in ((row["document"], 1), (other["document"], 0))
    ]
    pq.write_table(pa.Table.from_pylist(log), path)
    return path


def flags_of(recipe: str) -> list[str]:
    return flags([*COMMON, *SMALL[recipe]])


def flags(settings: list[str]) -> list[str]:
    return [flag for setting in settings for flag in ("--set", setting)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_as_a_job(recipe: str, cluster: Cluster, tmp_path: Path) -> None:
    data = WRITTEN.get(recipe, write_digits)(tmp_path / "data.parquet", NUM_ROWS)
    output = tmp_path / "run"
    status, log = cluster.submit(
        "train", recipe, "--data", data, "--output", output, "--steps", NUM_STEPS, *flags_of(recipe)
    )
    assert status == 0, log
    assert f"{NUM_STEPS} steps in" in log
    assert "Traceback" not in log
    assert read_result(Place(str(output)))["steps"] == NUM_STEPS


def test_jobs_evaluate_query_and_embed_a_run_on_images(cluster: Cluster, tmp_path: Path) -> None:
    train, test = (write_digits(tmp_path / f"{num}.parquet", num) for num in (NUM_ROWS, 60))
    output = tmp_path / "run"

    def log_of(job: str, *arguments: object) -> str:
        status, log = cluster.submit(job, *arguments)
        assert status == 0, log
        return log

    detached = ("--set", "bank.detached=true", "--set", "bank.name=kept")
    settings = ("--data", train, "--output", output, "--steps", NUM_STEPS, *flags_of("moco_v2"), *detached)
    log_of("train", "moco_v2", *settings)
    assert '"filled": 96' in log_of("bank", "stats", "kept", "--json")
    flags_for_run = ("--run", output, "--train", train, "--test", test)
    assert '"top1"' in log_of("evaluate", "knn", *flags_for_run)
    assert '"top1"' in log_of("evaluate", "linear", *flags_for_run)
    log_of("embed", "--run", output, "--data", test, "--output", tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet").num_rows == 60
    (tmp_path / "folder").mkdir()
    for number, content in enumerate(digit_files(20)[0]):
        (tmp_path / "folder" / f"{number}.png").write_bytes(content)
    packed = log_of("prepare", "images", "--data", tmp_path / "folder", "--output", tmp_path / "packed")
    assert "20 images packed" in packed


def test_jobs_evaluate_and_mine_a_run_on_clicks(cluster: Cluster, tmp_path: Path) -> None:
    log_of_clicks = write_clicks(tmp_path / "clicks.parquet")
    pairs, output, mined = (tmp_path / name for name in ("pairs.parquet", "run", "mined.parquet"))
    tokens = tmp_path / "tokens.json"
    for line in (
        f"prepare tokenizer --data {log_of_clicks} --output {tokens} --columns query,document --vocabulary-size 400",
        f"prepare pairs --data {log_of_clicks} --output {pairs}",
        f"train two_tower --data {pairs} --output {output} --steps {NUM_STEPS} --set text.tokenizer={tokens} "
        + " ".join(flags(COMMON)),
        f"mine --run {output} --data {pairs} --output {mined}",
        f"evaluate retrieval --run {output} --test {log_of_clicks}",
    ):
        status, log = cluster.submit(*line.split())
        assert status == 0, log
    assert "negatives" in pq.read_schema(mined).names


def test_a_failed_job_reports_its_error_and_status(cluster: Cluster, tmp_path: Path) -> None:
    status, log = cluster.submit(
        "train", "simclr", "--data", tmp_path / "nothing", "--output", tmp_path / "run"
    )
    assert status == 1
    assert "nothing at" in log
    assert "exit code 2" in log
    assert "Traceback" not in log


def test_a_stopped_job_saves_a_checkpoint_and_resumes_when_submitted_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    data, output = write_digits(tmp_path / "data.parquet", NUM_ROWS), tmp_path / "run"
    arguments = (
        "--data",
        data,
        "--output",
        output,
        "--resume",
        *flags_of("simclr"),
        "--set",
        "log_every_steps=1",
    )
    status, log = cluster.submit(
        "train", "simclr", "--steps", 40_000, *arguments, flags=["--no-wait", "--submission-id", "long"]
    )
    assert status == 0, log
    wait_until(lambda: (output / "metrics.jsonl").exists())
    stopped = cluster.ray("job", "stop", "--address", cluster.dashboard, "long")
    assert stopped.returncode == 0, stopped.stderr
    result = read_result(Place(str(output)))
    assert result["status"] == "stopped"
    printed = cluster.ray("job", "logs", "--address", cluster.dashboard, "long")
    assert result["error"] in printed.stdout + printed.stderr
    reached = read_metrics(Place(str(output)))[-1]["step"]
    status, log = cluster.submit("train", "simclr", "--steps", reached + 3, *arguments)
    assert status == 0, log
    assert read_result(Place(str(output)))["steps"] == reached + 3


def test_submitting_requires_the_token(cluster: Cluster) -> None:
    without = {**cluster.environment, "RAY_AUTH_MODE": "disabled"}
    refused = cluster.ray("job", "list", "--address", cluster.dashboard, environment=without)
    assert refused.returncode != 0
    assert "authentication is enabled" in refused.stdout + refused.stderr
