"""InfoNCE with keys of the batch, of other workers and of a queue, against the plain formula."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses import info_nce, tiled
from tests.test_losses import (
    Recorder,
    assert_close,
    leaves,
    make_views,
    tolerance_at,
    value_and_gradients,
)
from tests.test_losses import one_thread as one_thread

TEMPERATURES = (1.0, 0.2, 0.07, 0.03, 0.01)


def are_known(query_id: Tensor, candidate_id: Tensor, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Say of each query and candidate whether their ids are those of one of the pairs, one by one."""
    known = set(zip(*(ids.tolist() for ids in pairs), strict=True))
    answers = [
        (query, candidate) in known for query in query_id.tolist() for candidate in candidate_id.tolist()
    ]
    return torch.tensor(answers, dtype=torch.bool).view(len(query_id), len(candidate_id))


def plain_info_nce(
    query: Tensor,
    key: Tensor,
    temperature: Tensor,
    negatives: Tensor | None = None,
    *,
    in_batch: bool = True,
    offset: int = 0,
    ids: tuple[Tensor, Tensor] | None = None,
    negative_id: Tensor | None = None,
    pair_ids: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Write the loss down as the papers do: own key first, all candidates beside it, cross entropy."""
    index = torch.arange(len(query)) + offset
    positive = (query * key[index]).sum(1, keepdim=True)
    similarity, masked = [positive], [torch.zeros(len(query), 1, dtype=torch.bool)]
    if in_batch:
        similarity.append(query @ key.T)
        own = F.one_hot(index, len(key)).bool()
        if pair_ids is not None:
            own |= are_known(pair_ids[0][index], pair_ids[1], pair_ids)
        masked.append(own if ids is None else own | (ids[0][:, None] == ids[1]))
    if negatives is not None:
        similarity.append(query @ negatives.T)
        same = torch.zeros(len(query), len(negatives), dtype=torch.bool)
        if negative_id is not None and pair_ids is not None:
            same = are_known(pair_ids[0][index], negative_id, pair_ids)
        masked.append(same if negative_id is None or ids is None else ids[0][:, None] == negative_id)
    logits = torch.cat(similarity, 1) / temperature
    logits = logits.masked_fill(torch.cat(masked, 1), -torch.inf)
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.int64))


def make_rows(num_rows: int, dim: int, seed: int = 1) -> Tensor:
    return F.normalize(torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def compare_with_plain(
    query: Tensor,
    key: Tensor,
    temperature: float,
    negatives: Tensor,
    dtype: torch.dtype = torch.float32,
    **arguments: Any,
) -> Tensor:
    """Hold value and all four gradients against the plain formula in float64; return its value."""
    inputs = leaves(query, key, torch.tensor(temperature), negatives, dtype=dtype)
    exact = leaves(*inputs, dtype=torch.float64)
    ids, negative_id = arguments.pop("ids", None), arguments.pop("negative_id", None)
    true = plain_info_nce(*exact, ids=ids, negative_id=negative_id, **arguments)
    if arguments.get("in_batch", True):
        arguments |= {"gathered_key": inputs[1], "gathered_sample_id": None if ids is None else ids[1]}
    start = arguments.get("offset", 0)
    ours = info_nce(
        inputs[0],
        inputs[1][start : start + len(query)],
        temperature=inputs[2],
        negatives=inputs[3],
        sample_id=None if ids is None else ids[0],
        negative_id=negative_id,
        **arguments,
    )
    # Even in float64 the plain formula rounds the positive into the sum: 1 - p is 1e-16 wrong.
    single = dtype == torch.float32
    tolerance, floor = (tolerance_at(temperature), 1e-15 / temperature**2) if single else (1e-10, 1e-11)
    plain = [
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(
            [true, *exact], [true, *torch.autograd.grad(true, exact, allow_unused=True)], strict=True
        )
    ]
    assert_close(value_and_gradients(ours, inputs), plain, tolerance, floor)
    return true


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("in_batch", (True, False))
@pytest.mark.parametrize(
    ("batch", "dim", "num_negatives"), ((1, 3, 1), (3, 2, 7), (7, 5, 1025), (257, 9, 2100), (515, 17, 0))
)
def test_value_and_all_gradients_equal_the_plain_formula(
    batch: int, dim: int, num_negatives: int, in_batch: bool, temperature: float
) -> None:
    compare_with_plain(*make_views(batch, dim), temperature, make_rows(num_negatives, dim), in_batch=in_batch)


@pytest.mark.parametrize("temperature", (0.2, 0.01))
def test_many_pieces_of_gathered_keys_equal_the_plain_formula(temperature: float) -> None:
    query, key = make_views(1100, 6)
    compare_with_plain(query[300:700], key, temperature, make_rows(1030, 6), offset=300)


@pytest.mark.parametrize("temperature", (0.2, 0.01))
@pytest.mark.parametrize("in_batch", (True, False))
def test_candidates_with_the_same_id_are_masked_wherever_they_come_from(
    in_batch: bool, temperature: float
) -> None:
    query, key = make_views(300, 9)
    sample_id, negative_id = torch.arange(300) % 240, torch.arange(2500) % 777
    masked = {"ids": (sample_id, sample_id), "negative_id": negative_id, "in_batch": in_batch}
    compare_with_plain(query, key, temperature, make_rows(2500, 9), **masked)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 9),
    before=st.integers(0, 4),
    after=st.integers(0, 4),
    dim=st.integers(1, 6),
    num_negatives=st.integers(0, 12),
    num_ids=st.integers(1, 12),
    in_batch=st.booleans(),
    temperature=st.sampled_from(TEMPERATURES),
    seed=st.integers(0, 10_000),
)
def test_any_sizes_and_ids_equal_the_plain_formula(
    batch: int,
    before: int,
    after: int,
    dim: int,
    num_negatives: int,
    num_ids: int,
    in_batch: bool,
    temperature: float,
    seed: int,
) -> None:
    if not in_batch:
        before = after = 0
    generator = torch.Generator().manual_seed(seed)
    gathered_id = torch.randint(num_ids, (before + batch + after,), generator=generator)
    negative_id = torch.randint(num_ids, (num_negatives,), generator=generator)
    query, key = make_views(before + batch + after, dim, seed=seed)
    compare_with_plain(
        query[before : before + batch],
        key,
        temperature,
        make_rows(num_negatives, dim, seed),
        torch.float64,  # tiny cases cancel: in float32 a true gradient of 0 would not be one
        in_batch=in_batch,
        offset=before,
        ids=(gathered_id[before : before + batch], gathered_id),
        negative_id=negative_id,
    )


def make_pair_ids(
    batch: int, num_negatives: int, num_ids: int, seed: int = 3
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return ids of queries, of keys and of negatives, which occur twice and more; they are hashes."""
    generator = torch.Generator().manual_seed(seed)
    query_id, key_id, negative_id = (
        torch.randint(num_ids, (count,), generator=generator) * 2**40 - 2**42
        for count in (batch, batch, num_negatives)
    )
    return (query_id, key_id), negative_id


def named_ids(pair_ids: tuple[Tensor, Tensor], own: slice | None) -> dict[str, Tensor]:
    """Return the ids of pairs as a loss takes them: of all rows, or of own ones beside the gathered."""
    ids = dict(zip(("query_id", "key_id"), pair_ids, strict=True))
    if own is None:
        return ids
    return {name: each[own] for name, each in ids.items()} | {
        f"gathered_{name}": each for name, each in ids.items()
    }


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 9),
    before=st.integers(0, 4),
    after=st.integers(0, 4),
    num_negatives=st.integers(0, 12),
    num_ids=st.integers(1, 12),
    in_batch=st.booleans(),
    temperature=st.sampled_from(TEMPERATURES),
    seed=st.integers(0, 10_000),
)
def test_any_sizes_and_ids_of_pairs_equal_the_plain_formula(
    batch: int,
    before: int,
    after: int,
    num_negatives: int,
    num_ids: int,
    in_batch: bool,
    temperature: float,
    seed: int,
) -> None:
    """A negative is compared with the pairs of all workers, with or without their keys."""
    own, total = slice(before, before + batch), before + batch + after
    pair_ids, negative_id = make_pair_ids(total, num_negatives, num_ids, seed)
    query, key = make_views(total, 5, seed=seed)
    inputs = leaves(
        query[own], key, torch.tensor(temperature), make_rows(num_negatives, 5, seed), dtype=torch.float64
    )
    where = {"in_batch": in_batch, "offset": before, "negative_id": negative_id}
    true = plain_info_nce(*inputs, pair_ids=pair_ids, **where)
    ours = info_nce(
        inputs[0],
        inputs[1][own],
        temperature=inputs[2],
        gathered_key=inputs[1] if in_batch else None,
        negatives=inputs[3],
        **named_ids(pair_ids, own),
        **where,
    )
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(true, inputs), 1e-10, 1e-11)


