"""BatchNorm of a worker that has a single row: refused exactly where torch refuses it."""

from typing import Any

import numpy as np
import pytest
import torch

from raycl.config import RunConfig
from raycl.config.checks import problems
from raycl.config.overrides import override
from raycl.losses.example_ids import ExampleIds
from raycl.models.build import build_towers
from raycl.recipes import recipe
from raycl.tokenization import Vocabulary
from raycl.training.train_state import EmbedConfig, TrainState
from raycl.training.views import Views

SMALL = {"encoder.name": "resnet10", "encoder.width": 0.125, "workers": 2}
BATCHNORM = {"projection_head.num_layers": 2, "projection_head.batchnorm": True}
CROPS = [{"count": 2}, {"count": 1, "size": 16}]


def embed_one_row(config: RunConfig) -> None:
    """Embed the views of a single row, as each of the workers does."""
    state = TrainState.build(
        config, build_towers(config, Vocabulary.stand_in() if config.has_texts else None), num_samples=None
    )
    state.set_embed_config(EmbedConfig.of(config, config.stages[0]))
    images, crop = torch.rand(2, 1, 3, 32, 32), torch.rand(1, 3, 16, 16)
    ids = np.arange(1)
    views = Views(
        view_a=images[0],
        view_b=torch.ones(1, 3, dtype=torch.int64) if config.has_texts else images[1],
        crops=(crop,) if config.num_views > 2 else (),
        sample_id=torch.from_numpy(ids),
        ids=ids,
        example_ids=ExampleIds(query=torch.from_numpy(ids), key=torch.from_numpy(ids)),
    )
    state.embed(views, step=0)


@pytest.mark.parametrize(
    ("name", "settings", "is_refused"),
    [
        ("simclr", {"batchnorm": "local"}, False),
        ("simclr", {"batchnorm": "local", "stages.0.chunk_size": 1}, False),
        ("simclr", {"batchnorm": "local", "augment.views": CROPS}, True),
        ("simclr", {"batchnorm": "local_view"}, True),
        ("simclr", {"batchnorm": "local_view", "projection_head.batchnorm": False}, False),
        ("simclr", {"batchnorm": "local_view", "projection_head.num_layers": 1}, False),
        ("moco_v2", {"batchnorm": "local"}, False),
        ("moco_v2", {"batchnorm": "local", **BATCHNORM}, True),
        ("clip", {"batchnorm": "local", **BATCHNORM}, True),
        ("clip", {"batchnorm": "group", **BATCHNORM}, False),
    ],
)
def test_a_single_row_is_refused_exactly_if_batchnorm_of_the_head_cannot_normalize_it(
    name: str, settings: dict[str, Any], is_refused: bool
) -> None:
    config = override(recipe(name, image_size=32), SMALL | {"stages.0.batch_size": 4} | settings)
    assert list(problems(config)) == []
    one_row = config.model_copy(update={"stages": (config.stages[0].model_copy(update={"batch_size": 2}),)})
    assert any("normalizes a single row" in each for each in problems(one_row)) == is_refused
    try:
        embed_one_row(one_row)
    except ValueError as error:
        assert is_refused and "more than 1 value per channel" in str(error)
    else:
        assert not is_refused
