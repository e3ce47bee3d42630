"""raycl's functions in code of the user's own: other types, autocast, closures, and values that cannot be used."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raycl
from raycl.augment import ImageAugmentation, two_views
from raycl.augment.images import center_view
from raycl.batchnorm import replace_batchnorm
from raycl.config import RunConfig
from raycl.distributed.device_copy import use_channels_last
from raycl.errors import ConfigError, StorageError
from raycl.evaluation.embed import embed
from raycl.losses import clip, dcl, nt_xent, poly_view, siglip, supcon
from raycl.models.build import build_towers, save_towers
from raycl.models.encoder_io import save_encoder
from raycl.negatives import KeyQueue, MemoryBank
from raycl.optim import build_optimizer
from raycl.storage import Place
from tests.encoders import image_encoder
from tests.pairs import small_config, small_network, vocabulary
from tests.test_saved_text import load_texts
from tests.texts import invented_texts
from tests.towers import save, trained

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 12, 12, 3), np.uint8)
IDS = np.arange(6)
AUGMENTATION = ImageAugmentation(size=8, channels=3, mean=(0.5,) * 3, std=(0.25,) * 3, rotation=20.0)
COLORS = {"mean": (0.5,) * 3, "std": (0.25,) * 3}


# ---- encoders


def test_representations_can_be_used_in_training(tmp_path: Path) -> None:
    save(small_config("simcse"), tmp_path)
    images = list(PIXELS[:, :8, :8, :1])
    for rows in (load_texts(tmp_path).encode(["a", "b"]), image_encoder().encode(images)):
        head = nn.Linear(rows.shape[1], 2)
        head(rows).sum().backward()
        assert head.weight.grad is not None
        rows.div_(2)


def test_a_batch_size_below_1_is_refused(tmp_path: Path) -> None:
    save(small_config("simcse"), tmp_path)
    for encode, rows in (
        (load_texts(tmp_path).encode, ["a"]),
        (image_encoder().encode, list(PIXELS[..., :1])),
    ):
        with pytest.raises(ConfigError, match="batch_size must be 1 or more, came -1"):
            encode(rows, batch_size=-1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_encoder_of_another_precision_encodes_images(dtype: torch.dtype) -> None:
    encoder, images = image_encoder(), list(PIXELS[:, :8, :8, :1])
    expected = encoder.encode(images)
    found = copy.deepcopy(encoder).to(dtype).encode(images)
    assert found.dtype == torch.float32
    assert F.cosine_similarity(found, expected).min() > 0.999


class Projection(nn.Module):
    """A network with a buffer and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.eye(64)[:32])

    def forward(self, images: Tensor) -> Tensor:
        return F.linear(images.flatten(1), self.weight)


class OfDepth(nn.Module):
    """A network with a 3-D convolution and lazy layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv3d(1, 8, (1, 3, 3))
        self.norm = nn.LazyBatchNorm2d()

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.patches(images[:, :, None])[:, :, 0]).mean((2, 3))


class WithState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def gray(**settings: Any) -> RunConfig:
    small = {"data.image_size": 8, "data.channels": 1, "projection_head.dim": 8}
    return raycl.override(raycl.recipe("simclr", image_size=32), {**small, **settings})


def test_an_encoder_without_parameters_encodes_images(tmp_path: Path) -> None:
    save_encoder(Projection(), image_encoder().spec, Place(str(tmp_path)))
    encoder = raycl.load_encoder(str(tmp_path), network=Projection())
    found = encoder.encode(PIXELS[:, :8, :8, :1])
    assert found.equal(Projection()(encoder.prepare(PIXELS[:, :8, :8, :1])))


@pytest.mark.parametrize("norm", ["synchronized", "group", "layer"])
def test_a_network_of_lazy_layers_and_3d_convolutions_is_loaded_as_it_was_trained(
    norm: str, tmp_path: Path
) -> None:
    config = gray(batchnorm=norm)
    tower = build_towers(config, network=OfDepth())
    use_channels_last(tower)
    tower(torch.rand(4, 1, 8, 8))
    tower.eval()
    save_towers(tower, config, None, Place(str(tmp_path)))
    encoder = raycl.load_encoder(str(tmp_path), network=OfDepth())
    images = PIXELS[:, :8, :8, :1]
    assert encoder.encode(images).equal(tower.encoder(encoder.prepare(images)))


class OfViews(nn.Module):
    """A convolution, and a view of its map as rows, which channels_last does not allow."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(channels, 3, 3), nn.Linear(3 * 6 * 6, 8)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(self.conv(images).view(len(images), -1))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_for_contiguous_images_alone_is_refused_before_training(channels: int) -> None:
    config = gray(**{"data.channels": channels})
    with pytest.raises(ConfigError, match=r"in channels_last: view size is not compatible .* Use \.reshape"):
        build_towers(config, network=OfViews(channels))


