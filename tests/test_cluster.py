"""What a cluster has to offer."""

import pytest

from raycl import cluster


@pytest.mark.parametrize(
    ("workers", "cpus", "line"),
    [
        (2, 2.0, None),
        (
            8,
            2.0,
            "8 workers share 2 CPUs, which makes each of them slower; "
            "lower --workers to 2, or join a larger cluster by --address",
        ),
        (
            2,
            1.0,
            "2 workers share 1 CPU, which makes each of them slower; "
            "lower --workers to 1, or join a larger cluster by --address",
        ),
    ],
)
def test_workers_that_share_cpus_are_one_line(
    workers: int, cpus: float, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": cpus})
    assert cluster.crowding(workers) == line
