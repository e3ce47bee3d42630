"""The search index beside embedded rows: FAISS finds the same rows as a plain search."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import raycl
from raycl.errors import ConfigError, StorageError
from raycl.inference.index import write_index
from raycl.storage import Place
from tests.test_cli import run_raycl

faiss = pytest.importorskip("faiss")

DIM = 12


@pytest.fixture
def embedded(tmp_path: Path) -> Path:
    """Return a folder as ``raycl embed`` writes it: several files and row groups, lengths and ids far apart."""
    folder, generator = tmp_path / "embedded", np.random.default_rng(3)
    folder.mkdir()
    ids = generator.permutation(np.arange(-300, 300)) * 2**50
    for number, part in enumerate(np.split(ids, [7, 450])):
        rows = generator.normal(size=(len(part), DIM)) * 10 ** generator.uniform(-4, 4, size=(len(part), 1))
        rows[3] = 0  # has no direction
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1), pa.float32()), DIM)
        table = pa.table({"sample_id": part, "label": part, "representation": vectors})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=100)
    return folder


def plain_search(
    folder: Path, queries: NDArray[np.float64], k: int
) -> tuple[NDArray[np.float64], list[list[int]]]:
    """Return the cosines [num_queries, k] and the ids of the nearest rows, in float64."""
    table = pq.read_table(folder)
    rows = np.array(table["representation"].to_pylist(), np.float64)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    cosines = queries @ rows.T
    order = np.argsort(-cosines, axis=1)[:, :k]
    ids = table["sample_id"].to_numpy()
    return np.take_along_axis(cosines, order, 1), [[int(ids[row]) for row in each] for each in order]


def test_the_index_finds_the_neighbors_of_a_plain_search(embedded: Path) -> None:
    write_index(Place(str(embedded)), DIM)
    index = faiss.read_index(str(embedded / "_index.faiss"))
    queries = np.random.default_rng(4).normal(size=(50, DIM))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    expected, expected_ids = plain_search(embedded, queries, 8)  # of a folder that holds the index already
    cosines, ids = index.search(queries.astype(np.float32), 8)
    assert (index.ntotal, index.d, index.metric_type) == (600, DIM, faiss.METRIC_INNER_PRODUCT)
    assert ids.tolist() == expected_ids
    np.testing.assert_allclose(cosines, expected, atol=1e-6)


def test_an_index_of_no_rows_has_the_width_of_the_encoder(tmp_path: Path) -> None:
    write_index(Place(str(tmp_path)), DIM)
    index = faiss.read_index(str(tmp_path / "_index.faiss"))
    assert (index.ntotal, index.d) == (0, DIM)


def test_an_index_that_cannot_be_written_leaves_no_file(
    embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(index: object, writer: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(faiss, "write_index", write)
    with pytest.raises(StorageError, match="cannot write .*_index.faiss.*No space left"):
        write_index(Place(str(embedded)), DIM)
    assert sorted(path.suffix for path in embedded.iterdir()) == [".parquet"] * 3


def test_a_missing_faiss_is_reported_in_one_line_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    arguments = ["--run", tmp_path, "--data", tmp_path, "--output", tmp_path / "out", "--index", "faiss"]
    status, out, err = run_raycl(monkeypatch, capsys, "embed", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "; pip install 'raycl[faiss]'" in err
    with pytest.raises(ConfigError, match="faiss-cpu"):
        raycl.embed(tmp_path, tmp_path, tmp_path / "out", index="faiss")
