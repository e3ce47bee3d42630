"""Lexical baselines: TF-IDF and BM25 against the textbook formulas."""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from raycl.errors import ConfigError, DataError, RayclError
from raycl.evaluation import lexical_baselines
from raycl.evaluation.lexical_baselines import bm25_search, tfidf_search, tfidf_similarity

EvaluationResult = NDArray[np.float64]
WORDS = ("cat", "dog", "c", "7", "mat", "sat", "über", "the", "a", "on", "fish", "tree")


def draw_texts(num_texts: int, seed: int) -> list[str]:
    """Return texts of 1 to 9 common and rare words, in upper and lower case, with punctuation."""
    rng = np.random.default_rng(seed)
    weight = 1 / np.arange(1, len(WORDS) + 1)
    texts: list[str] = []
    for _ in range(num_texts):
        chosen = rng.choice(WORDS, rng.integers(1, 10), p=weight / weight.sum()).tolist()
        texts.append("-".join(word.upper() if rng.random() < 0.3 else word for word in chosen) + " !?")
    return texts


def count(text: str) -> Counter[str]:
    return Counter(text.lower().replace("-", " ").replace("!?", "").split())


def plain_vectors(texts: Sequence[str], corpus: Sequence[str]) -> list[dict[str, float]]:
    """Unit vectors of (1 + log count) * (1 + log((1 + n) / (1 + df)))."""
    df = Counter(word for text in corpus for word in count(text))
    vectors: list[dict[str, float]] = []
    for text in texts:
        idf = {word: 1 + math.log((1 + len(corpus)) / (1 + df[word])) for word in count(text)}
        vector = {word: (1 + math.log(number)) * idf[word] for word, number in count(text).items()}
        norm = math.sqrt(sum(value**2 for value in vector.values()))
        vectors.append({word: value / norm for word, value in vector.items()})
    return vectors


def dot(left: dict[str, float], right: dict[str, float]) -> float:
    return sum(value * right.get(word, 0) for word, value in left.items())


def plain_tfidf(queries: Sequence[str], documents: Sequence[str]) -> EvaluationResult:
    known = {word for text in documents for word in count(text)}
    kept = [" ".join(word for word in count(text).elements() if word in known) for text in queries]
    columns = plain_vectors(documents, documents)
    return np.array([[dot(row, column) for column in columns] for row in plain_vectors(kept, documents)])


def plain_bm25(queries: Sequence[str], documents: Sequence[str]) -> EvaluationResult:
    counts = [count(document) for document in documents]
    df = Counter(word for each in counts for word in each)
    mean_length = sum(each.total() for each in counts) / len(counts)

    def score(query: str, document: Counter[str]) -> float:
        length = 1.2 * (0.25 + 0.75 * document.total() / mean_length)
        return sum(
            math.log(1 + (len(counts) - df[word] + 0.5) / (df[word] + 0.5))
            * document[word]
            / (document[word] + length)
            for word in count(query).elements()
        )

    return np.array([[score(query, each) for each in counts] for query in queries])


def plain_ranking(
    scores: EvaluationResult, k: int, excluded: NDArray[np.int64]
) -> tuple[EvaluationResult, NDArray[np.int64]]:
    scores = scores.copy()
    scores[excluded[:, 0], excluded[:, 1]] = 0
    # Rounded, so that the order of summation does not break ties.
    index = np.argsort(-np.round(scores, 5), axis=1, kind="stable")[:, :k]
    similarity = np.take_along_axis(scores, index, axis=1)
    return np.where(similarity > 0, similarity, -np.inf), np.where(similarity > 0, index, -1)


SEARCHES = [(tfidf_search, plain_tfidf), (bm25_search, plain_bm25)]
both_searches = pytest.mark.parametrize("search", [tfidf_search, bm25_search])


@pytest.mark.parametrize(("search", "plain"), SEARCHES)
@pytest.mark.parametrize("k", [1, 5, 60])
@pytest.mark.parametrize("cells", [1, 100, 2**22])
def test_lexical_search_equals_the_plain_formula(
    search: Callable[..., Any],
    plain: Callable[..., EvaluationResult],
    k: int,
    cells: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lexical_baselines, "_CELLS", cells)
    documents, queries = draw_texts(40, seed=0), [*draw_texts(15, seed=1), "a cat nobody knows"]
    rng = np.random.default_rng(2)
    excluded = np.stack([rng.integers(0, 16, 50), rng.integers(0, 40, 50)], axis=1)
    similarity, index = search(queries, documents, k=k, excluded=excluded)
    expected, expected_index = plain_ranking(plain(queries, documents), k, excluded)
    assert similarity.shape == index.shape == (16, min(k, 40))
    np.testing.assert_allclose(similarity, expected, rtol=1e-5)
    np.testing.assert_array_equal(index, expected_index)


