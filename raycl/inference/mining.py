"""Hard negatives: the documents nearest to each query that are not its positives."""

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from raycl.arguments import Address, as_address, check_type
from raycl.data.columns import ColumnNames
from raycl.data.matches import Matches
from raycl.errors import ConfigError, DataError
from raycl.evaluation.search import Ranking, search
from raycl.inference.embed import embed_values
from raycl.inference.encoder import read_encoders
from raycl.inference.preflight import check_inputs, check_mining
from raycl.inference.reading import Values, read_pairs
from raycl.lease import writing_new
from raycl.progress import ProgressLine
from raycl.ray_runtime import connect_cluster, unwrap_ray_errors

QUERIES_PER_TASK = 4_096
ROWS_PER_GROUP = 1_024
_TYPES = {
    "query": pa.string(),
    "document": pa.string(),
    "negatives": pa.list_(pa.string()),
    "query_id": pa.int64(),
    "document_id": pa.int64(),
    "negative_ids": pa.list_(pa.int64()),
    "weight": pa.float64(),
}


@final
@dataclass(frozen=True, kw_only=True)
class Mined:
    """Counts of written pairs, added negatives, candidates that were too near, and invalid rows."""

    num_pairs: int
    num_negatives: int
    num_too_near: int
    num_invalid: int = 0


