"""Losses of prefixes of the embeddings, compared with sentence-transformers; see also test_plain_steps.py."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raycl
from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.losses.example_ids import ExampleIds
from raycl.losses.objective import Matryoshka, StoreBatch, build_objective
from raycl.recipes import recipe
from raycl.training.launch import _untrained_numbers

peer = pytest.importorskip("sentence_transformers.losses")
DIMS, WEIGHTS = (4, 16, 64), (0.5, 1.0, 2.0)


class Identity(nn.Module):
    """A model of sentence-transformers whose features are its embeddings."""

    model_card_data = SimpleNamespace(add_tags=lambda *_: None)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["rows"]}

    def get_embedding_dimension(self) -> int:
        return max(DIMS)


def test_value_and_gradient_equal_those_of_sentence_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(32, 64, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)
    )
    model: Any = Identity()
    inner = peer.MultipleNegativesRankingLoss(model, scale=20.0)
    theirs = peer.MatryoshkaLoss(
        model, inner, matryoshka_dims=list(DIMS), matryoshka_weights=list(WEIGHTS), n_dims_per_step=-1
    )([{"rows": query}, {"rows": key}], torch.arange(32))
    expected = torch.autograd.grad(theirs, (query, key))

    ids = torch.arange(32)
    objective = Matryoshka(
        objective=build_objective("info_nce", hinge_weight=0.0, temperature=0.05, pairs=True),
        dims=DIMS,
        weights=WEIGHTS,
    )
    ours = objective(query, key, StoreBatch(), ExampleIds(query=ids, key=ids))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    for found, gradient in zip(torch.autograd.grad(ours, (query, key)), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-12)
    assert objective.collapsed_loss(batch_size=32, stored=StoreBatch()) == pytest.approx(3.5 * math.log(32))


def test_numbers_without_a_loss_are_reported() -> None:
    config = override(recipe("two_tower"), {"stages.0.matryoshka_dims": [64, 256]})
    assert list(_untrained_numbers(config)) == [
        "stages.0.matryoshka_dims ends with 256: the other 768 numbers of the embedding are not trained; "
        "add 1024 to train them too"
    ]
    assert not list(_untrained_numbers(override(config, {"stages.0.matryoshka_dims": [64, 1024]})))
    assert not list(_untrained_numbers(recipe("two_tower")))
    # Other stages may train them.
    wider = override(config, {"stages.1.matryoshka_dims": [128, 512]})
    assert [note.partition(" numbers")[0] for note in _untrained_numbers(wider)] == [
        "stages.1.matryoshka_dims ends with 512: the other 512"
    ]
    for dims in ([64, 1024], None):
        assert not list(_untrained_numbers(override(config, {"stages.1.matryoshka_dims": dims})))


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("simclr", {"dims": [64, 256]}, "matryoshka_dims has 256, and the embedding has 128 numbers"),
        ("simclr", {"dims": [64, 64]}, "must be different lengths, got [64, 64]"),
        ("simclr", {"dims": []}, "must be different lengths, got []"),
        ("simclr", {"dims": [64], "weights": [1.0, 2.0]}, "has 2 numbers for 1 matryoshka_dims"),
        ("instance_discrimination", {"dims": [64]}, "loss nce estimates one normalizing constant"),
    ],
)
def test_unusable_prefixes_are_refused_in_one_line(recipe: str, settings: Any, message: str) -> None:
    given = {f"stages.0.matryoshka_{name}": value for name, value in settings.items()}
    with pytest.raises(ConfigError) as caught:
        raycl.override(raycl.recipe(recipe), given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
