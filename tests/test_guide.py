"""A guide masks the negatives that it finds nearer than the positive, as the plain formula does."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raycl.config.overrides import override
from raycl.config.schema import GuideConfig
from raycl.data.columns import ColumnNames
from raycl.doctor.data import check_data
from raycl.doctor.memory import check_memory
from raycl.doctor.nodes import Node, NodeAnswer, NodeInfo
from raycl.doctor.result import CheckResult
from raycl.errors import ConfigError, DataError
from raycl.losses import clip, info_nce
from raycl.losses.clip import Clip
from raycl.losses.example_ids import ExampleIds
from raycl.losses.guide import Guide
from raycl.losses.info_nce import InfoNce
from raycl.losses.objective import Matryoshka, Objective, StoreBatch
from raycl.recipes import recipe
from raycl.training.guide import read_guide
from raycl.training.preflight import check_data_sets, id_columns
from raycl.training.transforms import PairTransform, build_transform
from tests.embeddings import make_pair_ids, make_rows, make_views, named_ids
from tests.gradients import assert_close, leaves, value_and_gradients
from tests.pairs import clicks, noise_images, rows_of, small_config, vocabulary
from tests.plain_losses import are_known, are_nearer, plain_bidirectional, plain_info_nce
from tests.tiles import tiny_tiles_in

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, NUM_NEGATIVES = 23, 9
tiny_tiles = partial(tiny_tiles_in, "softmax", "clip")
MARGINS: tuple[dict[str, Any], ...] = (
    {},
    {"margin": 0.2},
    {"margin": -0.1},
    {"margin": 0.3, "relative": True},
)


def guide_rows(batch: int = BATCH, num_negatives: int = NUM_NEGATIVES) -> tuple[Tensor, Tensor, Tensor]:
    """Return a guide's queries, keys and negatives, of other numbers than the rows."""
    return *make_views(batch, 4, noise=0.8, seed=5), make_rows(num_negatives, 4, seed=6)


@pytest.mark.parametrize("own", (None, slice(7, 18)))
@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("loss", (info_nce, clip))
def test_a_guided_loss_equals_the_plain_formula(loss: Any, margin: dict[str, Any], own: slice | None) -> None:
    inputs = leaves(
        *make_views(BATCH, 6), torch.tensor(0.2), make_rows(NUM_NEGATIVES, 6), dtype=torch.float64
    )
    query, key, temperature, negatives = inputs
    pair_ids, negative_id = make_pair_ids(BATCH, NUM_NEGATIVES, 40)
    rows = guide_rows()
    to_keys = are_nearer(*rows[:2], torch.cat(rows[1:]), **margin)
    to_queries = are_nearer(rows[1], rows[0], rows[0], **margin)
    assert 0.02 < to_keys.double().mean() < 0.7
    assert not torch.equal(to_keys[:, :BATCH].T, to_queries)
    mine = slice(0, BATCH) if own is None else own
    if loss is clip:
        true = plain_bidirectional(
            *inputs,
            own=mine,
            **named_ids(pair_ids, None),
            negative_id=negative_id,
            nearer=(to_keys, to_queries),
        )
    else:
        true = plain_info_nce(
            query[mine],
            key,
            temperature,
            negatives,
            offset=mine.start,
            pair_ids=pair_ids,
            negative_id=negative_id,
            nearer=to_keys[mine],
        )
    arguments: dict[str, Any] = {
        "negatives": negatives,
        "negative_id": negative_id,
        "temperature": temperature,
    }
    arguments |= named_ids(pair_ids, own)
    if own is not None:
        sides = {"query": query, "key": key} if loss is clip else {"key": key}
        arguments |= {"offset": own.start} | {f"gathered_{name}": each for name, each in sides.items()}
    guide = Guide.of(*rows, **margin)
    with tiny_tiles():
        found = loss(query[mine], key[mine], **arguments, guide=guide)
    assert_close(value_and_gradients(found, inputs), value_and_gradients(true, inputs), 1e-9)
    # The positive and false negatives by id are not counted.
    masked = are_known(pair_ids[0], torch.cat([pair_ids[1], negative_id]), pair_ids)
    masked |= F.one_hot(torch.arange(BATCH), BATCH + NUM_NEGATIVES).bool()
    assert guide.counts is not None
    assert guide.counts.tolist() == [
        (to_keys & ~masked)[mine].sum().item(),
        (~masked)[mine].sum().item(),
    ]