def mine_negatives(
    run: Address,
    data: Address,
    output: Address,
    *,
    num_negatives: int = 8,
    max_relative_score: float = 0.95,
    columns: ColumnNames | None = None,
    network: nn.Module | None = None,
    gpu: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> Mined:
    """Write the pairs at ``data`` to ``output`` with up to ``num_negatives`` more negatives each.

    Each query searches all documents of ``data``, negatives among them, exactly, with the towers of
    ``run``. Documents known to match the query, by text or by id, are skipped, and so is its own text. A
    document nearer to the query than ``max_relative_score`` times its positive is skipped too, since it may well match
    (Moreira et al., 2024). ``data`` holds pairs with a label, with lists of negatives, or neither.
    ``output`` has ``query``, ``document``, ``negatives``, the ids of ``data`` as integers, and a ``weight`` if
    ``columns`` names one. A run that trained your own module needs it as ``network``. The distinct texts of ``data``
    stay in this process, their embeddings in Ray's object store.

    Raises:
        ConfigError: ``num_negatives`` or ``max_relative_score`` is not positive, the encoder takes images, or the name of
            ``output`` ends as another format than parquet, such as ``.jsonl``.
        StorageError: ``output`` exists.
        DataError: A column is missing, no pair matches, or a repeated pair has several weights.
    """
    run, data, output = as_address("run", run), as_address("data", data), as_address("output", output)
    check_mining(num_negatives, max_relative_score, output)
    check_type("columns", columns, ColumnNames, optional=True)
    check_inputs(run, data=[data], output=output, gpu=gpu, address=address)
    query_encoder, key_encoder = encoders = read_encoders(run, ["query", "key"], network=network)
    for each in encoders:
        each.check(network)  # before the pairs are read
    if query_encoder.takes_images:
        raise ConfigError(f"the run at {run} has an encoder of images; mine needs one of texts")
    with writing_new(output, is_file=True) as place:
        values = read_pairs(data, columns or ColumnNames(), quiet=quiet)
        connect_cluster(address, debug=debug, quiet_core=True)  # tasks search
        pairs = _Pairs(values)
        for line in [] if quiet else pairs.known.notices():
            print(line, file=sys.stderr)
        options: dict[str, Any] = {"network": network, "gpu": gpu, "address": address}
        options |= {"quiet": quiet, "debug": debug}
        query, document = (
            normalize(embed_values(texts, encoder, title=f"embedding the {name}", **options)[0])
            for name, texts, encoder in (
                ("queries", pairs.query.texts, query_encoder),
                ("documents", pairs.document.texts, key_encoder),
            )
        )
        with unwrap_ray_errors():
            k = num_negatives + pairs.known.spare
            ranking = _search_in_tasks(query, document, pairs.known, k=k, gpu=gpu, quiet=quiet)
        rows, columns_of_pairs = torch.from_numpy(pairs.known.positive).unbind(1)
        similarity = (query[rows] * document[columns_of_pairs]).sum(1).numpy()
        counts = Counter[str]()
        with place.create() as sink, pq.ParquetWriter(sink, pairs.schema) as writer:
            for table, some in pairs.with_mined(ranking, similarity, num_negatives, max_relative_score):
                writer.write_table(table)
                counts.update(some)
        return Mined(**counts, num_invalid=values.num_invalid)


@final
class _Pairs:
    """Distinct queries and documents, their matches, and the explicit negatives of each query."""

    def __init__(self, values: Values) -> None:
        by_role = values.by_role
        self.known = Matches[str](
            by_role["query"],
            by_role["document"],
            negatives=by_role.get("negatives"),
            query_ids=by_role.get("query_id"),
            document_ids=by_role.get("document_id"),
            negative_ids=by_role.get("negative_ids"),
            is_negative=(values.label == 0).tolist(),
        )
        self.query, self.document = self.known.query, self.known.document
        self._weights = _weights_of(values)
        names = ["query", "document", "negatives"]
        names += [role for role in ("query_id", "document_id") if role in by_role]
        if "document_id" in by_role and ("negative_ids" in by_role or "negatives" not in by_role):
            names.append("negative_ids")
        if self._weights:
            names.append("weight")
        self.schema = pa.schema({name: _TYPES[name] for name in names})

    def with_mined(
        self, ranking: Ranking, similarity: NDArray[Any], num_negatives: int, max_relative_score: float
    ) -> Iterator[tuple[pa.Table, dict[str, int]]]:
        """Yield a row for each positive pair, with its explicit and its mined negatives, and the counts of ``Mined``.

        ``similarity`` [num_pairs] is the cosine of each positive pair. A table has few rows, since all texts of all
        negatives take far more memory than the distinct texts.
        """
        query, document = self.query, self.document
        for start in range(0, len(self.known.positive), ROWS_PER_GROUP):
            rows, num_mined, num_too_near = [], 0, 0
            positive = self.known.positive[start : start + ROWS_PER_GROUP].tolist()
            for pair, (q, d) in enumerate(positive, start):
                near = [
                    (int(place), float(cosine))
                    for cosine, place in zip(ranking[0][q], ranking[1][q], strict=True)
                    if place >= 0
                ]
                found = self.known.hard_negatives(
                    pair,
                    near,
                    float(similarity[pair]),
                    num_negatives=num_negatives,
                    max_relative_score=max_relative_score,
                )
                num_too_near += found.num_too_near
                num_mined += len(found.mined)
                negatives = [*found.explicit, *found.mined]
                row = {
                    "query": query.texts[q],
                    "document": document.texts[d],
                    "negatives": [document.texts[place] for place in negatives],
                    "query_id": query.entity_ids.get(q),
                    "document_id": document.entity_ids.get(d),
                    "negative_ids": [document.entity_ids.get(place) for place in negatives],
                    "weight": self._weights.get((query.texts[q], document.texts[d])),
                }
                rows.append(row)
            table = pa.Table.from_pylist(rows, self.schema)  # without the columns that it does not have
            yield table, {"num_pairs": len(rows), "num_negatives": num_mined, "num_too_near": num_too_near}


def _weights_of(values: Values) -> dict[tuple[str, str], float]:
    """Return the weight of each positive pair by its texts; raises ``DataError`` if a pair has several weights."""
    found: dict[tuple[str, str], float] = {}
    if "weight" not in values.by_role:
        return found
    columns = (values.by_role[role] for role in ("query", "document", "weight"))
    for query, document, weight, label in zip(*columns, values.label.tolist(), strict=True):
        if label != 0 and found.setdefault((query, document), weight) != weight:
            raise DataError(
                f"the pair of query {query!r} and document {document!r} has the weights "
                f"{found[query, document]:g} and {weight:g}; give all of its rows the same weight"
            )
    return found


def _search_in_tasks(
    query: Tensor, document: Tensor, known: Matches[str], *, k: int, gpu: bool, quiet: bool
) -> Ranking:
    """Search in tasks of some queries each; the tasks of a node share one copy of the documents and of the matches."""
    of_query, of_document = (np.array(each.entity, np.int64) for each in (known.query, known.document))
    shared = [ray.put(each) for each in (document.numpy(), of_document, known.of_entities())]
    task = ray.remote(num_cpus=1, num_gpus=int(gpu))(_find)
    parts = [slice(first, first + QUERIES_PER_TASK) for first in range(0, len(query), QUERIES_PER_TASK)]
    pending = [task.remote(k, gpu, query[part].numpy(), of_query[part], *shared) for part in parts]

    def searched() -> tuple[int, int, str]:
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0, fetch_local=False)
        return min(len(ready) * QUERIES_PER_TASK, len(query)), len(query), "queries"

    with ProgressLine("searching", searched, quiet=quiet):
        found = ray.get(pending)
    similarity, index = zip(*found, strict=True)
    return np.concatenate(similarity), np.concatenate(index)


def _find(
    k: int,
    use_gpu: bool,
    queries: NDArray[Any],
    of_queries: NDArray[Any],
    documents: NDArray[Any],
    of_documents: NDArray[Any],
    matches: NDArray[Any],
) -> Ranking:
    """Search on the task's device; ``matches`` of entities are not found."""
    device = "cuda" if use_gpu else "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arrays from Ray's object store are read-only
        tensors = [torch.from_numpy(each).to(device) for each in (queries, documents)]
    return search(*tensors, k=k, excluded=matches, entities=(of_queries, of_documents))
