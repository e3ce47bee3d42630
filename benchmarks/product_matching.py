"""Product offers: which negatives teach a tower to distinguish the same product from another one.

    python benchmarks/product_matching.py --data FOLDER [--apart] [--ways mixed ...] [--test dev.parquet]
        [--output FOLDER] [--set key.path=value] [--json FILE]

FOLDER holds train.parquet and test.parquet with the columns ``dataset``, ``query``, ``document`` and ``label``. One
tower is trained on the pairs of all data sets, in five ways: with the negatives of the batch, with
the explicit ones, with both, with both and hard negatives mined by the run before, and with a stage
of the hinge behind. With ``--apart``, each data set has a tower of its own. The table shows the average precision of
the test pairs of each data set, beside TF-IDF (words weighed by all offers of that set), and of the sum of both cosines.
Runs in the output are continued.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch.nn.functional as F
from measuring import Line, make_parser, report, table
from numpy.typing import NDArray

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


def precisions(similarity: NDArray[Any], test: pa.Table) -> dict[str, float]:
    """Return the average precision of each data set's pairs."""
    names, label = test["dataset"].to_numpy(), test["label"].to_numpy()
    return {
        name: average_precision(similarity[names == name], label[names == name])
        for name in sorted(set(names))
    }


def encoder_similarity(run: str, test: pa.Table) -> NDArray[Any]:
    """Return the cosine of each test pair's embeddings."""
    towers = {"query": raycl.load_encoder(run, side="query"), "document": raycl.load_encoder(run, side="key")}
    query, key = (F.normalize(tower.encode(test[name].to_pylist()), dim=1) for name, tower in towers.items())
    return (query * key).sum(1).numpy()


def word_similarity(train: pa.Table, test: pa.Table) -> NDArray[Any]:
    """Return the TF-IDF cosine of each test pair."""
    names, similarity = test["dataset"].to_numpy(), np.zeros(len(test))
    for name in set(names):
        own, other = (part.filter(pc.field("dataset") == name) for part in (test, train))
        sides = [part[column].to_pylist() for part in (own, other) for column in ("query", "document")]
        corpus = [text for texts in sides for text in texts]
        similarity[names == name] = tfidf_similarity(sides[0], sides[1], corpus)
    return similarity


def tower_similarity(
    way: str, tables: Sequence[pa.Table], folder: Path, settings: dict[str, Any], *, apart: bool
) -> NDArray[Any]:
    """Train in one way on the first table, one tower or one for each data set; return the second one's cosines."""
    train, test = tables
    names, similarity = test["dataset"].to_numpy(), np.zeros(len(test))
    for name in sorted(set(names)) if apart else [None]:
        own = [part if name is None else part.filter(pc.field("dataset") == name) for part in (train, test)]
        place = folder / (name or "all")
        place.mkdir(parents=True, exist_ok=True)
        pq.write_table(own[0], place / "train.parquet")
        run = train_way(way, place, settings)
        similarity[(names == name) | (name is None)] = encoder_similarity(run, own[1])
    return similarity


def train_way(way: str, folder: Path, settings: dict[str, Any]) -> str:
    """Train on the folder's rows, with mined negatives if the way's name says so; return the run, which may exist."""
    data = train = folder / "train.parquet"
    if "mined" in way:
        data = folder / "mined.parquet"
        if not data.exists():
            mixed = train_way("mixed", folder, settings)
            print(mine_negatives(mixed, str(train), str(data), num_negatives=4, quiet=True))
    config = raycl.override(raycl.recipe("two_tower"), TOWER | settings | WAYS[way])
    output = folder / way.replace(" + ", "-").replace(", ", "-").replace(" ", "-")
    seconds = raycl.train(config, data=str(data), output=str(output), resume=True, quiet=True).seconds
    print(f"{way}, {folder.name}: {seconds:.0f} s")
    return str(output)


def main() -> None:
    parser = make_parser(__doc__, data=Path, output=None, test="test.parquet", apart=False, ways=list(WAYS))
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs, key.path=value")
    options = parser.parse_args()
    tables = [pq.read_table(options.data / name) for name in ("train.parquet", options.test)]
    settings = dict(parse_setting(each) for each in options.set)
    words = word_similarity(*tables)
    found = {"TF-IDF": precisions(words, tables[1])}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.output or temporary)
        for way in options.ways:
            similarity = tower_similarity(way, tables, folder, settings, apart=options.apart)
            found[way] = precisions(similarity, tables[1])
            found[f"{way}, with TF-IDF"] = precisions(similarity + words, tables[1])
    names, least = sorted(found["TF-IDF"]), found["TF-IDF"]
    lines: list[Line] = []
    for way, scores in found.items():
        above = sum(scores[name] > least[name] for name in names)
        lines.append({"side": way, **scores, "above": above})
    report(options, lines, table(lines, side="", **{name: name for name in names}, above="above TF-IDF"))


if __name__ == "__main__":
    main()
