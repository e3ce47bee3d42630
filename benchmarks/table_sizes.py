"""Sentence similarity (STS) by a table of subword vectors, whole, with fewer numbers and as int8.

    python benchmarks/table_sizes.py --table FOLDER --test FILE [--dims 128 64] [--json FILE]

``raycl export --to model2vec`` writes FOLDER, and ``pip install model2vec`` reads it. FILE has the columns
``sentence1``, ``sentence2``, ``score`` and ``dataset``. Each line is Spearman's correlation of all pairs of a data set,
averaged over the data sets, and the size of the file of vectors that model2vec saves.
"""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from measuring import Line, make_parser, report, table
from model2vec import StaticModel

from raycl.evaluation.metrics import sts_scores

DTYPES = "float32", "int8"


def measure(folder: Path, dims: int | None, dtype: str, pairs: dict[str, list]) -> Line:
    """Return the mean correlation and the megabytes of a table with its first ``dims`` numbers, or all, of this type."""
    model = StaticModel.from_pretrained(folder, dimensionality=dims, quantize_to=dtype)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        size = (Path(saved) / "model.safetensors").stat().st_size
    left, right = (np.asarray(model.encode(pairs[name]), np.float64) for name in ("sentence1", "sentence2"))
    cosine = (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    scores = sts_scores(cosine, np.array(pairs["score"]), pairs["dataset"])
    return {"dims": model.dim, "dtype": dtype, "MB": size / 1e6, "mean": 100 * scores["mean"]} | {
        name: 100 * value for name, value in scores["spearman"].items()
    }


def main() -> None:
    options = make_parser(__doc__, table=Path, test=Path, dims=[128, 64]).parse_args()
    pairs = pq.read_table(options.test).to_pydict()
    lines = [measure(options.table, dims, dtype, pairs) for dims in (None, *options.dims) for dtype in DTYPES]
    report(options, lines, table(lines, **{name: name for name in lines[0]}))


if __name__ == "__main__":
    main()
