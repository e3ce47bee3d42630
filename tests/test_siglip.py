"""SigLIP's pairwise sigmoid loss in tiles, over workers and over a ring against the formula in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses import siglip
from tests.embeddings import make_pair_ids, make_views, named_ids
from tests.gradients import assert_close, leaves, tolerance_at, value_and_gradients
from tests.plain_losses import plain_siglip
from tests.tiles import count_products, tiny_tiles_in

pytestmark = pytest.mark.usefixtures("one_thread")


def make_inputs(batch: int, dim: int = 5, *, temperature: float = 0.1, bias: float = -3.0) -> list[Tensor]:
    views = make_views(batch, dim, noise=1.0)
    return leaves(*views, torch.tensor(temperature), torch.tensor(bias), dtype=torch.float64)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 9),
    before=st.integers(0, 5),
    after=st.integers(0, 5),
    num_ids=st.none() | st.integers(1, 12),
    temperature=st.sampled_from((1.0, 0.1, 0.01)),
    bias=st.sampled_from((-10.0, 0.0, 2.0)),
)
def test_any_sizes_and_ids_equal_the_plain_formula(
    batch: int, before: int, after: int, num_ids: int | None, temperature: float, bias: float
) -> None:
    total, own = before + batch + after, slice(before, before + batch)
    inputs = make_inputs(total, temperature=temperature, bias=bias)
    pair_ids = None if num_ids is None else make_pair_ids(total, 0, num_ids)[0]
    ids = {} if pair_ids is None else named_ids(pair_ids, own)
    with tiny_tiles_in("siglip", "softmax"):
        ours = siglip(
            inputs[0][own],
            inputs[1][own],
            temperature=inputs[2],
            bias=inputs[3],
            gathered_key=inputs[1],
            offset=before,
            **ids,
        )
    true = plain_siglip(*inputs, own=own, pair_ids=pair_ids)
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(true, inputs), 1e-10, 1e-12)


@pytest.mark.parametrize("temperature", (0.1, 0.01))
def test_many_tiles_in_single_precision_equal_the_plain_formula(temperature: float) -> None:
    exact = make_inputs(1100, temperature=temperature)
    inputs = leaves(*exact, dtype=torch.float32)
    ours = siglip(inputs[0], inputs[1], temperature=inputs[2], bias=inputs[3])
    true = value_and_gradients(plain_siglip(*exact), exact)
    assert_close(value_and_gradients(ours, inputs), true, tolerance_at(temperature))


def test_products_without_gradients_are_skipped() -> None:
    small = make_views(5, 4)
    assert count_products(lambda: siglip(*small, temperature=0.1, bias=0.0), "siglip", "softmax") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "the temperature must be above 0, got 0"),
        ({"temperature": torch.tensor(-1.0)}, "the temperature must be above 0, got -1"),
        ({"key": torch.eye(4)[:3]}, "query and key must be"),
        ({"gathered_key": torch.eye(4), "offset": 1}, "offset 1 with 4 rows for 4 gathered rows"),
        ({"key_id": torch.arange(3)}, "key_id does not match its rows"),
    ],
)
def test_invalid_input_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"query": torch.eye(4), "key": torch.eye(4), "temperature": 0.1, "bias": 0.0} | changes
    with pytest.raises(ConfigError, match=message):
        siglip(**arguments)
