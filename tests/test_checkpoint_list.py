"""Repair of a truncated checkpoint list of Ray Train."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from raycl.errors import StorageError
from raycl.records import CHECKPOINT_LIST, CHECKPOINTS, backup_manifest, repair_manifest
from raycl.storage import Place
from raycl.training.checkpoint import numbers_of, resume_order


def result(step: int) -> dict[str, Any]:
    return {"version": 0, "checkpoint_dir_name": f"step-{step:08d}", "metrics": {"step": step}}


def write_list(output: Path, *steps: int) -> dict[str, Any]:
    """Write the list of these checkpoints in Ray's format, and their folders."""
    listed = {
        "ray_version": "2.60.0",
        "checkpoint_results": [result(step) for step in steps],
        "checkpoint_report_indices": [step // 10 for step in steps],
        "latest_checkpoint_result": result(steps[-1]),
        "current_report_index": 7,
    }
    folder = output / CHECKPOINTS
    for step in steps:
        (folder / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
    (folder / CHECKPOINT_LIST).write_text(json.dumps(listed))
    return listed


def listed_in(output: Path) -> dict[str, Any]:
    return json.loads((output / CHECKPOINTS / CHECKPOINT_LIST).read_text())


@pytest.mark.parametrize("rest", ["", '{"ray_version": "2.60.0", "checkpoint_res', "[]"])
def test_a_truncated_list_is_restored_from_its_copy(tmp_path: Path, rest: str) -> None:
    output = Place(str(tmp_path))
    before = write_list(tmp_path, 10, 20)
    backup_manifest(output)
    assert repair_manifest(output) is None
    (tmp_path / CHECKPOINTS / CHECKPOINT_LIST).write_text(rest)
    backup_manifest(output)  # a truncated list is not copied
    assert repair_manifest(output) is not None
    assert listed_in(tmp_path) == before
    assert repair_manifest(output) is None


def test_checkpoints_deleted_since_the_copy_are_not_listed(tmp_path: Path) -> None:
    output = Place(str(tmp_path))
    write_list(tmp_path, 10, 20, 30)
    backup_manifest(output)
    for step in (10, 30):
        (tmp_path / CHECKPOINTS / f"step-{step:08d}").rmdir()
    (tmp_path / CHECKPOINTS / CHECKPOINT_LIST).write_text("")
    assert repair_manifest(output) is not None
    found = listed_in(tmp_path)
    assert found["checkpoint_results"] == [result(20)]
    assert found["checkpoint_report_indices"] == [2]
    assert found["latest_checkpoint_result"] == result(20)
    assert found["current_report_index"] == 7


def test_the_latest_checkpoint_is_the_newest_and_not_the_best(tmp_path: Path) -> None:
    output = Place(str(tmp_path))
    listed = write_list(tmp_path, 20, 30, 10, 40)  # ordered by score
    backup_manifest(output)
    assert listed["latest_checkpoint_result"] == result(40)
    (tmp_path / CHECKPOINTS / "step-00000040").rmdir()
    (tmp_path / CHECKPOINTS / CHECKPOINT_LIST).write_text("")
    assert repair_manifest(output) is not None
    assert listed_in(tmp_path)["latest_checkpoint_result"] == result(30)


def test_a_truncated_list_without_a_copy_is_refused_if_checkpoints_exist(tmp_path: Path) -> None:
    write_list(tmp_path, 10, 20)
    for step in (10, 20):
        (tmp_path / CHECKPOINTS / f"step-{step:08d}" / "state.pt").write_bytes(b"0")
    (tmp_path / CHECKPOINTS / CHECKPOINT_LIST).write_text("{")
    with pytest.raises(
        StorageError, match=f"{CHECKPOINT_LIST} is truncated .* move the folder checkpoints away"
    ):
        repair_manifest(Place(str(tmp_path)))


def test_a_truncated_first_list_without_checkpoints_is_deleted(tmp_path: Path) -> None:
    output = Place(str(tmp_path))
    assert repair_manifest(output) is None
    backup_manifest(output)
    (tmp_path / CHECKPOINTS).mkdir()
    (tmp_path / CHECKPOINTS / CHECKPOINT_LIST).write_text("")
    assert repair_manifest(output) is not None
    assert not (tmp_path / CHECKPOINTS / CHECKPOINT_LIST).exists()


@pytest.mark.parametrize("suffix", ["", "-evaluated", "-judged"])  # the last one of earlier versions
def test_the_name_of_a_checkpoint_has_its_step_stage_and_rollbacks(suffix: str) -> None:
    assert numbers_of(f"step-00000120{suffix}") == (120, 0, 0)
    assert numbers_of(f"step-00000120-stage1-again2{suffix}") == (120, 1, 2)
    assert numbers_of(f"step-00000120-other{suffix}") is None


def test_a_run_resumes_from_the_last_rollback_then_step_then_stage() -> None:
    names = ["step-00000300", "step-00000120-again1", "step-00000120-stage1-again1", "step-00000200-again1"]
    assert all(resume_order(one) < resume_order(later) for one, later in pairwise(names))
    assert resume_order("other") == (0, 0, 0)
