"""Evaluation by retrieval: queries to documents, or images to captions and back."""

from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import normalize

from raycl.data.columns import ColumnNames
from raycl.display import EvaluationResult
from raycl.errors import ConfigError
from raycl.evaluation.lexical_baselines import bm25_search, tfidf_search, tfidf_similarity
from raycl.evaluation.metrics import average_precision, retrieval_scores
from raycl.evaluation.retrieval_task import Task, image_task, judged_task, pair_task
from raycl.evaluation.search import search
from raycl.inference.embed import embed_values
from raycl.inference.encoder import read_encoders
from raycl.models.encoder_io import SavedEncoder

DEPTH = 100  # of rankings: MRR and MAP ignore documents below


def evaluate_retrieval(
    *,
    run: str,
    test: str,
    train: str | None = None,
    columns: ColumnNames | None = None,
    queries: str | None = None,
    documents: str | None = None,
    baseline: bool = True,
    examples: int = 0,
    gpu: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> EvaluationResult:
    """Rank all documents of ``test`` and ``train`` for each query of ``test``.

    A set holds pairs of query and document, with an optional label: 0 for no match, 1 and above for
    grades of relevance. A query ignores the documents that match it in ``train``, and its own text. Or a
    set holds images with captions: then both directions are evaluated within ``test``, and one caption of
    an image is enough for its recall. For a benchmark with judgments, give the sets ``queries``
    (``query_id``, ``query``) and ``documents`` (``document_id``, ``document``), and both ids with the
    label in ``test``.

    Returns ``recall_at_1``, ``recall_at_5``, ``recall_at_10``, ``ndcg_at_10``, ``mrr`` and ``map``;
    ``average_precision`` over the pairs of ``test`` if they have labels of both kinds; the numbers of rows
    ``num_train``, ``num_test`` and ``num_invalid``; and for texts the same metrics of TF-IDF and BM25 as
    ``baseline``. ``examples`` adds that many queries with their nearest documents. Raises ``DataError`` if a
    column is missing or nothing is relevant; ``ConfigError`` if only one of ``queries`` and ``documents``
    is given, or ``train`` beside them, or for images any set beside ``test``, or if the run has an encoder
    of images but none of captions.
    """
    names = columns or ColumnNames()
    options: dict[str, Any] = {"gpu": gpu, "address": address, "quiet": quiet, "debug": debug}
    if (queries is None) != (documents is None):
        missing = "queries" if queries is None else "documents"
        raise ConfigError(
            f"judgments need both sets, and {missing} is missing: give --set {missing}=URI as well"
        )
    if queries is not None and train is not None:
        raise ConfigError("judgments are about the sets of queries and documents alone; leave out --train")
    encoders = read_encoders(run, ["query", "key"])
    if encoders[0].takes_images:
        if encoders[1].takes_images:
            raise ConfigError(
                f"the run at {run} has an encoder of images and none of captions; use knn or linear"
            )
        if train is not None or queries is not None:
            raise ConfigError(
                "images and captions are ranked within the set of --test alone; leave the other sets out"
            )
        scores = _evaluate_images(image_task(test, names), encoders, options)
    else:
        if queries is not None and documents is not None:
            task = judged_task(test, queries, documents, names)
        else:
            task = pair_task(test, train, names)
        scores = _evaluate_texts(task, encoders, options, baseline=baseline, examples=examples)
    return EvaluationResult({"measure": "retrieval", **scores})


def _evaluate_images(task: Task, encoders: list[SavedEncoder], options: dict[str, Any]) -> dict[str, Any]:
    image, caption = _embed(task, encoders, options)
    reverse = task.reversed()
    directions = {
        "query_to_document": _scores(task, image, caption, any_is_enough=True),
        "document_to_query": _scores(reverse, caption[task.relevant_documents()], image, any_is_enough=True),
    }
    scores = {
        f"{direction}_{name}": value for direction, each in directions.items() for name, value in each.items()
    }
    return scores | task.sizes


def _evaluate_texts(
    task: Task, encoders: list[SavedEncoder], options: dict[str, Any], *, baseline: bool, examples: int
) -> dict[str, Any]:
    query, document = _embed(task, encoders, options)
    result: dict[str, Any] = dict(_scores(task, query, document))
    if task.labeled is not None:
        similarity = (normalize(query)[task.labeled[:, 0]] * normalize(document)[task.labeled[:, 1]]).sum(1)
        result["average_precision"] = average_precision(similarity.numpy(), task.labeled[:, 2])
    result |= task.sizes
    if baseline:
        result["baseline"] = _lexical_baseline(task)
    if examples:
        result["examples"] = _examples(task, query, document, examples)
    return result


def _embed(task: Task, encoders: list[SavedEncoder], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    query = embed_values(task.queries, encoders[0], title="embedding the queries", **options)
    document = embed_values(task.documents, encoders[1], title="embedding the documents", **options)
    return query, document


def _scores(task: Task, query: Tensor, document: Tensor, *, any_is_enough: bool = False) -> dict[str, float]:
    _, ranked = search(query, document, k=DEPTH, excluded=task.excluded)
    return retrieval_scores(ranked, task.relevance, any_is_enough=any_is_enough)


def _lexical_baseline(task: Task) -> dict[str, Any]:
    baseline: dict[str, Any] = {}
    for name, find in (("tfidf", tfidf_search), ("bm25", bm25_search)):
        _, ranked = find(task.queries, task.documents, k=DEPTH, excluded=task.excluded)
        baseline[name] = retrieval_scores(ranked, task.relevance)
    if task.labeled is not None:
        query = [task.queries[number] for number in task.labeled[:, 0]]
        document = [task.documents[number] for number in task.labeled[:, 1]]
        similarity = tfidf_similarity(query, document, [*task.queries, *task.documents])
        baseline["tfidf"]["average_precision"] = average_precision(similarity, task.labeled[:, 2])
    return baseline


def _examples(task: Task, query: Tensor, document: Tensor, num: int) -> list[dict[str, Any]]:
    """Return evenly spaced queries, each with its five nearest documents and whether they match."""
    chosen = np.linspace(0, len(task.queries) - 1, min(num, len(task.queries))).astype(np.int64)
    similarity, ranked = search(query[chosen], document, k=5)
    matches = {(q, d) for q, d, grade in task.relevance.tolist() if grade > 0}
    return [
        {
            "query": task.queries[q],
            "nearest": [
                {
                    "similarity": float(s),
                    "matches": (int(q), int(d)) in matches,
                    "document": task.documents[d],
                }
                for s, d in zip(row_similarity, row, strict=True)
            ],
        }
        for q, row, row_similarity in zip(chosen, ranked, similarity, strict=True)
    ]