def test_a_local_batch_without_ids_and_negatives_is_guided_in_both_directions() -> None:
    query, key = make_views(BATCH, 6)
    rows = guide_rows()[:2]
    nearer = are_nearer(*rows, rows[1]), are_nearer(rows[1], rows[0], rows[0])
    doubles = query.double(), key.double()
    expected = plain_bidirectional(*doubles, torch.tensor(0.1), doubles[0][:0], nearer=nearer)
    assert clip(query, key, temperature=0.1, guide=Guide.of(*rows)).item() == pytest.approx(
        expected.item(), rel=1e-5
    )
    assert clip(query, key, temperature=0.1).item() != pytest.approx(expected.item(), rel=1e-2)


def test_explicit_negatives_alone_are_guided() -> None:
    query, key = make_views(BATCH, 6)
    rows, negatives = guide_rows(), make_rows(NUM_NEGATIVES, 6)
    nearer = are_nearer(*rows)
    doubles = query.double(), key.double(), torch.tensor(0.1), negatives.double()
    expected = plain_info_nce(*doubles, in_batch=False, nearer=nearer)
    found = info_nce(query, key, temperature=0.1, negatives=negatives, in_batch=False, guide=Guide.of(*rows))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_candidate_as_near_as_the_positive_is_kept_in_half_precision_too() -> None:
    query, key = make_views(300, 6)
    rows = (make_rows(300, 48, seed=8), F.normalize(torch.ones(300, 48), dim=1))
    for dtype in (torch.float16, torch.float32):
        guide = Guide.of(*(each.to(dtype) for each in rows))
        assert info_nce(query, key, temperature=0.1, guide=guide).item() == pytest.approx(
            info_nce(query, key, temperature=0.1).item()
        )


