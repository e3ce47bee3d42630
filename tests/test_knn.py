"""Nearest neighbors, their vote, and the linear probe."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raycl.errors import ConfigError, DataError, RayclError
from raycl.evaluation import knn as knn_module
from raycl.evaluation import linear as linear_module
from raycl.evaluation.knn import knn_accuracy, knn_predict, nearest
from raycl.evaluation.linear import linear_accuracy
from tests.test_floors import modules_imported_by

InMemoryDataset = tuple[Tensor, Tensor]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine, synchronizing threads costs more than small products gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def blobs(num_rows: int, num_classes: int = 5, dim: int = 9, noise: float = 1.0) -> InMemoryDataset:
    """Gaussian clusters around fixed centers; the labels have gaps."""
    label = torch.arange(num_rows) % num_classes
    rows = draw(num_classes, dim, seed=7)[label] + noise * draw(num_rows, dim, seed=num_rows)
    return rows, label * 1_000_003 + 4


def plain_nearest(query: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sort the full similarity matrix in float64, stably."""
    similarity = F.normalize(query.double(), dim=1) @ F.normalize(bank.double(), dim=1).T
    similarity, index = similarity.sort(dim=1, descending=True, stable=True)
    return similarity[:, :k], index[:, :k]


def plain_predict(query: Tensor, bank: Tensor, label: Tensor, k: int, temperature: float) -> list[int]:
    """Sum the votes for one query and one class at a time."""
    similarity, index = plain_nearest(query, bank, k)
    predicted: list[int] = []
    for row, chosen in zip(similarity, index, strict=True):
        weight = (row / temperature).exp()
        votes = {c: float(weight[label[chosen] == c].sum()) for c in sorted(set(label.tolist()))}
        predicted.append(max(votes, key=lambda c: votes[c]))
    return predicted


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's digits: 1,297 training rows, 500 test rows, 64 pixels."""
    bunch: Any = load_digits()
    order = torch.randperm(1_797, generator=torch.Generator().manual_seed(0))
    rows, label = torch.tensor(bunch.data).float()[order], torch.tensor(bunch.target)[order]
    return rows[500:], label[500:], rows[:500], label[:500]


Blocks = Callable[[int, int], None]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    """Set the number of queries and of bank rows in a tile."""
    return lambda *sizes: monkeypatch.setattr(knn_module, "_CPU_BLOCKS", sizes)


@pytest.mark.parametrize("k", [1, 2, 17, 130, 301, 1_000])
@pytest.mark.parametrize("sizes", [(256, 8_192), (12, 1), (7, 50), (64, 16), (5, 299), (3, 5)])
def test_nearest_equals_a_full_sort(k: int, sizes: tuple[int, int], blocks: Blocks) -> None:
    blocks(*sizes)
    query, bank = draw(23, 11, seed=1), draw(301, 11, seed=2)
    similarity, index = nearest(query, bank, k=k)
    expected, expected_index = plain_nearest(query, bank, k)
    assert similarity.shape == index.shape == (23, min(k, 301))
    torch.testing.assert_close(similarity, expected.float(), rtol=0, atol=5e-7)
    assert torch.equal(index, expected_index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1, -1])
def test_equal_similarities_are_ordered_by_index(dtype: torch.dtype, sign: int, blocks: Blocks) -> None:
    # One-hot rows: every similarity is exactly 1, 0 or -1, so every choice is a tie.
    bank = torch.eye(3, dtype=dtype)[torch.arange(200) * 7 % 3] * sign
    for k in (1, 5, 66, 70, 199):
        for bank_block in (8, 17, 64, 500):
            blocks(256, bank_block)
            _, index = nearest(torch.eye(3, dtype=dtype), bank, k=k)
            assert torch.equal(index, plain_nearest(torch.eye(3), bank, k)[1])
    _, index = knn_module._top(torch.tensor([[-0.0, 0.0, -0.0]]), torch.arange(3)[None], 1)
    assert index.tolist() == [[0]]


def test_queries_of_another_encoder_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"queries have the shape \[2, 3\] and the bank \[4, 5\]; give rows of the"
    ):
        nearest(torch.ones(2, 3), torch.ones(4, 5), k=1)


