"""A step that is made again: its softmax weights against plain formulas, its samples, and its refusals."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import raycl
from raycl.config.overrides import config_to_yaml
from raycl.data.ids import stable_id
from raycl.errors import ConfigError, DataError
from raycl.losses.clip import Clip
from raycl.losses.dcl import Dcl
from raycl.losses.example_ids import ExampleIds
from raycl.losses.info_nce import InfoNce
from raycl.losses.nt_xent import NtXent
from raycl.losses.objective import Objective, StoreBatch
from raycl.losses.poly_view import PolyView
from raycl.losses.supcon import SupCon
from raycl.step_replay.find import _drawn_id
from raycl.step_replay.record import read_record
from raycl.step_replay.restore import train_until
from raycl.step_replay.rows import read_rows
from raycl.step_replay.softmax import SideWeights, WatchedObjective, explain
from raycl.tokenization import inverse_document_frequency
from tests.images import write_digits
from tests.recorded_runs import record_run, small_config
from tests.texts import invented_texts

TEMPERATURE, BATCH, DIM = 0.3, 9, 5
TOP = 4


def unit(*shape: int, seed: int) -> Tensor:
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (rows / rows.norm(dim=-1, keepdim=True)).float()


def explained(
    objective: Objective, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds
) -> tuple[list[SideWeights], float]:
    """Return the softmax of all queries, and the loss of the objective."""
    watched = WatchedObjective(objective)
    loss = watched(query, key, stored, ids)
    sides, temperature = explain(watched, top=TOP)
    assert temperature == pytest.approx(TEMPERATURE)
    return sides, float(loss)


def check(
    side: SideWeights,
    queries: Tensor,
    positives: Tensor,
    columns: Tensor,
    *,
    is_negative: Any,
    bias: Any = lambda column: 0.0,
    positive_bias: Any = lambda row: 0.0,
) -> None:
    """Compare with loops over queries and candidates, in float64; ``is_negative`` takes a query and a column."""
    queries, positives, columns = (each.double() for each in (queries, positives, columns))
    for row, query in enumerate(queries):
        own = math.exp(float(query @ positives[row]) / TEMPERATURE + positive_bias(row))
        others = {
            column: math.exp(float(query @ columns[column]) / TEMPERATURE + bias(column))
            for column in range(len(columns))
            if is_negative(row, column)
        }
        total = own + sum(others.values())
        assert float(side.weight[row]) == pytest.approx(own / total, rel=1e-9)
        assert float(side.loss[row]) == pytest.approx(-math.log(own / total), rel=1e-9)
        assert float(side.similarity[row]) == pytest.approx(float(query @ positives[row]), rel=1e-5)
        assert int(side.num_negatives[row]) == len(others)
        hardest = sorted(others, key=lambda column: -float(query @ columns[column]))[:TOP]
        assert side.top[row].tolist()[: len(hardest)] == hardest
        assert side.top_weight[row].tolist()[: len(hardest)] == pytest.approx(
            [others[column] / total for column in hardest], rel=1e-9
        )


def mean_loss(sides: list[SideWeights], row_weight: Tensor | None) -> float:
    """Return the loss of a step: the mean over all queries, weighted by ``row_weight`` [batch], whose mean is 1."""
    losses = [side.loss if row_weight is None else side.loss * row_weight.cpu() for side in sides]
    return float(torch.cat(losses).mean())


def test_the_weights_of_nt_xent_are_those_of_its_formula() -> None:
    a, b = unit(BATCH, DIM, seed=1), unit(BATCH, DIM, seed=2)
    ids = torch.tensor([4, 7, 1, 4, 9, 2, 7, 3, 8])  # 4 and 7 twice
    sides, loss = explained(
        NtXent(temperature=TEMPERATURE), a, b, StoreBatch(), ExampleIds(query=ids, key=ids)
    )
    columns, of_columns = torch.cat([a, b]), ids.repeat(2)
    for side, (queries, positives) in zip(sides, ((a, b), (b, a)), strict=True):
        check(
            side, queries, positives, columns, is_negative=lambda row, column: ids[row] != of_columns[column]
        )
    assert mean_loss(sides, None) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("in_batch", [True, False])
def test_the_weights_of_info_nce_are_those_of_its_formula_with_a_queue(
    in_batch: bool, distinct: bool
) -> None:
    query, key, queue = unit(BATCH, DIM, seed=1), unit(BATCH, DIM, seed=2), unit(7, DIM, seed=3)
    ids, stored_ids = torch.arange(BATCH), torch.tensor([3, 20, 21, 3, 8, 22, 23])
    stored_ids = torch.arange(20, 27) if distinct else stored_ids  # without false negatives
    steps = torch.tensor([5, 5, 6, 6, 7, 7, 8])
    stored = StoreBatch(
        negatives=queue, negative_id=stored_ids, negative_name=stored_ids, negative_step=steps
    )
    objective = InfoNce(temperature=TEMPERATURE, in_batch=in_batch)
    (side,), loss = explained(objective, query, key, stored, ExampleIds(query=ids, key=ids))
    columns = torch.cat([key, queue]) if in_batch else queue
    of_columns = torch.cat([ids, stored_ids]) if in_batch else stored_ids
    check(side, query, key, columns, is_negative=lambda row, column: ids[row] != of_columns[column])
    assert mean_loss([side], None) == pytest.approx(loss, rel=1e-6)
    places = [candidate.place for candidate in side.side.candidates]
    assert places == ["batch"] * (BATCH * in_batch) + ["stored"] * 7


@pytest.mark.parametrize("distinct", [True, False])
def test_the_weights_of_clip_are_those_of_its_formula_in_both_directions(distinct: bool) -> None:
    query, key = unit(BATCH, DIM, seed=1), unit(BATCH, DIM, seed=2)
    explicit, queue = unit(3, DIM, seed=4), unit(4, DIM, seed=5)
    query_id = torch.tensor([0, 1, 2, 3, 0, 5, 6, 7, 8])  # a query with two documents
    key_id = torch.tensor([10, 11, 12, 13, 14, 15, 11, 17, 18])  # a document of two queries
    if distinct:
        query_id, key_id = torch.arange(BATCH), torch.arange(BATCH) + 40
    others, other_id = torch.cat([explicit, queue]), torch.tensor([30, 14, 32, 17, 34, 35, 36])
    stored = StoreBatch(
        negatives=others, negative_id=other_id, negative_name=other_id, negative_step=torch.arange(4)
    )
    frequency = {int(name): 0.1 * place for place, name in enumerate([*key_id.unique(), *other_id.unique()])}
    objective = Clip(
        temperature=TEMPERATURE,
        log_frequency=lambda names: torch.tensor(
            [frequency[int(each)] for each in names], dtype=torch.float64
        ),
    )
    weight = torch.linspace(0.5, 1.5, BATCH)
    ids = ExampleIds(query=query_id, key=key_id, weight=weight)
    (forward, backward), loss = explained(objective, query, key, stored, ids)
    pairs = set(zip(query_id.tolist(), key_id.tolist(), strict=True))
    columns, of_columns = torch.cat([key, others]), torch.cat([key_id, other_id]).tolist()
    check(
        forward,
        query,
        key,
        columns,
        is_negative=lambda row, column: (int(query_id[row]), of_columns[column]) not in pairs,
        bias=lambda column: -frequency[of_columns[column]],
        positive_bias=lambda row: -frequency[int(key_id[row])],
    )
    check(
        backward,
        key,
        query,
        query,
        is_negative=lambda row, column: (int(query_id[column]), int(key_id[row])) not in pairs,
    )
    assert mean_loss([forward, backward], weight) == pytest.approx(loss, rel=1e-6)
    places = [candidate.place for candidate in forward.side.candidates[BATCH:]]
    assert places == ["explicit"] * 3 + ["stored"] * 4


def test_another_loss_is_refused() -> None:
    rows, ids = unit(BATCH, DIM, seed=1), torch.arange(BATCH)
    with pytest.raises(ConfigError, match=r"nt_xent, info_nce and clip, and the step has Dcl"):
        explained(
            Dcl(temperature=TEMPERATURE), rows, rows, StoreBatch(), ExampleIds(query=ids, key=ids, label=ids)
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs and a half of SimCLR on digits, of which the last three are invalid images."""
    folder = tmp_path_factory.mktemp("recorded")
    data = write_digits(folder / "digits.parquet", 200, broken=3)
    config = small_config("simclr", {"stages.0.steps": 17})
    return record_run(config, data, folder / "run", checkpoints=(7, 12))