@pytest.mark.parametrize("objective", (InfoNce(temperature=0.1, in_batch=True), Clip(temperature=0.1)))
def test_a_guide_is_gathered_once_for_all_prefixes(
    objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[Any] = []
    monkeypatch.setattr(Guide, "gathered", lambda self, counts: gathered.append(counts) or self)
    numbers = torch.arange(BATCH)
    guided = ExampleIds(query=numbers, key=numbers, guide=Guide.of(*guide_rows()[:2]))
    prefixes = Matryoshka(objective=objective, dims=(2, 4, 6), weights=(1.0, 1.0, 1.0))
    losses = [
        prefixes(*make_views(BATCH, 6), StoreBatch().for_batch(ids, None), ids).item()
        for ids in (guided, replace(guided, guide=None))
    ]
    assert len(gathered) == 1
    assert losses[0] < 0.99 * losses[1]


@pytest.mark.parametrize("loss", (info_nce, clip))
def test_a_guide_of_other_rows_is_refused(loss: Any) -> None:
    query, key = make_views(BATCH, 6)
    for rows, counts in (
        (guide_rows()[:2], "23 queries, 23 keys and 0 negatives, and the batch has 23 pairs and 9 negatives"),
        (guide_rows(5), "5 queries, 5 keys and 9 negatives, and the batch has 23 pairs and 9 negatives"),
    ):
        with pytest.raises(ConfigError, match=f"the guide has {counts}; gather its rows in the same way"):
            loss(query, key, temperature=0.1, negatives=make_rows(NUM_NEGATIVES, 6), guide=Guide.of(*rows))


def test_a_guide_excludes_the_refined_correction() -> None:
    frequencies = torch.full((BATCH,), -5.0)
    with pytest.raises(ConfigError, match="refines_logq counts negatives, and a guide masks some of them"):
        clip(
            *make_views(BATCH, 6),
            temperature=0.1,
            key_log_frequency=frequencies,
            refines_logq=True,
            guide=Guide.of(*guide_rows(num_negatives=0)[:2]),
        )


# Folders of embeddings


def write_guide(folder: Path, **tables: Any) -> GuideConfig:
    """Write the embeddings of each side as parquet files of lists; return the settings of a guide."""
    for side, (ids, rows) in tables.items():
        place = folder / side
        place.mkdir(parents=True)
        half = len(ids) // 2
        for name, part in {"a": slice(0, half), "b": slice(half, None)}.items():
            table = pa.table({f"{side}_id": ids[part], "representation": rows[part], "text": ids[part]})
            pq.write_table(table, place / f"{name}.parquet")
    return GuideConfig(query=str(folder / "query"), document=str(folder / "document"))


def embeddings(ids: Sequence[Any], dim: int = 5, seed: int = 0) -> tuple[list[Any], list[list[float]]]:
    """Return ids with an embedding each, not of unit length."""
    return list(ids), (3 * make_rows(len(ids), dim, seed)).tolist()


def rows_and_ids() -> tuple[Any, pa.Table, list[str]]:
    """Return pairs with ids and explicit negatives, all their decoded columns, and the names of the ids."""
    rows = rows_of(small_config(), clicks(30, num_negatives=(0, 2, 1)))
    table = pa.Table.from_batches([rows.arrow_rows(np.arange(len(rows)))])
    return rows, table, ["query_id.id", "document_id.id", "negative_ids.id"]


@pytest.mark.parametrize("strategy", ("absolute", "relative"))
def test_a_batch_has_the_embeddings_of_its_ids(strategy: Any, tmp_path: Path) -> None:
    rows, table, names = rows_and_ids()
    values = clicks(30, num_negatives=(0, 2, 1))
    sides = {"query": embeddings(range(200), seed=1), "document": embeddings([*map(str, range(200))], seed=2)}
    settings = write_guide(tmp_path, **sides)
    settings = settings.model_copy(update={"margin": 0.25, "margin_strategy": strategy})
    tables = read_guide(settings, [table], names)
    guide = PairTransform(guide=tables).ids_and_negatives(rows.take(np.arange(7, 20)))[0].guide
    assert guide is not None
    numbers = {side: torch.tensor(vectors) / 3 for side, (_, vectors) in sides.items()}
    ids = {role: values[role][7:20] for role in ("query_id", "document_id")}
    ids["negative_ids"] = [each for row in values["negative_ids"][7:20] for each in row]
    query = numbers["query"][[*map(int, ids["query_id"])]]
    key = numbers["document"][[*map(int, ids["document_id"])]]
    negatives = numbers["document"][[*map(int, ids["negative_ids"])]]
    similarity = (query * key).sum(1)
    limit = similarity - 0.25 * (similarity.abs() if strategy == "relative" else 1)
    assert guide.negatives is not None
    for found, expected in ((guide.query, query), (guide.key, key), (guide.negatives, negatives)):
        assert found.dtype == torch.float16
        assert torch.allclose(found.float(), expected, atol=1e-3)
    assert torch.allclose(guide.limit, limit, atol=2e-3)


@pytest.mark.parametrize(("name", "role"), [("simcse", "text"), ("simclr", "image")])
def test_both_views_of_a_sample_have_its_embedding(name: str, role: str, tmp_path: Path) -> None:
    write_guide(tmp_path, sample=embeddings(range(40), seed=1))
    settings = {"negatives.guide.query": str(tmp_path / "sample"), "negatives.guide.margin": 0.25}
    config = override(recipe(name, image_size=8), settings | {"stages.0.loss": "info_nce"})
    values = {"text": [[f"text {n}"] for n in range(30)], "image": noise_images(30)}
    rows = rows_of(config, {role: values[role]})
    table = pa.Table.from_batches([rows.arrow_rows(np.arange(len(rows)))])
    tables = read_guide(config.negatives.guide, [table], [])
    transform = build_transform(config, vocabulary().tokenizer, tables)
    guide = transform.with_image_size(16).ids_and_negatives(rows.take(np.arange(7, 20)))[0].guide
    assert guide is not None
    vectors = torch.tensor(embeddings(range(40), seed=1)[1][7:20]) / 3
    assert torch.allclose(guide.query.float(), vectors, atol=1e-3)
    assert torch.equal(guide.query, guide.key)
    assert torch.allclose(guide.limit, torch.full((13,), 0.75), atol=2e-3)
    assert guide.negatives is None
    write_guide(tmp_path / "few", sample=embeddings(range(20)))
    few = GuideConfig(query=str(tmp_path / "few" / "sample"), margin=0.25)
    with pytest.raises(DataError, match="has no embedding of 10 of the 30 ids in sample_id, such as the row"):
        read_guide(few, [table], [])


def test_an_id_may_be_embedded_twice_if_its_embeddings_agree(tmp_path: Path) -> None:
    _, table, names = rows_and_ids()
    ids, vectors = embeddings(range(80))
    sides = {
        "query": (ids, vectors),
        "document": (ids * 2, vectors + [[2 * each for each in row] for row in vectors]),
    }
    assert len(read_guide(write_guide(tmp_path / "same", **sides), [table], names).document.ids) > 30
    sides["document"] = ids * 2, vectors + vectors[::-1]
    with pytest.raises(
        DataError, match="has two different embeddings of document_id [0-9]+; give each id to one"
    ):
        read_guide(write_guide(tmp_path / "other", **sides), [table], names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"query": embeddings(range(50, 90))},
            r"query has no embedding of \d+ of the \d+ ids in query_id, such as the",
        ),
        (
            {"document": embeddings(range(3))},
            "document has no embedding of .* such as the row with sample_id [0-9]+; embed",
        ),
        (
            {"document": embeddings(range(200), dim=6)},
            "the guide's queries have 5 numbers and its documents 6; embed",
        ),
        ({"query": (range(80), [[0.0] * 5] * 80)}, "a.parquet has an embedding that is zero or not finite"),
        (
            {"query": (range(80), [[1.0]] * 7 + [[1.0, 2.0]] * 73)},
            "a.parquet have 1 to 2 numbers; embed all with one",
        ),
        (
            {"query": (range(80), [[1.0]] * 40 + [[1.0, 2.0]] * 40)},
            "query have 1 and 2 numbers; embed all with one",
        ),
        ({"query": (range(80), list(range(80)))}, "representation must be lists of numbers, .* holds int64"),
        ({"query": (range(80), [["a"]] * 80)}, "must be lists of numbers, .* holds list<.*: string>"),
        ({"query": (range(80), [[[1.0]]] * 80)}, "must be lists of numbers, .* holds list<.*: list<"),
        (
            {"query": (range(80), [None, *[[1.0, 2.0]] * 79])},
            "must be lists of numbers, .* holds list<.*> with nulls",
        ),
        (
            {"query": (range(80), pa.array([None, *[[1.0, 2.0]] * 79], pa.list_(pa.float32(), 2)))},
            "must be lists of numbers, .* holds fixed_size_list<.* with nulls",
        ),
        (
            {"query": ([None, *range(79)], [[1.0, 2.0]] * 80)},
            r"a.parquet has an invalid query_id \(missing id\); give each embedding the id of its row",
        ),
        (
            {"document": ([2.0**53, *map(float, range(79))], [[1.0, 2.0]] * 80)},
            r"has an invalid document_id \(id of 2\^53 or more as float\); give each",
        ),
        (
            {"query": (range(80), [[1e300, 2.0]] * 80)},
            "a.parquet has an embedding that is zero or not finite",
        ),
    ],
)
def test_a_guide_that_does_not_fit_the_data_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, table, names = rows_and_ids()
    sides = {"query": embeddings(range(200)), "document": embeddings(range(200)), **changes}
    with pytest.raises(DataError, match=message):
        read_guide(write_guide(tmp_path, **sides), [table], names)


