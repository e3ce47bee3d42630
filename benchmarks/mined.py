"""Hard negatives of questions and answers: in-batch, mined once, mined after every epoch, and mined during training.

    python benchmarks/mined.py --data FOLDER [--minutes 10] [--seeds 0 1 2] [--ways in-batch once "every epoch" live]
        [--output FOLDER] [--set key.path=value] [--json FILE]

FOLDER holds train.parquet and test.parquet with the columns ``query`` and ``document``, and those of product offers
``dataset`` and ``label`` as well: only pairs with label 1 are trained on. The ways have equal minutes of
training and mining on as many cores: two workers, or one worker and the encoder of the miner. ``once`` mines by
``raycl mine`` after half of its time, ``every epoch`` after each epoch, and both continue the same run on the new negatives,
which ``raycl train --resume`` would refuse as other data; the time of the command, which starts processes and reads the
data, counts. Every way has a constant learning rate, and all but ``in-batch`` the same number of negatives for each query. The number of epochs that fit comes from a trial of one epoch, so the minutes differ by up to an epoch;
the table has those that were used. ``clock`` are the minutes from the first to the last line of the log, which include the start of
processes for each part of a run. A run is judged by nDCG@10 and recall@10 of the test questions among the test answers, beside
BM25, and on product offers by the mean over the data sets of the average precision of the test pairs, beside TF-IDF.
"""

import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import pyarrow.compute as pc
import pyarrow.parquet as pq
from measuring import Line, make_parser, report, summarize, table
from product_matching import encoder_similarity, precisions, word_similarity

import raycl
from raycl.config.overrides import parse_setting
from raycl.evaluation.retrieval import evaluate_retrieval
from raycl.inference.mining import mine_negatives
from raycl.records import read_metrics
from raycl.storage import Place

NUM_NEGATIVES = 4
COMMON: dict[str, Any] = {
    "workers": 2,
    "evaluation.every_epochs": 0,
    "text.max_document_length": 128,
    "stages.0.batch_size": 512,
    "stages.0.learning_rate_schedule": "constant",
}
LIVE: dict[str, Any] = {
    "workers": 1,
    "negatives.mined.num": NUM_NEGATIVES,
    "negatives.mined.candidates": 4 * NUM_NEGATIVES,
    "negatives.mined.refresh": 10,
}
MEASURES = ("ndcg_at_10", "recall_at_10")
WAYS = ("in-batch", "once", "every epoch", "live")
Settings = dict[str, Any]


class Run:
    """A run that is trained epoch by epoch, and the seconds that it has used."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.output, self._settings = folder, settings
        self.seconds, self._mined_s = 0.0, 0.0

    def train(self, data: Path, num_epochs: int) -> None:
        """Train up to this number of epochs in all."""
        config = raycl.override(raycl.recipe("two_tower"), self._settings | {"stages.0.epochs": num_epochs})
        resume = self.output.exists()
        with patch("raycl.training.launch.check_same_data"):  # the same pairs, with other negatives
            result = raycl.train(config, data=str(data), output=str(self.output), resume=resume, quiet=True)
        self.seconds = result.seconds + self._mined_s

    @property
    def clock_s(self) -> float:
        """The seconds from the first to the last line of its log."""
        first, *_, last = (line["time"] for line in read_metrics(Place(str(self.output))))
        return last - first

    def mine(self, data: Path, number: int) -> Path:
        """Return the pairs with the negatives that the command finds now."""
        mined = Path(f"{self.output}-{number}.parquet")
        began = time.monotonic()
        mine_negatives(str(self.output), str(data), str(mined), num_negatives=NUM_NEGATIVES, quiet=True)
        self._mined_s += time.monotonic() - began
        self.seconds += time.monotonic() - began
        return mined


def train_way(way: str, data: Path, folder: Path, settings: Settings, limit_s: float) -> Run:
    """Train in one way for these seconds."""
    settings = COMMON | (LIVE if way == "live" else {}) | settings
    trial = Run(folder / f"{way}-trial".replace(" ", "-"), settings)
    trial.train(data, 1)
    num_epochs = max(1, round(limit_s / trial.seconds))
    run = Run(folder / way.replace(" ", "-"), settings)
    if way in ("in-batch", "live"):
        run.train(data, num_epochs)
        return run
    first = max(1, num_epochs // 2) if way == "once" else 1
    run.train(data, first)
    mined, done, epoch_s = run.mine(data, first), first, trial.seconds
    while run.seconds + epoch_s / 2 < limit_s:
        began, done = run.seconds, done + 1
        if way == "once":
            done = max(done, first + round((limit_s - run.seconds) / epoch_s))
        run.train(mined, done)
        if way == "every epoch":
            mined = run.mine(data, done)
            epoch_s = run.seconds - began
    return run


def distinct_pairs(data: Path, folder: Path) -> Path:
    """Write each pair once, as the command does, so that a run may continue on the mined pairs."""
    pairs = pq.read_table(data)
    if "label" in pairs.column_names:
        pairs = pairs.filter(pc.field("label") == 1)
    pairs = pairs.select(["query", "document"])
    written = folder / "pairs.parquet"
    pq.write_table(pairs.group_by(["query", "document"], use_threads=False).aggregate([]), written)
    return written


def judge(run: Run, data: Path) -> dict[str, dict[str, float]]:
    """Return the measures of a run, and those of its words alone."""
    test = data / "test.parquet"
    if "label" not in pq.read_schema(test).names:
        found = evaluate_retrieval(run=str(run.output), test=str(test), quiet=True)
        sides = {"run": found, "BM25": found["baseline"]["bm25"]}
        return {side: {name: each[name] for name in MEASURES} for side, each in sides.items()}
    pairs, offers = pq.read_table(test), pq.read_table(data / "train.parquet")
    similarities = {
        "run": encoder_similarity(str(run.output), pairs),
        "TF-IDF": word_similarity(offers, pairs),
    }
    found = {side: precisions(each, pairs) for side, each in similarities.items()}
    return {side: {"average_precision": fmean(each.values())} for side, each in found.items()}


def main() -> None:
    parser = make_parser(__doc__, data=Path, minutes=10.0, seeds=[0, 1, 2], ways=list(WAYS), output=None)
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs, key.path=value")
    options = parser.parse_args()
    settings, lines = dict(parse_setting(each) for each in options.set), list[Line]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.output or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        data = distinct_pairs(options.data / "train.parquet", folder)
        judged: dict[str, dict[str, float]] = {}
        for way in options.ways:
            scores = []
            for seed in options.seeds:
                own = folder / f"seed-{seed}"
                own.mkdir(exist_ok=True)
                run = train_way(way, data, own, settings | {"seed": seed}, 60 * options.minutes)
                judged = judge(run, options.data)
                scores.append({"minutes": run.seconds / 60, "clock": run.clock_s / 60, **judged["run"]})
                print(way, seed, scores[-1], flush=True)
            lines.append(
                {"side": way, **{name: summarize([each[name] for each in scores]) for name in scores[0]}}
            )
    lines += [{"side": side, **scores} for side, scores in judged.items() if side != "run"]
    titles = {name: name for name in ("minutes", "clock", *judged["run"])}
    report(options, lines, table(lines, side="", **titles))


if __name__ == "__main__":
    main()
