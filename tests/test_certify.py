"""A run is checked against its chain of hashes: each tampering is found, and each part against a plain reference."""

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import raycl
from raycl.chain import CHAIN, Chain, hash_of_draw, kept_links, log_heads, read_chain, sha256_of_files
from raycl.cli.main import app
from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.data import decode
from raycl.data.discovery import find_source
from raycl.data.fingerprint import fingerprint
from raycl.data.ids import content_id
from raycl.data.sampler import InMemorySampler
from raycl.data.windows import WindowCutter
from raycl.errors import ConfigError, DataError, RunError
from raycl.records import CHECKPOINT_LIST, READ_ROWS
from raycl.step_replay import certificate, recompute
from raycl.step_replay.certificate import Certificate
from raycl.step_replay.check_history import ChainedHistory
from raycl.step_replay.recompute import RecomputedSteps
from raycl.step_replay.record import read_record
from raycl.step_replay.rows import read_rows
from raycl.storage import Place
from raycl.training.coordinator import RunCoordinator
from raycl.training.data_module import DataModule
from raycl.training.preflight import hash_of_settings, save_run_files
from raycl.training.run_chain import RunChain
from raycl.training.stages import Position
from tests import recorded_runs
from tests.images import write_digits
from tests.recorded_runs import record_run, small_config
from tests.table_files import write_rows
from tests.texts import invented_texts


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits.parquet", 200, broken=3)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs of SimCLR by two workers, with two checkpoints."""
    config = small_config("simclr", {"stages.0.steps": 17, "workers": 2})
    return record_run(config, data, tmp_path_factory.mktemp("recorded") / "run", checkpoints=(7, 12))


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def failed(certificate: Certificate) -> list[str]:
    """Return the names of the checks that failed."""
    return [check.name for check in certificate.checks if check.passed is False]