@pytest.mark.parametrize("rising", [True, False])
def test_the_order_of_the_bank_and_negative_similarities_have_no_effect(rising: bool, blocks: Blocks) -> None:
    blocks(256, 64)
    query, bank = draw(4, 6), draw(1_000, 6, seed=1)
    order = (bank @ query[0]).argsort(descending=not rising)
    _, index = nearest(query, bank[order], k=9)
    assert torch.equal(index, plain_nearest(query, bank[order], 9)[1])
    similarity, index = nearest(query.abs(), -bank.abs(), k=1_000)
    assert bool((similarity < 0).all())
    assert torch.equal(index, plain_nearest(query.abs(), -bank.abs(), 1_000)[1])


@pytest.mark.parametrize("k", [1, 5, 40, 203])
@pytest.mark.parametrize("temperature", [0.01, 0.07, 1.0])
@pytest.mark.parametrize("sizes", [(256, 8_192), (7, 33)])
def test_the_vote_equals_the_plain_formula(
    k: int, temperature: float, sizes: tuple[int, int], blocks: Blocks
) -> None:
    blocks(*sizes)
    bank, label = blobs(203, noise=1.5)
    query = torch.cat([blobs(58, noise=1.5)[0], bank[:3]])  # some queries are in the bank
    predicted = knn_predict(query, bank, label, k=k, temperature=temperature)
    assert predicted.dtype == torch.int64
    assert predicted.tolist() == plain_predict(query, bank, label, k, temperature)


def test_a_low_temperature_does_not_overflow_and_predicts_the_nearest_class() -> None:
    bank, label = blobs(200)
    predicted = knn_predict(bank, bank, label, temperature=1e-4)
    assert torch.equal(predicted, label)


def test_the_lower_class_wins_ties() -> None:
    bank = torch.ones(6, 2)
    label = torch.tensor([9, 4, 9, 4, 70, 5])
    assert knn_predict(bank[:1], bank, label, k=6).tolist() == [4]
    assert knn_predict(bank[:1], bank, label, k=1).tolist() == [9]


def test_rows_are_normalized_and_rows_of_zeros_are_allowed() -> None:
    bank, label = blobs(100)
    query = blobs(30)[0]
    scaled = bank * torch.rand(100, 1, generator=torch.Generator().manual_seed(0)).add(0.1)
    assert torch.equal(knn_predict(query, bank, label), knn_predict(query * 50, scaled, label))
    assert nearest(torch.zeros(1, 9), bank, k=3)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    query, bank = (draw(20, 8) * 20).abs().to(dtype), (draw(90, 8, seed=1) * 20).abs().to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        similarity, _ = nearest(query, bank, k=10)
    assert similarity.dtype == torch.float32
    torch.testing.assert_close(similarity, nearest(query.float(), bank.float(), k=10)[0])
    expected = plain_nearest(query, bank, 10)[0].float()
    torch.testing.assert_close(similarity, expected, rtol=0, atol=5e-7)


def test_float64_stays_float64(blocks: Blocks) -> None:
    blocks(256, 30)
    query, bank = draw(9, 8, dtype=torch.float64), draw(90, 8, seed=1)
    similarity, index = nearest(query, bank, k=10)
    expected, expected_index = plain_nearest(query, bank, 10)
    torch.testing.assert_close(similarity, expected, rtol=0, atol=1e-14)
    assert torch.equal(index, expected_index)