@pytest.fixture(scope="module")
def replayed(run: Path) -> Any:
    return raycl.replay(run, step=10, top=TOP, html=run.parent / "step.html")


def ids_by_step(run: Path) -> list[list[int]]:
    return json.loads((run / "ids.json").read_text())


def test_a_replayed_step_names_the_samples_of_its_batch(run: Path, replayed: Any) -> None:
    ids = ids_by_step(run)[9]
    assert sorted((query.sample.sample_id, query.sample.view) for query in replayed.queries) == sorted(
        (each, view) for each in ids for view in "ab"
    )
    for query in replayed.queries:
        assert query.positive.sample_id == query.sample.sample_id
        assert {query.sample.view, query.positive.view} == {"a", "b"}
        assert query.sample.name == f"digits.parquet row {query.sample.sample_id}"
        assert query.num_negatives == 2 * (len(ids) - 1)
        assert [each.source for each in query.negatives] == ["batch"] * TOP
        assert all(each.sample.sample_id in ids for each in query.negatives)
        similarities = [each.similarity for each in query.negatives]
        assert similarities == sorted(similarities, reverse=True)
        assert query.pull == pytest.approx(1 - math.exp(-query.loss), rel=1e-6)
        for each in query.negatives:
            assert each.share == pytest.approx(each.weight / query.pull, rel=1e-6)
    losses = [query.loss for query in replayed.queries]
    assert losses == sorted(losses, reverse=True)


