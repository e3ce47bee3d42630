"""One process repeats the steps of several workers."""

from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raycl
from raycl.errors import ConfigError
from raycl.training.virtual_workers import dropout_seed
from tests.images import write_digits
from tests.recorded_runs import record_run, small_config
from tests.texts import invented_texts

WORDS = {
    "encoder.name": "bag_of_subwords",
    "encoder.kwargs": {"dim": 16, "hidden_dim": 24, "dropout": 0.2},
}
LAYERS = {
    "encoder.name": "transformer",
    "encoder.kwargs": {"dim": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 24, "dropout": 0.2},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "simclr": ("simclr", {}),
    "skipped layers": (
        "simclr",
        {"encoder.name": "tests.cluster.networks:skipping", "projection_head.batchnorm": False},
    ),
    "local BatchNorm": ("simclr", {"batchnorm": "local"}),
    "BatchNorm of a view": ("simclr", {"batchnorm": "local_view"}),
    "shuffled views": ("simclr", {"batchnorm": "shuffled", "batchnorm_groups": 4}),
    "moco": ("moco_v2", {"batchnorm_groups": 4, "bank.location": "actor"}),
    "instance discrimination": (
        "instance_discrimination",
        {"stages.0.loss": "info_nce", "negatives.bank_init": "random"},
    ),
    "layers": ("simclr", {"batchnorm": "layer", "stages.0.chunk_size": 16}),
    "two towers": ("two_tower", {**WORDS, "stages.0.logq_correction": "simple"}),
    "buckets": ("two_tower", {**WORDS, "text.length_buckets": 2}),
    "simcse": ("simcse", LAYERS),
    "esimcse": ("esimcse", LAYERS),
    "learned temperature": ("simclr", {"learn_temperature": True}),
    "two stages": (
        "simclr",
        {
            "stages.0.steps": 4,
            "stages.1.steps": None,
            "stages.1.epochs": 2,
            "stages.1.batch_size": 64,
        },
    ),
}

QUICK = (
    "simclr",
    "skipped layers",
    "local BatchNorm",
    "BatchNorm of a view",
    "moco",
    "two towers",
    "buckets",
    "simcse",
    "two stages",
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits.parquet", 200, broken=3)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose documents repeat, so that batches have false negatives."""
    sentences, random = invented_texts(240), Random(0)
    documents = [sentences[random.randrange(40)] for _ in range(200)]
    columns = {"text": sentences[:200], "query": sentences[40:], "document": documents}
    path = tmp_path_factory.mktemp("data") / "texts.parquet"
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(
    ("case", "workers"),
    [
        pytest.param(case, workers, marks=[] if workers == 2 and case in QUICK else [pytest.mark.drill])
        for case in CASES
        for workers in (1, 2)
    ],
)
def test_a_replayed_step_has_the_loss_of_the_run(
    case: str, workers: int, images: Path, texts: Path, tmp_path: Path
) -> None:
    method, settings = CASES[case]
    data = texts if method in ("two_tower", "simcse", "esimcse") else images
    config = small_config(method, {"workers": workers, **settings})
    run = record_run(config, data, tmp_path / "run", checkpoints=(3, 6))
    for step, checkpoint, first in ((3, None, 1), (4, "step-00000003", 4), (8, "step-00000006", 7)):
        found = raycl.replay(run, step=step, top=3)
        assert (found.checkpoint, found.first_step) == (checkpoint, first)
        assert found.relative_difference is not None
        assert found.relative_difference < 2e-5, (step, found.loss, found.logged_loss)
        assert not found.notes
        assert found.workers == workers
        # A queue of 96 keys has those of the three steps before.
        ages = {each.age for query in found.queries for each in query.negatives if each.source == "queue"}
        assert ages <= {1, 2, 3}
        assert (1 in ages) == (case in ("moco", "esimcse"))
        # The cross-entropies of all queries, in float64.
        mean = sum(query.loss for query in found.queries) / len(found.queries)
        assert mean == pytest.approx(found.loss, rel=1e-5)
    certificate = raycl.certify(run, steps=6)
    assert certificate.is_valid, str(certificate)
    recomputed = certificate.recomputed
    assert [each.step for each in recomputed] == [1, 2, 4, 5, 7, 8]
    assert max(each.relative_difference for each in recomputed) < 1e-6


def test_skipped_layers_beside_batchnorm_need_one_worker(images: Path, tmp_path: Path) -> None:
    settings = {
        "workers": 2,
        "encoder.name": "tests.cluster.networks:skipping",
        "encoder.kwargs": {"channels": 1, "batchnorm": True},
    }
    run = record_run(small_config("simclr", settings), images, tmp_path / "run", checkpoints=(3,))
    message = (
        "^the network draws random numbers in layers other than nn.Dropout, such as stochastic depth, which "
        "one process cannot repeat for 2 workers; replay a run with workers=1$"
    )
    with pytest.raises(ConfigError, match=message):
        raycl.replay(run, step=3)
    certificate = raycl.certify(run, steps=3)
    assert not certificate.recomputed


def test_each_worker_and_step_has_its_own_dropout() -> None:
    seeds = {
        dropout_seed(seed, step, worker) for seed in range(3) for step in range(50) for worker in range(4)
    }
    assert len(seeds) == 600
