"""The loss of NNCLR against its formula, over workers, and against lightly's nearest neighbors."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.losses import nnclr, nt_xent
from raycl.losses.example_ids import mean_one
from raycl.losses.nnclr import nearest_rows
from raycl.recipes import recipe
from raycl.training.train_state import EmbedConfig
from tests.embeddings import make_rows, make_views
from tests.gradients import leaves
from tests.plain_losses import plain_nnclr


@pytest.mark.parametrize("is_weighted", [False, True])
def test_value_and_gradient_equal_the_formula_for_prediction_and_temperature(is_weighted: bool) -> None:
    prediction, projection = (each.double() for each in make_views(300, 16))
    support = make_rows(1_500, 16).double()
    inputs = leaves(prediction, torch.tensor(0.1), dtype=torch.float64)
    projection.requires_grad_()
    weight = (torch.arange(300) % 3).double() if is_weighted else None
    found = nnclr(
        inputs[0],
        projection,
        support,
        temperature=inputs[1],
        weight=None if weight is None else mean_one(weight),
    )
    expected = plain_nnclr(inputs[0], projection, support, inputs[1], weight=weight)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    theirs = torch.autograd.grad(expected, inputs)
    for ours, wanted in zip(torch.autograd.grad(found, inputs), theirs, strict=True):
        assert torch.allclose(ours, wanted, rtol=1e-9, atol=1e-12)
    assert projection.grad is None


@pytest.mark.parametrize("workers", [2, 4])
def test_the_mean_over_workers_is_the_loss_of_the_whole_batch(workers: int) -> None:
    prediction, projection = (each.double() for each in make_views(16, 8))
    support, ids = make_rows(50, 8).double(), torch.arange(16) % 15
    (whole,) = leaves(prediction, dtype=torch.float64)
    expected = nnclr(whole, projection, support, temperature=0.2, sample_id=ids)
    (parts,) = leaves(prediction, dtype=torch.float64)
    losses = []
    for own in torch.arange(16).chunk(workers):
        gathered: dict[str, Any] = {"gathered_prediction": parts, "gathered_sample_id": ids}
        losses.append(
            nnclr(
                parts[own],
                projection[own],
                support,
                temperature=0.2,
                offset=int(own[0]),
                sample_id=ids[own],
                **gathered,
            )
        )
    found = torch.stack(losses).mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    ours, theirs = (torch.autograd.grad(loss, rows)[0] for loss, rows in ((found, parts), (expected, whole)))
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_neighbors_equal_those_of_lightly() -> None:
    modules = pytest.importorskip("lightly.models.modules.nn_memory_bank")
    bank = modules.NNMemoryBankModule(size=(3_000, 16))
    rows = make_rows(300, 16)
    bank(rows, update=True)
    support = bank.bank if bank.bank.shape[0] == 3_000 else bank.bank.T
    assert nearest_rows(rows, support.contiguous()).equal(bank(rows))
    assert not nearest_rows(rows, support[300:].contiguous()).equal(bank(rows))


def test_lightlys_loss_of_neighbors_and_predictions_is_nt_xent() -> None:
    theirs = pytest.importorskip("lightly.loss").NTXentLoss(temperature=0.1)
    prediction, projection = make_views(32, 8)
    neighbor = nearest_rows(projection, make_rows(200, 8))
    found = theirs(neighbor, prediction).item()
    assert found == pytest.approx(nt_xent(neighbor, prediction, temperature=0.1).item(), rel=1e-5)
    assert found > nnclr(prediction, projection, make_rows(200, 8), temperature=0.1).item() + 0.1


def test_the_length_of_a_stored_row_does_not_make_it_nearer() -> None:
    support = torch.tensor([[10.0, 10.0], [1.0, 0.0]])
    assert nearest_rows(torch.tensor([[1.0, 0.1]]), support).tolist() == [[1.0, 0.0]]


def test_without_stored_rows_a_projection_is_its_own_neighbor() -> None:
    prediction, projection = make_views(20, 8)
    found = nnclr(prediction, projection, torch.empty(0, 8), temperature=0.1)
    expected = F.cross_entropy(projection @ prediction.T / 0.1, torch.arange(20))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_half_precision_queue_has_the_neighbors_of_its_rows_in_float32() -> None:
    rows, support = make_rows(30, 16), make_rows(20_000, 16).half()
    assert nearest_rows(rows, support).equal(nearest_rows(rows, support.float()))


def test_another_dimension_is_refused() -> None:
    rows = torch.eye(4)
    with pytest.raises(ConfigError, match=re.escape("the support set must be [rows, dim] with the dim")):
        nnclr(rows, rows, torch.eye(3), temperature=0.1)


LOCAL = {"batchnorm": "local", "stages.0.batch_size": 64}


@pytest.mark.parametrize(
    ("method", "settings", "group_size"),
    [
        ("nnclr", {}, 0),
        ("sogclr", {}, 0),
        ("nnclr", {"stages.0.loss": "info_nce"}, 256),
        ("simclr", LOCAL, 0),
        ("simclr", LOCAL | {"workers": 2}, 32),
        ("simclr", LOCAL | {"batchnorm": "local_view"}, 0),
        ("simclr", LOCAL | {"batchnorm": "local_view", "workers": 2}, 32),
        ("moco_v2", LOCAL, 64),
        ("moco_v2", LOCAL | {"workers": 2}, 32),
        ("moco_v2", {"stages.0.batch_size": 64, "batchnorm_groups": 4}, 16),
        ("simclr", {"batchnorm": "group", "workers": 2}, 0),
    ],
)
def test_batchnorm_is_probed_if_a_query_has_negatives_of_other_statistics(
    method: str, settings: dict[str, Any], group_size: int
) -> None:
    config = override(recipe(method, image_size=32), settings)
    assert EmbedConfig.of(config, config.stages[0]).leak_group_size == group_size