@pytest.mark.parametrize("temperature", (0.2, 0.01))
@pytest.mark.parametrize("own", (None, slice(300, 700)))
def test_many_pieces_with_ids_of_pairs_equal_the_plain_formula(own: slice | None, temperature: float) -> None:
    pair_ids, negative_id = make_pair_ids(1100, 1030, 900)
    query, key = make_views(1100, 6)
    mine = slice(0, 1100) if own is None else own
    inputs = leaves(query[mine], key, torch.tensor(temperature), make_rows(1030, 6), dtype=torch.float64)
    where = {"offset": mine.start, "negative_id": negative_id}
    true = plain_info_nce(*inputs, pair_ids=pair_ids, **where)
    gathered = {} if own is None else {"gathered_key": inputs[1]}
    ours = info_nce(
        inputs[0],
        inputs[1][mine],
        temperature=inputs[2],
        negatives=inputs[3],
        **named_ids(pair_ids, own),
        **gathered,
        **where,
    )
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(true, inputs), 1e-10)


def test_sample_ids_are_short_for_the_same_ids_of_queries_and_of_keys() -> None:
    inputs, queue = leaves(*make_views(300, 4)), make_rows(90, 4)
    ids = torch.arange(300) % 20
    shared = {"temperature": 0.1, "negatives": queue, "negative_id": torch.arange(90)}
    short = info_nce(*inputs, sample_id=ids, **shared)
    long = info_nce(*inputs, query_id=ids, key_id=ids.clone(), **shared)
    for one, other in zip(value_and_gradients(short, inputs), value_and_gradients(long, inputs), strict=True):
        assert torch.equal(one, other)