@both_searches
def test_a_document_without_a_word_of_the_query_is_not_found(search: Callable[..., Any]) -> None:
    documents = ["a dog", "the cat sat", "cat", ""]
    similarity, index = search(["cat", "unheard of", "", "?!"], documents, k=3)
    assert index.tolist() == [[2, 1, -1], [-1] * 3, [-1] * 3, [-1] * 3]
    assert (np.isinf(similarity) == (index == -1)).all()


@both_searches
def test_texts_without_spaces_are_found_by_their_characters(search: Callable[..., Any]) -> None:
    documents = ["高血圧の薬と副作用", "红色的运动鞋v2", "蓝色的帽子", "カタカナ 한국어"]
    queries = ["红鞋", "くすりの副作用", "V2", "帽", "カナ", "한국"]
    _, found = search(queries, documents, k=1)
    assert found[:, 0].tolist() == [1, 0, 1, 2, -1, -1]


@both_searches
def test_a_letter_keeps_its_marks(search: Callable[..., Any]) -> None:
    documents = [
        "हिन्दी की किताब",
        "ภาษา ไทยที่ดี",
        "un cafe\u0301",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "\u062e\u0648\u0627 \u0647\u0645 \u0645\u06cc",
    ]
    queries = [
        "किताब",
        "ไทยที่ดี",
        "caf\u00e9",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "क त ब ภ าษา e cafe",
    ]  # the last has no word of them
    _, found = search(queries, documents, k=2)
    assert found[:, 0].tolist() == [0, 1, 2, 3, -1]
    assert (found[:, 1] == -1).all()


def test_words_are_those_of_the_library_tokenizers() -> None:
    texts = [
        "हिन्दी की किताब, क्षत्रिय!",
        "ภาษาไทยที่ดี และ",
        "Cafe\u0301 na\u00efve \u0130stanbul x_1",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u06a9\u0650\u062a\u0627\u0628",
    ]
    words = lexical_baselines._vectorizer().build_analyzer()
    for text in texts:
        seen = unicodedata.normalize("NFC", text.lower())
        expected = [word for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(seen)]
        assert words(text) == [word for word in expected if word.isidentifier() or word[0].isalnum()]


@both_searches
def test_equal_documents_are_ordered_by_position(search: Callable[..., Any]) -> None:
    documents = ["dog", "cat sat", "cat", "cat", "dog", "cat", "cat"]
    assert search(["cat"], documents, k=3)[1].tolist() == [[2, 3, 5]]
    assert search(["cat"], documents, k=3, excluded=np.array([[0, 3]]))[1].tolist() == [[2, 5, 6]]
    assert search(["cat"], documents, k=9)[1].tolist() == [[2, 3, 5, 6, 1, -1, -1]]


@both_searches
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"k": 0}, ConfigError, "k must be at least 1, got 0"),
        ({"queries": []}, DataError, "queries and documents, got 0 and 2"),
        ({"documents": []}, DataError, "queries and documents, got 1 and 0"),
        ({"documents": ["", "?!"]}, DataError, "the documents have no words: got 2 texts"),
    ],
)
def test_invalid_input_to_the_search_is_named(
    search: Callable[..., Any], arguments: dict[str, Any], kind: type[RayclError], words: str
) -> None:
    good: dict[str, Any] = {"queries": ["cat"], "documents": ["cat", "dog"], "k": 1}
    with pytest.raises(kind, match=words) as caught:
        search(**(good | arguments))
    assert ";" in str(caught.value)  # and the remedy


def test_the_similarity_of_pairs_equals_the_plain_formula() -> None:
    left, right, corpus = draw_texts(30, seed=0), draw_texts(30, seed=1), draw_texts(50, seed=2)
    corpus = [text for text in corpus if "fish" not in text.lower()]  # a word missing from the corpus
    assert any("fish" in text.lower() for text in left)
    similarity = tfidf_similarity(left, right, corpus)
    vectors = zip(plain_vectors(left, corpus), plain_vectors(right, corpus), strict=True)
    np.testing.assert_allclose(similarity, [dot(*pair) for pair in vectors], atol=1e-12)
    assert similarity.dtype == np.float64


def test_pairs_without_a_word_are_refused() -> None:
    with pytest.raises(DataError, match=r"the pairs have no words: got 4 texts.*; check the text column"):
        tfidf_similarity(["", "-"], ["?", ""], ["cat"])