def test_the_doctor_checks_a_guide_and_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = write_guide(tmp_path, query=embeddings(range(30)), document=embeddings(range(80)))
    folders = {f"negatives.guide.{side}": getattr(guide, side) for side in ("query", "document")}
    config = override(recipe("two_tower"), {**folders, "data.cache": "materialize"})
    monkeypatch.setattr("raycl.doctor.memory.check_cluster", lambda *_, **__: None)
    monkeypatch.setattr("raycl.doctor.memory._profile_stages", lambda _: 1 / 0)

    def check(object_store: float, data: Any = None) -> CheckResult:
        node = Node(
            node_id="id", name="node", is_head=True, num_cpus=1, num_gpus=0, object_store=object_store
        )
        info = NodeInfo(versions={}, memory=1e9, free_memory=1e9)
        results = {each.name: each for each in check_memory(config, data, [NodeAnswer(node, info)])}
        return results["guide"]

    whole, few = 2 * (30 + 80) * 5, 2 * (10 + 25) * 5
    assert "embeddings of 5 numbers take at most 1.1 KiB of each node's" in check(whole).seen
    assert check(whole).good
    assert not check(whole - 1).good
    source = SimpleNamespace(num_rows=10, columns=ColumnNames())
    data = SimpleNamespace(source=source, negatives_per_pair=1.5)
    assert check(few, data).good
    assert not check(few - 1, data).good
    for file in (tmp_path / "document").iterdir():
        file.unlink()
    assert "document has no parquet file (0 others); give the --output of `raycl embed`" in check(1e9).seen
    write_guide(tmp_path, sample=embeddings(range(30)))
    folder = {"negatives.guide.query": str(tmp_path / "sample"), "negatives.guide.margin": 0.1}
    config = override(recipe("simcse"), {**folder, "data.cache": "materialize"})
    whole = 2 * 30 * 5
    assert [check(whole).good, check(whole - 1).good] == [True, False]
    config = override(recipe("two_tower"), {**folders, "data.cache": "materialize"})
    pairs = pa.table({"query": ["a", "b"], "document": ["c", "d"]})
    pq.write_table(pairs, tmp_path / "pairs.parquet")
    (result,) = check_data(str(tmp_path / "pairs.parquet"), None, config)
    assert "negatives.guide finds embeddings by id, and the data have no query_id" in result.seen