def test_the_stored_rows_of_a_memory_bank_of_texts_are_named_by_their_samples(tmp_path: Path) -> None:
    sentences = invented_texts(120, seed=5)
    pq.write_table(pa.table({"text": sentences}), tmp_path / "texts.parquet")
    slots = {"key": "memory_bank", "negatives.store": "memory_bank", "negatives.bank_init": "random"}
    words = {"encoder.name": "bag_of_subwords", "encoder.kwargs": {"dim": 16, "hidden_dim": 24}}
    settings = {**slots, **words, "stages.0.steps": 3, "stages.0.loss": "info_nce"}
    run = record_run(small_config("simcse", settings), tmp_path / "texts.parquet", tmp_path / "run")
    replayed = raycl.replay(run, step=3, top=TOP)
    stored = [each.sample for query in replayed.queries for each in query.negatives]
    assert len(stored) == TOP * len(replayed.queries)
    for sample in [*stored, *(query.positive for query in replayed.queries)]:
        assert sample.sample_id is not None
        assert sample.name == f"texts.parquet row {sample.sample_id}"
        assert sample.text
        # The tokenizer puts spaces before punctuation, and an encoder sees the beginning of a long text.
        assert sentences[sample.sample_id].replace(" ", "").startswith(sample.text.replace(" ", ""))


def test_a_replay_writes_nothing_to_the_run_and_leaves_the_process_as_it_was(run: Path) -> None:
    products = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    settings = products.fp32_precision, torch.get_num_threads()
    raycl.replay(run, step=9)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert (products.fp32_precision, torch.get_num_threads()) == settings


def test_the_json_of_a_step_has_the_documented_keys(replayed: Any) -> None:
    found = json.loads(json.dumps(replayed.to_dict(), allow_nan=False))
    page = (Path(__file__).parent.parent / "docs" / "replay.md").read_text()
    query = found["queries"][0]
    for part in (found, query, query["positive"], query["negatives"][0]):
        for key in part:
            assert f"`{key}`" in page, key


def test_the_page_of_a_step_has_pictures_of_both_views_and_loads_nothing(run: Path, replayed: Any) -> None:
    page = (run.parent / "step.html").read_text()
    assert "Step 10" in page
    hardest = replayed.queries[0]
    assert hardest.sample.picture and hardest.positive.picture
    assert hardest.sample.picture != hardest.positive.picture
    for sample in (hardest.sample, hardest.positive, *(each.sample for each in hardest.negatives)):
        assert sample.picture in page
    assert "http://" not in page and "https://" not in page


def test_a_sample_is_found_in_the_steps_that_drew_it(run: Path) -> None:
    by_step = ids_by_step(run)
    for sample in sorted({sample for ids in by_step for sample in ids})[::17]:
        found = raycl.find_steps(run, f"sample={sample}").steps
        expected = [(step, ids.index(sample)) for step, ids in enumerate(by_step, 1) if sample in ids]
        assert [(each["step"], each["row"]) for each in found] == expected
        assert expected


