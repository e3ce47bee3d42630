"""``raycl bank`` and its Python functions, from processes that join the cluster of the banks."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray

import raycl
from raycl.inference.encoder import load_checkpoint_encoder
from raycl.negatives.bank import Bank
from raycl.negatives.client import MemoryBankClient, QueueClient
from raycl.negatives.spec import BankSpec
from raycl.negatives.start import start_bank
from tests.images import digit_files, write_digits
from tests.test_cli import run_raycl

pytestmark = pytest.mark.usefixtures("ray_cluster")

ROOT = Path(__file__).parent.parent.parent
NUM_SAMPLES, NUM_WRITTEN, DIM = 300, 200, 8
SAMPLE_ID = 7 + 3 * np.arange(NUM_SAMPLES)
MAIN = "from raycl.cli.main import main; main()"


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process; RAY_ADDRESS is invalid, so that --address is used."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": "127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def address() -> str:
    return ray.get_runtime_context().gcs_address


def ask(*question: object) -> Any:
    """Return the output of ``raycl bank QUESTION --json``, which must be pure JSON."""
    answer = python("-c", MAIN, "bank", *question, "--json", "--address", address())
    assert (answer.returncode, answer.stderr) == (0, "")
    return json.loads(answer.stdout)


def unit_rows(num_rows: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((num_rows, DIM)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def spec(folder: Path, **settings: Any) -> BankSpec:
    return BankSpec(**{"dim": DIM, "output": str(folder)} | settings)


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    """Keep a memory bank of two shards; steps 1 to 4 wrote 50 slots each, and 100 were never written."""
    folder = tmp_path_factory.mktemp("slots")
    bank = start_bank(
        spec(folder, name="slots", kind="memory_bank", capacity=NUM_SAMPLES, num_shards=2), SAMPLE_ID
    )
    client = MemoryBankClient(bank, SAMPLE_ID)
    order = np.random.default_rng(0).permutation(SAMPLE_ID)[:NUM_WRITTEN].reshape(4, -1)
    for step, ids in enumerate(order, 1):
        client.update(ids, unit_rows(len(ids), step), step)
    client.flush()
    yield bank
    bank.stop()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    """Keep a queue of 128 keys that contains sample 5 twice."""
    folder = tmp_path_factory.mktemp("keys")
    bank = start_bank(spec(folder, name="keys", kind="queue", capacity=128))
    client = QueueClient(bank)
    client.push(unit_rows(4, 1), np.array([5, 6, 7, 8]), 1)
    client.push(unit_rows(4, 2), np.array([9, 5, 10, 11]), 2)
    client.flush()
    yield bank
    bank.stop()


def nearest_by_numpy(bank: Bank, query: np.ndarray, k: int, without: int | None = None) -> list[int]:
    rows = bank.negatives()
    similarity = rows.rows @ query / np.linalg.norm(query)
    similarity[(rows.step < 0) | (rows.sample_id == without)] = -np.inf
    return rows.sample_id[np.argsort(-similarity)[:k]].tolist()


@pytest.fixture
def bank_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Query from the test process, which has already joined Ray, to save time."""
    return lambda *arguments: run_raycl(monkeypatch, capsys, "bank", *arguments)


