"""Workers that normalize keys together all encode a batch, or none does."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raycl.training.encoder_pool import Encoded
from raycl.training.key_encoders import KeyClient
from tests.pretend_gpu import CPU
from tests.pretended_steps import SMALL, Case, batch, configuration
from tests.workers.processes import run_workers


def batches_with_keys(rank: int, num_workers: int, batchnorm: str) -> list[bool]:
    """Return whether this worker uses the pool's keys of each batch; the last worker lacks those of the second one."""
    settings = {"gpu": False, "batchnorm": batchnorm, "momentum_encoder.location": "actors"}
    config = configuration(Case("moco_v2", SMALL | settings | {"negatives.capacity": 128}), num_workers)
    requests: list[Any] = []

    def encode(rows: Any, **_: Any) -> Any:
        requests.append(rows)
        is_lost = rank == num_workers - 1 and len(requests) == 2
        embeddings = np.zeros((1, len(rows), 2), np.float32)
        return SimpleNamespace(encoded=None if is_lost else Encoded(embeddings, 0, 1), waited_s=0.0)

    client = KeyClient(SimpleNamespace(encode=encode), config, CPU)  # type: ignore[arg-type]
    drawn = (batch(config, step) for step in range(3))
    sent = client.sent_ahead(drawn, config.stages[0], epoch=0, start=0)
    return [client.take(step) is not None for step, _ in enumerate(sent)]


@pytest.mark.parametrize(
    ("batchnorm", "expected"),
    [
        ("shuffled", [[False] * 3] * 2),  # the rows of all batches are mixed, so each lacks some keys
        ("group", [[True] * 3, [True, False, True]]),
    ],
)
def test_workers_agree_whether_they_encode_a_batch_if_rows_of_all_share_statistics(
    batchnorm: str, expected: list[list[bool]]
) -> None:
    assert run_workers(batches_with_keys, 2, batchnorm) == expected