def test_plain_form_needs_query_key_and_temperature_only() -> None:
    inputs = leaves(*make_views(20, 5))
    exact = leaves(*inputs, dtype=torch.float64)
    plain = plain_info_nce(exact[0], exact[1], torch.tensor(0.1))
    ours = info_nce(inputs[0], inputs[1], temperature=0.1)
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(plain, exact), 1e-5)


def test_float64_rows_are_computed_in_float64() -> None:
    inputs = leaves(*make_views(5, 3), torch.tensor(0.07), make_rows(9, 3), dtype=torch.float64)
    ours = info_nce(inputs[0], inputs[1], temperature=inputs[2], negatives=inputs[3])
    plain = plain_info_nce(*inputs)
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(plain, inputs), 1e-13)


@pytest.mark.parametrize("in_batch", (True, False))
def test_a_queue_that_is_still_empty_gives_no_nan(in_batch: bool) -> None:
    inputs = leaves(*make_views(4, 3), torch.tensor(0.07))
    loss = info_nce(
        inputs[0], inputs[1], temperature=inputs[2], in_batch=in_batch, negatives=torch.empty(0, 3)
    )
    results = value_and_gradients(loss, inputs)
    if in_batch:
        alone = info_nce(inputs[0], inputs[1], temperature=inputs[2])
        assert_close(results, value_and_gradients(alone, inputs), 1e-12)
    else:
        assert all(torch.equal(result, torch.zeros_like(result)) for result in results)


@pytest.mark.parametrize("temperature", (0.07, 0.01))
def test_a_query_whose_candidates_are_all_masked_has_no_loss(temperature: float) -> None:
    inputs = leaves(*make_views(4, 3))
    zeros = torch.zeros(4, dtype=torch.int64)
    loss = info_nce(
        *inputs,
        temperature=temperature,
        sample_id=zeros,
        negatives=make_rows(4, 3),
        negative_id=zeros,
    )
    for result in value_and_gradients(loss, inputs):
        assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize("temperature", (*TEMPERATURES, 0.005))
