"""The tiled symmetric cross-entropy against the plain formula in float64."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses import clip, info_nce, tiled
from raycl.losses.example_ids import mean_one
from raycl.losses.false_negatives import FalseNegativeMask
from raycl.losses.tiled import read_scalars
from tests.embeddings import make_rows, make_views, of_worker
from tests.gradients import assert_close, leaves, tolerance_at, value_and_gradients, wanting
from tests.plain_losses import are_pairs, plain_bidirectional
from tests.tiles import MetricsLogger, count_products, tiny_tiles_in

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPERATURES = (1.0, 0.2, 0.07, 0.03, 0.01)
COMPANIONS = ("query_id", "key_id", "key_log_frequency")
tiny_tiles = partial(tiny_tiles_in, "softmax", "clip")


def compare_with_plain(
    queries: Tensor,
    keys: Tensor,
    temperature: float,
    negatives: Tensor | None,
    *,
    dtype: torch.dtype = torch.float64,
    own: slice | None = None,
    refines_logq: bool = False,
    **companions: Tensor,
) -> Tensor:
    """Compare the value and all gradients of one worker with the plain formula; return the value."""
    others = [] if negatives is None else [negatives]
    inputs = leaves(queries, keys, torch.tensor(temperature), *others, dtype=dtype)
    exact = leaves(*inputs, dtype=torch.float64)
    mine = slice(0, len(queries)) if own is None else own
    rows = [*exact, exact[0][:0]][:4]
    true = plain_bidirectional(*rows, own=mine, refines_logq=refines_logq, **companions)
    arguments: dict[str, Any] = companions | {"refines_logq": refines_logq}
    if own is not None:
        arguments |= {"gathered_query": inputs[0], "gathered_key": inputs[1], "offset": own.start}
        arguments |= of_worker({name: companions[name] for name in COMPANIONS if name in companions}, own)
    if negatives is not None:
        arguments["negatives"] = inputs[3]
    ours = clip(inputs[0][mine], inputs[1][mine], temperature=inputs[2], **arguments)
    assert ours.dtype == dtype
    tolerance, floor = tolerance_at(temperature), 1e-15 / temperature**2
    if dtype == torch.float64:
        # If terms of 1 / temperature**2 cancel, only their rounding error remains.
        tolerance, floor = 1e-10, 1e-11 + 1e-14 / temperature**2
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(true, exact), tolerance, floor)
    return true


def make_companions(
    batch: int, num_negatives: int, *, num_ids: int | None = None, seed: int = 3, frequencies: bool = True
) -> dict[str, Tensor]:
    """Return ids with duplicates, some also in ``negatives``, and frequencies of keys."""
    generator = torch.Generator().manual_seed(seed)
    companions = {}
    if num_ids is not None:
        for name, count in (("query_id", batch), ("key_id", batch), ("negative_id", num_negatives)):
            # Half of the ids are hashes, half are counts.
            companions[name] = torch.randint(num_ids, (count,), generator=generator) * 2**40 - 2**42
    if frequencies:
        companions["key_log_frequency"] = -9 * torch.rand(batch, generator=generator)
        companions["negative_log_frequency"] = -9 * torch.rand(num_negatives, generator=generator)
    return companions


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize(
    ("batch", "dim", "num_negatives"), ((1, 3, 1), (3, 2, 7), (7, 5, 1025), (257, 9, 300), (515, 17, 0))
)
def test_the_value_and_all_gradients_equal_the_plain_formula(
    batch: int, dim: int, num_negatives: int, dtype: torch.dtype, temperature: float
) -> None:
    compare_with_plain(*make_views(batch, dim), temperature, make_rows(num_negatives, dim), dtype=dtype)


@pytest.mark.parametrize("temperature", (0.2, 0.01))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("own", (None, slice(200, 600)))
@pytest.mark.parametrize("refines_logq", (False, True))
def test_the_loss_over_many_tiles_with_ids_and_frequencies_equals_the_plain_formula(
    refines_logq: bool, own: slice | None, dtype: torch.dtype, temperature: float
) -> None:
    compare_with_plain(
        *make_views(700, 6, noise=1.0),
        temperature,
        make_rows(1100, 6),
        dtype=dtype,
        own=own,
        refines_logq=refines_logq,
        **make_companions(700, 1100, num_ids=500),
    )


@pytest.mark.parametrize("temperature", (0.2, 0.01))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize(("batch", "dim"), ((1, 3), (7, 5), (1100, 6)))
def test_a_batch_alone_with_ids_and_weights_equals_the_plain_formula(
    batch: int, dim: int, dtype: torch.dtype, temperature: float
) -> None:
    """Without gathered rows, negatives and frequencies, both directions share the products."""
    companions = make_companions(batch, 0, num_ids=batch, frequencies=False)
    del companions["negative_id"]
    companions["weight"] = mean_one((1 + torch.arange(batch) % 4).double())
    arguments: dict[str, Any] = {"dtype": dtype, **companions}
    compare_with_plain(*make_views(batch, dim, noise=1.0), temperature, None, **arguments)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 9),
    before=st.integers(0, 7),
    after=st.integers(0, 7),
    dim=st.integers(1, 5),
    num_negatives=st.integers(0, 12),
    num_ids=st.none() | st.integers(1, 12),
    frequencies=st.sampled_from(("none", "simple", "refined")),
    temperature=st.sampled_from(TEMPERATURES),
    seed=st.integers(0, 10_000),
)
def test_the_loss_of_any_sizes_and_ids_equals_the_plain_formula(
    batch: int,
    before: int,
    after: int,
    dim: int,
    num_negatives: int,
    num_ids: int | None,
    frequencies: str,
    temperature: float,
    seed: int,
) -> None:
    total = before + batch + after
    with tiny_tiles():
        compare_with_plain(
            *make_views(total, dim, seed=seed, noise=1.0),
            temperature,
            make_rows(num_negatives, dim, seed),
            own=slice(before, before + batch),
            refines_logq=frequencies == "refined",
            **make_companions(
                total, num_negatives, num_ids=num_ids, seed=seed, frequencies=frequencies != "none"
            ),
        )


def test_without_frequencies_the_loss_is_info_nce_in_both_directions() -> None:
    query, key = make_views(60, 5)
    queue, ids, queue_ids = make_rows(30, 5), torch.arange(60) % 50, torch.arange(30) + 40
    inputs = leaves(query, key, torch.tensor(0.1), queue, dtype=torch.float64)
    query, key, temperature, queue = inputs
    ours = clip(
        query,
        key,
        temperature=temperature,
        query_id=ids,
        key_id=ids,
        negatives=queue,
        negative_id=queue_ids,
    )
    forth = info_nce(
        query, key, temperature=temperature, sample_id=ids, negatives=queue, negative_id=queue_ids
    )
    back = info_nce(key, query, temperature=temperature, sample_id=ids)
    assert_close(
        value_and_gradients(ours, inputs), value_and_gradients((forth + back) / 2, inputs), 1e-12, 1e-13
    )


def masked_negatives(
    query_id: list[int], key_id: list[int], negative_id: list[int]
) -> tuple[list[list[bool]], ...]:
    """Return the keys, stored negatives and queries that are negatives of each pair, by their weights."""
    inputs = leaves(
        torch.eye(len(key_id)), torch.eye(len(key_id)), torch.eye(len(key_id))[: len(negative_id)]
    )
    rules = {"query_id": torch.tensor(query_id), "key_id": torch.tensor(key_id)}
    rows, columns, negatives = [], [], []
    for k in range(len(key_id)):
        loss = clip(
            inputs[0][k : k + 1],
            inputs[1][k : k + 1],
            temperature=1.0,
            gathered_query=inputs[0],
            gathered_key=inputs[1],
            offset=k,
            negatives=inputs[2],
            negative_id=torch.tensor(negative_id, dtype=torch.int64),
            query_id=rules["query_id"][k : k + 1],
            key_id=rules["key_id"][k : k + 1],
            gathered_query_id=rules["query_id"],
            gathered_key_id=rules["key_id"],
        )
        at_queries, at_keys, at_negatives = torch.autograd.grad(loss, inputs)
        rows.append((at_keys[:, k] > 0).tolist())
        negatives.append((at_negatives[:, k] > 0).tolist())
        columns.append((at_queries[:, k] > 0).tolist())
    return rows, negatives, columns


def test_pairs_that_share_a_key_or_a_query_are_not_negatives_of_each_other() -> None:
    # Pairs 0 and 1 share a key, pairs 1 and 2 share a query. This query has two positives, but
    # key 2 is not a positive of query 0.
    keys, _, queries = masked_negatives([10, 11, 11], [20, 20, 21], [])
    assert keys == [[False, False, True], [False, False, False], [False, False, False]]
    assert queries == [[False, False, False], [False, False, False], [True, False, False]]


def test_a_negative_that_is_a_positive_of_the_query_is_masked() -> None:
    # Query 11 has the keys 20 and 21; no query has 22. Queries and keys have separate ids.
    _, negatives, _ = masked_negatives([20, 11, 11], [20, 20, 21], [21, 20, 22])
    assert negatives == [[True, False, True], [False, False, True], [False, False, True]]


def test_a_key_that_is_a_positive_through_another_pair_is_masked() -> None:
    # Query 10 has the keys 20 (pair 0) and 21 (pair 1), so pair 2 with key 21 is masked for pair 0.
    keys, _, queries = masked_negatives([10, 10, 12], [20, 21, 21], [])
    assert keys[0] == [False, False, False]
    assert keys[2] == [True, False, False]
    assert queries[0] == [False, False, True]
    assert queries[2] == [False, False, False]


def test_a_batch_of_few_ids_takes_at_most_the_memory_of_a_strip() -> None:
    """The same pair occurs a thousand times, and its key as often among the candidates."""
    batch = 2000
    query_id, key_id = torch.arange(batch) % 2, torch.arange(batch) % 3
    with MetricsLogger() as recorder:
        mask = FalseNegativeMask(
            (query_id, key_id), query_id, key_id, row_blocks=[slice(0, 256), slice(256, batch)]
        )
        read_scalars(masks=(mask,))
        tile = torch.zeros(256, batch)
        mask.apply_(tile, slice(0, 256), slice(0, batch))
    expected = are_pairs(query_id[:256], key_id, {"query_id": query_id, "key_id": key_id})
    assert torch.equal(tile.isinf(), expected)
    assert 0 < recorder.largest <= 2 * 256 * batch  # 8-byte numbers count twice


@pytest.mark.parametrize("left_out", ("query_id", "key_id"))
def test_without_ids_of_one_type_all_rows_of_that_type_are_distinct(left_out: str) -> None:
    views = make_views(40, 5)
    ids = {"query_id": torch.arange(40) % 30, "key_id": torch.arange(40) % 20}
    distinct = ids | {left_out: torch.arange(100, 140)}
    del ids[left_out]
    one = clip(*views, temperature=0.1, **ids)
    assert torch.equal(one, clip(*views, temperature=0.1, **distinct))
    assert one != clip(*views, temperature=0.1)


def test_the_loss_is_the_mean_over_pairs_and_then_over_directions() -> None:
    """All n equal candidates are equally likely: log n."""
    row = F.normalize(torch.ones(8, 4), dim=1)
    value = clip(row, row, temperature=0.5, negatives=row[:4])
    expected = (torch.tensor(12.0).log() + torch.tensor(8.0).log()) / 2
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert "mean" in (clip.__doc__ or "")


def test_frequencies_correct_for_frequent_candidates() -> None:
    """Computed by hand: a key drawn three times as often counts a third, in one direction only."""
    row = F.normalize(torch.ones(2, 4), dim=1)
    frequency = torch.tensor([0.75, 0.25]).log()
    value = clip(row, row, temperature=0.5, key_log_frequency=frequency)
    # Keys have weights 1/3 and 1, thus 1/4 and 3/4 of the mass as positives; queries have 1/2 each.
    forth = -(torch.tensor([0.25, 0.75]).log()).mean()
    assert value.item() == pytest.approx((forth + torch.tensor(2.0).log()).item() / 2, rel=1e-6)


def test_the_refined_correction_leaves_the_positive_out_of_the_sample() -> None:
    """Computed by hand: of equal candidates, each query has one negative, drawn with certainty."""
    row = F.normalize(torch.ones(2, 4), dim=1)
    frequency = torch.tensor([0.75, 0.25]).log()
    value = clip(row, row, temperature=0.5, key_log_frequency=frequency, refines_logq=True)
    # Without its positive, Q' of the only negative is 1: its logit is the positive's, and p(positive) is 1/2.
    assert value.item() == pytest.approx(torch.tensor(2.0).log().item() / 2, rel=1e-6)
    third = F.normalize(torch.ones(3, 4), dim=1)
    frequency = torch.tensor([0.5, 0.3, 0.2]).log()
    value = clip(third, third, temperature=0.5, key_log_frequency=frequency, refines_logq=True)
    # 1 / Q' = (1 - Q(positive)) / Q, summed over two negatives; a mean of m gives p = 1 / (1 + m).
    sums = torch.tensor([0.5 / 0.3 + 0.5 / 0.2, 0.7 / 0.5 + 0.7 / 0.2, 0.8 / 0.5 + 0.8 / 0.3])
    forth = (sums / (2 + sums) * sums.log()).mean()
    assert value.item() == pytest.approx((forth + torch.tensor(3.0).log()).item() / 2, rel=1e-6)


@pytest.mark.parametrize("temperature", (0.2, 0.01))
def test_only_differences_of_log_frequencies_matter(temperature: float) -> None:
    inputs, queue = leaves(*make_views(30, 5)), make_rows(20, 5)
    frequencies = {name: each.mul(8).round() / 8 for name, each in make_companions(30, 20).items()}
    results = [
        value_and_gradients(
            clip(
                *inputs,
                temperature=temperature,
                negatives=queue,
                **{name: each + shift for name, each in frequencies.items()},  # exact in binary
            ),
            inputs,
        )
        for shift in (0.0, -300.0, 300.0)
    ]
    for shifted in results[1:]:
        assert all(map(torch.equal, results[0], shifted))


@pytest.mark.parametrize("num_negatives", (0, 20))
@pytest.mark.parametrize("rare", (-60.0, -600.0))
def test_a_very_rare_key_does_not_cancel_the_weight_of_the_others(rare: float, num_negatives: int) -> None:
    frequency = torch.full((300,), -4.0)
    frequency[7] = rare
    # The rare key is a positive of the query of pair 8, so only the others are its candidates.
    query_id = torch.arange(300)
    query_id[8] = 7
    for dtype in (torch.float64, torch.float32):
        compare_with_plain(
            *make_views(300, 8),
            0.1,
            make_rows(num_negatives, 8),
            dtype=dtype,
            query_id=query_id,
            key_log_frequency=frequency,
            negative_log_frequency=torch.full((num_negatives,), -4.0),
        )


def test_very_frequent_negatives_are_not_rounded_away() -> None:
    (query, key), negatives = make_views(2, 8), make_rows(20, 8)
    # Two positives of one query, so that only negatives are candidates; the rare one dominates.
    value = clip(
        query,
        key,
        temperature=0.2,
        query_id=torch.zeros(2, dtype=torch.int64),
        key_log_frequency=torch.tensor([-60.0, 0.0]),
        negatives=negatives,
        negative_log_frequency=torch.full((20,), 45.0),
    )
    excess = (query[1] @ negatives.T - query[1] @ key[1]).double() / 0.2 - 45
    assert value.item() == pytest.approx(excess.exp().sum().item() / 4, rel=1e-4, abs=0.0)


def test_frequencies_get_no_gradient() -> None:
    frequency = torch.rand(9, requires_grad=True)
    assert not clip(*make_views(9, 4), temperature=0.1, key_log_frequency=frequency).requires_grad


@pytest.mark.parametrize("own", (None, slice(10, 30)))
def test_no_matrix_product_has_subnormal_inputs(own: slice | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a low temperature most weights would be subnormal and make the loss 40 times slower on a CPU."""
    tiny, smallest = torch.finfo(torch.float32).tiny, []
    original = tiled.product

    def watched(*inputs: Tensor, weights: int) -> Tensor:
        smallest.append(inputs[weights].abs().masked_fill(inputs[weights] == 0, 1.0).amin())
        return original(*inputs)

    for module, place in (("softmax", 0), ("mutual", 1)):
        monkeypatch.setattr(f"raycl.losses.{module}.product", partial(watched, weights=place))
    for temperature in (0.02, 0.01, 0.005):
        query, key = make_views(600, 64, noise=0.05)
        compare_with_plain(query, key, temperature, make_rows(300, 64), dtype=torch.float32, own=own)
        batch = leaves(query, key, torch.tensor(temperature), dtype=torch.float32)
        clip(*batch[:2], temperature=batch[2])  # computes the gradients as well
    assert tiny < min(smallest) < 1e4 * tiny


