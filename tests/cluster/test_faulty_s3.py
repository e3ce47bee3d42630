"""Runs with data and output on an S3 server that throttles, truncates, and finally denies access."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import raycl
from raycl.errors import StorageError
from raycl.records import last_checkpoint, read_metrics
from raycl.storage import Place
from tests.cluster.test_run import small_run
from tests.faulty_s3 import FaultyS3
from tests.images import write_digits

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.drill]

# Stream in each epoch, and keep all checkpoints.
STREAMED = small_run(**{"data.cache": "stream", "checkpoints.keep": 20})


@dataclass(frozen=True)
class Ended:
    undisturbed: Place
    disturbed: Place
    error: str
    num_throttled: int
    num_cut: int


def losses_of(output: Place) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(output) if "loss" in line}


def state_of(output: Place, checkpoint: str) -> dict[str, Any]:
    content = (output / "checkpoints" / checkpoint / "state.pt").read_bytes()
    return torch.load(io.BytesIO(content), weights_only=True)


@pytest.fixture(scope="module")
def ended(s3_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """One run on local files, and one with the same data that reads and writes S3."""
    folder = tmp_path_factory.mktemp("faulty")
    table = pq.read_table(write_digits(folder / "digits.parquet", 720))
    (folder / "data").mkdir()
    undisturbed = Place(str(folder / "undisturbed"))
    with FaultyS3(s3_server, seed=3) as s3:
        data, disturbed = Place(s3.uri("faulty/data")), Place(s3.uri("faulty/run"))
        for start in range(0, 720, 60):
            name = f"{start:03}.parquet"
            pq.write_table(table.slice(start, 60), folder / "data" / name)
            (data / name).write_bytes((folder / "data" / name).read_bytes())
        raycl.train(STREAMED, data=str(folder / "data"), output=undisturbed.uri, quiet=True)
        s3.heal()
        s3.add("throttled", fraction=0.2)
        s3.add("cut", methods="GET", fraction=0.1, after=500)
        saved = "faulty/run/checkpoints"
        s3.add(
            "denied", since=(f"{saved}/step-00000010/state.pt", f"{saved}/checkpoint_manager_snapshot.json")
        )
        with pytest.raises(StorageError) as caught:
            raycl.train(STREAMED, data=data.uri, output=disturbed.uri, quiet=True)
        num_throttled, num_cut = s3.count("throttled", prefix="faulty/data"), s3.count("cut")
        s3.heal()
        yield Ended(undisturbed, disturbed, str(caught.value), num_throttled, num_cut)


def test_throttled_and_truncated_requests_do_not_change_the_losses(ended: Ended) -> None:
    assert ended.num_throttled > 5
    assert ended.num_cut > 2
    expected, found = losses_of(ended.undisturbed), losses_of(ended.disturbed)
    assert list(found)[:10] == list(range(1, 11))
    assert found == {step: expected[step] for step in found}


def test_a_run_without_permission_fails_in_one_line_and_keeps_its_last_checkpoint(ended: Ended) -> None:
    assert "\n" not in ended.error
    assert "ACCESS_DENIED" in ended.error
    assert "allow it to the role or key" in ended.error
    checkpoint = last_checkpoint(ended.disturbed)
    assert checkpoint in ("step-00000005", "step-00000010")
    kept, expected = state_of(ended.disturbed, checkpoint), state_of(ended.undisturbed, checkpoint)
    assert kept["learner"]["tower"].keys() == expected["learner"]["tower"].keys()
    for name, weight in expected["learner"]["tower"].items():
        assert torch.equal(kept["learner"]["tower"][name], weight), name