class LargestTensor(TorchDispatchMode):
    """Record the size in bytes of the largest tensor returned by an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            # A view of the full bank costs nothing; only new tensors count.
            if isinstance(item, Tensor) and not item._is_view():
                self.num_bytes = max(self.num_bytes, item.nbytes)
        return result


def test_memory_is_independent_of_the_bank_size(blocks: Blocks) -> None:
    blocks(32, 1_024)
    query = draw(64, 8)
    largest: list[int] = []
    for num_rows in (4_096, 65_536):
        bank, label = draw(num_rows, 8, seed=1), torch.arange(num_rows)
        with LargestTensor() as seen:
            knn_predict(query, bank, label, k=20)
        largest.append(seen.num_bytes)
    assert largest[0] == largest[1] <= 32 * 1_024 * 8


def test_knn_classifies_digits_with_200_neighbors_at_temperature_007(digits: tuple[Tensor, ...]) -> None:
    train, train_label, test, test_label = digits
    accuracy = knn_accuracy(test, test_label, train, train_label, k=20)
    assert 0.96 < accuracy < 1
    predicted = knn_predict(test, train, train_label, k=20)
    assert accuracy == pytest.approx((predicted == test_label).double().mean().item())
    by_default = knn_predict(test[:60], train, train_label)
    assert by_default.tolist() == plain_predict(test[:60], train, train_label, 200, 0.07)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"k": 0}, ConfigError, "k must be at least 1, got 0"),
        ({"temperature": 0.0}, ConfigError, r"must be positive, got 0\.0"),
        ({"temperature": float("nan")}, ConfigError, "must be positive, got nan"),
        ({"bank": torch.ones(0, 2), "bank_label": torch.ones(0).long()}, DataError, "is empty"),
        ({"bank_label": torch.arange(4) - 1}, DataError, "must be 0 or more, got -1"),
        (
            {"bank_label": torch.arange(5)},
            DataError,
            r"bank_label must be integers \[4\], .* got torch.int64 \[5\]",
        ),
        ({"bank_label": torch.arange(4) + 0.5}, DataError, r"must be integers \[4\], .* got torch.float32"),
        ({"bank": torch.full((4, 2), torch.nan)}, DataError, "bank has rows .* not finite"),
        ({"query": torch.full((4, 2), torch.inf)}, DataError, "query has rows .* not finite"),
    ],
)
def test_invalid_input_to_the_vote_is_named(
    arguments: dict[str, Any], kind: type[RayclError], words: str
) -> None:
    good: dict[str, Any] = {
        "query": torch.ones(3, 2),
        "bank": torch.ones(4, 2),
        "bank_label": torch.arange(4),
    }
    with pytest.raises(kind, match=words) as caught:
        knn_predict(**(good | arguments))
    assert ";" in str(caught.value)  # and the remedy


def test_zero_queries_have_no_neighbors_and_their_accuracy_is_an_error() -> None:
    bank, label = blobs(10)
    assert knn_predict(bank[:0], bank, label).shape == (0,)
    with pytest.raises(DataError, match="the set of queries is empty"):
        knn_accuracy(bank[:0], label[:0], bank, label)


@pytest.mark.parametrize("accuracy", [knn_accuracy, linear_accuracy])
def test_labels_of_another_shape_are_refused(accuracy: Callable[..., float]) -> None:
    rows, label = blobs(30)
    for wrong in (label[:, None], label[:1], label.float()):
        with pytest.raises(DataError, match=rf"_label must be integers \[{len(rows)}\], one for each row"):
            accuracy(rows, label, rows, wrong)
        with pytest.raises(DataError, match=rf"_label must be integers \[{len(rows)}\], one for each row"):
            accuracy(rows, wrong, rows, label)


def test_a_probe_without_rows_is_refused() -> None:
    rows, label = blobs(30)
    for nothing, some in ((slice(0, 0), slice(None)), (slice(None), slice(0, 0))):
        with pytest.raises(DataError, match="a probe needs rows, got "):
            linear_accuracy(rows[nothing], label[nothing], rows[some], label[some])


def test_knn_does_not_import_scikit_learn() -> None:
    imported = modules_imported_by(Path(str(knn_module.__file__)))
    assert not {module for module in imported if "sklearn" in module or "linear" in module}


def test_the_probe_separates_separable_classes() -> None:
    train, train_label = blobs(300, noise=0.01)
    test, test_label = blobs(60, noise=0.01)
    assert linear_accuracy(train, train_label, test, test_label) == 1.0
    assert linear_accuracy(train, train_label, test, test_label, labels_per_class=1) == 1.0


def test_the_probe_classifies_digits(digits: tuple[Tensor, ...]) -> None:
    full = linear_accuracy(*digits)
    few = linear_accuracy(*digits, labels_per_class=10)
    assert 0.94 < full < 1
    assert 0.8 < few < full


def test_each_draw_has_the_given_number_of_labels_per_class_and_draws_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train, train_label = blobs(200)
    fitted: list[tuple[Any, Any]] = []
    fit = linear_module._fit

    def spy(rows: Any, label: Any, *rest: Any) -> Any:
        fitted.append((rows, label))
        return fit(rows, label, *rest)

    monkeypatch.setattr(linear_module, "_fit", spy)
    linear_accuracy(train, train_label, *blobs(50), labels_per_class=3)
    assert len(fitted) == 5
    for rows, label in fitted:
        assert sorted(label.tolist()) == sorted(train_label.unique().tolist() * 3)
        assert len({tuple(row) for row in rows.tolist()}) == 15
    assert len({tuple(rows.flatten().tolist()) for rows, _ in fitted}) == 5


def test_few_label_accuracy_is_the_mean_over_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = (*blobs(200, noise=2), *blobs(101, noise=2))
    means = []
    for num_draws in (1, 2):
        monkeypatch.setattr(linear_module, "_NUM_DRAWS", num_draws)
        means.append(linear_accuracy(*sets, labels_per_class=2))
    second = 2 * means[1] - means[0]
    assert 0 < second < 1
    assert second != means[0]
    assert second * 101 == pytest.approx(round(second * 101))


def test_the_linear_probe_is_reproducible_with_its_seed() -> None:
    sets = (*blobs(200, noise=2), *blobs(100, noise=2))
    results = [linear_accuracy(*sets, labels_per_class=2, seed=seed) for seed in (3, 3, 4)]
    assert results[0] == results[1] != results[2]


def test_weight_decay_is_chosen_on_training_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    train, train_label = blobs(200, noise=2)
    test, test_label = blobs(100, noise=2)
    chosen: list[float] = []
    choose = linear_module._choose_weight_decay
    monkeypatch.setattr(
        linear_module,
        "_choose_weight_decay",
        lambda *arguments: chosen.append(choose(*arguments)) or chosen[-1],
    )
    accuracy = linear_accuracy(train, train_label, test, test_label)
    linear_accuracy(train, train_label, -test, test_label)  # other test rows give the same choice
    assert chosen[0] == chosen[1]
    monkeypatch.setattr(linear_module, "_choose_weight_decay", lambda *arguments: chosen[0])
    assert accuracy == linear_accuracy(train, train_label, test, test_label)


def test_the_best_weight_decay_is_chosen_and_the_strongest_in_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = {1e-1: 0.2, 1e-2: 0.9, 1e-3: 0.9, 1e-4: 0.5}
    monkeypatch.setattr(linear_module, "_fit", lambda rows, label, decay: decay)
    monkeypatch.setattr(linear_module, "_accuracy", lambda decay, *rest: accuracy[decay])
    rows, label = (item.numpy() for item in blobs(50))
    choose: Any = linear_module._choose_weight_decay
    assert choose(rows, label, numpy.random.default_rng(0)) == 1e-2


def test_the_probe_is_invariant_to_the_scale_of_a_column() -> None:
    train, train_label = blobs(200, noise=2)
    test, test_label = blobs(1_000, noise=2)
    units = 10.0 ** torch.arange(-4, 5)
    plain, scaled = (
        linear_accuracy(rows, train_label, others, test_label)
        for rows, others in ((train, test), (train * units + 1, test * units + 1))
    )
    assert scaled == pytest.approx(plain, abs=0.005)


def test_weight_decay_is_independent_of_the_dataset_size() -> None:
    rows, label = (item.numpy() for item in blobs(200, noise=2))
    fit: Any = linear_module._fit
    once = fit(rows, label, 0.1)[-1].coef_
    twice = fit(rows.repeat(2, 0), label.repeat(2), 0.1)[-1].coef_
    assert abs(once).max() > 0.1
    assert abs(once - twice).max() < 2e-3


def test_a_probe_without_convergence_is_logged_without_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(linear_module, "_MAX_ITERATIONS", 2)
    assert 0.2 < linear_accuracy(*blobs(200, noise=2), *blobs(100, noise=2)) < 1
    assert "stopped at 2 iterations" in caplog.text


def test_the_probe_works_with_classes_too_small_for_held_out_rows() -> None:
    train, train_label = blobs(15, noise=0.01)
    assert linear_accuracy(train, train_label, *blobs(50, noise=0.01)) == 1.0


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"labels_per_class": 0}, ConfigError, "labels_per_class must be at least 1, got 0"),
        ({"labels_per_class": 3}, DataError, "labels_per_class is 3, but class 1 has only 2"),
        ({"train_label": torch.full((5,), 6)}, DataError, "only class 6"),
        ({"train": torch.full((5, 2), torch.nan)}, DataError, "not finite"),
    ],
)
def test_invalid_input_to_the_probe_is_named(
    arguments: dict[str, Any], kind: type[RayclError], words: str
) -> None:
    good: dict[str, Any] = {
        "train": torch.ones(5, 2),
        "train_label": torch.arange(5) % 2,
        "test": torch.ones(5, 2),
        "test_label": torch.arange(5) % 2,
    }
    with pytest.raises(kind, match=words) as caught:
        linear_accuracy(**(good | arguments))
    assert ";" in str(caught.value)
