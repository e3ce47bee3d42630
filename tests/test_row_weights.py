"""Weights of rows: from a column of the data to the loss, and their refusals in one line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from raycl.config.overrides import override
from raycl.data.codecs import store_all
from raycl.data.columns import ColumnNames, check_labels
from raycl.data.discovery import find_source
from raycl.data.in_memory import InMemoryDataset, weights_of
from raycl.data.sampler import BatchShard, InMemorySampler, MixedSampler
from raycl.data.sources import RawRows
from raycl.data.weights import WeightFormat, check_weight_columns
from raycl.errors import ConfigError, DataError
from raycl.losses import clip, nt_xent, supcon
from raycl.losses.clip import Clip
from raycl.losses.example_ids import mean_one
from raycl.models.build import build_towers
from raycl.recipes import recipe
from raycl.training.step import train_step
from raycl.training.stores import build_store
from raycl.training.train_state import TrainState
from raycl.training.transforms import build_transform
from raycl.training.views import ViewMaker
from tests.embeddings import make_views
from tests.gradients import assert_close, leaves, value_and_gradients
from tests.pairs import clicks, noise_images, rows_of, small_config, vocabulary

TEXTS = ColumnNames(image=None, text="text", weight="w")


def test_integer_weights_count_the_loss_of_a_row_several_times() -> None:
    inputs, temperature = leaves(*make_views(9, 5), dtype=torch.float64), 0.2
    weight = torch.arange(9) % 4
    logits = inputs[0] @ inputs[1].T / temperature
    rows = [
        F.cross_entropy(each, torch.arange(9), reduction="none").repeat_interleave(weight).mean()
        for each in (logits, logits.T)
    ]
    ours = clip(*inputs, temperature=temperature, weight=mean_one(weight.double()))
    expected = value_and_gradients((rows[0] + rows[1]) / 2, inputs)
    assert_close(value_and_gradients(ours, inputs), expected, 1e-12)


def test_equal_weights_change_nothing_and_zeros_give_a_loss_of_zero() -> None:
    inputs = leaves(*make_views(9, 5))
    plain = value_and_gradients(nt_xent(*inputs, temperature=0.2), inputs)
    equal = mean_one(torch.full((9,), 7.0))
    assert_close(value_and_gradients(nt_xent(*inputs, temperature=0.2, weight=equal), inputs), plain, 1e-6)
    zeros = mean_one(torch.zeros(9))
    for result in value_and_gradients(nt_xent(*inputs, temperature=0.2, weight=zeros), inputs):
        assert torch.equal(result, torch.zeros_like(result))


def test_a_step_with_weights_of_zero_only_has_a_trivial_loss() -> None:
    config = small_config(settings={"stages.0.batch_size": 8})
    learner = TrainState.build(config, build_towers(config, vocabulary()), num_samples=None)
    maker = ViewMaker.of(config, build_transform(config, vocabulary().tokenizer), torch.device("cpu"))
    (views,) = maker.views(rows_of(config, clicks(8, num_negatives=[0])).batches(8))
    for weight, is_trivial in ((mean_one(torch.zeros(8)), True), (mean_one(torch.eye(8)[0]), False)):
        weighted = replace(views, example_ids=replace(views.example_ids, weight=weight))
        output = train_step(
            learner,
            build_store(config, None, None, torch.device("cpu")),
            Clip(temperature=0.2),
            weighted,
            step=0,
            learning_rate=0.0,
            momentum=0.0,
            precision="float32",
        )
        assert (output.loss == output.collapsed_loss == 0) == is_trivial


def test_weights_of_classes_have_the_loss_and_gradient_of_pytorch_metric_learning() -> None:
    losses: Any = pytest.importorskip("pytorch_metric_learning.losses")
    reducers: Any = pytest.importorskip("pytorch_metric_learning.reducers")
    rows, label = leaves(*make_views(12, 5), dtype=torch.float64), torch.arange(12) % 4
    weights = torch.tensor([0.0, 1.0, 2.5, 4.0], dtype=torch.float64)
    theirs = losses.SupConLoss(temperature=0.1, reducer=reducers.ClassWeightedReducer(weights))
    expected = value_and_gradients(theirs(torch.cat(rows), label.repeat(2)), rows)
    unit_rows = [F.normalize(each, dim=1) for each in rows]  # as theirs
    ours = supcon(*unit_rows, label, temperature=0.1, weight=weights[label])
    assert_close(value_and_gradients(ours, rows), expected, 1e-9)


def test_a_weight_per_row_is_required() -> None:
    rows = make_views(4, 3)
    with pytest.raises(ConfigError, match=r"weight does not match its rows: got \[3\] weights for 4 rows"):
        nt_xent(*rows, temperature=0.1, weight=torch.ones(3))


KINDS: dict[str, dict[str, Any]] = {
    "two_tower": clicks(8, num_negatives=[2]),
    "simcse": {"text": ["a b", "c d", "e f", "g h", "i", "j", "k l", "m"]},
    "clip": {"image": noise_images(8), "caption": ["a b", "c d", "e f", "g h", "i", "j", "k l", "m"]},
}


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_has_the_weights_of_its_rows_with_a_mean_of_one(name: str) -> None:
    config = small_config(name, {"data.columns.weight": "weight"})
    rows = rows_of(config, KINDS[name] | {"weight": [0, 1, 2, 3, 4, 5, 6, 7.5]})
    batch = rows.take(np.array([5, 2, 0, 7]))
    weights = weights_of(batch)
    assert weights is not None and weights.tolist() == [5, 2, 0, 7.5]
    maker = ViewMaker.of(config, build_transform(config, vocabulary().tokenizer), torch.device("cpu"))
    (views,) = maker.views(iter([batch]))
    assert views.example_ids.weight is not None
    assert torch.allclose(views.example_ids.weight, torch.tensor([5, 2, 0, 7.5]).double() * 4 / 14.5)


@pytest.mark.parametrize("samples_per_class", [None, 2])
def test_each_batch_of_several_data_sets_has_the_weights_of_its_rows(samples_per_class: int | None) -> None:
    samplers = []
    for ids in (np.arange(20), np.arange(100, 130)):
        stored = store_all({"weight": WeightFormat()}, {"weight": (ids / 4).tolist()})
        table = pa.table(stored | {"sample_id": ids, "label": ids // 3})
        rows = InMemoryDataset([table], {"weight": WeightFormat()})
        samplers.append(InMemorySampler(rows=rows, seed=1, samples_per_class=samples_per_class))
    batches = list(MixedSampler(samplers=samplers, seed=2).epoch_batches(BatchShard(batch_size=4), epoch=1))
    assert {batch.data_set for batch in batches} == {0, 1}
    for batch in batches:
        weights = weights_of(batch)
        assert weights is not None and np.array_equal(weights, batch.sample_id / 4)


def test_weights_do_not_change_the_ids_of_rows() -> None:
    table = pa.table({"text": ["a", "b"], "w": [1.0, 2.0]})
    weighted = RawRows.of_table(table, TEXTS, None)
    assert weighted.values["weight"] == [1.0, 2.0]
    plain = RawRows.of_table(table, ColumnNames(image=None, text="text"), None)
    assert np.array_equal(weighted.sample_id, plain.sample_id)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -0.5], r"the weight -0.5 in row 1 of .*x.parquet \(1 of 2 rows are invalid\); give each row"),
        ([None, 1.0], r"a missing weight \(null or NaN\) in row 0 of .*x.parquet"),
        ([1.0, float("inf")], "the weight inf in row 1 of"),
        ([float("nan"), float("nan")], r"a missing weight .* \(2 of 2 rows"),
        ([1.0, 1e39], "the weight 1e\\+39 in row 1 of"),
        ([0, 0], "all 2 weights of .* are 0, so there is no loss; give rows a weight above 0, or remove"),
        (["1", "2"], "weights must be numbers, column 'w' of .* holds string"),
    ],
)
def test_invalid_weights_are_refused_in_one_line_before_training(
    weights: list[Any], message: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], "w": weights}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=message) as caught:
        find_source(str(tmp_path), TEXTS)
    assert "\n" not in str(caught.value)


def test_rows_of_a_column_in_parts_are_counted_from_its_start() -> None:
    parts = [
        ("x", pa.chunked_array([[0, 1]])),
        ("y", pa.chunked_array([[2]])),
        ("x", pa.chunked_array([[3, -4]])),
    ]
    with pytest.raises(DataError, match="the weight -4 in row 3 of x"):
        check_weight_columns(parts, where="the data")


def test_weights_are_read_only_from_a_named_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], "weight": [-1, 2]}), tmp_path / "x.parquet")
    assert find_source(str(tmp_path), ColumnNames(image=None, text="text")).columns.weight is None
    with pytest.raises(DataError, match="has no column 'w'; it has text, weight: name the right one"):
        find_source(str(tmp_path), TEXTS)


def test_integers_of_any_size_are_weights() -> None:
    assert WeightFormat().decode_all([0, 2**60 + 1]) == [0.0, float(2**60)]
    with pytest.raises(DataError, match="the weight -1 in row 1 of a batch of the data"):
        WeightFormat().decode_all([3, -1])


def test_a_click_log_has_no_weights() -> None:
    with pytest.raises(DataError, match="rows become pairs, which have no weight"):
        check_labels(ColumnNames(image=None, query="query", document="document", label="label", weight="w"))


@pytest.mark.parametrize(
    "settings",
    [
        {"stages.0.loss": "hinge"},
        {"stages.0.hinge_weight": 0.5},
        {"stages.0.final_hinge_weight": 0.5},
    ],
)
def test_a_loss_without_row_weights_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="loss hinge does not weight rows; remove data.columns.weight, or set"
    ):
        override(recipe("two_tower"), {"data.columns.weight": "w"} | settings)
    with pytest.raises(ConfigError, match="loss nce does not weight rows"):
        override(recipe("instance_discrimination"), {"data.columns.weight": "w"})