@pytest.fixture
def ask_here(bank_command: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """Return a function like ``ask`` that queries from the test process."""

    def answer(*question: object) -> Any:
        status, out, err = bank_command(*question, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return answer


def test_all_banks_are_listed(slots: Bank, keys: Bank) -> None:
    listed = {each["name"]: each for each in ask("list")}
    assert {"slots", "keys"} <= set(listed)
    assert (listed["slots"]["kind"], listed["slots"]["capacity"]) == ("memory_bank", NUM_SAMPLES)
    assert listed["keys"]["output"] == keys.spec.output


def test_statistics_equal_numpy(ask_here: Callable[..., Any], slots: Bank) -> None:
    shown = ask_here("stats", "slots")
    rows = slots.negatives()
    there = rows.step >= 0
    lengths = np.linalg.norm(rows.rows[there], axis=1)
    assert (shown["rows"], shown["filled"], shown["dim"], shown["dtype"]) == (300, 200, DIM, "float32")
    assert shown["num_bytes"] == sum(slots.spec.bytes_of(shard) for shard in range(2))
    assert (shown["newest_step"], shown["age_mean"], shown["age_max"]) == (4, 1.5, 3)
    assert shown["age_histogram"] == [[1, 50], [2, 50], [4, 100]]
    assert shown["norm_mean"] == pytest.approx(float(lengths.mean()), rel=1e-5)
    assert (shown["puts"], shown["restarts"], shown["output"]) == (NUM_WRITTEN, 0, slots.spec.output)
    assert [shard["rows"] for shard in shown["shards"]] == [150, 150]
    assert len({shard["pid"] for shard in shown["shards"]} - {os.getpid()}) == 2
    (node,) = (each["NodeID"] for each in ray.nodes() if each["Alive"])
    assert {shard["node_id"] for shard in shown["shards"]} == {node}


def test_nearest_to_a_sample_equal_numpy_and_exclude_the_sample(slots: Bank) -> None:
    rows = slots.negatives()
    own = int(np.flatnonzero(rows.step == 3)[0])
    sample_id = int(rows.sample_id[own])
    shown = ask("nearest", "slots", "--id", sample_id, "-k", 7)
    found = [each["sample_id"] for each in shown["neighbors"]]
    assert found == nearest_by_numpy(slots, rows.rows[own], 7, without=sample_id)
    best = rows.sample_id == found[0]
    assert shown["neighbors"][0]["similarity"] == pytest.approx(
        float(rows.rows[best][0] @ rows.rows[own]), abs=1e-5
    )
    assert shown["neighbors"][0]["step"] == rows.step[best][0]
    assert (shown["query"], shown["newest_step"]) == ({"id": sample_id}, 4)


def test_nearest_to_a_vector_equal_numpy_for_npy_and_json(
    ask_here: Callable[..., Any], slots: Bank, tmp_path: Path
) -> None:
    query = 3 * unit_rows(1, seed=9)[0]
    np.save(tmp_path / "query.npy", query)
    (tmp_path / "query.json").write_text(json.dumps(query.tolist()))
    for name in ("query.npy", "query.json"):
        shown = ask_here("nearest", "slots", "--vector", tmp_path / name)
        assert [each["sample_id"] for each in shown["neighbors"]] == nearest_by_numpy(slots, query, 10)


def test_rows_are_exact_and_missing_samples_are_named(ask_here: Callable[..., Any], keys: Bank) -> None:
    shown = ask_here("get", "keys", "--id", 5, "--id", 77, "--id", 8)
    found = keys.get(np.array([5, 77, 8]))
    assert [each["sample_id"] for each in shown["rows"]] == found.sample_id.tolist() == [5, 8, 5]
    assert [each["step"] for each in shown["rows"]] == [1, 1, 2]
    np.testing.assert_array_equal(np.array([each["embedding"] for each in shown["rows"]]), found.rows)
    assert (shown["missing"], shown["newest_step"]) == ([77], 2)


def test_an_export_contains_the_written_rows(
    ask_here: Callable[..., Any], slots: Bank, tmp_path: Path
) -> None:
    shown = ask_here("export", "slots", "--output", tmp_path / "rows")
    assert shown["rows"] == NUM_WRITTEN
    table = pq.read_table(tmp_path / "rows").sort_by("sample_id")
    rows = slots.negatives()
    there = rows.step >= 0
    np.testing.assert_array_equal(table["sample_id"].to_numpy(), rows.sample_id[there])
    np.testing.assert_array_equal(np.stack(table["embedding"].to_pylist()), rows.rows[there])


def test_each_fact_is_a_line_without_json(bank_command, slots: Bank) -> None:
    status, out, err = bank_command("stats", "slots")
    assert (status, err) == (0, "")
    facts = dict(line.split(maxsplit=1) for line in out.splitlines() if " " in line)
    assert (facts["filled"], facts["run"], facts["restarts"]) == ("200", slots.spec.output, "0")
    (bars,) = ([line.count("#") for line in out.splitlines() if line.startswith("below")],)
    assert bars == [20, 20, 40]
    _, out, _ = bank_command("get", "slots", "--id", 7)
    assert out.splitlines()[0].split() == ["sample_id", "step", "norm", "embedding"]
    written = slots.negatives().sample_id[slots.negatives().step >= 0]
    _, out, _ = bank_command("nearest", "slots", "--id", written[0], "-k", 3)
    assert len(out.splitlines()) == 5
    assert out.splitlines()[-1] == "newest step: 4"


@pytest.mark.parametrize(
    ("question", "says"),
    [
        (["stats", "missing"], "no bank 'missing'.*'slots'"),
        (["nearest", "slots", "--id", 8], "no slot for the samples 8"),
        (["get", "slots", "--id", 8], "no slot for the samples 8"),
        (["get", "keys", "--id", 77], "holds no row of sample 77"),
        (["nearest", "keys", "--id", 77], "holds no row of sample 77"),
        (["nearest", "slots", "--id", 7, "-k", 0], "-k must be at least 1"),
        (["nearest", "slots"], "one of --id, --image, --text and --vector"),
        (["nearest", "slots", "--id", 7, "--image", "a.png"], "one of --id, --image, --text and --vector"),
        (["nearest", "slots", "--id", "seven"], "--id"),
        (["nearest", "slots", "--image", "nowhere.png"], "cannot read.*nowhere.png"),
        (["nearest", "slots", "--vector", "README.md"], "does not contain an embedding"),
        (["export", "slots", "--output", "README.md"], "exists already"),
        (["stats"], "name"),
        (["ask"], "ask"),
    ],
)
def test_an_invalid_query_prints_one_line_and_exits_with_status_2(
    bank_command, slots: Bank, keys: Bank, question: list[object], says: str
) -> None:
    status, out, err = bank_command(*question)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "Traceback" not in err
    assert re.search(says, err), err


def test_a_missing_ray_cluster_prints_one_line_and_exits_with_status_1() -> None:
    answer = python("-c", MAIN, "bank", "list")
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (1, "", 1)
    assert "nothing answers at 127.0.0.1:1" in answer.stderr


def test_the_job_prints_the_same_as_the_command(keys: Bank) -> None:
    answer = python("jobs/bank.py", "get", "keys", "--id", 11, "--json", "--address", address())
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["rows"][0]["step"] == 2


def test_python_queries_import_neither_torch_nor_ray_data(slots: Bank) -> None:
    code = f"""
import json, sys
import raycl
names = raycl.list_banks({address()!r})
bank = raycl.connect_bank("slots")
shown = [names, bank.stats().filled, len(bank.nearest_of(int(bank.negatives().sample_id[bank.negatives().step >= 0][0]), 3))]
print(json.dumps([*shown, sorted({{"torch", "ray.data", "ray.train", "pandas"}} & set(sys.modules))]))
"""
    answer = python("-c", code)
    assert answer.returncode == 0, answer.stderr
    names, filled, num_neighbors, heavy = json.loads(answer.stdout.splitlines()[-1])
    assert "slots" in names
    assert (filled, num_neighbors, heavy) == (NUM_WRITTEN, 3, [])


@pytest.mark.drill
def test_an_image_query_returns_the_nearest_keys_by_the_momentum_encoder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = raycl.override(
        raycl.recipe("moco_v2", image_size=16),
        {
            "cpus_per_worker": 0.5,
            "data.channels": 1,
            "encoder.name": "tests.cluster.networks:small",
            "encoder.kwargs": {"channels": 1},
            "stages.0.epochs": 1,
            "stages.0.batch_size": 64,
            "negatives.capacity": 128,
            "bank.detached": True,
            "evaluation.every_epochs": 0,
        },
    )
    run = tmp_path / "photographed"
    raycl.train(config, data=str(write_digits(tmp_path / "digits.parquet", 300)), output=str(run))
    shown = capfd.readouterr().err
    assert f"raycl bank stats photographed --address {address()}" in shown
    (image,), _ = digit_files(1)
    (tmp_path / "digit.png").write_bytes(image)
    bank = raycl.connect_bank("photographed")
    try:
        answer = ask("nearest", "photographed", "--image", tmp_path / "digit.png", "-k", 5)
        query = load_checkpoint_encoder(str(run)).embed("image", image)
        assert [each["sample_id"] for each in answer["neighbors"]] == nearest_by_numpy(bank, query, 5)
        assert (run / "checkpoints" / answer["query"]["checkpoint"] / "state.pt").exists()
    finally:
        bank.stop()
