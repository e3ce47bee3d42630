"""Small sets are embedded and evaluated in this process; only others start Ray."""

import copy
import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from raycl import config_to_yaml, load_encoder, override
from raycl.data.columns import ColumnNames
from raycl.data.embeddings import read_embeddings
from raycl.errors import ConfigError, DataError, RunError
from raycl.evaluation.classification import evaluate
from raycl.inference import embed, reading
from raycl.inference.embed import embed_dataset, embed_to_parquet, embed_values
from raycl.inference.encoder import read_encoder
from raycl.inference.preflight import allowed_invalid_fraction
from raycl.inference.reading import MAX_BYTES, connect_unless_small
from raycl.models.encoder_io import SavedEncoder, save_encoder
from raycl.models.registry import OWN
from raycl.models.specs import ImageEncoderSpec
from raycl.preparation import pack_images
from raycl.ray_runtime import NEW_NODE_S
from raycl.recipes import recipe
from raycl.storage import Place
from tests.encoders import write_images_run
from tests.images import digit_files, write_digits


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "run"
    return write_images_run(folder, "resnet10", width=0.125, representation_dim=64)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The addresses of the clusters that would be joined or started."""
    addresses: list[str | None] = []
    monkeypatch.setattr(
        "ray.is_initialized", lambda: False
    )  # other tests of this process may have started Ray
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(reading, "connect_cluster", lambda address, **_: addresses.append(address))
    return addresses


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times in seconds that a GPU would be waited for."""
    found: list[float] = []
    monkeypatch.setattr(reading, "wait_for_gpu", found.append)
    return found


def expected(run: str, num_images: int) -> Tensor:
    encoder: Any = load_encoder(run)
    return encoder.encode(digit_files(num_images)[0])


