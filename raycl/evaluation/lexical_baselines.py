"""Retrieval by shared words: TF-IDF from scikit-learn and BM25 from bm25s."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import bm25s
import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer

from raycl.errors import DataError
from raycl.evaluation.search import Ranking, pair_numbers, ranking_width

# Chinese characters and hiragana, written without spaces between words.
_UNSPACED = "\u3041-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003fffd"
# Marks, such as vowel signs of Hindi and Thai, belong to the letter before them, and so do variation selectors and the
# joiners of Persian: the words of Unicode's UTS 18. Python's \w lacks them.
_CATEGORIES = "".join(unicodedata.category(chr(code))[0] for code in range(0x1F000))
_MARKS = "".join(f"{chr(run.start())}-{chr(run.end() - 1)}" for run in re.finditer("M+", _CATEGORIES))
_MARK = rf"[{_MARKS}\u200c\u200d\U000e0100-\U000e01ef]"
# Unlike scikit-learn's default, this keeps words of one character: "vitamin C", "type 2".
_WORD = rf"[{_UNSPACED}]{_MARK}*|[^\W{_UNSPACED}]+(?:{_MARK}+[^\W{_UNSPACED}]*)*"
_CELLS = 2**22  # of the dense block of queries by documents, 32 MB

Excluded = NDArray[np.integer] | None


def tfidf_search(
    queries: Sequence[str], documents: Sequence[str], *, k: int, excluded: Excluded = None
) -> Ranking:
    """Find the ``k`` documents nearest to each query by the cosine of TF-IDF.

    Words are runs of letters with their marks, digits and underscores, in lower case and NFC, and single
    Chinese characters and hiragana, as in Lucene's standard tokenizer. A word weighs 1 + log(count) times
    its inverse document frequency in ``documents``. ``excluded`` is [num_excluded, 2], positions of a query
    and of a document that it must not find.

    Returns a ranking as ``raycl.evaluation.search.search`` does, without documents that share no word with
    the query: -inf and -1 fill their places. Raises ``ConfigError`` for k below 1, ``DataError``
    without a query, a document or a word.
    """
    width = ranking_width(k, len(queries), len(documents))
    known = pair_numbers(excluded, len(documents))
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

    k1 is 1.2, b is 0.75, and the inverse document frequency is Lucene's, which is always positive. The
    similarity is the BM25 score. Words, arguments and errors as in ``tfidf_search``.
    """
    width = ranking_width(k, len(queries), len(documents))
    known = pair_numbers(excluded, len(documents))
    words = _vectorizer().build_analyzer()
    number: dict[str, int] = {}
    tokens = [[number.setdefault(word, len(number)) for word in words(document)] for document in documents]
    if not number:
        raise _no_word("documents", len(documents))
    index = bm25s.BM25(k1=1.2, b=0.75, method="lucene")
    index.index((tokens, number), create_empty_token=False, show_progress=False)

    def scores() -> Iterator[NDArray[np.floating]]:
        for query in queries:
            yield index.get_scores_from_ids([number[word] for word in words(query) if word in number])

    return _ranking(scores(), (len(queries), len(documents)), width, known)


def tfidf_similarity(left: Sequence[str], right: Sequence[str], corpus: Sequence[str]) -> NDArray[np.float64]:
    """Return the cosine of TF-IDF of each pair of texts, [num_pairs], 0 to 1.

    Words are weighted as in ``tfidf_search``, with document frequencies in ``corpus``; a word outside it
    counts as the rarest. A text without words has similarity 0. Raises ``DataError`` if no text has a word.
    """
    # Only words of the pairs matter, and the corpus may lack some of them.
    vocabulary = _fitted([*left, *right], "pairs").vocabulary_
    vectorizer = _vectorizer(vocabulary).fit(corpus)
    product = vectorizer.transform(left).multiply(vectorizer.transform(right))
    return np.asarray(product.sum(axis=1), dtype=np.float64).ravel()


def _vectorizer(vocabulary: dict[str, int] | None = None) -> TfidfVectorizer:
    return TfidfVectorizer(
        token_pattern=_WORD, preprocessor=_normalized, sublinear_tf=True, vocabulary=vocabulary
    )


def _normalized(text: str) -> str:
    return unicodedata.normalize("NFC", text.lower())


def _fitted(texts: Sequence[str], name: str) -> TfidfVectorizer:
    words = _vectorizer().build_analyzer()
    if not any(words(text) for text in texts):  # stops at the first word
        raise _no_word(name, len(texts))
    return _vectorizer().fit(texts)


def _no_word(name: str, num_texts: int) -> DataError:
    return DataError(
        f"the {name} have no words: got {num_texts} texts without a letter or a digit; check the text column"
    )


def _ranking(
    scores: Iterable[NDArray[np.floating]], shape: tuple[int, int], width: int, known: NDArray[np.int64]
) -> Ranking:
    """Rank the documents by the scores of successive queries, each [num_documents]."""
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
    """Return the positions of the highest positive scores, best first, ties in order of position."""
    found = np.flatnonzero(row > 0)
    if len(found) > width:
        last = np.partition(row[found], -width)[-width]
        better, equal = found[row[found] > last], found[row[found] == last]
        found = np.concatenate([better, equal[: width - len(better)]])
    return found[np.argsort(-row[found], kind="stable")]
