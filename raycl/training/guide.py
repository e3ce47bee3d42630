"""The guide of a run: the embeddings of another encoder by id, read before training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycl.config.schema import GuideConfig
from raycl.data.codecs import list_lengths, to_numpy
from raycl.data.embeddings import read_embeddings
from raycl.errors import DataError
from raycl.losses.guide import Guide

_SAME = 0.99  # cosine of two embeddings of one text, which padding and precision change a little


@final
@dataclass(frozen=True)
class EmbeddingTable:
    """Embeddings of unit length, float16 [num_ids, dim], by ascending id."""

    ids: NDArray[np.int64]
    rows: NDArray[np.float16]

    def of(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the embeddings of these ids, which are all in the table, [n, dim]."""
        place = np.searchsorted(self.ids, ids)
        assert np.array_equal(self.ids[place], ids), "the ids of all rows are looked up before training"
        return torch.from_numpy(self.rows[place])


@final
@dataclass(frozen=True, kw_only=True)
class GuideTables:
    """A guide's embeddings of all queries and documents of a run, or of all samples twice, and its margin."""

    query: EmbeddingTable
    document: EmbeddingTable
    margin: float
    relative: bool

    @property
    def dim(self) -> int:
        """The width of the embeddings."""
        return self.query.rows.shape[1]

    def of(
        self,
        query_id: NDArray[np.int64],
        document_id: NDArray[np.int64],
        negative_id: NDArray[np.int64] | None = None,
    ) -> Guide:
        """Return the guide's embeddings of a batch, by the ids in the data."""
        return Guide.of(
            self.query.of(query_id),
            self.document.of(document_id),
            None if negative_id is None else self.document.of(negative_id),
            margin=self.margin,
            relative=self.relative,
        )


def read_guide(settings: GuideConfig, tables: Sequence[pa.Table], names: Sequence[str]) -> GuideTables:
    """Read the guide's embeddings of all ids in decoded rows: their ``sample_id`` and their columns of ids ``names``.

    Without ``names``, the rows have one embedding each, of their ``sample_id``. Raises ``DataError`` if a folder does
    not have one embedding of each id.
    """
    assert settings.query is not None, "the configuration gives a guide its folders"
    if names:
        assert settings.document is not None, "the configuration gives a guide both folders"
        query = _read_table(settings.query, "query_id", _Needed.of(tables, names[:1]))
        document = _read_table(settings.document, "document_id", _Needed.of(tables, names[1:]))
    else:
        query = document = _read_table(settings.query, "sample_id", _Needed.of_samples(tables))
    dims = query.rows.shape[1], document.rows.shape[1]
    if dims[0] != dims[1]:
        raise DataError(
            f"the guide's queries have {dims[0]} numbers and its documents {dims[1]}; "
            "embed both with one model, or with its two towers"
        )
    return GuideTables(
        query=query,
        document=document,
        margin=settings.margin,
        relative=settings.margin_strategy == "relative",
    )


@final
@dataclass(frozen=True)
class _Needed:
    """The distinct ids in some columns, ascending, and for each the id of a sample with it."""

    ids: NDArray[np.int64]
    sample_id: NDArray[np.int64]

    @classmethod
    def of(cls, tables: Sequence[pa.Table], names: Sequence[str]) -> "_Needed":
        ids, samples = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for table in tables:
            for name in names:
                lists = table[name].combine_chunks()
                ids.append(to_numpy(lists.flatten()))
                samples.append(np.repeat(table["sample_id"].to_numpy(), list_lengths(lists)))
        distinct, first = np.unique(np.concatenate(ids), return_index=True)
        return cls(distinct, np.concatenate(samples)[first])

    @classmethod
    def of_samples(cls, tables: Sequence[pa.Table]) -> "_Needed":
        """Return the distinct ids of the samples."""
        ids = np.unique(np.concatenate([table["sample_id"].to_numpy() for table in tables]))
        return cls(ids, ids)


def _read_table(uri: str, role: str, needed: _Needed) -> EmbeddingTable:
    """Read the embeddings of the needed ids; raises ``DataError`` if one is missing or has two."""
    rows, is_found = np.empty((0, 0), np.float16), np.zeros(len(needed.ids), np.bool_)
    for ids, found in read_embeddings(uri, role):
        if not rows.size:
            rows = np.zeros((len(needed.ids), found.shape[1]), np.float16)
        if found.shape[1] != rows.shape[1]:
            raise DataError(
                f"the embeddings in {uri} have {rows.shape[1]} and {found.shape[1]} numbers; embed all with one model"
            )
        place = np.searchsorted(needed.ids, ids).clip(max=len(needed.ids) - 1)
        is_needed = needed.ids[place] == ids
        place, found = place[is_needed], found[is_needed]
        new, first = np.unique(place, return_index=True)
        new, first = new[~is_found[new]], first[~is_found[new]]
        rows[new], is_found[new] = found[first], True
        cosine = (rows[place].astype(np.float32) * found).sum(1)
        if len(cosine) and cosine.min() < _SAME:
            raise DataError(
                f"{uri} has two different embeddings of {role} {needed.ids[place[cosine.argmin()]]}; "
                "give each id to one text, and embed it once"
            )
    if not is_found.all():
        lacking = needed.sample_id[~is_found]
        raise DataError(
            f"{uri} has no embedding of {len(lacking)} of the {len(is_found)} ids in {role}, such as the row with "
            f"sample_id {lacking[0]}; embed all rows, with their ids (--set data.columns.{role}=NAME)"
        )
    return EmbeddingTable(needed.ids, rows)
