"""Floors of raw text: what shared words alone find. TF-IDF by scikit-learn, BM25 by bm25s."""

from collections.abc import Iterable, Iterator, Sequence

import bm25s
import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer

from raycl.errors import DataError
from raycl.evaluation.search import Ranking, pair_numbers, ranking_width

__all__ = ["bm25_search", "tfidf_search", "tfidf_similarity"]

# Words of one letter or digit too, which scikit-learn drops: "vitamin C" and "type 2" need theirs.
_WORD = r"\w+"
_CELLS = 2**22  # of queries times documents that stand dense at once, 32 MB

Excluded = NDArray[np.integer] | None


def tfidf_search(
    queries: Sequence[str], documents: Sequence[str], *, k: int, excluded: Excluded = None
) -> Ranking:
    """Find the ``k`` documents nearest to each query by the cosine of TF-IDF.

    Words are runs of letters, digits and underscores, in lower case; a word counts 1 + log(its
    number) times its inverse document frequency, known from ``documents``. ``excluded`` is
    [num_excluded, 2], positions of a query and of a document that is not to be found for it.

    Returns as ``raycl.evaluation.search.search``, save that a document without a word of the query
    is not found: -inf and -1 stand there. Raises ``ConfigError`` for k below 1, ``DataError`` for
    positions that do not fit, or no query, no document or no word.
    """
    width = ranking_width(k, len(queries), len(documents))
    known = pair_numbers(excluded, len(queries), len(documents))
    vectorizer = _fitted(documents, "documents")
    columns = vectorizer.transform(documents).T.tocsr()  # [num_words, num_documents]
    rows = vectorizer.transform(queries)
    step = max(1, _CELLS // len(documents))

    def scores() -> Iterator[NDArray[np.floating]]:
        for first in range(0, len(queries), step):
            yield from (rows[first : first + step] @ columns).toarray()

    return _ranking(scores(), (len(queries), len(documents)), width, known)


def bm25_search(
    queries: Sequence[str], documents: Sequence[str], *, k: int, excluded: Excluded = None
) -> Ranking:
    """Find the ``k`` best documents of each query by BM25 (Robertson & Zaragoza, 2009).

    k1 is 1.2 and b 0.75, the inverse document frequency is Lucene's, above 0 for every word; the
    similarity returned is the BM25 score. The rest, errors included, as in ``tfidf_search``.
    """
    width = ranking_width(k, len(queries), len(documents))
    known = pair_numbers(excluded, len(queries), len(documents))
    words = _vectorizer().build_analyzer()
    number: dict[str, int] = {}
    cut = [[number.setdefault(word, len(number)) for word in words(document)] for document in documents]
    if not number:
        raise _no_word("documents", len(documents))
    index = bm25s.BM25(k1=1.2, b=0.75, method="lucene")
    index.index((cut, number), create_empty_token=False, show_progress=False)

    def scores() -> Iterator[NDArray[np.floating]]:
        for query in queries:
            yield index.get_scores_from_ids([number[word] for word in words(query) if word in number])

    return _ranking(scores(), (len(queries), len(documents)), width, known)


def tfidf_similarity(left: Sequence[str], right: Sequence[str], corpus: Iterable[str]) -> NDArray[np.float64]:
    """Return the cosine of TF-IDF of each pair of texts, [num_pairs], 0 to 1.

    Words are counted as in ``tfidf_search``, their inverse document frequency is known from
    ``corpus``; a word that it lacks is the rarest of all. A text without a word is similar to
    nothing. Raises ``DataError`` for sides of different length, no pair, no word or no corpus.
    """
    if len(left) != len(right):
        raise DataError(
            f"pairs need two sides of one length, got {len(left)} and {len(right)} texts; "
            "check that both come from the same pairs"
        )
    if len(left) == 0:
        raise DataError("there is no pair to compare: got 0 rows; give a test set that has some")
    # The words of the pairs are all that matter, and the corpus need not hold each of them.
    vocabulary = _fitted([*left, *right], "pairs").vocabulary_
    corpus = list(corpus)
    if not corpus:
        raise DataError("the corpus is empty: got 0 texts; give those that tell rare words from common ones")
    vectorizer = _vectorizer(vocabulary).fit(corpus)
    product = vectorizer.transform(left).multiply(vectorizer.transform(right))
    return np.asarray(product.sum(axis=1), dtype=np.float64).ravel()


def _vectorizer(vocabulary: dict[str, int] | None = None) -> TfidfVectorizer:
    return TfidfVectorizer(token_pattern=_WORD, sublinear_tf=True, vocabulary=vocabulary)


def _fitted(texts: Sequence[str], name: str) -> TfidfVectorizer:
    words = _vectorizer().build_analyzer()
    if not any(words(text) for text in texts):  # looks no further than the first word
        raise _no_word(name, len(texts))
    return _vectorizer().fit(texts)


def _no_word(name: str, num_texts: int) -> DataError:
    return DataError(
        f"the {name} hold no word: got {num_texts} texts without a letter or a digit; check the text column"
    )


def _ranking(
    scores: Iterable[NDArray[np.floating]], shape: tuple[int, int], width: int, known: NDArray[np.int64]
) -> Ranking:
    """Rank the documents by the scores of one query after the other, each [num_documents]."""
    num_queries, num_documents = shape
    similarity = np.full((num_queries, width), -np.inf, dtype=np.float32)
    index = np.full((num_queries, width), -1, dtype=np.int64)
    bounds = np.searchsorted(known, np.arange(num_queries + 1) * num_documents)
    for query, row in enumerate(scores):
        row[known[bounds[query] : bounds[query + 1]] - query * num_documents] = 0
        best = _best(row, width)
        similarity[query, : len(best)], index[query, : len(best)] = row[best], best
    return similarity, index


def _best(row: NDArray[np.floating], width: int) -> NDArray[np.int64]:
    """Return the positions of the highest scores above 0, best first, of equals the lower first."""
    found = np.flatnonzero(row > 0)
    if len(found) > width:
        last = np.partition(row[found], -width)[-width]
        better, equal = found[row[found] > last], found[row[found] == last]
        found = np.concatenate([better, equal[: width - len(better)]])
    return found[np.argsort(-row[found], kind="stable")]
