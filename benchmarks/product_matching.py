"""Product offers: which negatives teach a tower to distinguish the same product from another one.

    python benchmarks/product_matching.py --data FOLDER [--output FOLDER] [--json FILE]

FOLDER holds train.parquet and test.parquet with the columns ``dataset``, ``query``, ``document`` and ``label``. One
tower is trained on the pairs of all data sets, in five ways: with the negatives of the batch, with
the explicit ones, with both, with both and hard negatives mined by the run before, and with a stage
of the hinge behind. Each is judged by the average precision of the test pairs of each data set,
beside TF-IDF (words weighed by all offers of that set).
"""

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch.nn.functional as F
from measuring import describe_machine, make_parser, write_json

import raycl
from raycl.config.overrides import parse_setting
from raycl.evaluation.lexical_baselines import tfidf_similarity
from raycl.evaluation.metrics import average_precision
from raycl.inference.mining import mine_negatives

TOWER: dict[str, Any] = {
    "evaluation.every_epochs": 0,
    "text.max_length": 64,
    "text.max_document_length": 64,
    "stages.0.epochs": 20,
    "stages.0.batch_size": 256,
}
HINGE = {
    "stages.1.epochs": 5,
    "stages.1.loss": "hinge",
    "stages.1.learning_rate": 1e-4,
    "stages.1.margin": 0.2,
}
WAYS: dict[str, dict[str, Any]] = {
    "in-batch": {"negatives.explicit": False},
    "explicit": {"negatives.in_batch": False, "stages.0.loss": "info_nce"},
    "mixed": {},
    "mixed + mined": {},
    "mixed + mined, then hinge": HINGE,
}


def judge(run: str, test: pa.Table) -> dict[str, float]:
    """Return the average precision of each data set's pairs."""
    query, key = (raycl.load_encoder(run, side=side) for side in ("query", "key"))
    rows = {
        "query": query.encode(test["query"].to_pylist()),
        "document": key.encode(test["document"].to_pylist()),
    }
    left, right = (F.normalize(each, dim=1) for each in rows.values())
    similarity, label = (left * right).sum(1).numpy(), test["label"].to_numpy()
    names = test["dataset"].to_numpy()
    return {
        name: average_precision(similarity[names == name], label[names == name])
        for name in sorted(set(names))
    }


def floor(train: pa.Table, test: pa.Table) -> dict[str, float]:
    """Return the average precision of TF-IDF."""
    found = {}
    for name in sorted(set(test["dataset"].to_pylist())):
        own, other = (table.filter(pc.field("dataset") == name) for table in (test, train))
        corpus = [
            text
            for table in (own, other)
            for column in ("query", "document")
            for text in table[column].to_pylist()
        ]
        similarity = tfidf_similarity(own["query"].to_pylist(), own["document"].to_pylist(), corpus)
        found[name] = average_precision(similarity, own["label"].to_numpy())
    return found


def run_ways(
    train: Path, test: pa.Table, folder: Path, settings: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Train in each way; return the average precisions by way and data set."""
    found = {}
    for way, own in WAYS.items():
        data = train
        if "mined" in way:
            data = folder / "mined.parquet"
            if not data.exists():
                mined = mine_negatives(
                    str(folder / "mixed"), str(train), str(data), num_negatives=4, quiet=True
                )
                print(mined)
        config = raycl.override(raycl.recipe("two_tower"), TOWER | settings | own)
        output = folder / way.replace(" + ", "-").replace(", ", "-").replace(" ", "-")
        result = raycl.train(config, data=str(data), output=str(output), quiet=True)
        found[way] = judge(str(output), test)
        print(
            f"{way:26} {result.seconds:5.0f} s  " + "  ".join(f"{n} {v:.3f}" for n, v in found[way].items())
        )
    return found


def main() -> None:
    """Train, judge, print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--output", type=Path, help="keep the runs here")
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs, key.path=value")
    options = parser.parse_args()
    train, test = options.data / "train.parquet", pq.read_table(options.data / "test.parquet")
    settings = dict(parse_setting(each) for each in options.set)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary)
        found = run_ways(train, test, folder, settings)
    found = {"TF-IDF": floor(pq.read_table(train), test)} | found
    names = sorted(found["TF-IDF"])
    print(f"\n| | {' | '.join(names)} | above TF-IDF |\n|---|{'---|' * (len(names) + 1)}")
    for way, scores in found.items():
        above = sum(scores[name] > found["TF-IDF"][name] for name in names)
        print(f"| {way} | {' | '.join(f'{scores[name]:.3f}' for name in names)} | {above} |")
    write_json(options.json, {"machine": describe_machine(), "average_precision": found})


if __name__ == "__main__":
    main()
