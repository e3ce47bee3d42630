"""The doctor on a real cluster: storage, every kind of data, memory of recipes; drills with several nodes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import raycl
from raycl.config.overrides import override
from raycl.data.discovery import find_source
from raycl.doctor import memory
from raycl.doctor.checks import check_access, has_autoscaler, refuses_calls_without_token
from raycl.doctor.data import DataSummary, check_data
from raycl.doctor.memory import check_decoded_data, check_memory
from raycl.doctor.nodes import Node, alive_nodes, ask_nodes, describe_node
from raycl.doctor.result import CheckResult
from raycl.doctor.storage import check_storage
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.training.coordinator import start_coordinator
from raycl.training.data_module import DataModule
from raycl.training.preflight import column_names
from tests.conftest import BUCKET
from tests.images import encode, photograph, write_digits
from tests.test_cli import run_raycl

pytestmark = pytest.mark.usefixtures("ray_cluster")

ROOT = Path(__file__).parent.parent.parent


def write_table(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def collect(checks: Generator[CheckResult, None, Any]) -> tuple[dict[str, CheckResult], Any]:
    """Return the results by name, and the return value of the checks."""
    results = {}
    while True:
        try:
            result = next(checks)
        except StopIteration as end:
            return results, end.value
        results[result.name] = result


def check(data: str, config: Any = None) -> dict[str, CheckResult]:
    return collect(check_data(data, None, config))[0]


def summary_of(data: str, config: Any = None) -> DataSummary:
    results, summary = collect(check_data(data, None, config))
    assert summary is not None, results
    return summary


def test_an_unresponsive_node_is_named_and_delays_no_other_node() -> None:
    # Ray pickles nested functions by value, so the task imports nothing.
    def answer_late(seconds: float) -> None:
        import time

        time.sleep(seconds)

    def refuse() -> None:
        raise ValueError("not today")

    nodes = alive_nodes()
    assert [node.is_head for node in nodes] == [True]
    gone = Node(node_id="0" * 56, name="gone", is_head=False, num_cpus=1, num_gpus=0, object_store=0)
    answers = {answer.node.name: answer for answer in ask_nodes([*nodes, gone], describe_node, timeout_s=60)}
    assert answers[nodes[0].name].value is not None
    assert answers["gone"].problem
    (late,) = ask_nodes(nodes, answer_late, 10.0, timeout_s=1.0)
    assert late.problem == "no answer within 1 s"
    (refusing,) = ask_nodes(nodes, refuse)
    assert "not today" in refusing.problem


def test_a_reachable_cluster_without_a_token_is_red() -> None:
    assert refuses_calls_without_token(ray.get_runtime_context().gcs_address) is False
    finding = check_access(alive_nodes())
    assert not finding.good
    assert "other machines reach its head" in finding.seen
    assert "RAY_AUTH_MODE=token" in finding.remedy


def test_a_cluster_without_an_autoscaler_is_recognized() -> None:
    assert has_autoscaler() is not True


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_storage_is_tested_from_every_node_and_left_unchanged(tmp_path: Path, kind: str) -> None:
    output = str(tmp_path / "deep" / "run") if kind == "local" else f"s3://{BUCKET}/doctor/deep/run"
    finding = check_storage(output, alive_nodes())
    assert finding.good, finding
    assert "written, read and deleted" in finding.seen
    assert list(tmp_path.iterdir()) == []
    if kind == "s3":
        filesystem, path = Place(f"s3://{BUCKET}/doctor").resolve()
        found = filesystem.get_file_info(path)
        assert found.type.name == "NotFound" or Place(f"s3://{BUCKET}/doctor").files() == []


def test_unwritable_storage_is_red_and_left_without_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    finding = check_storage(str(tmp_path / "file" / "runs" / "first"), alive_nodes())
    assert not finding.good
    assert "cannot write" in finding.seen
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_output_with_an_earlier_run_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    finding = check_storage(str(tmp_path / "run"), alive_nodes())
    assert finding.good
    assert "holds an earlier run" in finding.seen


def test_a_file_that_a_node_reads_differently_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_other_bytes(folder: Place, file: str) -> str:
        (folder / file).write_bytes(b"other")
        return ""

    monkeypatch.setattr(
        "raycl.doctor.storage.write_file", write_other_bytes
    )  # run on this machine, not on the nodes
    finding = check_storage(str(tmp_path / "run"), alive_nodes())
    assert not finding.good
    assert "sees other bytes in the file of this machine" in finding.seen
    assert "a folder that all nodes share" in finding.remedy
    assert list(tmp_path.iterdir()) == []


def test_images_are_described_with_sizes_labels_and_invalid_rows(tmp_path: Path) -> None:
    found = check(str(write_digits(tmp_path / "digits.parquet", 400, broken=8)))
    assert "400 rows with labels, images, parquet in 1 fragment" in found["data"].seen
    assert not found["sample"].good
    assert (
        "400 rows decoded, 8 invalid, images of 16x16 to 16x16 pixels: 8 not an image" in found["sample"].seen
    )
    assert "row 392 (not an image)" in found["sample"].seen
    assert "10 different ones" in found["labels"].seen
    few = check(str(write_digits(tmp_path / "few.parquet", 400, broken=4)))
    assert few["sample"].good  # one percent may be invalid


def test_a_label_column_without_labels_is_red(tmp_path: Path) -> None:
    images = pa.array([encode(photograph()[:32, :24])] * 5, pa.binary())
    data = write_table(tmp_path / "a.parquet", image=images, label=pa.array([None] * 5, pa.int64()))
    found = check(data)
    assert "images of 24x32 to 24x32" in found["sample"].seen
    assert not found["labels"].good
    assert "'label' holds no label in the 5 rows" in found["labels"].seen


def test_texts_are_described_with_lengths_and_counts(tmp_path: Path) -> None:
    data = write_table(tmp_path / "a.parquet", text=[["one", "two words"], ["three"], ["", "x"]])
    found = check(data)
    assert "3 rows without labels, texts" in found["data"].seen
    assert (
        "1 invalid, text of 3 to 9 characters, 6 on average in 1.5 per row: 1 empty text"
        in found["sample"].seen
    )


def test_captioned_images_are_recognized_by_their_columns(tmp_path: Path) -> None:
    images = pa.array([encode(photograph()[:20, :20])] * 3, pa.binary())
    found = check(write_table(tmp_path / "a.parquet", image=images, caption=["a", "bb", "ccc"]))
    assert "images with captions" in found["data"].seen
    assert (
        "images of 20x20 to 20x20 pixels, caption of 1 to 3 characters, 2 on average" in found["sample"].seen
    )


def test_a_click_log_has_negatives_and_may_have_invalid_labels(tmp_path: Path) -> None:
    log = {"query": ["a"] * 5, "document": list("vwxyz"), "label": [1, 0, 0, 0, 7]}
    results, summary = collect(
        check_data(write_table(tmp_path / "a.parquet", **log), None, recipe("two_tower"))
    )
    assert "5 rows with labels, pairs" in results["data"].seen
    assert "1 label other than 0 and 1" in results["sample"].seen
    assert summary.negatives_per_pair == 3.0
    lists = {"query": ["a", "b"], "document": ["v", "w"], "negatives": [["x"], ["y", "z"]]}
    results, summary = collect(check_data(write_table(tmp_path / "b.parquet", **lists), None, None))
    assert all(result.good for result in results.values())
    assert summary.negatives_per_pair == 1.5


def test_the_doctor_checks_the_columns_of_the_recipe(tmp_path: Path) -> None:
    data = write_table(tmp_path / "a.parquet", question=["a", "b"], answer=["c", "d"])
    columns = {"data.columns.query": "question", "data.columns.document": "answer"}
    assert not check(data)["data"].good
    assert check(data, override(recipe("two_tower"), columns))["sample"].good
    assert "no column 'query'" in check(data, recipe("two_tower"))["data"].seen


@pytest.mark.parametrize(
    ("size", "cache"),
    [
        (16, "auto"),
        (16, "stream"),
        (16, "materialize"),
        (2_048, "auto"),  # the size decides
        pytest.param(2_048, "stream", marks=pytest.mark.drill),
        pytest.param(2_048, "materialize", marks=pytest.mark.drill),
    ],
)
def test_the_doctor_predicts_streaming_exactly_as_a_run_decides(
    tmp_path: Path, cache: str, size: int
) -> None:
    data = str(write_digits(tmp_path / "digits.parquet", 24))
    config = override(
        recipe("simclr", image_size=16),
        {"data.decode_size": size, "data.cache": cache, "evaluation.every_epochs": 0},
    )
    result = check_decoded_data(config, summary_of(data, config), ask_nodes(alive_nodes(), describe_node))
    with start_coordinator() as coordinator:
        streamed = DataModule(config, coordinator, [find_source(data, column_names(config))]).streamed
    assert ("streamed" in result.seen) == streamed
    # 24 images of 12 MiB barely fit into an object store of 300 MiB.
    assert result.good


def test_a_recipe_that_fits_is_green_and_a_too_large_recipe_gets_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"encoder.name": "resnet10", "encoder.width": 0.25}
    config = override(recipe("simclr", image_size=16), settings)
    answers = ask_nodes(alive_nodes(), describe_node)
    measured = memory._profile_stages(config)  # a few rows, for any batch size and number of workers
    monkeypatch.setattr(memory, "_profile_stages", lambda _: measured)
    results, gradient_bytes = collect(check_memory(config, None, answers))
    assert results["memory of a worker"].good, results
    assert gradient_bytes > 0
    # The network is the same: few rows are measured, for any batch size and number of workers.
    measured = memory._profile_stages(config)
    monkeypatch.setattr(memory, "_profile_stages", lambda _: measured)
    huge = override(config, {"stages.0.batch_size": 2**24})
    results, _ = collect(check_memory(huge, None, answers))
    assert not results["memory of a worker"].good
    assert "stages.0.chunk_size" in results["memory of a worker"].remedy
    assert "workers" not in results
    on_gpus = override(config, {"workers": 8, "gpu": True})
    results, _ = collect(check_memory(on_gpus, None, answers))
    assert "--gpu takes one GPU per worker: 8 needed, but the cluster has 0" in results["workers"].seen
    assert not results["workers"].good
    monkeypatch.undo()
    wrong = override(config, {"encoder.name": "tests.cluster.networks:no_such"})
    results, gradient_bytes = collect(check_memory(wrong, None, answers))
    (red,) = results.values()
    assert not red.good
    assert "no_such" in red.seen
    assert gradient_bytes == 0


def test_the_command_prints_json_and_exits_with_status_1_if_a_check_is_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = write_digits(tmp_path / "digits.parquet", 30)
    status, out, _ = run_raycl(
        monkeypatch, capsys, "doctor", "--data", data, "--output", tmp_path / "run", "--json"
    )
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert {"versions", "cluster", "object store", "GPUs", "access", "storage", "data", "sample"} < set(
        findings
    )
    assert findings["network"]["seen"] == "one node"
    assert not findings["access"]["good"]  # the test cluster requires no token
    assert status == 1


def test_a_missing_cluster_is_one_red_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    (finding,) = raycl.run_doctor(address="nowhere:-1")
    assert not finding.good
    assert "cannot join a Ray cluster at 'nowhere:-1'" in finding.seen


def drill(kind: str) -> list[dict[str, dict[str, Any]]]:
    """Return the results of each run of the doctor by name, from clusters in a separate process."""
    # Socket paths have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="rcl", dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.cluster.doctor_nodes", kind, folder],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            capture_output=True,
            text=True,
            timeout=540,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return [{finding["name"]: finding for finding in findings} for findings in found]


@pytest.mark.drill
def test_node_local_paths_are_red_and_differing_nodes_are_named() -> None:
    local, shared = drill("two_nodes")
    assert not local["storage"]["good"]
    assert "does not see the file of" in local["storage"]["seen"]
    assert "s3://" in local["storage"]["remedy"]
    assert shared["storage"]["good"]
    assert "2 nodes and this machine" in shared["storage"]["seen"]
    for found in (local, shared):
        assert not found["versions"]["good"]
        assert found["versions"]["seen"].count(" has raycl ") == 1
        assert "2 nodes, 2 CPUs, 1 GPUs" in found["cluster"]["seen"]
        (gpus,) = [finding for name, finding in found.items() if name.startswith("GPUs of")]
        assert not gpus["good"]
        assert "Ray counts 1 free of 1, torch sees 0" in gpus["seen"]
        assert " MB/s from " in found["network"]["seen"]


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["idle_head_v1", "idle_head_v2"])
def test_a_head_without_cpus_is_green_with_an_autoscaler(kind: str) -> None:
    (found,) = drill(kind)
    assert found["cluster"]["good"]
    assert "0 CPUs, 0 GPUs now; nodes come when a run asks" in found["cluster"]["seen"]
    assert found["memory of a worker"]["good"]
    assert "nothing to compare" in found["memory of a worker"]["seen"]


@pytest.mark.drill
def test_a_head_without_cpus_and_without_an_autoscaler_is_red() -> None:
    (found,) = drill("plain_head")
    assert not found["cluster"]["good"]
    assert "0 CPUs" in found["cluster"]["seen"]


@pytest.mark.drill
def test_a_cluster_that_refuses_calls_without_token_is_green() -> None:
    (found,) = drill("token_head")
    assert found["access"] == {
        "good": True, "name": "access", "seen": "Ray refuses calls without its token", "remedy": ""
    }  # fmt: skip
