"""Retrieval scores by relevance, scores of labeled pairs by similarity, and exact search."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from raycl.errors import ConfigError, DataError, RayclError
from raycl.evaluation import knn, metrics
from raycl.evaluation import search as search_module
from raycl.evaluation.knn import nearest
from raycl.evaluation.metrics import average_precision, retrieval_scores
from raycl.evaluation.search import fuse, search
from tests.pretend_gpu import pretend_gpu

Positions = NDArray[np.int64]


def rows(*values: Any) -> Positions:
    return np.array(values, dtype=np.int64)


def plain_scores(ranked: Positions, relevance: Positions) -> dict[str, float]:
    """Score one query at a time, by the textbook formulas."""
    judged: list[dict[str, float]] = []
    for query, row in enumerate(ranked.tolist()):
        grade: dict[int, int] = {}
        for number, document, value in relevance.tolist():
            if number == query and value > 0:
                grade[document] = max(value, grade.get(document, 0))
        if grade:
            judged.append(plain_scores_of_one([d for d in row if d >= 0], grade))
    means = {name: float(np.mean([scores[name] for scores in judged])) for name in judged[0]}
    return means | {"num_queries": len(judged), "num_skipped": len(ranked) - len(judged)}


def plain_scores_of_one(found: list[int], grade: dict[int, int]) -> dict[str, float]:
    def dcg(grades: list[int]) -> float:
        return sum((2**g - 1) / math.log2(place + 2) for place, g in enumerate(grades[:10]))

    hits = [place for place, document in enumerate(found, start=1) if document in grade]
    scores = {f"recall_at_{k}": sum(hit <= k for hit in hits) / len(grade) for k in (1, 5, 10)}
    ideal = dcg(sorted(grade.values(), reverse=True))
    return scores | {
        "ndcg_at_10": dcg([grade.get(document, 0) for document in found]) / ideal,
        "mrr": 1 / hits[0] if hits else 0.0,
        "map": sum(n / hit for n, hit in enumerate(hits, start=1)) / len(grade),
    }


def draw_rankings(seed: int) -> tuple[Positions, Positions]:
    """40 rankings of 60 documents, some truncated, with relevance for most queries, some listed twice."""
    rng = np.random.default_rng(seed)
    ranked = np.stack([rng.permutation(60)[:30] for _ in range(40)])
    for query in range(0, 40, 3):
        ranked[query, rng.integers(0, 30) :] = -1
    relevance = np.stack([rng.integers(0, limit, 400) for limit in (35, 60, 4)], axis=1)
    return ranked, relevance


@pytest.mark.parametrize("seed", range(3))
def test_recall_by_any_document_is_the_share_of_queries_with_a_hit(seed: int) -> None:
    ranked, relevance = draw_rankings(seed)
    scores = retrieval_scores(ranked, relevance, any_is_enough=True)
    relevant = {(query, document) for query, document, grade in relevance.tolist() if grade > 0}
    judged = sorted({query for query, _ in relevant if query < len(ranked)})
    for k in (1, 5, 10):
        found = [any((q, d) in relevant for d in ranked[q, :k].tolist() if d >= 0) for q in judged]
        assert scores[f"recall_at_{k}"] == pytest.approx(np.mean(found))
    plain = retrieval_scores(ranked, relevance)
    assert {name for name in plain if plain[name] != scores[name]} == {
        "recall_at_5",
        "recall_at_10",
        "recall_at_1",
    }


def test_the_scores_of_one_ranking_equal_scores_by_hand() -> None:
    # The ranking has grades 0, 2, 0 and 1; a document of grade 3 is not found.
    scores = retrieval_scores(rows([3, 1, 2, 0]), rows([0, 1, 2], [0, 0, 1], [0, 7, 3]))
    ideal = 7 + 3 / math.log2(3) + 1 / math.log2(4)
    assert scores == pytest.approx(
        {
            "recall_at_1": 0,
            "recall_at_5": 2 / 3,
            "recall_at_10": 2 / 3,
            "ndcg_at_10": (3 / math.log2(3) + 1 / math.log2(5)) / ideal,
            "mrr": 1 / 2,
            "map": (1 / 2 + 2 / 4) / 3,
            "num_queries": 1,
            "num_skipped": 0,
        }
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at_once", [1, 7, 1_024])
def test_scores_equal_the_plain_formulas(seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_QUERIES", at_once)
    ranked, relevance = draw_rankings(seed)
    scores = retrieval_scores(ranked, relevance)
    assert scores["num_skipped"] >= 5  # queries 35 to 39 have no relevance at all
    assert scores == pytest.approx(plain_scores(ranked, relevance), abs=1e-12)


def test_the_given_order_is_scored_regardless_of_document_names() -> None:
    # trec_eval itself breaks this tie by the document's name.
    for first, second in ((9, 10), (10, 9)):
        assert retrieval_scores(rows([first, second]), rows([0, first, 1]))["mrr"] == 1
        assert retrieval_scores(rows([first, second]), rows([0, second, 1]))["mrr"] == 0.5


@pytest.mark.parametrize(
    ("relevance", "words"),
    [
        (rows([0, 1, 11], [0, 0, 1]), "must be 0 to 10, got 1 to 11"),
        (rows([0, 1, -1]), "must be 0 to 10, got -1 to -1"),
        (rows([0, 1, 0]), "none of the 2 queries has a relevant document"),
    ],
)
def test_invalid_relevance_is_named(relevance: Positions, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        retrieval_scores(rows([0, 1], [1, 0]), relevance)
    assert ";" in str(caught.value)  # with the remedy


def test_average_precision_equals_the_textbook_and_ties_share_a_threshold() -> None:
    assert average_precision(np.array([0.9, 0.8, 0.7, 0.6]), rows(1, 0, 1, 0)) == pytest.approx(
        (1 + 2 / 3) / 2
    )
    assert average_precision(np.array([0.5, 0.5, 0.5, 0.5]), rows(1, 0, 0, 0)) == 1 / 4


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_search(
    query: torch.Tensor, documents: torch.Tensor, k: int, excluded: Positions
) -> tuple[NDArray[np.float64], Positions]:
    """Sort the whole matrix stably in float64, without the excluded pairs."""
    similarity = F.normalize(query.double(), dim=1) @ F.normalize(documents.double(), dim=1).T
    similarity[excluded[:, 0], excluded[:, 1]] = -torch.inf
    similarity, index = similarity.sort(dim=1, descending=True, stable=True)
    index[similarity == -torch.inf] = -1
    return similarity[:, :k].numpy(), index[:, :k].numpy()


@pytest.mark.parametrize("k", [1, 4, 17, 50])
@pytest.mark.parametrize("blocks", [(1, 8), (7, 10), (256, 8_192)])
def test_search_equals_a_full_sort_without_excluded_pairs(
    k: int, blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knn, "_CPU_BLOCKS", blocks)
    query, documents = draw(23, 6, seed=0), draw(19, 6, seed=1)
    rng = np.random.default_rng(k)
    excluded = np.stack([rng.integers(0, 20, 60), rng.integers(0, 19, 60)], axis=1)  # with duplicates
    excluded = np.concatenate([excluded, [[22, document] for document in range(18)]])  # all except one
    similarity, index = search(query, documents, k=k, excluded=excluded)
    expected, expected_index = plain_search(query, documents, k, excluded)
    assert similarity.shape == index.shape == (23, min(k, 19))
    np.testing.assert_array_equal(index, expected_index)
    np.testing.assert_allclose(similarity, expected, rtol=0, atol=1e-6)


def test_search_without_exclusions_equals_nearest() -> None:
    query, documents = draw(9, 5, seed=0), draw(40, 5, seed=1)
    similarity, index = nearest(query, documents, k=6)
    found = search(query, documents, k=6)
    np.testing.assert_array_equal(found[0], similarity.numpy())
    np.testing.assert_array_equal(found[1], index.numpy())
    assert search(query.double(), documents, k=6)[0].dtype == np.float64


def test_equal_similarities_keep_the_order_of_positions_after_an_exclusion() -> None:
    _, index = search(torch.ones(2, 3), torch.ones(6, 3), k=3, excluded=rows([1, 0], [1, 2]))
    assert index.tolist() == [[0, 1, 2], [1, 3, 4]]


@pytest.mark.parametrize("blocks", [(3, 8), (256, 8_192)])
def test_excluded_entities_are_the_pairs_of_all_their_queries_and_documents(
    blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knn, "_CPU_BLOCKS", blocks)
    query, documents = draw(23, 6, seed=0), draw(41, 6, seed=1)
    rng = np.random.default_rng(0)
    of_query, of_document = rng.integers(0, 5, 23), rng.integers(0, 9, 41)
    matches = np.unique(rng.integers(0, (5, 9), (14, 2)), axis=0)
    related = {tuple(each) for each in matches.tolist()}
    pairs = [(q, d) for q in range(23) for d in range(41) if (of_query[q], of_document[d]) in related]
    found = search(query, documents, k=30, excluded=matches, entities=(of_query, of_document))
    expected = search(query, documents, k=30, excluded=rows(*pairs))
    assert (found[1] == -1).any()
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[0], expected[0])


def test_a_device_finds_what_a_cpu_finds() -> None:
    query, documents, excluded = draw(23, 6, seed=0), draw(41, 6, seed=1), rows([2, 3], [2, 4], [7, 0])
    expected = search(query, documents, k=5, excluded=excluded)
    with pretend_gpu():
        found = search(query.cuda(), documents.cuda(), k=5, excluded=excluded)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[0], expected[0])


def test_many_exclusions_of_a_query_do_not_widen_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def spy(*tensors: torch.Tensor, k: int, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(k)
        return nearest(*tensors, k=k, mask=mask)

    monkeypatch.setattr(search_module, "nearest", spy)
    search(draw(10, 3, seed=0), draw(20, 3, seed=1), k=2, excluded=rows([5, 1], [5, 2], [5, 7]))
    assert asked == [2]


def plain_fusion(*rankings: list[int]) -> list[int]:
    scores: dict[int, Fraction] = {}
    for ranking in rankings:
        for place, document in enumerate(ranking, 1):
            scores[document] = scores.get(document, Fraction(0)) + Fraction(1, 60 + place)
    places = [
        (place, number, each) for number, ranking in enumerate(rankings) for place, each in enumerate(ranking)
    ]
    order = list(dict.fromkeys(document for _, _, document in sorted(places)))
    return sorted(scores, key=lambda document: (-scores[document], order.index(document)))


@given(
    st.lists(st.tuples(*[st.lists(st.integers(0, 12), unique=True, max_size=7)] * 2), min_size=1, max_size=4)
)
def test_fused_rankings_equal_a_sum_of_fractions(queries: list[tuple[list[int], list[int]]]) -> None:
    one, other = (
        [[*each, *[-1] * (7 - len(each))] for each in rankings] for rankings in zip(*queries, strict=True)
    )
    found = fuse(np.array(one), np.array(other))
    assert found.shape == (len(queries), 14)
    for row, rankings in zip(found, queries, strict=True):
        expected = plain_fusion(*rankings)
        assert row.tolist() == [*expected, *[-1] * (14 - len(expected))]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"k": 0}, ConfigError, "k must be at least 1, got 0; give the number of documents"),
        ({"query": torch.ones(0, 2)}, DataError, "queries and documents, got 0 and 4"),
        ({"documents": torch.ones(0, 2)}, DataError, "queries and documents, got 3 and 0"),
    ],
)
def test_invalid_input_of_the_search_is_named(
    arguments: dict[str, Any], kind: type[RayclError], words: str
) -> None:
    good: dict[str, Any] = {"query": torch.ones(3, 2), "documents": torch.ones(4, 2), "k": 2}
    with pytest.raises(kind, match=words) as caught:
        search(**(good | arguments))
    assert ";" in str(caught.value)
