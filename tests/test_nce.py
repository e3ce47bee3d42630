"""Noise-contrastive estimation and its normalizing constant against the formula of the paper."""

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycl.errors import ConfigError, RunError
from raycl.losses import NormalizingConstant, nce, noise_mass, proximal_term, tiled
from tests.embeddings import make_rows
from tests.gradients import assert_close, assert_zero, leaves, tolerance_at, value_and_gradients
from tests.plain_losses import plain_nce
from tests.tiles import count_products

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPERATURES = (1.0, 0.2, 0.07, 0.01)


def make_case(batch: int, dim: int, num_noise: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    query = make_rows(batch, dim, seed)
    positive = F.normalize(query + 0.3 * make_rows(batch, dim, seed + 1), dim=1)
    return query, positive, make_rows(num_noise, dim, seed + 2)


def compare_with_plain(
    query: Tensor,
    positive: Tensor,
    noise: Tensor,
    temperature: float,
    *,
    num_samples: int = 5000,
    ids: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare the value and the gradients of queries and temperature with the plain formula in float64."""
    log_normalizer = math.log(num_samples) + 0.4 / temperature
    inputs = leaves(query, torch.tensor(temperature), dtype=dtype)
    ours = nce(
        inputs[0],
        positive.to(dtype),
        noise.to(dtype),
        num_samples=num_samples,
        temperature=inputs[1],
        log_normalizer=log_normalizer,
        sample_id=None if ids is None else ids[0],
        noise_id=None if ids is None else ids[1],
    )
    exact = leaves(*inputs, dtype=torch.float64)
    masked = None if ids is None else ids[0][:, None] == ids[1]
    true = plain_nce(
        exact[0], positive.double(), noise.double(), exact[1], num_samples, log_normalizer, masked
    )
    single = dtype == torch.float32
    tolerance, floor = (tolerance_at(temperature), 1e-12) if single else (1e-10, 1e-10)
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(true, exact), tolerance, floor)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    ("batch", "dim", "num_noise"), ((1, 3, 1), (3, 2, 7), (7, 5, 1025), (257, 9, 33), (300, 17, 2100))
)
def test_value_and_gradients_equal_the_plain_formula(
    batch: int, dim: int, num_noise: int, temperature: float
) -> None:
    compare_with_plain(*make_case(batch, dim, num_noise), temperature)


@pytest.mark.parametrize("temperature", (0.07, 0.01))
def test_noise_rows_of_the_querys_own_sample_are_masked_and_not_counted(temperature: float) -> None:
    """Slots drawn twice count twice, and queries may have different numbers of noise rows."""
    case = make_case(300, 9, 1500)
    noise_id = torch.randint(400, (1500,), generator=torch.Generator().manual_seed(5))
    compare_with_plain(*case, temperature, ids=(torch.arange(300) % 200, noise_id))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 8),
    dim=st.integers(1, 6),
    num_noise=st.integers(0, 20),
    num_ids=st.integers(2, 30),
    num_samples=st.integers(1, 2_000_000),
    temperature=st.sampled_from(TEMPERATURES),
    seed=st.integers(0, 10_000),
)
def test_any_sizes_and_ids_equal_the_plain_formula(
    batch: int, dim: int, num_noise: int, num_ids: int, num_samples: int, temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(num_ids, (size,), generator=generator) for size in (batch, num_noise))
    case = make_case(batch, dim, num_noise, seed)
    compare_with_plain(*case, temperature, num_samples=num_samples, ids=(ids[0], ids[1]), dtype=torch.float64)


@pytest.mark.parametrize("num_noise", (0, 5))
def test_a_query_without_noise_has_no_loss(num_noise: int) -> None:
    query, positive, noise = make_case(4, 3, num_noise)
    inputs = leaves(query, torch.tensor(0.07))
    loss = nce(
        inputs[0],
        positive,
        noise,
        num_samples=9,
        temperature=inputs[1],
        log_normalizer=3.0,
        sample_id=torch.zeros(4, dtype=torch.int64),
        noise_id=torch.zeros(num_noise, dtype=torch.int64),
    )
    assert_zero(value_and_gradients(loss, inputs))


@pytest.mark.parametrize("log_normalizer", (-300.0, 0.0, 300.0))
@pytest.mark.parametrize("sign", (1, -1))
def test_extreme_logits_stay_finite_and_exact(sign: int, log_normalizer: float) -> None:
    """At temperature 0.01 a similarity of 1 becomes exp(100); -log h is then 100, never infinite."""
    query = torch.eye(6)
    inputs = leaves(query, torch.tensor(0.01))
    loss = nce(
        inputs[0],
        sign * query,
        -sign * query[:3],
        num_samples=1_000_000,
        temperature=inputs[1],
        log_normalizer=log_normalizer,
    )
    assert all(result.isfinite().all() for result in value_and_gradients(loss, inputs))
    threshold = math.log(3) + log_normalizer - math.log(1_000_000)

    def softplus(number: float) -> float:
        return max(number, 0.0) + math.log1p(math.exp(-abs(number)))

    # One of the first three queries meets its opposite; all other pairs are orthogonal.
    of_each = [
        softplus(threshold - 100 * sign)
        + sum(softplus((-100 * sign if i == j else 0) - threshold) for j in range(3))
        for i in range(6)
    ]
    assert loss.item() == pytest.approx(sum(of_each) / 6, rel=1e-5)


def test_with_all_slots_as_noise_and_the_exact_constant_the_data_probability_is_the_softmax() -> None:
    """With enough noise NCE has the gradient of the full softmax (Gutmann and Hyvarinen, 2010).

    Each slot of the bank serves as noise ``repeats`` times, so the test is deterministic.
    """
    bank = make_rows(40, 5, 0).double()
    (query,) = leaves(make_rows(8, 5, 3), dtype=torch.float64)
    labels = torch.arange(8)
    exact = F.cross_entropy(query @ bank.T / 0.5, labels)
    (true,) = torch.autograd.grad(exact, query)
    errors = []
    for repeats in (10, 100, 1000):
        gradient = torch.zeros_like(query)
        for i in range(8):  # Z belongs to a query, so compute each alone
            log_normalizer = (query[i].detach() @ bank.T / 0.5).logsumexp(0)
            loss = nce(
                query[i : i + 1],
                bank[i : i + 1],
                bank.repeat(repeats, 1),
                num_samples=40,
                temperature=0.5,
                log_normalizer=log_normalizer,
            )
            gradient += torch.autograd.grad(loss, query)[0] / 8
        errors.append(((gradient - true).norm() / true.norm()).item())
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[2] < 5e-3


@pytest.mark.parametrize("has_onednn", (True, False))
def test_half_precision_noise_is_computed_in_float32_and_autocast_changes_nothing(
    has_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "_HAS_ONEDNN", has_onednn and tiled._HAS_ONEDNN)
    query, positive, noise = make_case(30, 6, 1100)
    inputs = leaves(query, torch.tensor(0.07))
    positive, noise = positive.half(), noise.half()
    arguments = {"num_samples": 99, "temperature": inputs[1], "log_normalizer": 9.0}
    half = nce(inputs[0], positive, noise, **arguments)
    full = nce(inputs[0], positive.float(), noise.float(), **arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = nce(inputs[0], positive, noise, **arguments)
    assert half.dtype == torch.float32
    true = value_and_gradients(full, inputs)
    assert_close(value_and_gradients(half, inputs), true, 1e-7)
    assert_close(value_and_gradients(lowered, inputs), true, 1e-7)


@pytest.mark.parametrize(("wanted", "num_products"), ((True, 2), (False, 1)))
def test_without_gradients_only_the_value_is_computed(wanted: bool, num_products: int) -> None:
    query, positive, noise = make_case(5, 4, 7)
    query.requires_grad_(wanted)
    arguments = {"num_samples": 9, "temperature": 0.07, "log_normalizer": 9.0}
    taken = count_products(lambda: nce(query, positive, noise, **arguments), "nce")
    assert taken == num_products


def test_value_does_not_depend_on_which_inputs_need_a_gradient() -> None:
    query, positive, noise = make_case(30, 6, 40)
    arguments = {"num_samples": 99, "log_normalizer": torch.tensor(9.0, requires_grad=True)}
    inputs = leaves(query, torch.tensor(0.07))
    both = value_and_gradients(nce(inputs[0], positive, noise, temperature=inputs[1], **arguments), inputs)
    bare = nce(query, positive, noise, temperature=0.07, **arguments)
    assert not bare.requires_grad
    assert_close([bare], both[:1], 1e-6)
    (degrees,) = leaves(torch.tensor(0.07))
    loss = nce(query, positive, noise, temperature=degrees, **arguments)
    assert_close(list(torch.autograd.grad(loss, degrees)), both[2:], 1e-6)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_mass_is_the_plain_sum_over_unmasked_pairs(temperature: float) -> None:
    query, _, noise = make_case(300, 5, 1500)
    sample_id, noise_id = torch.arange(300), torch.arange(1500) % 450
    mass = noise_mass(query, noise, temperature=temperature, sample_id=sample_id, noise_id=noise_id)
    kept = sample_id[:, None] != noise_id
    logits = (query.double() @ noise.double().T / temperature)[kept]
    assert mass.dtype == torch.float64
    assert mass[0].item() == pytest.approx(logits.logsumexp(0).item(), rel=1e-6)
    assert mass[1].item() == kept.sum().item()


@pytest.mark.parametrize("cuts", ((60,), (30, 30), (7, 1, 52), (20, 20, 20)))
def test_constant_is_the_same_for_any_number_of_workers(cuts: tuple[int, ...]) -> None:
    query, _, noise = make_case(60, 5, 200)
    sample_id, noise_id = torch.arange(60), torch.arange(200) % 90
    masses = torch.stack(
        [
            noise_mass(rows, noise, temperature=0.07, sample_id=ids, noise_id=noise_id)
            for rows, ids in zip(query.split(cuts), sample_id.split(cuts), strict=True)
        ]
    )
    constant = NormalizingConstant(1_281_167)
    constant.update(masses)
    kept = sample_id[:, None] != noise_id
    mean = (query.double() @ noise.double().T / 0.07)[kept].exp().mean()
    assert constant.log_normalizer == pytest.approx(math.log(1_281_167 * mean.item()), rel=1e-7)


def test_constant_stays_fixed_after_the_first_batch() -> None:
    constant = NormalizingConstant(100)
    assert not constant.is_settled
    constant.update(torch.tensor([[math.log(6.0), 3.0]], dtype=torch.float64))
    assert constant.is_settled
    constant.update(torch.tensor([[math.log(60.0), 3.0]], dtype=torch.float64))
    assert constant.log_normalizer == pytest.approx(math.log(200.0), rel=1e-12)


@pytest.mark.parametrize("momentum", (0.0, 0.9, 0.99))
@pytest.mark.parametrize("scale", (0.0, 900.0))
def test_constant_is_a_moving_average_of_z_over_batches(momentum: float, scale: float) -> None:
    """``scale`` shifts every logarithm: exp(900) itself would overflow."""
    constant, average = NormalizingConstant(100, momentum=momentum), None
    for mean in (2.0, 5.0, 0.5, 7.0):
        constant.update(torch.tensor([[math.log(4 * mean) + scale, 4.0]], dtype=torch.float64))
        assert not constant.is_settled
        average = 100 * mean if average is None else momentum * average + (1 - momentum) * 100 * mean
    assert average is not None
    assert constant.log_normalizer == pytest.approx(math.log(average) + scale, rel=1e-12)


def test_constant_resumes_from_a_checkpoint_even_if_not_yet_estimated() -> None:
    first, fresh = NormalizingConstant(100, momentum=0.9), NormalizingConstant(100, momentum=0.9)
    fresh.load_state_dict(first.state_dict())
    with pytest.raises(RunError, match="no estimate yet; call update"):
        _ = fresh.log_normalizer
    batches = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    first.update(batches[:1])
    fresh.load_state_dict(first.state_dict())
    first.update(batches[1:])
    fresh.update(batches[1:])
    assert fresh.log_normalizer == first.log_normalizer
    held = NormalizingConstant(100)
    held.load_state_dict(first.state_dict())
    assert held.is_settled


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_proximal_term_is_the_mean_squared_distance_between_rows(dtype: torch.dtype) -> None:
    query, own_slot = make_rows(7, 5, 0).to(dtype).requires_grad_(), make_rows(7, 5, 1).to(dtype)
    value = proximal_term(query, own_slot)
    difference = query.detach().double() - own_slot.double()
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(sum((row @ row).item() for row in difference) / 7, rel=1e-6)
    (gradient,) = torch.autograd.grad(value, query)
    assert_close([gradient], [2 * difference / 7], 1e-6 if dtype == torch.float32 else 5e-3)


ROWS = torch.eye(4)
IDS = torch.arange(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "the temperature must be above 0, got 0; usual values"),
        ({"positive": ROWS[:3]}, "query and positive must be [local_batch, dim] of the same shape, got"),
        ({"noise": ROWS[:, :2]}, "the noise rows must be [rows, dim] with the dim of the queries"),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0; pass the number of slots"),
        ({"sample_id": IDS}, "noise_id is None; pass both or neither"),
        ({"noise_id": IDS}, "sample_id is None; pass both or neither"),
        ({"sample_id": IDS[:3], "noise_id": IDS}, "got [3] ids for 4 rows; pass one id per row"),
        ({"sample_id": IDS, "noise_id": IDS[:3]}, "noise_id does not match its rows: got [3] ids"),
        (
            {"positive": ROWS.clone().requires_grad_()},
            "positive requires grad, but rows of a memory bank get no",
        ),
        ({"noise": ROWS.clone().requires_grad_()}, "noise requires grad, but rows of a memory bank get no"),
    ],
)
def test_invalid_input_is_refused_with_the_value_and_a_remedy(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"query": ROWS, "positive": ROWS, "noise": ROWS, "num_samples": 9}
    arguments |= {"temperature": 0.1, "log_normalizer": 1.0} | changes
    with pytest.raises(ConfigError, match=re.escape(message)):
        nce(**arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NormalizingConstant(0), "num_samples must be at least 1, got 0; pass the number"),
        (lambda: NormalizingConstant(9, momentum=1.0), "must be in [0, 1), got 1; 0.99 is usual"),
        (lambda: NormalizingConstant(9, momentum=-0.1), "must be in [0, 1), got -0.1; 0.99 is usual"),
        (lambda: NormalizingConstant(9).update(torch.zeros(2)), "got [2]; gather noise_mass"),
        (
            lambda: NormalizingConstant(9).update(noise_mass(ROWS, ROWS[:0], temperature=0.1)[None]),
            "got 0 pairs of query and noise; draw noise",
        ),
        (lambda: noise_mass(ROWS, ROWS[:, :2], temperature=0.1), "the noise rows must be [rows, dim]"),
        (lambda: proximal_term(ROWS, ROWS[:3]), "query and own_slot must be [local_batch, dim]"),
        (lambda: proximal_term(ROWS, ROWS, torch.ones(4, 1)), "weight does not match its rows: got [4, 1]"),
    ],
)
def test_invalid_constants_and_masses_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        call()
