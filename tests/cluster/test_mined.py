"""Negatives mined while a run trains: the miner, its bank, its death, and a resumed run."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import raycl
from raycl.config import RunConfig
from raycl.data.columns import ColumnNames
from raycl.data.in_memory import tokens_of
from raycl.inference.mining import mine_negatives
from raycl.models.build import load_tokenizer
from raycl.negatives.bank import connect_bank
from raycl.records import CHECKPOINTS, read_metrics
from raycl.storage import Place
from raycl.training.corpus import build_corpus, table_of_bytes
from tests.cluster.faults import kill_process, wait_until
from tests.images import digit_files
from tests.pairs import rows_of, write_pairs
from tests.settings import override_active
from tests.texts import invented_texts

pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_PAIRS, BATCH_SIZE, CANDIDATES, NUM_EPOCHS = 96, 32, 4, 80
PAIRS = ColumnNames(image=None, query="query", document="document")
SETTINGS: dict[str, Any] = {
    "workers": 2,
    "cpus_per_worker": 0.5,
    "text.vocabulary_size": 400,
    "encoder.name": "tests.cluster.networks:slow_words",
    "projection_head.dim": 16,
    "negatives.mined.num": 2,
    "negatives.mined.candidates": CANDIDATES,
    "negatives.mined.refresh": 5,
    "negatives.mined.cpus_per_actor": 0.5,
    "bank.shards": 2,
    "evaluation.every_epochs": 0,
    "stages.0.batch_size": BATCH_SIZE,
    "stages.0.learning_rate": 1e-12,  # frozen, so that every search finds the same
    "stages.0.warmup_epochs": 0.0,
    "log_every_steps": 1,
}


def config_of(folder: Path, **settings: Any) -> RunConfig:
    arguments = {"encoder.kwargs": {"marker": str(folder / "hurry"), "dim": 16}}
    return override_active(raycl.recipe("two_tower"), SETTINGS, arguments | settings)


def logged(output: Place) -> list[dict[str, Any]]:
    """Return the metrics of all steps so far."""
    if not (output / "metrics.jsonl").exists():
        return []
    return [line for line in read_metrics(output) if "mined_random_fraction" in line]


def last_table(output: Place) -> dict[str, Any]:
    """Return the table in the last checkpoint."""
    paths = sorted(path for path, _ in (output / CHECKPOINTS).files() if path.endswith("state.pt"))
    return torch.load((output / CHECKPOINTS / paths[-1]).uri, weights_only=True)["mined"]


@pytest.mark.drill
def test_a_run_mines_what_raycl_mine_finds_survives_its_miner_and_resumes_with_its_table(
    tmp_path: Path,
) -> None:
    data, output = write_pairs(tmp_path / "pairs.parquet", NUM_PAIRS), Place(str(tmp_path / "mined"))
    config = config_of(tmp_path, **{"stages.0.epochs": NUM_EPOCHS})
    options: dict[str, Any] = {"data": str(data), "output": output.uri, "quiet": True}
    run = threading.Thread(target=raycl.train, args=(config,), kwargs=options)
    run.start()

    def newest() -> dict[str, Any]:
        assert run.is_alive(), "the run has ended"
        return ([{"mined_random_fraction": 1.0}, *logged(output)])[-1]

    wait_until(lambda: newest()["mined_random_fraction"] < 1, timeout_s=600)
    bank = connect_bank("mined")
    held = bank.negatives()
    assert (held.step % 5 == 0).all()
    found = bank.nearest_of(int(held.sample_id[0]), 3)
    assert (found.step >= held.step.min()).all()
    killed_at = newest()["step"]
    kill_process("ray::Miner")
    wait_until(lambda: newest()["miner_restarts"] == 1)
    wait_until(lambda: newest()["step"] - newest().get("negatives_age_max", np.inf) > killed_at)
    (tmp_path / "hurry").touch()
    run.join(300)

    lines = logged(output)
    assert [line["step"] for line in lines] == list(range(1, NUM_EPOCHS * NUM_PAIRS // BATCH_SIZE + 1))
    assert lines[0]["mined_random_fraction"] == 1
    ages = [
        (line["negatives_age_mean"], line["negatives_age_max"])
        for line in lines
        if "negatives_age_mean" in line
    ]
    assert all(1 <= mean <= most for mean, most in ages)
    assert mined_texts(output, config, data, last_table(output)) == mined_by_command(output, data)

    longer = config_of(tmp_path, **{"stages.0.epochs": NUM_EPOCHS + 1})
    raycl.train(longer, resume=True, **options)
    assert logged(output)[len(lines)]["mined_random_fraction"] < 1


def write_rows(folder: Path, kind: str) -> Path:
    """Write pairs, digits with captions, or sentences; each row has one or two captions or sentences."""
    if kind == "two_tower":
        return write_pairs(folder / "rows.parquet", NUM_PAIRS)
    texts = invented_texts(2 * NUM_PAIRS)
    columns: dict[str, Any] = {
        "caption" if kind == "clip" else "text": [
            texts[2 * row : 2 * row + 1 + row % 2] for row in range(NUM_PAIRS)
        ]
    }
    if kind == "clip":
        columns["image"] = pa.array(digit_files(NUM_PAIRS)[0], pa.binary())
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=32)
    return folder / "rows.parquet"


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["clip", "simcse", "two_tower streamed", "simcse streamed"])
def test_other_rows_are_mined_too_and_a_resumed_run_keeps_the_table(kind: str, tmp_path: Path) -> None:
    name, *streamed = kind.split()
    data, output = write_rows(tmp_path, name), Place(str(tmp_path / "mined"))
    side = "text_encoder" if name == "clip" else "encoder"
    settings = SETTINGS | {
        f"{side}.name": "tests.cluster.networks:slow_words",
        f"{side}.kwargs": {"marker": str(tmp_path / "hurry"), "dim": 16},
        "data.cache": "stream" if streamed else "materialize",
    }
    if name == "clip":
        images = {"encoder.name": "tests.cluster.networks:small", "encoder.kwargs": {"channels": 1}}
        settings |= images | {"data.channels": 1, "data.decode_size": 16}

    def config(num_epochs: int) -> RunConfig:
        recipe = raycl.recipe(name, image_size=16)
        return override_active(recipe, settings, {"stages.0.epochs": num_epochs})

    num_epochs = 10 if streamed else 40  # each epoch of a stream starts an actor, which takes seconds
    options: dict[str, Any] = {"data": str(data), "output": output.uri, "quiet": True}
    run = threading.Thread(target=raycl.train, args=(config(num_epochs),), kwargs=options)
    run.start()

    def is_mined() -> bool:
        assert run.is_alive(), "the run has ended"
        return any(line["mined_random_fraction"] < 1 for line in logged(output))

    wait_until(is_mined, timeout_s=300)
    (tmp_path / "hurry").touch()
    run.join(300)
    lines = logged(output)
    assert lines[0]["mined_random_fraction"] == 1
    table = last_table(output)
    assert (table["document"] >= 0).any()
    if streamed:  # it was read so far
        assert table_of_bytes(table["rows"].numpy().tobytes()).num_rows >= BATCH_SIZE
    else:
        assert table["document"].shape == (NUM_PAIRS + NUM_PAIRS // 2, CANDIDATES)
    raycl.train(config(num_epochs + 1), resume=True, **options)
    assert logged(output)[len(lines)]["mined_random_fraction"] < 1


def mined_texts(
    output: Place, config: RunConfig, data: Path, table: dict[str, Any]
) -> dict[tuple[str, str], list[str]]:
    """Return the mined documents of each pair in a table."""
    values = {name: column.to_pylist() for name, column in zip(*columns_of(data), strict=True)}
    tokenizer = load_tokenizer(output.uri)
    rows = rows_of(config, values, tokenizer)
    corpus = build_corpus(rows, explicit=True).corpus
    texts = list(dict.fromkeys([*values["document"], *(text for row in values["negatives"] for text in row)]))
    as_rows = rows_of(config, {"query": texts, "document": texts}, tokenizer)
    names = tokens_of(as_rows.take(np.arange(len(texts))), "document").text_id.tolist()
    text_of = dict(zip(names, texts, strict=True))
    pairs = list(zip(values["query"], values["document"], strict=True))
    return {
        pairs[row]: [
            text_of[int(corpus.document.text_id[number])]
            for number in table["document"][corpus.pairs_of(rows.sample_id[[row]])[0]].tolist()
            if number >= 0
        ]
        for row in range(len(pairs))
    }


def columns_of(data: Path) -> tuple[list[str], list[Any]]:
    table = pq.read_table(data)
    return table.column_names, table.columns


def mined_by_command(output: Place, data: Path) -> dict[tuple[str, str], list[str]]:
    """Return the negatives that ``raycl mine`` adds to each pair."""
    written = f"{output.uri}-by-command.parquet"
    mine_negatives(output.uri, data, written, num_negatives=CANDIDATES, columns=PAIRS, quiet=True)
    given = {row["query"]: set(row["negatives"]) for row in pq.read_table(data).to_pylist()}
    return {
        (row["query"], row["document"]): [
            text for text in row["negatives"] if text not in given[row["query"]]
        ]
        for row in pq.read_table(written).to_pylist()
    }