def test_only_products_needed_for_requested_gradients_are_computed() -> None:
    """The batch alone: one product for the sums, one for the weights, and one for each gradient."""
    inputs = (*make_views(5, 4), torch.tensor(0.1), make_rows(3, 4))
    local = {(): 1, (0,): 3, (1,): 3, (2,): 3, (0, 1): 4, (0, 2): 3}
    # With negatives each direction has its own products for logits and for each gradient.
    wider = {(): 3, (0,): 6, (1,): 5, (2,): 6, (3,): 4, (0, 1): 8, (0, 2): 6, (1, 3): 6, (0, 1, 2, 3): 9}
    for expected, has_negatives in ((local, False), (wider, True)):
        for wanted, num_products in expected.items():
            query, key, degrees, queue = wanting(inputs, wanted)
            others = {"negatives": queue} if has_negatives else {}
            loss = partial(clip, query, key, temperature=degrees, **others)
            assert count_products(loss, "softmax", "mutual") == num_products, wanted


@pytest.mark.parametrize("invalid", (torch.nan, torch.inf))
@pytest.mark.parametrize("temperature", (0.1, 0.01))
@pytest.mark.parametrize("place", (0, 1, 2, 3))
def test_invalid_rows_and_frequencies_give_nan(place: int, temperature: float, invalid: float) -> None:
    rows = [*make_views(9, 4), make_rows(12, 4), torch.zeros(9)]
    rows[place][3] = -invalid
    loss = clip(
        *rows[:2],
        temperature=temperature,
        negatives=rows[2],
        key_log_frequency=rows[3],
        negative_log_frequency=torch.zeros(12),
    )
    assert loss.isnan()