def test_unrelated_rows_neither_overflow_nor_underflow(temperature: float) -> None:
    """The best similarity is far below 1, so exp((similarity - 1) / 0.005) is zero."""
    query, key = make_views(40, 128, noise=100.0)
    value = compare_with_plain(query, key, temperature, make_rows(1500, 128), in_batch=False)
    assert value.isfinite()


def test_a_candidate_that_beats_all_before_it_is_weighed_right() -> None:
    """The shift of a low temperature follows the greatest logit, here from piece to piece."""
    query, key = make_views(6, 8, noise=100.0)
    nearer = torch.linspace(0.0, 1.0, 3000)[:, None] * query[0] + 0.1 * make_rows(3000, 8)
    compare_with_plain(query, key, 0.01, F.normalize(nearer, dim=1), in_batch=False)
    compare_with_plain(query, key, 0.01, F.normalize(nearer.flip(0), dim=1), in_batch=False)


@pytest.mark.parametrize("temperature", (0.1, 0.05))
def test_loss_near_zero_is_not_rounded_away(temperature: float) -> None:
    key = torch.eye(40)
    value = compare_with_plain(key[:30], key[:30], temperature, key[30:] + 1e-3, in_batch=False)
    assert 0 < value < 1e-2


def test_long_rows_and_short_ones_give_the_right_value() -> None:
    query, key = make_views(20, 4)
    negatives = make_rows(30, 4) * torch.logspace(-3, 2, 30)[:, None]
    exact = plain_info_nce(query.double(), key.double(), torch.tensor(0.5), negatives.double())
    assert_close([info_nce(query, key, temperature=0.5, negatives=negatives)], [exact], 1e-5)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("temperature", (0.07, 0.01))
def test_a_half_precision_queue_loses_nothing_but_its_own_rounding(
    temperature: float, dtype: torch.dtype
) -> None:
    query, key = make_views(70, 6)
    queue = make_rows(3000, 6).to(dtype)
    for wanted in (False, True):
        inputs = leaves(query, key)
        halves = queue.clone().requires_grad_(wanted)
        exact = leaves(*inputs, queue, dtype=torch.float64)
        plain = plain_info_nce(exact[0], exact[1], torch.tensor(temperature), exact[2], in_batch=False)
        ours = info_nce(*inputs, temperature=temperature, negatives=halves, in_batch=False)
        true = value_and_gradients(plain, exact)
        assert_close(value_and_gradients(ours, inputs), true[:3], tolerance_at(temperature))
        if wanted:
            again = info_nce(*inputs, temperature=temperature, negatives=halves, in_batch=False)
            (gradient,) = torch.autograd.grad(again, halves)
            assert gradient.dtype == dtype
            assert_close([gradient], true[3:], 2e-2)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_rows_lose_nothing_but_their_own_rounding(dtype: torch.dtype) -> None:
    half = leaves(*make_views(70, 6), dtype=dtype)
    value = info_nce(*half, temperature=0.1, negatives=make_rows(50, 6))
    assert value.dtype == torch.float32
    exact = leaves(*half, dtype=torch.float64)
    plain = plain_info_nce(exact[0], exact[1], torch.tensor(0.1), make_rows(50, 6).double())
    true = value_and_gradients(plain, exact)
    assert_close([value], true[:1], 1e-5)
    gradients = torch.autograd.grad(value, half)
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype]
    assert_close(list(gradients), true[1:], 5e-3)


def test_a_half_precision_queue_is_never_copied_as_a_whole() -> None:
    query, key = leaves(*make_views(8, 16))
    queue = make_rows(20_000, 16).half()
    with Recorder() as recorder:
        info_nce(query, key, temperature=0.1, negatives=queue, in_batch=False).backward()
    assert 0 < recorder.largest <= 20_000 * 16 // 2  # as many floats as the queue itself has bytes / 4


@pytest.mark.parametrize("has_onednn", (True, False))
@pytest.mark.parametrize("temperature", (0.1, 0.01))
def test_autocast_does_not_lower_the_precision(
    temperature: float, has_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "_HAS_ONEDNN", has_onednn and tiled._HAS_ONEDNN)
    inputs, queue = leaves(*make_views(70, 6)), make_rows(90, 6)
    without = info_nce(*inputs, temperature=temperature, negatives=queue)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = info_nce(*inputs, temperature=temperature, negatives=queue)
    assert within.dtype == torch.float32
    assert_close(value_and_gradients(within, inputs), value_and_gradients(without, inputs), 1e-6)