def test_packing_images_of_a_table_is_refused_since_other_columns_would_be_lost(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [b"a"], "caption": ["b"]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"holds rows \(parquet\), whose other columns would be lost"):
        pack_images(str(tmp_path / "rows.parquet"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_small_set_is_embedded_in_this_process(
    run: str, tmp_path: Path, connected: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.data.discovery.ROWS_PER_FRAGMENT", 100)  # so that threads decode several
    data = write_digits(tmp_path / "digits.parquet", 800, broken=5)
    table = pq.read_table(data).take(np.random.default_rng(0).permutation(800))
    table = table.append_column("key", pa.array(range(7, 807)))
    pq.write_table(table, data, row_group_size=64)
    columns = ColumnNames(sample_id="key")
    stats = embed_to_parquet(run, data, tmp_path / "rows", columns=columns, quiet=True)
    rows = pq.read_table(tmp_path / "rows")
    assert (stats.num_rows, stats.num_invalid) == (800, 5)
    valid = table.filter(pa.array([image != b"broken" for image in table["image"].to_pylist()]))
    assert rows["sample_id"].to_pylist() == valid["key"].to_pylist()
    assert rows["label"].to_pylist() == valid["label"].to_pylist()
    encoder: Any = load_encoder(run)
    exact = encoder.encode(valid["image"].to_pylist())
    torch.testing.assert_close(torch.tensor(rows["representation"].to_pylist()), exact, rtol=0, atol=1e-5)
    assert connected == []


def test_the_name_of_a_content_that_the_encoder_does_not_take_is_refused(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_digits(tmp_path / "digits.parquet", 8)
    caption = ColumnNames(caption="body")
    message = r"data\.columns\.caption has no effect, since the encoder takes images, from data\.columns\.image; remove"
    with pytest.raises(ConfigError, match=message):
        embed_to_parquet(run, data, tmp_path / "rows", columns=caption, quiet=True)
    with pytest.raises(ConfigError, match=message):
        evaluate("knn", run=run, train=str(data), test=str(data), columns=caption, quiet=True)
    assert not (tmp_path / "rows").exists()
    monkeypatch.setattr(embed, "role_of", lambda _: "text")
    encoder: Any = None
    with pytest.raises(
        ConfigError, match=r"data\.columns\.image has no effect, since the encoder takes texts, from data"
    ):
        embed.columns_for(encoder, ColumnNames(image="photo"))
    assert embed.columns_for(encoder, ColumnNames(document_id="id")).asked == {
        "text": "text",
        "document_id": "id",
    }


def test_too_many_broken_images_leave_nothing_behind(
    run: str, tmp_path: Path, connected: list[str | None]
) -> None:
    data = write_digits(tmp_path / "digits.parquet", 100, broken=50)
    with pytest.raises(DataError, match="50 of 100 rows are invalid"):
        embed_to_parquet(run, data, tmp_path / "rows", quiet=True)
    assert not (tmp_path / "rows").exists()


def test_a_set_may_have_as_many_broken_images_as_the_run_allowed(
    tmp_path: Path, connected: list[str | None]
) -> None:
    run = write_images_run(tmp_path / "run", "resnet10", width=0.125, representation_dim=64)
    config = override(recipe("simclr"), {"data.max_invalid_fraction": 0.5})
    (tmp_path / "run" / "config.yaml").write_text(config_to_yaml(config))
    data = str(write_digits(tmp_path / "digits.parquet", 100, broken=40))
    assert embed_to_parquet(run, data, tmp_path / "rows", quiet=True).num_invalid == 40
    assert evaluate("knn", run=run, train=data, test=data, quiet=True)["num_test"] == 60
    with pytest.raises(DataError, match=r"more than the fraction 0.3 allowed"):
        embed_to_parquet(run, data, tmp_path / "fewer", max_invalid_fraction=0.3, quiet=True)
    with pytest.raises(DataError, match=r"more than the fraction 0.3 allowed"):
        evaluate("knn", run=run, train=data, test=data, max_invalid_fraction=0.3, quiet=True)
    (tmp_path / "run" / "config.yaml").write_text("of another program")
    with pytest.raises(DataError, match=r"more than the fraction 0.01 allowed"):
        embed_to_parquet(run, data, tmp_path / "fewer", quiet=True)


def test_a_checkpoint_allows_as_many_broken_images_as_its_run(tmp_path: Path) -> None:
    config = override(recipe("simclr"), {"data.max_invalid_fraction": 0.5})
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    checkpoint = tmp_path / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.pt").write_bytes(b"")
    assert [allowed_invalid_fraction(str(each)) for each in (tmp_path, checkpoint)] == [0.5, 0.5]


@pytest.mark.parametrize("measure", ["knn", "linear"])
def test_a_small_set_is_evaluated_in_this_process(
    measure: Any, run: str, tmp_path: Path, connected: list[str | None]
) -> None:
    train, test = (write_digits(tmp_path / f"{number}.parquet", number) for number in (300, 60))
    result = evaluate(measure, run=run, train=str(train), test=str(test), quiet=True)
    assert (result["num_train"], result["num_test"]) == (300, 60)
    assert result["baseline"]["pixels"] > 0.8
    assert result["top1"] > 0.3
    assert connected == []


def test_splits_are_not_evaluated_embedded_or_packed_as_classes(run: str, tmp_path: Path) -> None:
    for name in ("train/a.png", "val/b.png"):
        (tmp_path / "all" / name).parent.mkdir(parents=True)
        (tmp_path / "all" / name).write_bytes(digit_files(1)[0][0])
    data = str(tmp_path / "all")
    for command in (
        lambda: evaluate("knn", run=run, train=data, test=data, quiet=True),
        lambda: embed_to_parquet(run, data, tmp_path / "out", quiet=True),
        lambda: pack_images(data, str(tmp_path / "out")),
    ):
        with pytest.raises(DataError, match="all holds a data set in 2 splits; give --data"):
            command()
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("are_numbers", [False, True])
def test_embedded_rows_have_the_names_of_their_classes(run: str, tmp_path: Path, are_numbers: bool) -> None:
    files, _ = digit_files(4)
    names = ["zebra", None, "ant", "zebra"]
    columns: dict[str, Any] = {"image": files, "label": names}
    if are_numbers:  # as Hugging Face's datasets write them: the names are beside the numbers
        columns["label"] = [1, -1, 0, 1]
    table = pa.table(columns)
    if are_numbers:
        feature = {"names": ["ant", "zebra"], "_type": "ClassLabel"}
        info = json.dumps({"info": {"features": {"label": feature}}})
        table = table.replace_schema_metadata({"huggingface": info})
    pq.write_table(table, tmp_path / "rows.parquet")
    embed_to_parquet(run, tmp_path / "rows.parquet", tmp_path / "out", quiet=True)
    rows = pq.read_table(tmp_path / "out")
    assert (rows["label"].to_pylist(), rows["class"].to_pylist()) == ([1, -1, 0, 1], names)


@pytest.mark.usefixtures("connected")
def test_an_embedded_image_of_a_folder_has_the_address_of_its_file(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.data.discovery.ROWS_PER_FRAGMENT", 16)
    files, labels = digit_files(40)
    for number, (content, label) in enumerate(zip(files, labels, strict=True)):
        path = tmp_path / "digits" / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"broken" if number == 3 else content)  # a row less, not an id
    embed_to_parquet(run, tmp_path / "digits", tmp_path / "rows", max_invalid_fraction=0.1, quiet=True)
    rows = pq.read_table(tmp_path / "rows")
    found = rows["path"].to_pylist()
    assert set(found) == {str(path) for path in (tmp_path / "digits").glob("*/*.png") if path.name != "3.png"}
    assert rows["class"].to_pylist() == [Path(path).parent.name for path in found]
    encoder: Any = load_encoder(run)
    exact = encoder.encode([Path(path).read_bytes() for path in found])
    torch.testing.assert_close(torch.tensor(rows["representation"].to_pylist()), exact, rtol=0, atol=1e-5)
    guide = list(read_embeddings(str(tmp_path / "rows"), "sample_id"))
    assert np.concatenate([ids for ids, _ in guide]).tolist() == rows["sample_id"].to_pylist()
    write_digits(tmp_path / "digits.parquet", 8)
    embed_to_parquet(run, tmp_path / "digits.parquet", tmp_path / "others", quiet=True)
    assert pq.read_schema(tmp_path / "others" / "part-0.parquet").names == [
        "sample_id",
        "label",
        "representation",
    ]


@pytest.mark.usefixtures("connected")
def test_the_files_that_are_not_read_are_named(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, labels = digit_files(40)
    for number, (content, label) in enumerate(zip(files, labels, strict=True)):
        path = tmp_path / "digits" / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "digits" / "notes.md").touch()
    data, line = str(tmp_path / "digits"), f"files not read in {tmp_path / 'digits'}: 1 .md"
    embed_to_parquet(run, data, tmp_path / "quiet", quiet=True)
    assert "not read" not in capsys.readouterr().err
    embed_to_parquet(run, data, tmp_path / "rows")
    assert line in capsys.readouterr().err.splitlines()
    evaluate("knn", run=run, train=data, test=data, baseline=False)
    assert capsys.readouterr().err.splitlines().count(line) == 1  # of both sets


def test_a_column_label_of_other_values_has_no_classes(run: str, tmp_path: Path) -> None:
    images = pa.array(digit_files(4)[0], pa.binary())
    pq.write_table(pa.table({"image": images, "label": [0.5] * 4}), tmp_path / "a.parquet")
    data = str(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has no labels: column 'label' holds double; put images in"):
        evaluate("knn", run=run, train=data, test=data, quiet=True)
    assert embed_to_parquet(run, data, tmp_path / "rows", quiet=True).num_rows == 4


@pytest.mark.usefixtures("connected")
def test_the_encoder_of_a_small_set_is_built_once(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, built = SavedEncoder.build, list[str]()
    data = str(write_digits(tmp_path / "digits.parquet", 300))
    monkeypatch.setattr(
        SavedEncoder,
        "build",
        lambda self, *given, **named: built.append(self.uri) or build(self, *given, **named),
    )
    embed_to_parquet(run, data, tmp_path / "rows", quiet=True)
    evaluate("knn", run=run, train=data, test=data, baseline=False, quiet=True)
    embed_values(digit_files(2)[0], read_encoder(run), quiet=True)
    assert built == [run] * 3


def test_values_of_this_process_are_embedded_in_order(run: str, connected: list[str | None]) -> None:
    files, _ = digit_files(50)
    found, _ = embed_values(files, read_encoder(run), quiet=True)
    torch.testing.assert_close(found, expected(run, 50), rtol=0, atol=1e-5)
    with pytest.raises(DataError, match=r"1 of 51 rows are invalid \(.*not an image\)\); fix or remove them"):
        embed_values([*files, b"broken"], read_encoder(run), quiet=True)
    assert connected == []


def test_representations_in_order_are_not_copied_and_others_are_sorted(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, found = digit_files(50)[0], list[torch.Tensor]()
    decode_table, representations = embed.decode_table, embed.representations
    monkeypatch.setattr(
        embed, "representations", lambda *given: found.append(representations(*given)) or found[-1]
    )
    assert embed_values(files, read_encoder(run), quiet=True)[0] is found[0]
    monkeypatch.setattr(
        embed, "decode_table", lambda *given: [each[::-1] for each in decode_table(*given)][::-1]
    )
    assert torch.equal(embed_values(files, read_encoder(run), quiet=True)[0], found[0])


def test_representations_count_as_well_as_images(
    run: str, connected: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, _ = digit_files(20)
    monkeypatch.setattr(reading, "MAX_BYTES", 20 * (32 * 32 * 3 + 4 * 64))
    embed_values(files, read_encoder(run), quiet=True)
    assert connected == []
    monkeypatch.setattr(reading, "MAX_BYTES", 20 * 32 * 32 * 3)
    embed_values(files, read_encoder(run), quiet=True)
    assert connected == [None]


def test_large_sets_gpus_and_clusters_need_ray(
    connected: list[str | None], waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_unless_small(MAX_BYTES)
    assert connected == []
    connect_unless_small(MAX_BYTES + 1)
    connect_unless_small(1, gpu=True)
    connect_unless_small(1, address="10.0.0.1:6379")
    with monkeypatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "auto")
        connect_unless_small(1)
    # A Ray that another library started may not keep the order of rows.
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    connect_unless_small(1)
    assert connected == [None, None, "10.0.0.1:6379", None, None]
    assert waits == [0]


def test_a_gpu_of_a_cluster_may_start_on_demand(connected: list[str | None], waits: list[float]) -> None:
    connect_unless_small(1, gpu=True, address="10.0.0.1:6379")
    connect_unless_small(1, gpu=True, address="local")
    assert connected == ["10.0.0.1:6379", "local"]
    assert waits == [NEW_NODE_S, 0]


class Own(nn.Module):
    """A network of the user's."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)
        self.error = error

    def forward(self, images: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.layer(images).mean((2, 3))


def write_own_run(folder: Path, network: nn.Module) -> str:
    spec = ImageEncoderSpec(
        name=OWN,
        image_size=32,
        stored_size=32,
        channels=3,
        representation_dim=8,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
    )
    save_encoder(network, spec, Place(str(folder)))
    return str(folder)


@pytest.mark.parametrize(
    ("have", "come", "num_cpus", "most"),
    [(0, 1, 0.0, 1), (0, 2, 0.5, None), (1, 1, 0.0, 1), (2, 2, 0.5, 1), (8, 8, 0.5, 7)],
)
def test_actors_leave_a_cpu_for_the_task_that_decodes_their_rows(
    have: float, come: float, num_cpus: float, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = {"CPU": have} if have else {}
    monkeypatch.setattr("ray.cluster_resources", lambda: resources)
    monkeypatch.setattr("raycl.inference.embed.wait_for_cpu", lambda: resources.update(CPU=come))
    monkeypatch.setattr("ray.put", lambda value: value)
    decoded, saved = MagicMock(), MagicMock()
    embed_dataset(decoded, saved)
    asked = decoded.map_batches.call_args.kwargs
    assert asked["num_cpus"] == num_cpus
    assert (asked["compute"].min_size, asked["compute"].max_size) == (1, most or float("inf"))


def test_a_module_of_the_user_is_not_changed(tmp_path: Path, connected: list[str | None]) -> None:
    trained, network = Own(), Own()
    run = write_own_run(tmp_path / "run", trained)
    data = write_digits(tmp_path / "digits.parquet", 20)
    before = copy.deepcopy(network.state_dict())
    embed_to_parquet(run, data, tmp_path / "rows", network=network, quiet=True)
    assert network.layer.weight.stride() == before["layer.weight"].stride()
    rows = torch.tensor(pq.read_table(tmp_path / "rows")["representation"].to_pylist())
    encoder: Any = load_encoder(run, network=Own())
    exact = encoder.encode(digit_files(20)[0])
    torch.testing.assert_close(rows, exact, rtol=0, atol=1e-5)


def test_an_error_of_a_network_is_not_one_of_the_storage(tmp_path: Path, connected: list[str | None]) -> None:
    run = write_own_run(tmp_path / "run", Own())
    data = write_digits(tmp_path / "digits.parquet", 20)
    with pytest.raises(RunError, match="no such cache file"):
        embed_to_parquet(run, data, tmp_path / "rows", network=Own(OSError("no such cache file")), quiet=True)
    assert not (tmp_path / "rows").exists()