ROWS = torch.eye(4)
IDS = torch.arange(4)
BOTH = {"gathered_query": ROWS, "gathered_key": ROWS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "the temperature must be above 0, got 0; usual values"),
        ({"gathered_key": ROWS}, "only one side is gathered: gathered_query is None; gather both"),
        ({"gathered_query": ROWS}, "only one side is gathered: gathered_key is None; gather both"),
        (
            BOTH | {"gathered_key": torch.cat([ROWS, ROWS])},
            "gathered_query and gathered_key must be [batch, 4] of one batch, got [4, 4] and [8, 4]",
        ),
        (
            {"gathered_query": ROWS[:, :2], "gathered_key": ROWS[:, :2]},
            "must be [batch, 4] of one batch, got [4, 2] and [4, 2]; gather the rows",
        ),
        (BOTH | {"offset": 1}, "offset 1 with 4 rows for 4 gathered rows"),
        ({"negatives": ROWS[:, :2]}, "the negatives must be [rows, dim] with the dim of the queries"),
        ({"query_id": IDS[:3]}, "query_id does not match its rows: got [3] ids for 4 rows; pass one"),
        ({"key_id": torch.eye(4)}, "key_id does not match its rows: got [4, 4] ids for 4 rows"),
        ({"gathered_key_id": IDS}, "gathered_key_id requires gathered_key, got only [4] values"),
        (BOTH | {"key_id": IDS}, "gathered_key_id is None; pass both or neither"),
        (BOTH | {"gathered_query_id": IDS}, "query_id is None; pass both or neither"),
        (
            BOTH | {"key_id": IDS, "gathered_key_id": IDS[:3]},
            "gathered_key_id does not match its rows: got [3] ids for 4 rows",
        ),
        ({"negative_id": IDS}, "negative_id requires negatives, got only [4] values; pass both"),
        ({"negatives": ROWS, "negative_id": IDS}, "key_id is None; pass both or neither"),
        ({"negatives": ROWS, "key_id": IDS}, "negative_id is None; pass both or neither"),
        (
            {"negatives": ROWS, "key_id": IDS, "negative_id": IDS[:3]},
            "negative_id does not match its rows: got [3] ids for 4 rows",
        ),
        (
            {"negatives": ROWS, "key_log_frequency": ROWS[0]},
            "negative_log_frequency is None; pass all of them or none",
        ),
        (
            {"negatives": ROWS, "negative_log_frequency": ROWS[0]},
            "key_log_frequency is None; pass all of them or none",
        ),
        ({"refines_logq": True}, "refines_logq needs log frequencies: key_log_frequency is None; pass both"),
        ({"key_log_frequency": ROWS[0, :2]}, "key_log_frequency does not match its rows: got [2] values"),
    ],
)
def test_invalid_input_is_refused_with_its_value_and_a_remedy(changes: dict[str, Any], message: str) -> None:
    arguments = {"query": ROWS, "key": ROWS, "temperature": 0.1} | changes
    with pytest.raises(ConfigError, match=re.escape(message)):
        clip(**arguments)