@pytest.mark.parametrize("with_ids", (False, True))
@pytest.mark.parametrize("temperature", (0.2, 0.01))
@pytest.mark.parametrize("num_workers", (2, 4))
def test_mean_over_workers_gives_loss_and_gradient_of_the_whole_batch(
    num_workers: int, temperature: float, with_ids: bool
) -> None:
    """Slicing plays the part of the gather, the mean that of DDP."""
    ids, negative_id = (torch.arange(300) % 250, torch.arange(500) % 400) if with_ids else (None, None)
    inputs = leaves(*make_views(300, 7), torch.tensor(temperature), make_rows(500, 7))
    query, key, degrees, queue = inputs
    shared = {"temperature": degrees, "negatives": queue, "negative_id": negative_id}
    whole = info_nce(query, key, sample_id=ids, **shared)
    local = 300 // num_workers
    losses = [
        info_nce(
            query[start : start + local],
            key[start : start + local],
            gathered_key=key,
            offset=start,
            sample_id=None if ids is None else ids[start : start + local],
            gathered_sample_id=ids,
            **shared,
        )
        for start in range(0, 300, local)
    ]
    assert_close(
        value_and_gradients(torch.stack(losses).mean(), inputs),
        value_and_gradients(whole, inputs),
        tolerance_at(temperature),
    )


@pytest.mark.parametrize("temperature", (0.1, 0.01))
def test_only_a_strip_is_held_and_of_a_queue_only_a_tile(temperature: float) -> None:
    inputs, queue = leaves(*make_views(600, 4)), make_rows(5000, 4)
    with Recorder() as detached:
        info_nce(*inputs, temperature=temperature, negatives=queue, in_batch=False).backward()
    assert 0 < detached.largest <= max(256 * 1024, 5000 * 4)
    with Recorder() as wanted:
        info_nce(*inputs, temperature=temperature, negatives=queue.requires_grad_()).backward()
    assert 0 < wanted.largest <= 256 * 5 * 1024


def count_products(monkeypatch: pytest.MonkeyPatch, loss_of: Any) -> int:
    """Return how many matrix products loss and gradient take."""
    calls = []
    original = tiled.product

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return original(*arguments)

    monkeypatch.setattr("raycl.losses.rectangle.product", counted)
    loss_of()
    return len(calls)


def test_no_product_is_taken_that_no_gradient_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = make_views(5, 4)
    queue, degrees = make_rows(3, 4), torch.tensor(0.1)
    inputs = (query, key, degrees, queue)
    expected = {(): 2, (0,): 4, (1,): 3, (2,): 4, (3,): 3, (0, 2): 4, (0, 1): 5, (0, 1, 2, 3): 6}
    for wanted, num_products in expected.items():
        leaf = [tensor.clone().requires_grad_(k in wanted) for k, tensor in enumerate(inputs)]
        taken = count_products(
            monkeypatch,
            lambda leaf=leaf: info_nce(leaf[0], leaf[1], temperature=leaf[2], negatives=leaf[3]),
        )
        assert taken == num_products, wanted


def test_gradient_is_the_same_whoever_else_wants_one() -> None:
    inputs = [*make_views(300, 4), torch.tensor(0.1), make_rows(1100, 4)]
    together = leaves(*inputs)
    all_at_once = value_and_gradients(
        info_nce(together[0], together[1], temperature=together[2], negatives=together[3]), together
    )
    for k in range(4):
        mixed = [tensor.clone().requires_grad_(at == k) for at, tensor in enumerate(inputs)]
        loss = info_nce(mixed[0], mixed[1], temperature=mixed[2], negatives=mixed[3])
        assert_close([torch.autograd.grad(loss, mixed[k])[0]], [all_at_once[k + 1]], 1e-6)