def rewritten(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the objects of a file with one per line."""
    objects = [json.loads(line) for line in path.read_text().splitlines()]
    change(objects)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in objects))


def with_new_hashes(run: Path) -> None:
    """Forge the chain: hash all links again, and name the last one in the result."""
    links = [json.loads(line) for line in (run / CHAIN).read_text().splitlines()]
    (run / CHAIN).unlink()
    chain = Chain(Place(str(run)))
    heads = [
        chain.add(
            link["kind"], {name: link[name] for name in link if name not in ("kind", "previous", "hash")}
        )
        for link in links
    ]
    chain.flush()
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"chain": heads[-1]}))


def test_an_untouched_run_passes_all_checks_to_six_digits(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = raycl.certify(run, steps=99)
    assert found.is_valid, str(found)
    assert capsys.readouterr().err.splitlines()[-1] == "computing steps again 6/6  steps"
    assert [check.name for check in found.checks] == [
        "chain",
        "files",
        "log",
        "checkpoints",
        "rows",
        "samples",
        "steps",
    ]
    assert all(check.passed for check in found.checks)
    assert [(each.step, each.updates, each.workers) for each in found.recomputed] == [
        (1, 0, 2),
        (2, 1, 2),
        (8, 0, 2),
        (9, 1, 2),
        (13, 0, 2),
        (14, 1, 2),
    ]
    assert [each.checkpoint for each in found.recomputed[::2]] == [None, "step-00000007", "step-00000012"]
    assert max(each.relative_difference for each in found.recomputed) < 5e-6
    # 5 batches of 32 in an epoch; the last epoch has 2.
    assert [epoch["drawn"] for epoch in found.epochs] == [160, 160, 160, 64]
    assert {epoch["drawn_twice"] for epoch in found.epochs} == {0}
    assert {epoch["samples"] for epoch in found.epochs} == {found.epochs[0]["samples"]}


def write_parts(folder: Path) -> Path:
    """Write images in three files, each a fragment of a stream."""
    folder.mkdir()
    for name, num_images in (("a", 70), ("b", 81), ("c", 50)):
        write_digits(folder / f"{name}.parquet", num_images, broken=1)
    return folder


@pytest.mark.parametrize(("settings", "repeats"), [({}, False), ({"data.weights": [1, 3]}, True)])
def test_equal_ids_of_two_data_sets_are_different_samples(
    settings: dict[str, Any], repeats: bool, tmp_path: Path
) -> None:
    data = [
        write_digits(tmp_path / f"{name}.parquet", size, broken=0)
        for name, size in (("large", 150), ("small", 80))
    ]
    config = small_config("simclr", {"stages.0.steps": 12, **settings})
    found = raycl.certify(record_run(config, data, tmp_path / "run"), steps=0)
    assert found.is_valid, str(found)
    assert {epoch["drawn_twice"] > 0 for epoch in found.epochs} == {repeats}


STREAM: dict[str, Any] = {"data.cache": "stream", "data.shuffle_buffer_size": 70, "workers": 2}


def test_a_streamed_run_passes_the_checks_of_its_samples_and_steps(tmp_path: Path) -> None:
    config = small_config("moco_v2", {**STREAM, "stages.0.steps": 14})
    run = record_run(config, write_parts(tmp_path / "data"), tmp_path / "run", checkpoints=(3, 8))
    found = raycl.certify(run, steps=99)
    assert found.is_valid, str(found)
    assert all(check.passed for check in found.checks)
    assert "3 of 3 parts of the stream with the contents" in str(found)
    assert [(each.step, each.updates) for each in found.recomputed] == [
        (1, 0),
        (2, 1),
        (4, 0),
        (5, 1),
        (9, 0),
        (10, 1),
    ]
    assert max(each.relative_difference for each in found.recomputed) < 5e-6
    # 201 rows, three of them broken and some held out: five batches of 32 in an epoch, in windows of two.
    assert [epoch["drawn"] for epoch in found.epochs] == [160, 160, 128]
    assert {epoch["drawn_twice"] for epoch in found.epochs} == {0}
    assert {epoch["samples"] for epoch in found.epochs} == {181}


def test_a_streamed_run_of_texts_by_length_is_certified(tmp_path: Path) -> None:
    texts = pa.table({"text": list(invented_texts(200))})
    pq.write_table(texts, tmp_path / "texts.parquet", row_group_size=40)
    words = {"encoder.name": "bag_of_subwords", "encoder.kwargs": {"dim": 16, "hidden_dim": 24}}
    config = small_config("simcse", {**STREAM, **words, "text.length_buckets": 2})
    run = record_run(config, tmp_path / "texts.parquet", tmp_path / "run", checkpoints=(3,))
    found = raycl.certify(run, steps=99)
    assert found.is_valid, str(found)
    assert [check.name for check in found.checks if check.passed] == [
        "chain",
        "files",
        "log",
        "checkpoints",
        "rows",
        "samples",
        "steps",
    ]


def test_a_changed_corpus_is_found(tmp_path: Path) -> None:
    texts = [str(each) for each in invented_texts(120)]
    corpus = write_rows(tmp_path / "corpus.parquet", [{"text": each} for each in texts])
    data = write_rows(tmp_path / "texts.parquet", [{"text": each} for each in texts[:60]])
    words = {"encoder.name": "bag_of_subwords", "encoder.kwargs": {"dim": 16, "hidden_dim": 24}}
    config = small_config("simcse", {**words, "text.corpus": str(corpus), "stages.0.steps": 2, "workers": 1})
    run = record_run(config, data, tmp_path / "run")
    (start, *_) = read_chain(Place(str(run)))
    assert start["corpus"] == sum(content_id(each.encode()) for each in texts) % 2**64
    found = raycl.certify(run, steps=0)
    assert found.is_valid, str(found)
    assert [check.text for check in found.checks if check.name == "corpus"] == [
        f"the texts at {corpus} are those that the run read"
    ]
    write_rows(corpus, [{"text": each} for each in [*texts[1:], "a single other text"]])
    found = raycl.certify(run, steps=0)
    assert failed(found) == ["corpus"]
    assert f"the run read other texts at step 0 than there are now at {corpus}" in str(found)
    rewritten(run / CHAIN, lambda links: links[0].pop("corpus"))  # as an older version wrote it
    with_new_hashes(run)
    assert [check.name for check in raycl.certify(run, steps=0).checks if check.passed is None] == ["corpus"]


def test_changed_rows_of_a_stream_are_found_and_the_file_is_named(tmp_path: Path) -> None:
    config = small_config("simclr", {**STREAM, "workers": 1, "stages.0.steps": 3})
    data = write_parts(tmp_path / "data")
    run = record_run(config, data, tmp_path / "run", checkpoints=(3,))
    found = raycl.certify(run, steps=0)
    assert "its data have the contents that it read" in found.proves
    shutil.copytree(data, tmp_path / "moved")
    table = pq.read_table(data / "b.parquet")
    order = [1, 0, *range(2, len(table))]  # two images change places; their labels and ids stay
    swapped = table.set_column(0, "image", table["image"].take(order))
    pq.write_table(swapped, data / "b.parquet", row_group_size=64)
    found = raycl.certify(run, steps=0)
    assert failed(found) == ["rows"]
    assert "among the 81 rows from" in str(found)
    assert "b.parquet row 0 on" in str(found)
    assert raycl.certify(run, steps=0, data=[str(tmp_path / "moved")]).is_valid
    (run / "read_rows.json.gz").write_bytes(gzip.compress(b"{}"))
    found = raycl.certify(run, steps=0, data=[str(tmp_path / "moved")])
    assert failed(found) == ["files"]
    assert "not checked: the run has no read_rows.json.gz with fingerprints" in str(found)


def test_changed_rows_of_an_unfinished_stream_are_not_hidden_by_a_changed_list_of_them(
    tmp_path: Path,
) -> None:
    config = small_config("simclr", {**STREAM, "workers": 1, "stages.0.steps": 3})
    data = write_parts(tmp_path / "data")
    run = record_run(config, data, tmp_path / "run", checkpoints=(2,))
    (run / "result.json").write_text(json.dumps({"status": "stopped"}))
    (run / CHAIN).write_text("".join((run / CHAIN).read_text().splitlines(keepends=True)[:2]))
    found = raycl.certify(run, steps=0)
    assert found.is_valid, str(found)
    assert "its data have the contents that it read" in found.proves
    write_digits(data / "b.parquet", 81, broken=2)
    assert failed(raycl.certify(run, steps=0)) == ["rows"]
    recorded_runs.counted(read_rows(read_record(str(run)))).save_rows(Place(str(run)) / READ_ROWS)
    found = raycl.certify(run, steps=0)
    assert [check.passed for check in found.checks if check.name == "rows"] == [None]
    assert "no link of chain.jsonl binds read_rows.json.gz" in str(found)
    assert "its data have" not in found.proves


def test_files_are_hashed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(256)) * 40
    for name, length in (("state.pt", 10_240), ("whole.pt", 7_000), ("empty", 0)):
        (tmp_path / name).write_bytes(content[:length])
    monkeypatch.setattr("raycl.chain._PIECE_BYTES", 3_500)
    monkeypatch.setattr(Place, "read_bytes", lambda place: pytest.fail(f"read {place} as a whole"))
    found = sha256_of_files(Place(str(tmp_path)), ["state.pt", "whole.pt", "empty", "none"])
    assert found == {
        "state.pt": hashlib.sha256(content).hexdigest(),
        "whole.pt": hashlib.sha256(content[:7_000]).hexdigest(),
        "empty": hashlib.sha256(b"").hexdigest(),
    }


def test_a_run_hashes_the_rows_of_its_stream_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config("simclr", {**STREAM, "stages.0.steps": 3})
    data = write_parts(tmp_path / "data")
    run = record_run(config, data, tmp_path / "run")
    monkeypatch.setattr("ray.get", lambda _: None)
    monkeypatch.setattr(
        decode,
        "map_fragments",
        lambda source, read, _: [list(read(source, each)) for each in source.fragments],
    )
    opened = MagicMock()
    monkeypatch.setattr("raycl.training.data_module.stream_source", opened)
    DataModule(config, MagicMock(), [find_source(str(data))]).stream(Place(str(run)))
    (source, decoder), named = opened.call_args.args, opened.call_args.kwargs
    made, saved = RunCoordinator(), RunCoordinator()
    decode.decode_source(source, replace(decoder, coordinator=made), kept_whole=named["kept_whole"])
    saved.restore_rows(Place(str(run)) / READ_ROWS)
    assert len(made.fingerprints()) == 3
    assert made.fingerprints() == saved.fingerprints()


@pytest.mark.parametrize("change", ["skipped", "twice"])
def test_a_sample_of_a_stream_that_training_skipped_or_drew_twice_is_found(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = WindowCutter.cut

    def faulty(self: WindowCutter, *given: Any, **named: Any) -> Any:
        pieces, num_grouped = cut(self, *given, **named)
        [rows], [following] = pieces[0], pieces[-1]
        # In place of the first row of the window: one of its last batch, or another one of its first batch again.
        other = following if change == "skipped" else rows
        pieces[0] = [pa.concat_tables([rows.slice(1), other.slice(3, 1)])]
        return pieces, num_grouped

    monkeypatch.setattr(recorded_runs, "run_workers", lambda train, number, *given: [train(0, 1, *given)])
    config = small_config("simclr", {**STREAM, "workers": 1, "stages.0.steps": 9})
    data = write_parts(tmp_path / "data")
    with monkeypatch.context() as patched:
        patched.setattr(WindowCutter, "cut", faulty)
        run = record_run(config, data, tmp_path / "run", checkpoints=(3,))
    found = raycl.certify(run, steps=0)
    assert failed(found) == ["samples"]
    assert "up to step 3 the run drew other samples" in str(found)


def test_only_as_many_steps_are_computed_again_as_asked(run: Path) -> None:
    assert len(raycl.certify(run, steps=2).recomputed) == 2
    assert raycl.certify(run, steps=0).recomputed == []
    with pytest.raises(ConfigError, match="--steps must be at least 0, got -1"):
        raycl.certify(run, steps=-1)


def test_a_changed_loss_in_the_log_is_found(copy: Path) -> None:
    rewritten(copy / "metrics.jsonl", lambda lines: lines[9].update(loss=lines[9]["loss"] * 1.0001))
    found = raycl.certify(copy)
    assert failed(found) == ["log"]
    assert "lines 8 to 12 of metrics.jsonl" in str(found)


@pytest.mark.parametrize("change", [lambda lines: lines.pop(), lambda lines: lines.append(lines[-1])])
def test_a_removed_and_an_added_step_in_the_log_are_found(change: Any, copy: Path) -> None:
    rewritten(copy / "metrics.jsonl", change)
    assert failed(raycl.certify(copy)) == ["log"]


def test_an_evaluation_added_after_the_end_is_found_but_a_notice_of_a_tracker_is_none(copy: Path) -> None:
    notice = {"step": 17, "event": "tracking", "text": "wandb: no network"}
    rewritten(copy / "metrics.jsonl", lambda lines: lines.append(notice))
    assert raycl.certify(copy, steps=0).is_valid
    for added in ({"step": 17, "knn_top1": 0.999}, {**notice, "knn_top1": 0.999}):
        rewritten(copy / "metrics.jsonl", lambda lines, added=added: lines.append(added))
        found = raycl.certify(copy, steps=0)
        assert failed(found) == ["log"]
        assert found.proves == ""
        rewritten(copy / "metrics.jsonl", lambda lines: lines.pop())
    assert raycl.certify(copy, steps=0).is_valid


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"steps": 90}, "steps is 17 in chain.jsonl, and 90 in result.json"),
        (
            {"final": {"linear_top1": 0.99}},
            "linear_top1 is None in chain.jsonl, and 0.99 in result.json",
        ),
        ({"chain": "0" * 64}, "is not the one that result.json names"),
    ],
)
def test_a_changed_result_is_found(change: dict[str, Any], says: str, copy: Path) -> None:
    result = json.loads((copy / "result.json").read_text())
    (copy / "result.json").write_text(json.dumps(result | change))
    found = raycl.certify(copy)
    assert failed(found) == ["chain"]
    assert says in str(found)


@pytest.mark.parametrize("final", [None, [], "knn_top1"])
def test_a_result_without_its_metrics_is_found(final: Any, copy: Path) -> None:
    rewritten(copy / CHAIN, lambda links: links[-1].update(final={"knn_top1": 0.5}))
    with_new_hashes(copy)
    result = json.loads((copy / "result.json").read_text())
    (copy / "result.json").write_text(json.dumps(result | {"final": final}))
    found = raycl.certify(copy, steps=0)
    assert failed(found) == ["chain"]
    assert "knn_top1 is 0.5 in chain.jsonl, and None in result.json" in str(found)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *[(name, content) for name in ("result.json", "data.json") for content in ("", "[]", '{"steps": ')],
        ("data.json", "{}"),
        ("data.json", '{"num_rows": "many"}'),
    ],
)
def test_a_damaged_file_is_named_in_one_line(name: str, content: str, copy: Path) -> None:
    (copy / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name} is damaged: .*") as caught:
        raycl.certify(copy, steps=0)
    assert "\n" not in str(caught.value)


def test_an_unfinished_run_is_certified_up_to_its_last_checkpoint(copy: Path) -> None:
    (copy / "result.json").write_text(json.dumps({"status": "stopped"}))
    lines = (copy / CHAIN).read_text().splitlines()
    (copy / CHAIN).write_text("\n".join([*lines[:3], ""]))
    found = raycl.certify(copy, steps=0)
    assert found.is_valid, str(found)
    assert "this unfinished run wrote its settings, its checkpoints and its log up to step 12" in found.proves
    assert "the last 5 are not bound" in str(found)


def test_a_run_may_replace_its_checkpoints_while_it_is_certified(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "result.json").write_text(json.dumps({"status": "running"}))
    chain, listed = copy / CHAIN, copy / "checkpoints" / CHECKPOINT_LIST
    links, both = chain.read_text().splitlines(keepends=True), listed.read_text()
    chain.write_text("".join(links[:2]))
    results = json.loads(both)["checkpoint_results"]
    listed.write_text(json.dumps({"checkpoint_results": results[:1]}))
    check_files = ChainedHistory._check_files

    def save_meanwhile(history: ChainedHistory) -> str:
        chain.write_text("".join(links[:3]))
        listed.write_text(both)
        shutil.rmtree(copy / "checkpoints" / "step-00000007")
        return check_files(history)

    monkeypatch.setattr(ChainedHistory, "_check_files", save_meanwhile)
    found = raycl.certify(copy, steps=0)
    assert found.is_valid, str(found)
    assert found.steps == 7


def started_again(run: Path, **settings: Any) -> None:
    """Let ``--resume`` write its files, and end before the workers start."""
    config = raycl.config_from_yaml((run / "config.yaml").read_text())
    described = json.loads((run / "data.json").read_text())
    save_run_files(Place(str(run)), override(config, settings), described, None)


def test_a_finished_run_whose_second_start_ended_before_the_workers_is_unfinished(copy: Path) -> None:
    (copy / "encoder.json").write_text("{}")
    spec = {"encoder.json": hashlib.sha256(b"{}").hexdigest()}
    rewritten(copy / CHAIN, lambda links: links[-1].update(files=spec))
    with_new_hashes(copy)
    assert raycl.certify(copy, steps=0).proves.startswith("It proves that the files of this run")
    result = (copy / "result.json").read_text()
    (copy / "encoder.json").write_text('{"name": "another"}')
    for edited in (result, '{"status": "stopped"}'):
        (copy / "result.json").write_text(edited)
        found = raycl.certify(copy, steps=0)
        assert failed(found) == ["files"]
        assert "encoder.json was changed since the run wrote it" in str(found)
    started_again(copy)
    assert not (copy / "encoder.json").exists()
    found = raycl.certify(copy, steps=0)
    assert found.is_valid, str(found)
    assert "this unfinished run wrote its settings, its checkpoints and its log up to step 17" in found.proves


def test_a_longer_run_whose_workers_did_not_start_is_certified_once_they_do(copy: Path) -> None:
    started_again(copy, **{"stages.0.steps": 20})
    found = raycl.certify(copy, steps=0)
    assert failed(found) == ["files"]
    assert "config.yaml was changed after the workers last started" in str(found)
    assert "continue the run with --resume" in str(found)
    config = raycl.config_from_yaml((copy / "config.yaml").read_text())
    place, restored = Place(str(copy)), {"drawn": 0, "checkpoint": "step-00000012"}
    job: Any = SimpleNamespace(
        output=place,
        fingerprint=read_chain(place)[0]["rows"],
        corpus_fingerprint=None,
        config=config,
        coordinator=None,
        check_lease=lambda: None,
    )
    RunChain(job, config, dict, Position(step=12), restored, torch.device("cpu"))
    found = raycl.certify(copy, steps=0)
    assert found.is_valid, str(found)


@pytest.mark.parametrize("line", ['{"step": ', "3", "[]", "{}", '{"step": "9"}'])
def test_a_damaged_log_is_one_line(line: str, copy: Path) -> None:
    with (copy / "metrics.jsonl").open("a") as log:
        log.write(line)
    with pytest.raises(DataError, match=r"line 18 of .*metrics.jsonl is damaged"):
        raycl.certify(copy)


def test_steps_that_one_process_cannot_repeat_are_not_checked(tmp_path: Path) -> None:
    rows = [{"query": text[:9], "document": text, "negatives": [text[::-1]]} for text in invented_texts(200)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    words = {
        "encoder.name": "bag_of_subwords",
        "encoder.kwargs": {"dim": 16, "hidden_dim": 24, "dropout": 0.2},
    }
    config = small_config("two_tower", {"workers": 2, "negatives.explicit": True, **words})
    run = record_run(config, tmp_path / "pairs.parquet", tmp_path / "run")
    found = raycl.certify(run)
    assert found.is_valid, str(found)
    [steps] = [check for check in found.checks if check.name == "steps"]
    assert steps.passed is None and "explicit negatives" in steps.text
    assert [check.passed for check in found.checks if check.name in ("rows", "samples")] == [True, True]


def test_a_swapped_checkpoint_is_found(copy: Path) -> None:
    first, second = (copy / "checkpoints" / f"step-{step:08d}" / "state.pt" for step in (7, 12))
    shutil.copy(first, second)
    found = raycl.certify(copy, steps=0)
    assert failed(found) == ["checkpoints"]
    assert "the checkpoint step-00000012 is not the one that the run saved" in str(found)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("step-00000099", "the run did not save the checkpoint step-00000099"),
        ("step-00000012", "the checkpoint step-00000012 is not the one that the run saved"),
    ],
)
def test_a_latest_checkpoint_that_the_run_did_not_save_is_found(name: str, says: str, copy: Path) -> None:
    listed = copy / "checkpoints" / CHECKPOINT_LIST
    results = json.loads(listed.read_text())["checkpoint_results"]
    latest = {"checkpoint_dir_name": name}
    listed.write_text(json.dumps({"checkpoint_results": results[:1], "latest_checkpoint_result": latest}))
    (copy / "checkpoints" / name).mkdir(exist_ok=True)
    (copy / "checkpoints" / name / "state.pt").write_bytes(b"forged")
    found = raycl.certify(copy, steps=0)
    assert failed(found) == ["checkpoints"]
    assert says in str(found)


def test_a_swapped_checkpoint_that_the_list_lacks_is_found_unless_its_upload_was_interrupted(
    copy: Path,
) -> None:
    listed, state = copy / "checkpoints" / CHECKPOINT_LIST, copy / "checkpoints/step-00000012/state.pt"
    listed.write_text(
        json.dumps({"checkpoint_results": json.loads(listed.read_text())["checkpoint_results"][:1]})
    )
    assert "checkpoints/step-00000012/state.pt" in raycl.certify(copy, steps=0).files
    state.write_bytes(state.read_bytes()[:99])
    found = raycl.certify(copy, steps=0)
    assert failed(found) == ["checkpoints"]
    assert "the checkpoint step-00000012 is not the one that the run saved" in str(found)
    # Its link is the last one of a run that ended while it saved.
    (copy / "result.json").write_text(json.dumps({"status": "failed"}))
    (copy / CHAIN).write_text("".join((copy / CHAIN).read_text().splitlines(keepends=True)[:3]))
    assert raycl.certify(copy, steps=0).is_valid


def test_an_edited_config_is_found(copy: Path) -> None:
    text = (copy / "config.yaml").read_text()
    assert "crop_scale" in text
    (copy / "config.yaml").write_text(text.replace("log_every_steps: 1", "log_every_steps: 2"))
    assert failed(raycl.certify(copy, steps=0)) == ["files"]


@pytest.mark.parametrize("change", ["skipped", "twice"])
def test_a_sample_that_training_skipped_or_drew_twice_is_found(
    change: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = InMemorySampler._order

    def faulty(self: InMemorySampler, *given: Any) -> Any:
        rows = order(self, *given)
        left_out = next(iter(set(range(len(self.rows))) - set(rows.flatten().tolist())))
        rows[2, 5] = left_out if change == "skipped" else rows[1, 2]
        return rows

    monkeypatch.setattr(recorded_runs, "run_workers", lambda train, number, *given: [train(0, 1, *given)])
    config = small_config("simclr", {"stages.0.steps": 9, "workers": 1})
    with monkeypatch.context() as patched:
        patched.setattr(InMemorySampler, "_order", faulty)
        run = record_run(config, data, tmp_path / "run", checkpoints=(3,))
    found = raycl.certify(run, steps=2)
    assert failed(found) == ["samples"]
    assert "up to step 3 the run drew other samples" in str(found)


@pytest.mark.parametrize("column", ["image", "label"])
def test_changed_data_are_found(column: str, copy: Path, data: Path, tmp_path: Path) -> None:
    table = pq.read_table(data)
    values = table[column].to_pylist()
    values[3], values[4] = values[4], values[3]
    assert values[3] != values[4]
    index = table.schema.get_field_index(column)
    changed = tmp_path / "digits.parquet"
    pq.write_table(table.set_column(index, table.schema.field(index), [values]), changed)
    found = raycl.certify(copy, steps=0, data=changed)
    assert failed(found) == ["rows"]
    assert raycl.certify(copy, steps=0, data=data).is_valid


def test_fewer_data_are_found(copy: Path, data: Path, tmp_path: Path) -> None:
    pq.write_table(pq.read_table(data).slice(1), tmp_path / "digits.parquet")
    found = raycl.certify(copy, data=tmp_path / "digits.parquet")
    assert failed(found) == ["rows"]
    assert "the run trained on 200 rows, and there are 199" in str(found)


def test_a_forged_chain_does_not_hide_a_changed_loss(copy: Path) -> None:
    def change(objects: list[dict[str, Any]]) -> None:
        for each in objects:
            if "8" in each.get("losses", {}):
                each["losses"]["8"] *= 1.0001
            if each.get("step") == 8 and "loss" in each:
                each["loss"] *= 1.0001

    rewritten(copy / "metrics.jsonl", change)
    heads = list(log_heads((copy / "metrics.jsonl").read_text().splitlines()))

    def forge(links: list[dict[str, Any]]) -> None:
        change(links)
        for link in links:
            if "log" in link:
                link["log"] = heads[link["log"]["lines"]]

    rewritten(copy / CHAIN, forge)
    with_new_hashes(copy)
    found = raycl.certify(copy, steps=99)
    assert failed(found) == ["steps"]
    assert [each.step for each in found.recomputed if not each.is_equal] == [8]


def test_a_forged_chain_does_not_hide_another_learning_rate(copy: Path) -> None:
    config = copy / "config.yaml"
    text = config.read_text()
    rate = raycl.config_from_yaml(text).stages[0].learning_rate
    assert text.count(f"learning_rate: {rate}") == 1
    config.write_text(text.replace(f"learning_rate: {rate}", f"learning_rate: {1.5 * rate}"))
    names = {"config.yaml": hashlib.sha256(config.read_bytes()).hexdigest()}

    def forge(links: list[dict[str, Any]]) -> None:
        for link in links:
            if link["kind"] == "start":
                link["files"] |= names

    rewritten(copy / CHAIN, forge)
    with_new_hashes(copy)
    found = raycl.certify(copy, steps=99)
    assert failed(found) == ["steps"]
    # The steps right after a checkpoint do not depend on it.
    assert {each.updates for each in found.recomputed if not each.is_equal} == {1}


def test_a_loss_after_an_update_may_differ_by_the_rounding_of_float32(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the rounding of gradients changed updates by more than the limit.
    monkeypatch.setattr(recompute, "_AFTER_UPDATE", 0.0)
    found = raycl.certify(copy, steps=99)
    assert failed(found) == []
    assert any(each.relative_difference > 0 for each in found.recomputed if each.updates)
    monkeypatch.setattr(recompute, "_ROUNDINGS", 0)
    assert failed(raycl.certify(copy, steps=99)) == ["steps"]


def test_losses_of_the_chain_must_be_those_of_the_log(copy: Path) -> None:
    def forge(links: list[dict[str, Any]]) -> None:
        links[1]["losses"]["1"] *= 1.001

    rewritten(copy / CHAIN, forge)
    with_new_hashes(copy)
    found = raycl.certify(copy, steps=0)
    assert failed(found) == ["log"]
    assert "step 1 has loss" in str(found)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_changed_and_a_removed_link_are_found(number: int, copy: Path) -> None:
    def change(links: list[dict[str, Any]]) -> None:
        links[number]["step"] += 1

    lines = (copy / CHAIN).read_text().splitlines()
    rewritten(copy / CHAIN, change)
    found = raycl.certify(copy)
    assert failed(found) == ["chain"]
    assert f"link {number + 1} of" in str(found)
    assert [check.name for check in found.checks] == ["chain"]
    (copy / CHAIN).write_text("\n".join([*lines[:number], *lines[number + 1 :], ""]))
    assert failed(raycl.certify(copy)) == ["chain"]


def test_a_run_without_a_chain_and_one_whose_chain_begins_late_are_not_certified(copy: Path) -> None:
    rewritten(copy / CHAIN, lambda links: links[0].update(step=5, checkpoint="step-00000005"))
    with_new_hashes(copy)
    assert "begins at step 5" in str(raycl.certify(copy))
    (copy / CHAIN).unlink()
    found = raycl.certify(copy)
    assert failed(found) == ["chain"]
    assert "an older version of raycl made it" in str(found)


def test_a_run_that_cannot_be_replayed_is_certified_without_steps(copy: Path, data: Path) -> None:
    described = json.loads((copy / "data.json").read_text()) | {"streamed": True, "data": None}
    (copy / "data.json").write_text(json.dumps(described))
    rewritten(
        copy / CHAIN,
        lambda links: links[0]["files"].update(
            {"data.json": hashlib.sha256((copy / "data.json").read_bytes()).hexdigest()}
        ),
    )
    with_new_hashes(copy)
    found = raycl.certify(copy, data=data)
    assert found.is_valid
    assert [check.name for check in found.checks if check.passed is None] == ["rows", "samples", "steps"]
    assert "it streamed a Ray Dataset" in str(found)
    assert "float64" not in found.proves


def test_a_certificate_is_written_and_checked_by_the_commands(copy: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["certify", str(copy), "--steps", "2"])
    assert done.exit_code == 0, done.output
    assert "certified" in done.output and "It proves that" in done.output
    file = copy / "certificate.json"
    found = json.loads(file.read_text())
    assert found["valid"]
    page = (Path(__file__).parent.parent / "docs" / "certificate.md").read_text()
    for part in (found, found["checks"][0], found["recomputed"][0], found["epochs"][0]):
        for key in part:
            assert f"`{key}`" in page, key
    done = runner.invoke(app, ["certify", "--check", str(file)])
    assert done.exit_code == 0, done.output
    # A folder that has the run only.
    elsewhere = Path(shutil.copy(file, copy.parent / "elsewhere.json"))
    assert raycl.check_certificate(elsewhere, copy).is_valid
    with pytest.raises(DataError, match="holds no run"):
        raycl.check_certificate(elsewhere)
    # The run changes.
    with (copy / "metrics.jsonl").open("a") as log:
        log.write('{"step": 17}\n')
    done = runner.invoke(app, ["certify", "--check", str(file)])
    assert done.exit_code == 1
    assert "metrics.jsonl is not the file that was certified" in done.output
    assert raycl.check_certificate(file).proves == ""


def test_an_edited_certificate_is_found(copy: Path, tmp_path: Path) -> None:
    values = raycl.certify(copy, steps=2).to_dict()
    file = tmp_path / "certificate.json"
    for change in (
        lambda each: each["recomputed"][0].update(loss=1.0),
        lambda each: each.update(steps=99),
        lambda each: each["checks"].pop(),
        lambda each: each.update(note="more"),
    ):
        changed = json.loads(json.dumps(values))
        change(changed)
        file.write_text(json.dumps(changed))
        found = raycl.check_certificate(file, copy)
        assert failed(found) == ["certificate"]
        assert "was changed after it was written" in str(found)
    file.write_text(json.dumps(values))
    assert raycl.check_certificate(file, copy).is_valid
    for missing in ({}, {name: value for name, value in values.items() if name != "steps"}):
        file.write_text(json.dumps(missing))
        with pytest.raises(DataError, match="is no certificate"):
            raycl.check_certificate(file, copy)
    with pytest.raises(DataError, match="there is no certificate at"):
        raycl.check_certificate(tmp_path / "none.json", copy)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"files": {}}, "the certificate does not bind chain.jsonl, "),
        ({"chain": "0" * 64}, "the certificate has chain 000"),
        ({"steps": 999_999}, "the certificate has steps 999999, and the run 17"),
    ],
)
def test_a_certificate_of_another_history_is_found_even_with_a_new_hash(
    change: dict[str, Any], says: str, copy: Path, tmp_path: Path
) -> None:
    values = raycl.certify(copy, steps=0).to_dict()
    changed = {name: value for name, value in (values | change).items() if name != "sha256"}
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps({**changed, "sha256": certificate._hash_of(changed)}))
    found = raycl.check_certificate(file, copy)
    assert failed(found) == ["same run"]
    assert says in str(found)


def test_a_certificate_states_what_its_checks_prove_and_the_last_hash(copy: Path, tmp_path: Path) -> None:
    values = raycl.certify(copy, steps=0).to_dict()
    changed = {name: value for name, value in values.items() if name != "sha256"} | {"proves": "everything"}
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps({**changed, "sha256": certificate._hash_of(changed)}))
    found = raycl.check_certificate(file, copy)
    assert found.proves == values["proves"]
    assert values["chain"] in str(found)
    changed["checks"] = [{"name": "rows"}]
    file.write_text(json.dumps({**changed, "sha256": certificate._hash_of(changed)}))
    with pytest.raises(DataError, match="is no certificate"):
        raycl.check_certificate(file, copy)


def test_a_looser_precision_in_a_forged_chain_is_found(copy: Path) -> None:
    def loosen(links: list[dict[str, Any]]) -> None:
        for link in links:
            if link["kind"] == "start":
                link["precision"] = "bfloat16"

    rewritten(copy / "chain.jsonl", loosen)
    with_new_hashes(copy)
    found = raycl.certify(copy, steps=0)
    assert failed(found) == ["files"]
    assert "the precision is float32 in config.yaml, and bfloat16 in chain.jsonl" in str(found)


def test_a_run_that_fails_gets_no_valid_certificate(copy: Path) -> None:
    (copy / "config.yaml").write_text((copy / "config.yaml").read_text() + "\n")
    done = CliRunner().invoke(app, ["certify", str(copy), "--steps", "0"])
    assert done.exit_code == 1
    assert "NOT certified" in done.output
    assert not (copy / "certificate.json").exists()


def test_steps_that_a_restart_or_a_rollback_undid_do_not_count() -> None:
    def start(checkpoint: str | None) -> dict[str, Any]:
        return {"kind": "start", "checkpoint": checkpoint}

    def saved(name: str) -> dict[str, Any]:
        return {"kind": "checkpoint", "name": name}

    def back(checkpoint: str) -> dict[str, Any]:
        return {"kind": "rollback", "checkpoint": checkpoint}

    lost = [start(None), saved("10"), start(None), saved("10"), saved("20"), start("10"), saved("15")]
    assert kept_links(lost) == [start(None), saved("10"), start("10"), saved("15")]
    rolled_back = [*lost, saved("25"), back("15"), saved("15-again"), {"kind": "end"}]
    kept = [
        start(None),
        saved("10"),
        start("10"),
        saved("15"),
        back("15"),
        saved("15-again"),
        {"kind": "end"},
    ]
    assert kept_links(rolled_back) == kept
    # The checkpoint after the rollback was never complete: the group resumes from the last one before it.
    crashed = [*rolled_back[:-1], start("25"), saved("30")]
    assert kept_links(crashed) == [*lost[2:4], *lost[5:], saved("25"), start("25"), saved("30")]
    assert kept_links([start("of an older version"), saved("30")]) == [
        start("of an older version"),
        saved("30"),
    ]
    assert kept_links([]) == []


def test_steps_after_a_rollback_behind_a_start_are_those_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(tmp_path))
    chain = Chain(place)
    first = {"settings": "s", "workers": 2, "checkpoint": None}
    chain.add("start", first)
    chain.add("checkpoint", {"name": "step-00000040", "losses": {"1": 3.0}})
    chain.add("start", {**first, "workers": 1, "checkpoint": "step-00000040"})
    chain.add("rollback", {"checkpoint": "step-00000040"})
    chain.add("checkpoint", {"name": "step-00000040-again1", "losses": {}})
    chain.add("checkpoint", {"name": "step-00000080-again1", "losses": {"41": 1.0}})
    chain.flush()
    links = read_chain(place)
    monkeypatch.setattr(recompute, "complete_checkpoints", lambda _: ["step-00000040-again1"])
    history: Any = SimpleNamespace(
        run=SimpleNamespace(output=place, is_kept=lambda *_, **__: True),
        links=links,
        kept=kept_links(links),
        starts=[link for link in links if link["kind"] == "start"],
    )
    found = RecomputedSteps(history, MagicMock())._recomputable()
    assert [(start["workers"], losses) for start, losses in found] == [(2, {1: 3.0}), (1, {41: 1.0})]


@pytest.mark.parametrize("content", [b"{}\n", b"\xff\x00\xfe damaged\n"])
def test_a_damaged_chain_is_moved_and_a_new_one_begins(content: bytes, tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    first = Chain(place)
    first.add("start", {"step": 0})
    first.flush()
    assert not Chain(place).is_damaged
    (tmp_path / CHAIN).write_bytes(content)
    second = Chain(place)
    assert second.is_damaged
    second.add("start", {"step": 5})
    second.flush()
    assert [link["step"] for link in read_chain(place)] == [5]
    assert (tmp_path / "chain.damaged.jsonl").read_bytes() == content


def test_the_hash_of_a_draw_is_a_sum_over_samples_that_depends_on_the_epoch() -> None:
    ids = np.array([5, -3, 2**62, 0, 7], np.int64)
    whole = hash_of_draw(ids, 3)
    parts = hash_of_draw(ids[[4, 0]], 3) + hash_of_draw(ids[[2, 1, 3]], 3)
    assert parts % 2**64 == whole
    assert len({hash_of_draw(ids[:1], epoch) for epoch in range(100)}) == 100
    assert len({hash_of_draw(np.array([each]), 0) for each in range(1_000)}) == 1_000
    # The checkpoints and chains of earlier runs have these sums.
    assert (hash_of_draw(ids, 0), whole) == (83729651061763851, 796286392081069436)
    # A sample drawn in another epoch, or in the place of its neighbor.
    assert hash_of_draw(ids[:2], 0) + hash_of_draw(ids[2:], 1) != hash_of_draw(ids, 0) % 2**64
    assert hash_of_draw(np.array([1, 2, 2]), 0) != hash_of_draw(np.array([1, 2, 3]), 0)


def test_the_fingerprint_depends_on_contents_only() -> None:
    random = np.random.default_rng(0)
    pixels = pa.array([random.bytes(12) for _ in range(9)], pa.binary(12))
    tokens = [[1, 2], [3], [], [4, 5, 6], [7], [8], [9], [1], [2]]
    lists = [[[1, 2], [3]], [[1], [2, 3]], [], [[]], [[1]], [[2]], [[3]], [[4]], [[5]]]
    columns = {
        "sample_id": pa.array(range(9), pa.int64()),
        "image.pixels": pixels,
        "text.tokens": pa.array(tokens, pa.list_(pa.int32())),
        "negatives.tokens": pa.array(lists, pa.list_(pa.list_(pa.int32()))),
        "weight.value": pa.array(random.random(9)),
    }
    table = pa.table(columns)
    expected = fingerprint(table)
    order = random.permutation(9)
    assert fingerprint(table.take(order)) == expected
    assert fingerprint(table.slice(5), table.slice(0, 5)) == expected
    assert fingerprint(pa.concat_tables([table.slice(3), table.slice(0, 3)]).combine_chunks()) == expected
    assert fingerprint(table.select(sorted(columns, reverse=True))) == expected
    assert fingerprint(table.slice(1)) != expected
    changes: dict[str, Any] = {
        "sample_id": [*range(8), 9],
        "text.tokens": [[1], [2, 3], *tokens[2:]],
        "negatives.tokens": [[[1], [2, 3]], *lists[1:]],
        "weight.value": [0.5, *columns["weight.value"].to_pylist()[1:]],
        "image.pixels": [bytes(12), *pixels.to_pylist()[1:]],
    }
    for name, values in changes.items():
        changed = pa.table(columns | {name: pa.array(values, columns[name].type)})
        assert fingerprint(changed) != expected, name


def job_of(config: RunConfig, output: Path, check_lease: Callable[[], None] = lambda: None) -> Any:
    """Return the parts of a job that a chain reads."""
    return SimpleNamespace(
        output=Place(str(output)),
        fingerprint=7,
        corpus_fingerprint=8,
        config=config,
        check_lease=check_lease,
    )


def test_a_group_without_its_lease_adds_no_start(copy: Path) -> None:
    def lose() -> None:
        raise RunError("this process lost its lease")

    config, before = small_config("simclr", {}), (copy / CHAIN).read_bytes()
    with pytest.raises(RunError, match="lost its lease"):
        RunChain(job_of(config, copy, lose), config, dict, Position(), None, torch.device("cpu"))
    assert (copy / CHAIN).read_bytes() == before


def test_steps_of_a_lost_group_and_before_a_rollback_are_not_counted(tmp_path: Path) -> None:
    config = small_config("simclr", {})
    job = job_of(config, tmp_path)
    cpu, state_file = torch.device("cpu"), tmp_path / "state"
    state_file.write_bytes(b"weights")
    ids = {step: np.arange(step, step + 8) for step in range(1, 12)}

    def make(chain: RunChain, *steps: int) -> None:
        for step in steps:
            views: Any = SimpleNamespace(ids=ids[step])
            chain.step(views, Position(step=step - 1, epoch=step // 4), 0.5 * step)

    def save(chain: RunChain, step: int) -> dict[str, Any]:
        chain.sum_draws()
        chain.checkpoint(f"step-{step:08d}", Position(step=step), state_file)
        return chain.state_dict() | {"checkpoint": f"step-{step:08d}"}

    first = RunChain(job, config, dict, Position(), None, cpu)
    make(first, 1, 2, 3)
    saved = save(first, 3)
    make(first, 4, 5)  # lost
    second = RunChain(job, config, dict, Position(step=3), saved, cpu)
    make(second, 4, 5, 6)
    kept = save(second, 6)
    make(second, 7, 8)
    save(second, 8)
    second.roll_back(Position(step=6, rollbacks=1), kept)
    make(second, 7)
    save(second, 7)
    make(second, 8, 9)
    second.sum_draws()
    head = second.end(Position(step=9), {"knn_top1": 0.5})

    links = read_chain(Place(str(tmp_path)))
    assert [link["kind"] for link in links] == [
        "start",
        "checkpoint",
        "start",
        "checkpoint",
        "checkpoint",
        "rollback",
        "checkpoint",
        "end",
    ]
    assert links[-1]["hash"] == head
    assert [link["checkpoint"] for link in links if "checkpoint" in link] == [
        None,
        "step-00000003",
        "step-00000006",
    ]
    assert (links[0]["rows"], links[0]["corpus"]) == (7, 8)
    assert (links[0]["device"], links[0]["precision"]) == ("cpu", "float32")
    assert links[1]["state"] == hashlib.sha256(b"weights").hexdigest()
    drawn = [link["drawn"] for link in links if "drawn" in link]
    sums = [
        sum(hash_of_draw(ids[step], step // 4) for step in range(1, last + 1)) % 2**64
        for last in (3, 6, 8, 7, 9)
    ]
    assert drawn == sums
    assert [link["losses"] for link in links if "losses" in link] == [
        {"1": 0.5, "2": 1.0},
        {"4": 2.0, "5": 2.5},
        {"7": 3.5, "8": 4.0},
        {"7": 3.5},
        {"8": 4.0, "9": 4.5},
    ]
    # A checkpoint of a version without a chain: the sum of its steps is unknown.
    old = RunChain(job, config, dict, Position(step=9), {}, cpu)
    assert save(old, 9)["drawn"] is None


def test_settings_that_determine_no_loss_may_change_between_starts() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"workers": 2, "checkpoints.keep": 9},
        {"stages.0.learning_rate": 0.9},
        {"stages.0.chunk_size": 16},  # another order of dropout
    ]
    first, *others = (hash_of_settings(small_config("simclr", change)) for change in changes)
    assert [other == first for other in others] == [True, False, False]


def test_a_run_with_files_that_are_not_installed_has_a_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    config = small_config("simclr", {})
    job = job_of(config, tmp_path)
    RunChain(job, config, dict, Position(), None, torch.device("cpu"))
    assert read_chain(job.output)[0]["version"] == "unknown"
