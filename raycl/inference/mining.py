"""Hard negatives: for each query the documents nearest to it, by an encoder, that are not its positives."""

import warnings
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from raycl.data.columns import ColumnNames
from raycl.errors import ConfigError, DataError
from raycl.evaluation.search import search
from raycl.inference.distinct_texts import DistinctTexts
from raycl.inference.embed_values import Values, embed_values, read_pairs
from raycl.inference.encoder import read_encoders
from raycl.inference.preflight import admit, check_mining
from raycl.lease import writing_new
from raycl.ray_runtime import unwrap_ray_errors

QUERIES_A_TASK = 4_096
SPARE = 50  # looked at as well, since the nearest may be too near


@final
@dataclass(frozen=True, kw_only=True)
class Mined:
    """How many pairs were written, how many negatives were added, how many were too near, or rows broken."""

    num_pairs: int
    num_negatives: int
    num_too_near: int
    num_broken: int = 0


def mine_negatives(
    run: str,
    data: str,
    output: str,
    *,
    num_negatives: int = 8,
    max_relative_score: float = 0.95,
    columns: ColumnNames | None = None,
    gpu: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> Mined:
    """Write the pairs at ``data`` with up to ``num_negatives`` more explicit negatives each, to ``output``.

    The documents of ``data``, negatives among them, are searched exactly for each query, by the towers of
    ``run``. What is known to match the query, by text or by id, and its own text, is no negative; nor is
    a document that is nearer to the query than ``max_relative_score`` times its positive, for it may well match
    (Moreira et al., 2024). ``data`` has pairs with a label, with lists of negatives, or neither;
    ``output`` has ``query``, ``document``, ``negatives``, and the ids that ``data`` has, as numbers. The
    distinct texts of ``data`` are held in this process, their embeddings in Ray's object store.

    Raises:
        ConfigError: ``num_negatives`` or ``max_relative_score`` is not positive, or the run is one of images.
        StorageError: There is something at ``output``.
        DataError: A column is missing, or no pair matches.
    """
    check_mining(num_negatives, max_relative_score)
    admit(run, data=[data], output=output, gpu=gpu, address=address)
    of_queries, of_documents = read_encoders(run, ["query", "key"])
    if of_queries.takes_images:
        raise ConfigError(f"the run at {run} has an encoder of images; mine needs one of texts")
    with writing_new(output, is_file=True) as place:
        values = read_pairs(data, columns or ColumnNames())
        pairs = _Pairs(values)
        options: dict[str, Any] = {"gpu": gpu, "address": address, "quiet": quiet, "debug": debug}
        query = embed_values(pairs.query.texts, of_queries, title="embedding the queries", **options)
        document = embed_values(
            pairs.document.texts, of_documents, title="embedding the documents", **options
        )
        with unwrap_ray_errors():
            found = _search_in_tasks(
                normalize(query), normalize(document), pairs.matching(), k=num_negatives + SPARE
            )
        table, mined = pairs.with_mined(
            found, _similarity(pairs, query, document), num_negatives, max_relative_score
        )
        filesystem, path = place.resolve()
        pq.write_table(table, path, filesystem=filesystem, row_group_size=1_024)
        return replace(mined, num_broken=values.num_broken)


@final
class _Pairs:
    """Distinct queries and documents, which match, and which explicit negatives a query has."""

    def __init__(self, values: Values) -> None:
        by_role, no_ids = values.by_role, [None] * len(values.label)
        asked, answers = by_role["query"], by_role["document"]
        lists = by_role.get("negatives", [[]] * len(asked))
        of_lists = by_role.get("negative_ids", [[None] * len(each) for each in lists])
        self.query = DistinctTexts(asked, by_role.get("query_id", no_ids))
        self.document = DistinctTexts(
            [*answers, *chain.from_iterable(lists)],
            [*by_role.get("document_id", no_ids), *chain.from_iterable(of_lists)],
        )
        self._ids = [role for role in ("query_id", "document_id") if role in by_role]
        if "document_id" in by_role and ("negative_ids" in by_role or "negatives" not in by_role):
            self._ids.append("negative_ids")
        query, document = self.query.number, self.document.number
        rows = list(zip(asked, answers, values.label.tolist(), lists, strict=True))
        positive = [(query[q], document[d]) for q, d, label, _ in rows if label != 0]
        if not positive:
            raise DataError("no pair has label 1; hard negatives are those of queries with a match")
        self.positive = np.array(list(dict.fromkeys(positive)), np.int64)
        own_text = [(number, document[text]) for text, number in query.items() if text in document]
        self._matches: dict[int, set[int]] = {}
        for q, d in [*positive, *own_text]:
            self._matches.setdefault(self.query.thing[q], set()).add(self.document.thing[d])
        self._explicit: dict[int, dict[int, None]] = {}
        for q, d, label, negatives in rows:
            known = self._explicit.setdefault(self.query.thing[query[q]], {})
            known.update(dict.fromkeys([document[d]] if label == 0 else []))
            known.update(dict.fromkeys(document[text] for text in negatives))

    def matching(self) -> NDArray[np.int64]:
        """Return all texts that match, [num_matching, 2], numbers of a query and of a document."""
        alike = self.document.alike()
        pairs = [
            (q, d)
            for q, thing in enumerate(self.query.thing)
            for known in self._matches.get(thing, ())
            for d in alike[known]
        ]
        return np.array(pairs, np.int64)

    def with_mined(
        self,
        found: tuple[NDArray[Any], NDArray[np.int64]],
        similarity: NDArray[Any],
        num_negatives: int,
        max_relative_score: float,
    ) -> tuple[pa.Table, Mined]:
        """Return one row a positive pair, with the explicit negatives and those that were found."""
        rows, num_mined, num_too_near = [], 0, 0
        document = self.document
        for (q, d), own in zip(self.positive.tolist(), similarity.tolist(), strict=True):
            near = [
                (int(place), float(cosine))
                for place, cosine in zip(found[1][q], found[0][q], strict=True)
                if place >= 0
            ]
            fit = [place for place, cosine in near if cosine <= max_relative_score * own]
            num_too_near += len(near) - len(fit)
            thing = self.query.thing[q]
            explicit = document.distinct(
                place for place in self._explicit[thing] if document.thing[place] not in self._matches[thing]
            )
            negatives = document.distinct([*explicit, *fit])[: len(explicit) + num_negatives]
            num_mined += len(negatives) - len(explicit)
            row = {
                "query": self.query.texts[q],
                "document": document.texts[d],
                "negatives": [document.texts[place] for place in negatives],
                "query_id": self.query.ids.get(q),
                "document_id": document.ids.get(d),
                "negative_ids": [document.ids.get(place) for place in negatives],
            }
            rows.append({name: row[name] for name in ("query", "document", "negatives", *self._ids)})
        return pa.Table.from_pylist(rows), Mined(
            num_pairs=len(rows), num_negatives=num_mined, num_too_near=num_too_near
        )


def _similarity(pairs: _Pairs, query: Tensor, document: Tensor) -> NDArray[Any]:
    """Return the cosine of each positive pair, [num_pairs]."""
    rows, columns = torch.from_numpy(pairs.positive).unbind(1)
    return (normalize(query)[rows] * normalize(document)[columns]).sum(1).numpy()


def _search_in_tasks(
    query: Tensor, document: Tensor, matching: NDArray[np.int64], *, k: int
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Search some queries a task; all tasks of a node read the same documents."""
    held = ray.put(document.numpy())

    def find(rows: NDArray[Any], documents: NDArray[Any], known: NDArray[np.int64]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's memory may not be written to, and is not
            return search(torch.from_numpy(rows), torch.from_numpy(documents), k=k, excluded=known)

    task = ray.remote(num_cpus=1)(find)
    parts = []
    for first in range(0, len(query), QUERIES_A_TASK):
        inside = (matching[:, 0] >= first) & (matching[:, 0] < first + QUERIES_A_TASK)
        known = matching[inside] - np.array([first, 0])
        parts.append(task.remote(query[first : first + QUERIES_A_TASK].numpy(), held, known))
    found = ray.get(parts)
    return np.concatenate([part[0] for part in found]), np.concatenate([part[1] for part in found])
