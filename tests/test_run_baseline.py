"""The baseline that a run is compared with at its end: raw pixels, or BM25."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pytest
import torch

from raycl.data.in_memory import InMemoryDataset
from raycl.recipes import recipe as recipe_of
from raycl.storage import Place
from raycl.training.coordinator import RunCoordinator
from raycl.training.evaluators import KnnEvaluator, RetrievalEvaluator, build_evaluator
from raycl.training.job import Job
from raycl.training.launch import _noticing, _warn_of_baseline, _warn_of_solved_task
from raycl.training.transforms import PairTransform, build_transform
from tests.images import encode
from tests.pairs import clicks, rows_of, small_config, vocabulary
from tests.workers.processes import run_workers

CPU = torch.device("cpu")
NUM_TEST = 21


def pictures() -> np.ndarray:
    """Return noise with a brighter pixel for each of three classes."""
    number = np.arange(60)
    pixels = np.random.default_rng(0).integers(0, 120, (60, 8, 8), np.uint8)
    pixels[number, number % 3, 0] += 130
    return pixels


def knn_evaluator() -> KnnEvaluator:
    config = small_config("clip")
    rows = rows_of(config, {"image": list(map(encode, pictures())), "caption": [["a"]] * 60})
    rows.label = rows.sample_id % 3
    bank, test = rows.where(lambda ids: ids >= NUM_TEST), rows.where(lambda ids: ids < NUM_TEST)
    transform = build_transform(config, vocabulary().tokenizer)
    return KnnEvaluator(bank=bank, test=test, transform=transform, k=7)


def expected_accuracy(*, bank: Sequence[int], k: int, temperature: float) -> float:
    """Classify the first images by a weighted vote, one by one in float64."""
    rows = pictures().reshape(60, -1).astype(np.float64)
    rows -= rows[list(bank)].mean(axis=0)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    num_right = 0
    for query in range(NUM_TEST):
        votes = dict.fromkeys(range(3), 0.0)
        for cosine, row in sorted((rows[query] @ rows[row], row) for row in bank)[-k:]:
            votes[row % 3] += math.exp(cosine / temperature)
        num_right += max(votes, key=votes.__getitem__) == query % 3
    return num_right / NUM_TEST


def test_the_baseline_of_images_is_knn_on_centered_pixels() -> None:
    found = knn_evaluator().baseline(CPU)["baseline_knn_top1"]
    assert found == pytest.approx(expected_accuracy(bank=range(NUM_TEST, 60), k=7, temperature=0.07))
    assert 0.4 < found < 1


def test_the_baseline_reads_a_part_of_a_large_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_rows, positions in ((38, [*range(19), *range(20, 39)]), (2, [0, 38])):
        monkeypatch.setattr("raycl.training.evaluators.MAX_PIXEL_ROWS", num_rows)
        found = knn_evaluator().baseline(CPU)["baseline_knn_top1"]
        bank = [NUM_TEST + each for each in positions]
        assert found == pytest.approx(expected_accuracy(bank=bank, k=7, temperature=0.07))


def test_documents_without_a_word_have_no_baseline() -> None:
    config = small_config()
    rows = rows_of(config, {"query": ["a", "b"], "document": ["!", "?"]})
    judge = RetrievalEvaluator(
        bank=rows, test=rows, transform=PairTransform(), tokenizer=vocabulary().tokenizer
    )
    assert judge.baseline(CPU) == {}


def queries_and_documents() -> tuple[list[str], list[str]]:
    """Return documents, and queries of some words of them or of none."""
    documents = clicks(80, num_negatives=[0], seed=1)["document"]
    return [" ".join(text.split()[: row % 4]) or "zzz" for row, text in enumerate(documents)], documents


def retrieval_evaluator() -> RetrievalEvaluator:
    config, (queries, documents) = small_config(), queries_and_documents()
    rows = rows_of(config, {"query": queries, "document": documents})
    bank, test = rows.where(lambda ids: ids >= 40), rows.where(lambda ids: ids < 40)
    return RetrievalEvaluator(
        bank=bank, test=test, transform=PairTransform(), tokenizer=vocabulary().tokenizer
    )


def words_of(text: str, max_length: int) -> list[str]:
    """Return the words of a text after it is cut to its first tokens."""
    tokenizer = vocabulary().tokenizer
    return re.findall(r"\w+", tokenizer.decode(tokenizer.encode([text], max_length))[0].lower())


def expected_recall(*, k: int) -> tuple[float, float]:
    """Score all documents by the formula of BM25, one by one; return the recall if ties come first, and if last."""
    lengths, (queries, documents) = small_config().text, queries_and_documents()
    max_length = lengths.max_document_length or lengths.max_length
    seen = [tuple(words_of(text, max_length)) for text in documents]
    words = set(seen)
    mean = sum(map(len, words)) / len(words)
    num_with = Counter(word for each in words for word in set(each))
    first = last = 0
    for query, document in zip(queries[:40], seen[:40], strict=True):
        scores = dict.fromkeys(words, 0.0)
        for word in words_of(query, lengths.max_length):
            weight = math.log(1 + (len(words) - num_with[word] + 0.5) / (num_with[word] + 0.5))
            for each in words:
                count, length = each.count(word), 1 - 0.75 + 0.75 * len(each) / mean
                scores[each] += weight * count / (count + 1.2 * length)
        own = scores[document]
        first += own > 0 and sum(score > own + 1e-6 for score in scores.values()) < k
        last += own > 0 and sum(score > own - 1e-6 for score in scores.values()) <= k
    return first / 40, last / 40


def test_the_baseline_of_texts_is_the_recall_of_bm25() -> None:
    found = retrieval_evaluator().baseline(CPU)
    for k in (1, 10):
        first, last = expected_recall(k=k)
        assert last <= found[f"baseline_recall_at_{k}"] <= first < last + 0.15
    assert 0.3 < found["baseline_recall_at_1"] < found["baseline_recall_at_10"] < 0.8


def test_a_query_without_a_known_word_finds_nothing() -> None:
    config = small_config()
    rows = rows_of(config, {"query": ["?", "!"], "document": ["one word", "another"]})
    judge = RetrievalEvaluator(
        bank=rows, test=rows, transform=PairTransform(), tokenizer=vocabulary().tokenizer
    )
    assert set(judge.baseline(CPU).values()) == {0.0}


def baselines(rank: int, num_workers: int) -> dict[str, float]:
    return knn_evaluator().baseline(CPU) | retrieval_evaluator().baseline(CPU)


def test_several_workers_share_the_queries_of_the_baseline() -> None:
    alone = baselines(0, 1)
    assert set(map(str, run_workers(baselines, 2))) == {str(alone)}


def test_captions_and_texts_without_pairs_have_no_baseline() -> None:
    judge, texts = knn_evaluator(), retrieval_evaluator()
    assert RetrievalEvaluator(bank=judge.bank, test=judge.test, transform=judge.transform).baseline(CPU) == {}
    assert KnnEvaluator(bank=texts.bank, test=texts.test, transform=texts.transform).baseline(CPU) == {}


@pytest.mark.parametrize(("value", "is_reported"), [(0.8, True), (0.5, True), (0.81, False)])
def test_an_encoder_that_is_not_better_than_the_baseline_is_reported(value: float, is_reported: bool) -> None:
    lines: list[str] = []
    for recipe, name in (("simclr", "knn_top1"), ("two_tower", "recall_at_10")):
        final = {name: value, f"baseline_{name}": 0.8}
        _warn_of_baseline(recipe_of(recipe), final, lines.append)
        _warn_of_baseline(recipe_of(recipe), {name: value}, lines.append)
    assert len(lines) == 2 * is_reported
    if is_reported:
        assert f"raw pixels on held-out rows: knn_top1 {value:.3f} and 0.800" in lines[0]
        assert f"BM25 on held-out rows: recall_at_10 {value:.3f} and 0.800" in lines[1]
        assert all(line.endswith("; train longer (--epochs)") for line in lines)


@pytest.mark.parametrize("value", [1.0, 0.7])
def test_a_perfect_baseline_is_no_reason_to_train_longer(value: float) -> None:
    lines: list[str] = []
    final = {"recall_at_10": value, "baseline_recall_at_10": 1.0}
    _warn_of_baseline(recipe_of("two_tower"), final, lines.append)
    (line,) = lines
    assert line.endswith(
        f"recall_at_10 {value:.3f} and 1.000; no encoder can be, as these rows are too easy or too few"
    )


def remarks_of(recipe: str, losses: Sequence[float], output: Path) -> list[str]:
    """Return the remarks on the task of a run that logs the loss of every fifth step."""
    lines = [{"step": 0, "embedding_std": 0.1}]
    lines += [{"step": 5 * number + 5, "loss": loss} for number, loss in enumerate(losses)]
    (output / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    coordinator, printed = MagicMock(), list[str]()
    _warn_of_solved_task(recipe_of(recipe), Place(str(output)), _noticing(printed.append, coordinator))
    assert printed == [each.args[0] for each in coordinator.add_notice.remote.call_args_list]
    return printed


@pytest.mark.parametrize(
    ("recipe", "advice"),
    [
        ("simcse", "lists of equivalent texts, a teacher (loss distillation), or another encoder"),
        ("simclr", "(augment.*)"),
        ("two_tower", "harder negatives, such as those of raycl mine"),
        ("clip", "harder negatives, such as those of raycl mine"),
    ],
)
def test_a_task_that_is_solved_is_reported_with_a_harder_one(
    recipe: str, advice: str, tmp_path: Path
) -> None:
    (line,) = remarks_of(recipe, [0.5] * 90 + [2e-5] * 9 + [0.3], tmp_path)
    assert line.startswith(
        "the median loss of the last tenth of the steps is below 0.0001: the task is already solved"
    )
    assert advice in line


@pytest.mark.parametrize(
    ("recipe", "losses"),
    [
        ("simcse", [1e-5] * 91 + [2e-4] * 9),  # learned again
        ("simcse", [0.5]),
        ("simcse", []),
        ("sogclr", [-2.0] * 100),  # a loss that may be below 0
    ],
)
def test_a_task_that_is_not_solved_is_not_reported(recipe: str, losses: list[float], tmp_path: Path) -> None:
    assert remarks_of(recipe, losses, tmp_path) == []


def test_a_damaged_log_leaves_the_result_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{")
    _warn_of_solved_task(recipe_of("simcse"), Place(str(tmp_path)), print)


def job_of(holdout: Any, **others: Any) -> Any:
    job: Any = SimpleNamespace(
        is_evaluated=True, holdout=holdout, evaluation=None, **{"coordinator": MagicMock()} | others
    )
    job.load_evaluation_rows = partial(Job.load_evaluation_rows, job)
    return job


@pytest.mark.parametrize(("labels", "says"), [([1, -1], True), ([1, 0], False)])
def test_a_run_on_one_class_has_no_periodic_knn_and_says_so(labels: list[int], says: bool) -> None:
    ids = np.arange(40)
    table = pa.table({"sample_id": ids, "label": np.array(labels)[ids // 2 % 2]})
    holdout = SimpleNamespace(is_reference=lambda ids: ids % 2 == 0, is_test=lambda ids: ids % 2 == 1)
    job = job_of(holdout)
    evaluator = build_evaluator(job, recipe_of("simclr"), InMemoryDataset([table], {}), MagicMock())
    notices = job.coordinator.add_notice.remote.call_args_list
    assert (evaluator is None, len(notices)) == (says, int(says))
    assert not says or notices[0].args == ("all labels are 1 (a negative one is missing): no periodic kNN",)


@pytest.mark.parametrize("num_held_out", [0, 1])
def test_a_run_with_too_few_held_out_rows_has_no_periodic_knn_and_says_so(num_held_out: int) -> None:
    table = pa.table({"sample_id": np.arange(40), "label": np.arange(40) % 2})
    holdout = SimpleNamespace(
        is_reference=lambda ids: ids >= num_held_out, is_test=lambda ids: ids < num_held_out
    )
    job = job_of(holdout)
    evaluator = build_evaluator(job, recipe_of("simclr"), InMemoryDataset([table], {}), MagicMock())
    notices = [each.args for each in job.coordinator.add_notice.remote.call_args_list]
    says = "0 held-out labeled rows and 40 to compare them with are too few for 1 worker: no periodic kNN"
    assert (evaluator is None, notices) == ((False, []) if num_held_out else (True, [(says,)]))


def test_the_next_group_of_workers_does_not_repeat_why_a_run_is_not_evaluated() -> None:
    coordinator = RunCoordinator()
    add_notice = SimpleNamespace(remote=coordinator.add_notice)
    table = pa.table({"sample_id": np.arange(4), "label": np.zeros(4, np.int64)})
    holdout = SimpleNamespace(is_reference=lambda ids: ids < 2, is_test=lambda ids: ids >= 2)
    job = job_of(holdout, coordinator=SimpleNamespace(add_notice=add_notice))
    for _ in range(2):
        build_evaluator(job, recipe_of("simclr"), InMemoryDataset([table], {}), MagicMock())
    assert coordinator.notices() == ["all labels are 0 (a negative one is missing): no periodic kNN"]
    for _ in range(2):  # an event, which may recur
        coordinator.add_notice("no worker answers")
    assert coordinator.notices()[1:] == ["no worker answers"] * 2


def test_held_out_pairs_that_are_trained_on_are_not_evaluated() -> None:
    config = small_config()
    #                 trained      held out
    queries = [*"aabc", *"abbad"]
    documents = [*"xyyz", *"xxyyz"]
    rows = rows_of(config, {"query": queries, "document": documents})
    holdout = SimpleNamespace(
        is_train=lambda ids: ids < 4, is_reference=lambda ids: ids < 3, is_test=lambda ids: ids >= 4
    )
    job = job_of(holdout, tokenizer=vocabulary().tokenizer)
    evaluator = build_evaluator(job, config, rows, PairTransform())
    assert isinstance(evaluator, RetrievalEvaluator)
    assert evaluator.test.sample_id.tolist() == [5, 8]
    (notice,) = job.coordinator.add_notice.remote.call_args_list
    assert notice.args == ("3 of 5 held-out pairs are training pairs as well, and are not evaluated",)
    assert notice.kwargs == {"once": True}
