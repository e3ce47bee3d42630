"""The supervised contrastive loss in tiles, over workers and over a ring against its formula in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycl.config.overrides import override
from raycl.data.columns import ColumnNames
from raycl.data.sources import Source
from raycl.errors import ConfigError
from raycl.losses import nt_xent, supcon
from raycl.losses.example_ids import ExampleIds, IdExchange
from raycl.recipes import recipe
from raycl.training.data_module import DataModule
from tests.embeddings import make_views
from tests.gradients import assert_close, leaves, tolerance_at, value_and_gradients
from tests.plain_losses import plain_supcon
from tests.pretend_gpu import CPU
from tests.pretended_steps import SMALL, Case, Worker
from tests.tiles import tiny_tiles_in

pytestmark = pytest.mark.usefixtures("one_thread")


def make_inputs(batch: int, dim: int = 5, *, temperature: float = 0.1) -> list[Tensor]:
    return leaves(*make_views(batch, dim, noise=1.0), torch.tensor(temperature), dtype=torch.float64)


def labels_of(batch: int, num_classes: int) -> Tensor:
    return torch.randint(num_classes, (batch,), generator=torch.Generator().manual_seed(2)) * 3 - 2


def peer_supcon(rows: Tensor, label: Tensor, temperature: Tensor) -> Tensor:
    """Compute the loss like other libraries: one matrix of logits, with masks of positives and other rows."""
    logits = rows @ rows.T / temperature
    logits = logits - logits.max(1, keepdim=True).values.detach()
    other = 1 - torch.eye(len(rows), dtype=rows.dtype)
    positive = (label[:, None] == label).to(rows) * other
    log_p = logits - (logits.exp() * other).sum(1, keepdim=True).log()
    return -((positive * log_p).sum(1) / positive.sum(1)).mean()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 6),
    before=st.integers(0, 4),
    after=st.integers(0, 4),
    num_classes=st.integers(1, 8),
    temperature=st.sampled_from((1.0, 0.1, 0.02)),
)
def test_any_sizes_and_labels_equal_the_plain_formula(
    batch: int, before: int, after: int, num_classes: int, temperature: float
) -> None:
    total, own = before + batch + after, slice(before, before + batch)
    inputs, label = make_inputs(total, temperature=temperature), labels_of(total, num_classes)
    gathered: dict[str, Any] = {}
    if before + after:
        gathered = {
            "gathered_a": inputs[0],
            "gathered_b": inputs[1],
            "gathered_label": label,
            "offset": before,
        }
    with tiny_tiles_in("softmax"):
        ours = supcon(inputs[0][own], inputs[1][own], label[own], temperature=inputs[2], **gathered)
    places = [*range(total)[own], *range(total, 2 * total)[own]]
    true = plain_supcon(torch.cat(inputs[:2]), label.repeat(2), inputs[2], own=places)
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(true, inputs), 1e-9, 1e-11)


@pytest.mark.parametrize("temperature", (0.1, 0.01))
def test_many_tiles_in_single_precision_equal_the_formula_of_other_libraries(temperature: float) -> None:
    exact, label = make_inputs(700, temperature=temperature), labels_of(700, 30)
    inputs = leaves(*exact, dtype=torch.float32)
    ours = supcon(inputs[0], inputs[1], label, temperature=inputs[2])
    true = value_and_gradients(peer_supcon(torch.cat(exact[:2]), label.repeat(2), exact[2]), exact)
    assert_close(value_and_gradients(ours, inputs), true, tolerance_at(temperature))


def test_one_class_per_sample_gives_nt_xent() -> None:
    view_a, view_b, temperature = inputs = make_inputs(20)
    ours = supcon(view_a, view_b, torch.arange(20), temperature=temperature)
    expected = nt_xent(view_a, view_b, temperature=temperature)
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(expected, inputs), 1e-10)


def test_an_unlabeled_sample_shares_its_class_only_with_its_duplicates() -> None:
    names = torch.tensor([[7, 7], [8, 5], [-9, -9], [2**62, 8], [0, 0], [-9, 3]])
    label = torch.tensor([3, -1, 3, -1, -1, 0])
    found = (
        IdExchange(CPU).start(ExampleIds(query=names, key=names, label=label, shared_id_space=True))().label
    )
    assert found is not None
    first, duplicate, other = found[[1, 3, 4]].tolist()
    assert found[[0, 2, 5]].tolist() == [3, 3, 0]
    assert first == duplicate != other
    assert max(first, other) < 0


@pytest.mark.parametrize("chunk_size", (None, 16))
def test_a_step_uses_the_labels_of_the_batch(chunk_size: int | None) -> None:
    case = Case("simclr", SMALL | {"stages.0.loss": "supcon", "stages.0.chunk_size": chunk_size})
    worker = Worker(case, device=CPU)
    (rows,) = worker.batches(1)
    rows = replace(rows, label=np.where(np.arange(len(rows)) < 9, -1, rows.label))
    views = next(worker.maker.views(iter([rows])))
    worker.learner.tower.train()
    with torch.no_grad():
        embedded = worker.learner.embed(views, step=0)
    assert embedded.key is not None
    label = torch.from_numpy(np.where(rows.label < 0, -1 - np.arange(len(rows)), rows.label)).repeat(2)
    temperature = torch.tensor(worker.stage.temperature)
    expected = plain_supcon(torch.cat([embedded.query, embedded.key]).double(), label, temperature)
    assert worker.step(views, 0).loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("moco_v2", {}, "loss supcon is incompatible with key momentum_encoder and negatives.store queue"),
        ("two_tower", {"negatives.explicit": False}, "loss supcon compares views of one sample"),
        (
            "simclr",
            {"stages.0.hinge_weight": 0.5},
            "hinge_weight acts only with loss nt_xent, info_nce or clip",
        ),
    ],
)
def test_supcon_is_refused_without_two_views(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(recipe(name, image_size=32), {"stages.0.loss": "supcon", **changes})


def test_samples_without_labels_are_refused() -> None:
    config = override(recipe("simclr", image_size=32), {"stages.0.loss": "supcon"})
    source = Source(
        uri="", kind="folder", fragments=(), columns=ColumnNames(), classes=None, has_labels=False
    )
    with pytest.raises(ConfigError, match=r"loss supcon needs labels.*--set data.columns.label=NAME"):
        DataModule(config, None, [source])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "the temperature must be above 0, got 0"),
        ({"view_b": torch.eye(4)[:3]}, "the two views must be"),
        ({"label": torch.arange(3)}, "label does not match its rows: got .3. ids for 4 rows"),
        ({"offset": 2}, "got offset 2 with 4 rows for 4 gathered rows"),
        ({"gathered_label": torch.arange(8)}, "gathered_label requires gathered_a"),
        ({"gathered_a": torch.eye(4)}, "only one side is gathered: gathered_b is None"),
        ({"gathered_a": torch.eye(4), "gathered_b": torch.eye(4)}, "gathered_label is None; pass both"),
    ],
)
def test_invalid_input_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "view_a": torch.eye(4),
        "view_b": torch.eye(4),
        "label": torch.arange(4),
        "temperature": 0.1,
    }
    with pytest.raises(ConfigError, match=message):
        supcon(**(arguments | changes))