@pytest.mark.parametrize(("loss", "objective"), [("supcon", SupCon), ("poly_view", PolyView)])
def test_a_rollback_leaves_the_loss_of_a_later_stage(loss: str, objective: type, tmp_path: Path) -> None:
    stages = {"stages.0.loss": "hinge", "stages.0.steps": 1, "stages.1.loss": loss, "stages.1.steps": 2}
    settings = {**stages, "monitor.on_collapse": "rollback", "data.columns.label": "label"}
    data = write_digits(tmp_path / "digits.parquet", 80)
    run = record_run(small_config("simclr", settings), data, tmp_path / "run")
    before = train_until(read_rows(read_record(str(run))), 2)
    used: list[Objective] = []

    def watch(objective: Objective) -> Objective:
        used.append(objective)
        return objective

    runner = before.runner
    runner.position = replace(runner.position, rollbacks=1, cross_entropy_until=10)
    assert math.isfinite(runner.step(before.views, watch=watch).loss)
    assert isinstance(used[0], objective)


def test_a_replay_counts_the_tokens_of_the_corpus(tmp_path: Path) -> None:
    texts = invented_texts(60)
    for name, part in (("own", texts[:40]), ("more", texts)):
        pq.write_table(pa.table({"text": part}), tmp_path / f"{name}.parquet")
    bag = {"encoder.name": "bag_of_subwords", "encoder.kwargs": {"dim": 16, "hidden_dim": 0}}
    config = small_config(
        "simcse", {**bag, "text.corpus": str(tmp_path / "more.parquet"), "stages.0.steps": 1}
    )
    run = record_run(config, tmp_path / "own.parquet", tmp_path / "run")
    job = read_rows(read_record(str(run))).with_counted_tokens()
    assert job.vocabulary is not None and job.vocabulary.weights is not None
    tokenizer = job.vocabulary.tokenizer
    rows = tokenizer.encode(texts[:40] + texts, config.text.longest)
    np.testing.assert_array_equal(
        job.vocabulary.weights, inverse_document_frequency(rows, tokenizer.num_tokens)
    )


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of two data sets whose ids are the same numbers; the last three rows of each are invalid."""
    folder = tmp_path_factory.mktemp("mixed")
    data = [
        write_digits(folder / f"{name}.parquet", size, broken=3)
        for name, size in (("large", 200), ("small", 100))
    ]
    return record_run(small_config("simclr", {"stages.0.steps": 16}), data, folder / "run")


def test_a_step_of_several_data_sets_names_the_rows_of_its_own(mixed_run: Path) -> None:
    step_of = {each["data_set"]: each["step"] for each in raycl.find_steps(mixed_run, "sample=5").steps}
    assert step_of.keys() == {0, 1}
    for data_set, name in enumerate(("large", "small")):
        for query in raycl.replay(mixed_run, step=step_of[data_set]).queries:
            assert query.sample.name == f"{name}.parquet row {query.sample.sample_id}"


def test_a_sample_of_several_data_sets_is_found_with_its_data_set(mixed_run: Path) -> None:
    lines = [json.loads(line) for line in (mixed_run / "metrics.jsonl").read_text().splitlines()]
    found = raycl.find_steps(mixed_run, "sample=5").steps
    expected = [(step, ids.index(5)) for step, ids in enumerate(ids_by_step(mixed_run), 1) if 5 in ids]
    assert [(each["step"], each["row"]) for each in found] == expected
    assert [each["data_set"] for each in found] == [lines[each["step"] - 1]["data_set"] for each in found]
    with pytest.raises(DataError, match=r"no sample 200; its 278 training samples have ids such as 0"):
        raycl.find_steps(mixed_run, "sample=200")
    with pytest.raises(DataError, match="no sample cat-17; its 278"):  # an id that is text
        raycl.find_steps(mixed_run, "sample=cat-17")
    with pytest.raises(DataError, match=r"the sample 198 \(large\.parquet row 198\) is "):
        raycl.find_steps(mixed_run, "sample=198")


@pytest.mark.parametrize(
    ("name", "sample_id"), [("12", 12), ("-3", -3), ("0012", stable_id("0012")), ("a", stable_id("a"))]
)
def test_samples_are_found_by_integers_and_by_texts_even_of_digits(name: str, sample_id: int) -> None:
    rows: Any = MagicMock(where=[])
    rows.train_ids.return_value = np.array([7, sample_id])
    assert _drawn_id(rows, name) == sample_id


def test_the_order_of_samples_is_a_permutation_seeded_by_seed_and_epoch(run: Path) -> None:
    drawn = {sample for ids in ids_by_step(run) for sample in ids}
    by_step = ids_by_step(run)
    first = [raycl.find_steps(run, f"sample={each}").steps[0] for each in by_step[0][:3]]
    assert [(each["step"], each["epoch"], each["row"]) for each in first] == [(1, 0, row) for row in range(3)]
    assert len(drawn) <= 197  # three rows are invalid


def test_losses_of_a_log_without_epochs_are_found(run: Path, tmp_path: Path) -> None:
    changed = copied(run, tmp_path)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    written = [{name: value for name, value in line.items() if name != "epoch"} for line in lines]
    (changed / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    expected = [(each["step"], each["loss"]) for each in raycl.find_steps(run, "max-loss").steps]
    found = raycl.find_steps(changed, "max-loss").steps
    assert [(each["step"], each["loss"]) for each in found] == expected
    assert {each["epoch"] for each in found} == {None}
    assert raycl.find_steps(changed, "nan").steps == []


def test_the_largest_losses_are_found(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = raycl.find_steps(run, "max-loss", top=4).steps
    assert [each["loss"] for each in found] == sorted((line["loss"] for line in lines), reverse=True)[:4]
    for each in found:
        of_epoch = [line["loss"] for line in lines if line["epoch"] == each["epoch"]]
        assert each["times_median"] == pytest.approx(each["loss"] / float(np.median(of_epoch)), abs=1e-3)
        assert lines[each["step"] - 1]["loss"] == each["loss"]
    assert raycl.find_steps(run, "nan").steps == []


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


def test_steps_with_nan_and_the_step_that_ended_the_run_are_found(run: Path, tmp_path: Path) -> None:
    changed = copied(run, tmp_path)
    lines = (changed / "metrics.jsonl").read_text().splitlines()
    broken = json.loads(lines[4]) | {"grad_norm": None}
    (changed / "metrics.jsonl").write_text("\n".join([*lines[:4], json.dumps(broken), *lines[5:11], ""]))
    error = "the loss became nan at step 12 (epoch 2), on the batch of sample ids 1, 2"
    (changed / "result.json").write_text(json.dumps({"status": "failed", "error": error}))
    found = raycl.find_steps(changed, "nan").steps
    assert [(each["step"], each["metrics"]) for each in found] == [(5, "grad_norm"), (12, "loss")]
    error = "the weights are not finite after step 11; the last checkpoint (step 7) is kept: lower the rate"
    (changed / "result.json").write_text(json.dumps({"status": "failed", "error": error}))
    found = raycl.find_steps(changed, "nan").steps
    assert [(each["step"], each["metrics"]) for each in found] == [(5, "grad_norm"), (11, "weights")]


def test_a_step_with_nan_is_explained(run: Path, tmp_path: Path) -> None:
    changed = copied(run, tmp_path)
    text = (changed / "config.yaml").read_text()
    assert "kwargs:\n    channels: 1\n" in text
    # From step 7 on, this is the second training batch of the process.
    text = text.replace("kwargs:\n    channels: 1\n", "kwargs:\n    channels: 1\n    nan_at: 2\n")
    (changed / "config.yaml").write_text(text)
    found = raycl.replay(changed, step=9)
    assert math.isnan(found.loss)
    assert found.relative_difference is None
    assert "not finite" in found.notes[0]
    assert math.isnan(found.queries[0].loss)
    assert found.to_dict()["loss"] is None
    json.dumps(found.to_dict(), allow_nan=False)


def logged_with(run: Path, folder: Path, workers: Callable[[int], int], **added: Any) -> Path:
    """Return a copy whose steps were made by these numbers of workers, with another line."""
    changed = copied(run, folder)
    lines = [json.loads(line) for line in (changed / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"workers": workers(line["step"])} for line in lines]
    if added:
        lines.insert(0, added)
    (changed / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return changed


def test_the_workers_are_those_that_made_the_step(run: Path, tmp_path: Path, replayed: Any) -> None:
    resumed = logged_with(
        run, tmp_path / "resumed", lambda _: 2
    )  # config.yaml has the one worker of the last command
    same = copied(resumed, tmp_path / "same")
    text = (same / "config.yaml").read_text()
    assert "\nworkers: 1\n" in text
    (same / "config.yaml").write_text(text.replace("\nworkers: 1\n", "\nworkers: 2\n"))
    losses = [raycl.replay(each, step=10).loss for each in (resumed, same)]
    assert losses[0] == losses[1] != pytest.approx(replayed.loss, rel=1e-4)  # dropout differs
    staged = copied(resumed, tmp_path / "staged")  # whose next stage has as many workers as this one had
    config = raycl.config_from_yaml(text.replace("\nworkers: 2\n", "\nworkers: 1\n"))
    (staged / "config.yaml").write_text(config_to_yaml(raycl.override(config, {"stages.1.workers": 2})))
    assert raycl.replay(staged, step=10).loss == losses[0]
    rows = read_rows(read_record(str(staged)))
    runners = [train_until(rows, 8, workers=workers).runner for workers in (1, 2)]
    assert [runner.shard.num_workers for runner in runners] == [1, 2]
    mixed = logged_with(run, tmp_path / "mixed", lambda step: 1 + (step > 8))
    assert raycl.replay(mixed, step=14).loss == raycl.replay(same, step=14).loss
    with pytest.raises(ConfigError, match="steps 8 to 10 were made by 1 and 2 workers"):
        raycl.replay(mixed, step=10)


def test_steps_that_a_rollback_kept_are_replayed_and_others_only_from_later_checkpoints(
    run: Path, tmp_path: Path, replayed: Any
) -> None:
    changed = logged_with(run, tmp_path, lambda _: 1, step=10, event="rollback", text="back to step 10")
    assert raycl.replay(changed, step=10).loss == replayed.loss
    with pytest.raises(
        ConfigError, match="rolled back 1 times, and no checkpoint between .* step 14 is left"
    ):
        raycl.replay(changed, step=14)


def test_a_replay_without_checkpoints_begins_at_the_start_and_shows_its_steps(
    run: Path, tmp_path: Path, replayed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = copied(run, tmp_path)
    shutil.rmtree(changed / "checkpoints")
    found = raycl.replay(changed, step=10)
    assert capsys.readouterr().err.endswith("training again 9/9  steps\n")
    assert (found.checkpoint, found.first_step) == (None, 1)
    assert found.loss == pytest.approx(replayed.loss, rel=1e-5)


def test_a_loss_that_differs_is_reported(run: Path, tmp_path: Path) -> None:
    changed = copied(run, tmp_path)
    lines = [json.loads(line) for line in (changed / "metrics.jsonl").read_text().splitlines()]
    lines[8] |= {"loss": lines[8]["loss"] * 1.1, "learning_rate": 5.0}
    (changed / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = raycl.replay(changed, step=9)
    assert found.relative_difference == pytest.approx(1 - 1 / 1.1, rel=1e-3)
    assert "learning rate 5" in found.notes[0]
    assert "differ by 9.1%" in found.notes[1]


def test_rows_that_moved_are_found_by_data_and_other_rows_are_refused(run: Path, tmp_path: Path) -> None:
    changed = copied(run, tmp_path)
    described = json.loads((changed / "data.json").read_text())
    moved = tmp_path / "digits.parquet"
    shutil.copy(described["data"], moved)
    (changed / "data.json").write_text(json.dumps(described | {"data": str(tmp_path / "gone.parquet")}))
    with pytest.raises(DataError, match="nothing at"):
        raycl.replay(changed, step=9)
    assert raycl.replay(changed, step=9, data=moved).loss == raycl.replay(run, step=9).loss
    other = write_digits(tmp_path / "other.parquet", 150)
    with pytest.raises(DataError, match="trained on 200 rows, and there are 150 at"):
        raycl.replay(changed, step=9, data=other)


def test_rows_that_do_not_fit_the_run_are_refused_without_a_setting(run: Path, tmp_path: Path) -> None:
    # replay and certify have no --set.
    changed, config = copied(run, tmp_path), (run / "config.yaml").read_text()
    digits = pq.read_table(run.parent / "digits.parquet")
    (changed / "config.yaml").write_text(config.replace("    label: null\n", "    label: digit\n", 1))
    remedy = "; give the rows of the run by --data$"
    with pytest.raises(DataError, match=f"has no column 'digit'; it has image, label{remedy}"):
        raycl.replay(changed, step=9)
    invalid = tmp_path / "invalid.parquet"
    images = pa.array([b""] * len(digits), pa.binary())
    pq.write_table(digits.set_column(digits.column_names.index("image"), "image", images), invalid)
    with pytest.raises(DataError, match=f"a batch of .* is larger than the 0 rows to train on{remedy}"):
        raycl.replay(run, step=9, data=invalid)


def test_integer_labels_have_the_names_that_the_data_give_them(run: Path, tmp_path: Path) -> None:
    table = pq.read_table(run.parent / "digits.parquet")
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    named = tmp_path / "digits.parquet"
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), named)
    found = raycl.replay(run, step=9, data=named, html=tmp_path / "step.html")
    for query in found.queries:
        for sample in (query.sample, query.positive, *(each.sample for each in query.negatives)):
            assert sample.label == names[table["label"][sample.sample_id].as_py()]
    assert f"<b>{found.queries[0].sample.label}</b>" in (tmp_path / "step.html").read_text()


def exit_of(*arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the command; return its only line on stderr, and check its exit status 2."""
    from raycl.cli.main import main

    monkeypatch.setattr("sys.argv", ["raycl", "replay", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.count("\n") == 1
    return captured.err


def test_wrong_input_is_refused_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = set(range(197)) - {sample for ids in ids_by_step(run) for sample in ids}
    cases = {
        (str(run), "--step", "0"): "the run has steps 1 to 17, got --step 0",
        (str(run), "--step", "18"): "the run has steps 1 to 17, got --step 18",
        (str(tmp_path), "--step", "1"): "holds no run: there is no config.yaml",
        (str(run), "--find", "sample=100000"): "the run trained on no sample 100000",
        (str(run), "--find", "sample=199"): "is invalid, and was skipped: no step draws it",
        (str(run), "--find", f"sample={min(held_out)}"): "is held out of training: no step draws it",
        (str(run), "--find", "largest"): "--find takes max-loss, nan or sample=ID, got 'largest'",
        (str(run),): "exactly one of --step N and --find",
        (str(run), "--step", "3", "--find", "nan"): "exactly one of --step N and --find",
        (str(run), "--step", "3", "--top", "0"): "--top must be at least 1, got 0",
        (str(run), "--find", "nan", "--html", "a.html"): "--html shows a step",
    }
    for arguments, says in cases.items():
        assert says in exit_of(*arguments, capsys=capsys, monkeypatch=monkeypatch)


def test_the_command_prints_a_table_and_writes_json_and_a_page(run: Path, tmp_path: Path) -> None:
    from raycl.cli.main import app

    arguments = ["replay", str(run), "--step", "8", "--top", "2"]
    files = ["--json", str(tmp_path / "step.json"), "--html", str(tmp_path / "step.html")]
    result = CliRunner().invoke(app, [*arguments, *files])
    assert result.exit_code == 0
    assert "step 8 of" in result.output
    assert "logged loss" in result.output
    assert max(map(len, result.output.splitlines())) < 250
    found = json.loads((tmp_path / "step.json").read_text())
    assert found["step"] == 8
    assert all(len(query["negatives"]) == 2 for query in found["queries"])
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")
    result = CliRunner().invoke(app, ["replay", str(run), "--find", "max-loss", "--top", "3"])
    assert "times_median" in result.output


@pytest.mark.parametrize(
    ("settings", "method", "says"),
    [
        (
            {"bank.location": "actor", "stages.0.loss": "info_nce"},
            "instance_discrimination",
            "actors hold its memory_bank",
        ),
        ({"momentum_encoder.location": "actors"}, "moco_v2", "a pool of actors encoded its keys"),
        ({"negatives.mined.num": 2}, "two_tower", "mined during training"),
    ],
)
def test_runs_that_one_process_cannot_repeat_are_refused(
    settings: dict[str, Any], method: str, says: str, run: Path, tmp_path: Path
) -> None:
    changed = copied(run, tmp_path)
    config = raycl.override(raycl.recipe(method), settings)
    (changed / "config.yaml").write_text(raycl.config_to_yaml(config))
    with pytest.raises(ConfigError, match=f"cannot be replayed: .*{says}"):
        raycl.replay(changed, step=1)


def began(folder: Path, method: str, **settings: Any) -> Path:
    """Write the settings and the description of the data of a run that has made no step."""
    config = raycl.override(raycl.recipe(method), settings)
    (folder / "config.yaml").write_text(raycl.config_to_yaml(config))
    (folder / "data.json").write_text(json.dumps({"data": "images", "num_rows": 700}))
    return folder


@pytest.mark.parametrize(
    ("settings", "method", "says"),
    [
        ({}, "dcl", "the losses nt_xent, info_nce and clip, and the run has dcl"),
        ({}, "moco_v3", "one pair of views of a sample, and the run compares several"),
        ({"augment.views": [{"count": 3}]}, "simclr", "one pair of views of a sample"),
    ],
)
def test_a_run_without_a_step_to_explain_is_refused_before_its_rows_are_read(
    settings: dict[str, Any], method: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = MagicMock(side_effect=AssertionError("reads the rows"))
    monkeypatch.setattr("raycl.step_replay.step.read_rows", reading)
    with pytest.raises(ConfigError, match=f"replay explains .*{says}"):
        raycl.replay(began(tmp_path, method, **settings), step=1)


def test_a_step_with_another_loss_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(views: Any, watch: Callable[[Objective], Objective]) -> None:
        watch(Dcl(temperature=TEMPERATURE))
        raise AssertionError("makes the step")

    before = MagicMock(runner=MagicMock(step=step))
    monkeypatch.setattr("raycl.step_replay.step.read_rows", lambda _: None)
    monkeypatch.setattr("raycl.step_replay.step.train_until", lambda *_: before)
    with pytest.raises(ConfigError, match="and the step has Dcl"):
        raycl.replay(began(tmp_path, "simclr"), step=1)


def test_a_step_of_a_stream_is_replayed_with_its_samples_and_its_queue(tmp_path: Path) -> None:
    digits = pq.read_table(write_digits(tmp_path / "all.parquet", 200))
    (tmp_path / "data").mkdir()
    for name, start, stop in (("a", 0, 70), ("b", 70, 151), ("c", 151, 200)):
        pq.write_table(digits.slice(start, stop - start), tmp_path / "data" / f"{name}.parquet")
    settings = {"data.cache": "stream", "data.shuffle_buffer_size": 70, "workers": 2, "stages.0.steps": 14}
    run = record_run(small_config("moco_v2", settings), tmp_path / "data", tmp_path / "run", checkpoints=(8,))
    by_step = ids_by_step(run)
    found: Any = raycl.replay(run, step=10, top=TOP)
    assert (found.first_step, found.workers) == (9, 2)
    assert found.loss == pytest.approx(found.logged_loss, rel=1e-5)
    assert sorted(query.sample.sample_id for query in found.queries) == sorted(by_step[9])
    starts = {"a": 0, "b": 70, "c": 151}
    ages = set()
    for query in found.queries:
        for sample in (query.sample, query.positive, *(each.sample for each in query.negatives)):
            assert sample.picture is not None
            assert sample.label == str(digits["label"][sample.sample_id].as_py())
            file, row = re.findall(r"([abc])\.parquet row ([0-9]+)", sample.name)[0]
            assert sample.sample_id == starts[file] + int(row)
        for negative in query.negatives:
            assert negative.sample.sample_id in by_step[9 - negative.age]
            ages.add(negative.age)
    assert len(ages) > 2
    for sample_id in by_step[9][:3]:
        steps = [each["step"] for each in raycl.find_steps(run, f"sample={sample_id}").steps]
        assert steps == [step for step, ids in enumerate(by_step, 1) if sample_id in ids]
    with pytest.raises(DataError, match="the run trained on no sample 1000; its 1[0-9]+ training samples"):
        raycl.find_steps(run, "sample=1000")


def test_a_streamed_queue_of_texts_and_ray_datasets_are_refused(run: Path, tmp_path: Path) -> None:
    texts = began(tmp_path, "two_tower", **{"negatives.store": "queue", "negatives.capacity": 4096})
    described = json.loads((texts / "data.json").read_text())
    (texts / "data.json").write_text(json.dumps(described | {"streamed": True}))
    with pytest.raises(
        ConfigError, match="its texts are streamed, and replay finds the texts of a queue only"
    ):
        raycl.replay(texts, step=1)
    changed = copied(run, tmp_path)
    described = json.loads((changed / "data.json").read_text())
    (changed / "data.json").write_text(json.dumps(described | {"data": None}))
    with pytest.raises(ConfigError, match="trained on a Ray Dataset"):
        raycl.find_steps(changed, "sample=1")


def test_code_of_other_packages_is_not_imported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYCL_TRUSTED", "other")
    with pytest.raises(ConfigError, match="asks to import 'tests.cluster.networks'"):
        raycl.replay(run, step=1)