def test_distinct_ids_cost_no_mask() -> None:
    (query, key), queue = make_views(40, 4), make_rows(50, 4)
    for negative_id, masked in ((torch.arange(40, 90), False), (torch.arange(39, 89), True)):
        with Recorder() as recorder:
            info_nce(
                query,
                key,
                temperature=0.1,
                sample_id=torch.randperm(40),
                negatives=queue,
                negative_id=negative_id,
            )
        assert ("masked_fill_" in recorder.functions) == masked


def test_second_derivative_is_refused_rather_than_wrong() -> None:
    inputs = leaves(*make_views(9, 4))
    (gradient, _) = torch.autograd.grad(info_nce(*inputs, temperature=0.1), inputs, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


@pytest.mark.parametrize("broken", (torch.nan, torch.inf))
@pytest.mark.parametrize("temperature", (0.1, 0.01))
@pytest.mark.parametrize("place", (0, 1, 2))
def test_broken_rows_give_nan(place: int, temperature: float, broken: float) -> None:
    rows = [*make_views(9, 4), make_rows(12, 4)]
    rows[place][3] = broken
    assert info_nce(rows[0], rows[1], temperature=temperature, negatives=rows[2]).isnan()


def test_loss_is_the_mean_over_the_queries() -> None:
    """Of n equal candidates each is as likely as the other: log n."""
    row = F.normalize(torch.ones(8, 4), dim=1)
    value = info_nce(row, row, temperature=0.5, negatives=row)
    assert value.item() == pytest.approx(torch.tensor(16.0).log().item(), rel=1e-6)
    assert "mean" in (info_nce.__doc__ or "")


ROWS = torch.eye(4)
IDS = torch.arange(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "the temperature is not above 0: it is 0; usual values"),
        ({"key": ROWS[:3]}, "query and key are not [local_batch, dim] of one shape: they came as [4, 4]"),
        ({"query": ROWS[:0], "key": ROWS[:0]}, "they came as [0, 4] and [0, 4]; pass one row"),
        ({"sample_id": torch.arange(5)}, "[5] ids came for 4 rows; pass one id per row"),
        ({"in_batch": False}, "in_batch is False and negatives is None; pass negatives ([0, dim]"),
        (
            {"in_batch": False, "negatives": ROWS, "gathered_key": ROWS},
            "[4, 4] came with in_batch=False; leave gathered_key out",
        ),
        (
            {"negatives": ROWS[:, :2]},
            "the negatives are not [rows, dim] with the dim of the queries: they came as [4, 2]",
        ),
        ({"gathered_key": ROWS[0]}, "the gathered keys are not [rows, dim]"),
        ({"gathered_key": ROWS, "offset": 1}, "offset 1 with 4 rows came for 4 gathered rows"),
        ({"offset": -1}, "offset -1 with 4 rows came for 4 gathered rows"),
        ({"negative_id": IDS}, "negative_id came without negatives: [4] ids of no rows; pass both"),
        ({"gathered_sample_id": IDS}, "gathered_sample_id came without gathered_key"),
        ({"negatives": ROWS, "negative_id": IDS}, "sample_id is None; pass both or neither"),
        ({"negatives": ROWS, "sample_id": IDS}, "negative_id is None; pass both or neither"),
        ({"gathered_key": ROWS, "sample_id": IDS}, "gathered_sample_id is None; pass both or neither"),
        ({"sample_id": IDS, "key_id": IDS}, "two kinds of ids: sample_id came beside key_id; pass sample_id"),
        ({"query_id": IDS[:3]}, "query_id does not match its rows: [3] ids came for 4 rows; pass one id"),
        ({"gathered_key": ROWS, "query_id": IDS}, "gathered_query_id is None; pass both or neither"),
        ({"gathered_key_id": IDS, "key_id": IDS}, "gathered_key_id came without gathered_key"),
        ({"negatives": ROWS, "key_id": IDS}, "negative_id is None; pass both or neither"),
        (
            {"negatives": ROWS, "sample_id": IDS, "negative_id": IDS[:3]},
            "negative_id does not match its rows: [3] ids came for 4 rows",
        ),
    ],
)
def test_impossible_input_is_refused_with_what_came_and_what_to_do(
    changes: dict[str, Any], message: str
) -> None:
    arguments = {"query": ROWS, "key": ROWS, "temperature": 0.1} | changes
    with pytest.raises(ConfigError, match=re.escape(message)):
        info_nce(**arguments)