class WithTable(nn.Module):
    """Positions from a table that grows with the longest text, like that of many encoders."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.table = nn.Embedding(9, 4), torch.empty(0, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if len(self.table) < length:
            self.table = torch.arange(4.0 * length).view(length, 4).cos()
        return (self.words(tokens) * self.table[:length]).mean(1)


def test_a_network_that_keeps_a_table_trains_after_an_evaluation() -> None:
    network, tokens = WithTable(), torch.tensor([[3, 4, 5]])
    found = embed(network, [tokens])
    output = network(tokens)
    output.sum().backward()
    assert found.equal(output) and not found.requires_grad


def test_a_state_that_a_file_of_tensors_cannot_hold_is_refused_before_training() -> None:
    network = nn.Sequential(nn.Flatten(), WithState(64, 8))
    with pytest.raises(ConfigError, match=r"the encoder has the state 1\._extra_state, which is dict"):
        build_towers(gray(), network=network)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{clip: .inf}", "give finite numbers, text, lists and mappings"),
        ("{sizes: {1: 2}}", "the key 1 is not text"),
    ],
)
def test_arguments_that_would_reach_the_network_changed_are_refused(value: str, says: str) -> None:
    settings = ["encoder.name=tests.pairs:small_network", f"encoder.kwargs={value}"]
    with pytest.raises(ConfigError, match=says):
        raycl.override(raycl.recipe("simclr", image_size=32), settings)


def test_two_runs_with_one_network_are_two_encoders(tmp_path: Path) -> None:
    network = small_network()
    before = copy.deepcopy(network.state_dict())
    runs = [str(tmp_path / name) for name in ("a", "b")]
    for run in runs:
        save_encoder(small_network(), image_encoder().spec, Place(run))
    a, b = (raycl.load_encoder(run, network=network) for run in runs)
    images = list(PIXELS[:, :8, :8, :1])
    assert not torch.equal(a.encode(images), b.encode(images))
    assert all(torch.equal(network.state_dict()[name], value) for name, value in before.items())


def test_measures_of_texts_and_mining_take_a_network_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_nothing(query: Tensor, document: Tensor, *_: Any, **__: Any) -> Any:
        embedded.append(torch.cat([query, document]))
        return np.zeros((len(query), 1)), np.full((len(query), 1), -1)

    config = small_config("two_tower")
    towers, tokenizer = trained(config), vocabulary().tokenizer
    named, own, other = (str(tmp_path / name) for name in ("named", "own", "other"))
    save_towers(towers, config, tokenizer, Place(named))
    save_towers(towers, config, tokenizer, Place(own), own=True)
    texts = invented_texts(12)
    pairs = {"query": texts[:6], "document": texts[6:]}
    scored = {"sentence1": texts[:6], "sentence2": texts[6:], "score": range(6)}
    pq.write_table(pa.table({"image": ["a"]}), other)
    for measure, columns in (("retrieval", pairs), ("sts", scored)):
        pq.write_table(pa.table(columns), tmp_path / measure)
        test: dict[str, Any] = {"test": tmp_path / measure, "quiet": True}
        found = raycl.evaluate(measure, run=own, network=towers.towers[0].encoder, **test)
        assert found == raycl.evaluate(measure, run=named, **test)
        with pytest.raises(StorageError, match="pass it as network= in Python"):
            raycl.evaluate(measure, run=own, test=other)
    with pytest.raises(StorageError, match="pass it as network= in Python"):
        raycl.mine(own, other, tmp_path / "mined")
    embedded = list[Tensor]()
    monkeypatch.setattr("raycl.inference.mining.connect_cluster", lambda *_, **__: None)
    monkeypatch.setattr("raycl.inference.mining._search_in_tasks", find_nothing)
    for run, network in ((named, None), (own, towers.towers[0].encoder)):
        raycl.mine(run, tmp_path / "retrieval", f"{run}-mined", network=network, quiet=True)
    assert embedded[0].equal(embedded[1])


# ---- autocast


def test_autocast_does_not_change_views() -> None:
    def views() -> list[Tensor]:
        drawn = two_views(PIXELS, IDS, augmentation=AUGMENTATION, seed=0, epoch=0)
        return [*drawn, center_view(PIXELS, size=8, **COLORS)]

    expected = views()
    with torch.autocast("cpu", torch.bfloat16):
        found = views()
    for each, other in zip(found, expected, strict=True):
        assert torch.equal(each, other)


def test_losses_of_views_take_half_precision_under_autocast() -> None:
    views = F.normalize(torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0)), dim=2).half()
    labels = torch.arange(6) % 3
    losses: list[Any] = [
        lambda: nt_xent(*views[:2], temperature=0.5),
        lambda: dcl(*views[:2], temperature=0.5),
        lambda: dcl(*views[:2], temperature=0.5, sigma=0.5),
        lambda: poly_view(list(views), temperature=0.5),
        lambda: supcon(*views[:2], label=labels, temperature=0.5),
        lambda: clip(*views[:2], temperature=0.5),
    ]
    for loss in losses:
        expected = loss()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(loss(), expected)


# ---- optimizers and layers


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "muon"])
def test_an_optimizer_evaluates_a_closure(name: Any) -> None:
    def trained(*, by_closure: bool) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        network = nn.Linear(4, 3)
        optimizer = build_optimizer(name, network)
        optimizer.param_groups[0]["lr"] = 0.1

        def loss_of() -> Any:
            optimizer.zero_grad()
            loss = network(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        if by_closure:
            loss = optimizer.step(loss_of)
        else:
            loss = loss_of()
            optimizer.step()
        return network.weight.detach().clone(), loss

    found, expected = trained(by_closure=True), trained(by_closure=False)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_unknown_names_are_refused() -> None:
    name: Any = "adam"
    with pytest.raises(ConfigError, match="unknown optimizer 'adam'; there are sgd, adamw, lars, muon"):
        build_optimizer(name, nn.Linear(2, 2))
    name = "instance"
    with pytest.raises(ConfigError, match="unknown normalization 'instance'.*; choose layer or group"):
        replace_batchnorm(nn.BatchNorm1d(4), name)


# ---- losses


def test_scalars_of_losses_are_checked() -> None:
    rows = torch.eye(4)
    for bias in (torch.zeros(1), torch.zeros(4)):
        with pytest.raises(ConfigError, match="the bias must be a number or a 0-d tensor"):
            siglip(rows, rows, temperature=0.1, bias=bias)
    with pytest.raises(ConfigError, match="the temperature must be above 0, got nan"):
        nt_xent(rows, rows, temperature=float("nan"))
    # A learned temperature of a run that diverges: the run reports the loss.
    for loss in (nt_xent, clip):
        assert loss(rows, rows, temperature=torch.tensor(float("nan"))).isnan()
    for sigma in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="sigma must be above 0, or None for DCL"):
            dcl(rows, rows, temperature=0.1, sigma=sigma)


# ---- numbers of numpy, tensors and paths


def test_integers_of_numpy_are_integers() -> None:
    def views(seed: Any, view: Any) -> Tensor:
        return AUGMENTATION(PIXELS, IDS, seed=seed, epoch=0, view=view)

    assert torch.equal(views(np.int64(7), np.int64(1)), views(7, 1))
    bank = MemoryBank(np.arange(9), 4, seed=0)
    number: Any = np.int64(3)
    drawn, expected = bank.draw(number, step=number), bank.draw(3, step=3)
    assert np.array_equal(drawn, expected)


def test_settings_take_numbers_of_numpy_and_paths() -> None:
    config = raycl.recipe("simcse")
    found = raycl.override(
        config,
        {
            "stages.0.batch_size": np.int64(32),
            "stages.0.temperature": torch.tensor(0.5),
            "text.tokenizer": Path("folder/tokenizer.json"),
        },
    )
    assert (found.stages[0].batch_size, found.stages[0].temperature) == (32, 0.5)
    assert found.text.tokenizer == "folder/tokenizer.json"
    with pytest.raises(ConfigError, match=r"<object object at .*> is object; give numbers, text and lists"):
        raycl.override(config, {"stages.0.batch_size": object()})


def test_stores_name_a_tensor_in_place_of_an_array() -> None:
    rows: Any = torch.randn(2, 3)
    with pytest.raises(ConfigError, match=r"the rows must be a numpy array, came Tensor.*\.numpy\(\)"):
        KeyQueue(6, 3).push(rows, np.arange(2), 0)
    ids: Any = torch.arange(2)
    with pytest.raises(ConfigError, match="the sample ids must be a numpy array, came Tensor"):
        MemoryBank(np.arange(9), 3, seed=0).update(ids, np.ones((2, 3), np.float32), 0)


@pytest.mark.parametrize(
    "step",
    [1.5, "1", None, True, np.arange(3), np.ones((2, 1), np.int64)],
    ids=["1.5", "text", "None", "flag", "3", "2x1"],
)
def test_stores_refuse_steps_of_another_type_or_length(step: Any) -> None:
    ids, rows = np.arange(2), np.ones((2, 3), np.float32)
    queue, bank = KeyQueue(6, 3), MemoryBank(ids, 3, seed=0)
    with pytest.raises(ConfigError, match="the step is not an integer, or one for each row: it came as"):
        queue.push(rows, ids, step)
    for write in (lambda: bank.update(ids, rows, step), lambda: bank.replace(ids, rows, step)):
        with pytest.raises(ConfigError, match="step must be a whole number, came"):
            write()
    assert len(queue) == 0
    assert (bank.negatives().step == -1).all()


def test_stores_refuse_settings_of_other_types() -> None:
    wrong: Any = "6"
    nothing: Any = None
    ids = np.arange(2)
    for make, message in (
        (lambda: KeyQueue(wrong, 3), "capacity must be a whole number"),
        (lambda: KeyQueue(6, wrong), "dim must be a whole number"),
        (lambda: MemoryBank(ids, 3, seed=wrong), "seed must be a whole number"),
        (lambda: MemoryBank(ids, 3, seed=0, momentum=wrong), "momentum must be a number"),
        (
            lambda: MemoryBank(ids, 3, seed=0, kind="queue"),
            "unknown kind 'queue' of a bank; choose memory_bank or partition",
        ),
        (lambda: MemoryBank(ids, 3, seed=0).draw(wrong, step=0), "num must be a whole number"),
        (lambda: MemoryBank(ids, 3, seed=0).draw(1, step=wrong), "step must be a whole number"),
        (lambda: KeyQueue(6, 3).push(nothing, ids, 0), "the rows must be a numpy array, came NoneType"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"encoder": nn.Linear},
            "encoder must be a torch.nn.Module, came <class .*Linear'>; pass the module",
        ),
        ({"encoder": "resnet18"}, "encoder must be a torch.nn.Module, came 'resnet18'; .* settings="),
        ({"output": None}, "output must be an address, came NoneType"),
        ({"data": (each for each in ["a"])}, "data must be an address, came generator"),
        (
            {"data": None, "dataset": pd.DataFrame({"a": [1]})},
            "dataset must be a Ray Dataset, came DataFrame",
        ),
        ({"data": None, "dataset": [{"image": b""}]}, "dataset must be a Ray Dataset, came dict"),
    ],
)
def test_a_run_refuses_arguments_of_other_types(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"data": "images", "output": tmp_path / "run"} | changes
    with pytest.raises(ConfigError, match=message):
        raycl.train("simclr", **arguments)
    assert not (tmp_path / "run").exists()