def test_a_folder_without_ids_or_nothing_at_all_is_no_guide(tmp_path: Path) -> None:
    _, table, names = rows_and_ids()
    settings = write_guide(tmp_path, query=embeddings(range(200)), document=embeddings(range(200)))
    swapped = GuideConfig(query=settings.document, document=settings.query)
    with pytest.raises(
        DataError, match="no column 'query_id'; it has document_id, representation, text: write it by"
    ):
        read_guide(swapped, [table], names)
    with pytest.raises(DataError, match="there is nothing at .*/none"):
        read_guide(GuideConfig(query=str(tmp_path / "none"), document=settings.document), [table], names)


def test_data_without_ids_have_no_guide() -> None:
    columns = ColumnNames(
        image=None, query="query", document="document", negatives="negatives", query_id="query_id"
    )
    with pytest.raises(
        DataError, match="finds embeddings by id, and the data have no document_id; name the column"
    ):
        id_columns(columns, explicit=True)
    columns = replace(columns, document_id="document_id")
    assert id_columns(columns, explicit=False) == ["query_id.id", "document_id.id"]
    with pytest.raises(DataError, match="the data have no negative_ids; name the column with --set"):
        id_columns(columns, explicit=True)


# Settings

FOLDERS = {"negatives.guide.query": "guide/queries", "negatives.guide.document": "guide/documents"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"negatives.guide.document": None},
            "negatives.guide has no folder of embeddings as document; give query and",
        ),
        (
            {"negatives.guide.margin_strategy": "relative"},
            "margin_strategy acts only with negatives.guide.margin other than 0; remove it",
        ),
        ({"negatives.guide.query": ""}, "negatives.guide.query.* at least 1 character"),
        (
            {"negatives.store": "queue"},
            "negatives.guide has no embeddings of stored keys, got negatives.store queue",
        ),
        (
            {"stages.0.loss": "hinge"},
            "loss hinge cannot use negatives.guide; set loss to info_nce or clip, or remove negatives.guide",
        ),
        ({"stages.0.loss": "siglip", "negatives.explicit": False}, "loss siglip cannot use negatives.guide"),
        ({"stages.0.hinge_weight": 0.5}, "negatives.guide masks no negatives of a hinge; set hinge_weight=0"),
        ({"stages.0.logq_correction": "refined"}, "logq_correction refined counts the negatives, of which"),
    ],
)
def test_settings_that_a_guide_excludes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(recipe("two_tower"), {**FOLDERS, **settings})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("simclr", {}, "loss nt_xent cannot use negatives.guide; set loss to info_nce or clip, or remove negatives.guide"),
        (
            "simcse",
            {"negatives.guide.margin": 0.0},
            "masks nothing with negatives.guide.margin 0: .* set it above 0, such as to 0.1$",
        ),
        (
            "simcse",
            {"negatives.guide.margin_strategy": "relative"},
            "margin_strategy acts only with data.kind pairs",
        ),
        (
            "simcse",
            {"negatives.guide.document": "guide"},
            "guide.document acts only with data.kind pairs, and this run has data.kind text; remove it",
        ),
        ("simcse", {"negatives.mined.num": 2}, "no embeddings of mined negatives of data.kind text, got .* 2; set"),
        ("esimcse", {}, "negatives.guide has no embeddings of stored keys, got negatives.store queue"),
        ("clip", {}, "guide.query acts only with data.kind image, text or pairs, and this run has data.kind image_text"),
    ],
)  # fmt: skip
def test_settings_that_a_guide_of_samples_excludes_are_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    folder = {"negatives.guide.query": "guide", "negatives.guide.margin": 0.1}
    with pytest.raises(ConfigError, match=message):
        override(recipe(name, image_size=32), {**folder, **settings})


def test_a_guide_has_the_ids_of_one_data_set() -> None:
    config = override(recipe("two_tower"), FOLDERS)
    check_data_sets(config, 1)
    with pytest.raises(
        ConfigError, match="negatives.guide has the ids of one data set, and there are 2; give one"
    ):
        check_data_sets(config, 2)
