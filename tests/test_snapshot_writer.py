"""Embedding snapshots of a run: equal on any number of workers, and without changes to the towers."""

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor, nn

from raycl.augment.images import ImageAugmentation
from raycl.data.codecs import store_all
from raycl.data.images import ImageFormat
from raycl.data.in_memory import Batch, InMemoryDataset, pixels_of
from raycl.embedding_snapshot import FIRST, LATEST, read_probe_set, read_snapshot
from raycl.models.towers import Tower, TwoTowers, build_projection_head
from raycl.storage import Place
from raycl.tokenization import Tokenizer, train_tokenizer
from raycl.training.evaluators import SnapshotWriter, _thumbnail
from raycl.training.transforms import ImageTransform, Transform
from tests.images import digit_files
from tests.texts import invented_texts, with_cls
from tests.workers.processes import run_workers

NUM_ROWS, SIZE = 37, 16  # neither 2 nor 3 workers share these rows evenly
CPU = torch.device("cpu")


class Counting(nn.Module):
    """An encoder with all state that a snapshot could change: statistics, dropout, and a counter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(SIZE * SIZE, 12), nn.BatchNorm1d(12), nn.Dropout(dropout), nn.ReLU()
        )
        self.num_trained = 0

    def forward(self, images: Tensor) -> Tensor:
        self.num_trained += self.training
        return self.layers(images)


def tower(*, dropout: float = 0.0) -> Tower:
    torch.manual_seed(0)
    head = build_projection_head(12, num_layers=2, hidden_dim=None, dim=6, batchnorm=True)
    built = Tower(Counting(dropout), head)
    built(torch.randn(64, 1, SIZE, SIZE))  # statistics differ from the initial ones
    built.encoder.num_trained = 0
    return built


def digits() -> InMemoryDataset:
    images, labels = digit_files(NUM_ROWS)
    formats = {"image": ImageFormat(size=SIZE, channels=1)}
    decoded = {role: each.decode_all(images) for role, each in formats.items()}
    numbers = {"sample_id": pa.array(range(100, 100 + NUM_ROWS)), "label": pa.array(labels)}
    return InMemoryDataset([pa.table(store_all(formats, decoded) | numbers)], formats)


def snapshot_writer(folder: Path, **changed: Any) -> SnapshotWriter:
    rows = digits()
    augmentation = ImageAugmentation(size=SIZE, channels=1, mean=(0.5,), std=(0.25,), **changed)
    return SnapshotWriter(
        rows=rows,
        positions=np.random.default_rng(0).permutation(NUM_ROWS),
        transform=ImageTransform(augmentations=(augmentation,) * 2, seed=0),
        output=Place(str(folder)),
        tokenizer=None,
        held_out=True,
        seed=0,
    )


def write(rank: int, num_workers: int, folder: str, step: int, two_towers: bool) -> None:
    towers = TwoTowers(tower(), tower()) if two_towers else tower()
    snapshot_writer(Path(folder)).write(towers, CPU, step=step)


@pytest.mark.parametrize("two_towers", [False, True])
def test_any_number_of_workers_writes_the_same_snapshot(two_towers: bool) -> None:
    found = []
    for num_workers in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            run_workers(write, num_workers, folder, 0, two_towers)
            snapshot, probes = read_snapshot(Place(folder), FIRST), read_probe_set(Place(folder))
            assert snapshot is not None
            assert probes is not None
            found.append((snapshot, probes.sample_id))
    (first, ids), *others = found
    for other, other_ids in others:
        assert np.array_equal(ids, other_ids)
        assert np.array_equal(first.embedding, other.embedding)
        assert (first.key is None) == (other.key is None) == (not two_towers)
        for side in ("positives", "negatives"):
            counts = [getattr(each.similarities, side) for each in (first, other)]
            assert np.abs(counts[0] - counts[1]).sum() <= 2  # rounding at bin edges


def test_rows_are_the_unit_representations_of_their_samples(tmp_path: Path) -> None:
    built = tower()
    snapshot_writer(tmp_path).write(built, CPU, step=0)
    snapshot, probes = read_snapshot(Place(str(tmp_path)), FIRST), read_probe_set(Place(str(tmp_path)))
    assert snapshot is not None
    assert probes is not None
    by_id = {int(number): place for place, number in enumerate(digits().sample_id)}
    batch = digits().take(np.array([by_id[int(number)] for number in probes.sample_id]))
    images = snapshot_writer(tmp_path).transform.plain(batch).on(CPU)
    with torch.no_grad():
        expected = F.normalize(built.eval().encoder(images), dim=1)
    assert np.allclose(snapshot.embedding, expected.numpy(), atol=2e-3)
    assert probes.label.tolist() == batch.label.tolist()
    assert snapshot.similarities.positives.sum() == NUM_ROWS
    assert snapshot.similarities.negatives.sum() == NUM_ROWS * (NUM_ROWS - 1)
    for content, pixels in zip(probes.contents["image"], pixels_of(batch).images, strict=True):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), pixels.squeeze(-1))


def test_a_snapshot_leaves_the_towers_unchanged(tmp_path: Path) -> None:
    built = tower(dropout=0.5).train()
    before = {name: value.clone() for name, value in built.state_dict().items()}
    snapshot_writer(tmp_path).write(built, CPU, step=0)
    assert all(torch.equal(value, before[name]) for name, value in built.state_dict().items())
    assert all(module.training for module in built.modules())
    assert built.encoder.num_trained == 0


def test_the_first_snapshot_is_kept_and_the_latest_replaced(tmp_path: Path) -> None:
    steps = []
    for step in (0, 5, 9):
        snapshot_writer(tmp_path).write(tower(), CPU, step=step)
        snapshots = [read_snapshot(Place(str(tmp_path)), name) for name in (FIRST, LATEST)]
        steps.append([each.step for each in snapshots if each is not None])
    assert steps == [[0], [0, 5], [0, 9]]


def test_dropout_makes_the_views_of_a_sample_differ(tmp_path: Path) -> None:
    def mean_bin(dropout: float) -> float:
        # Views without any randomness.
        unchanged = {"crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0), "flip": 0.0, "jitter": 0.0}
        quiet = snapshot_writer(tmp_path, **unchanged, grayscale=0.0, blur=0.0)
        quiet.write(tower(dropout=dropout), CPU, step=0)
        snapshot = read_snapshot(Place(str(tmp_path)), FIRST)
        assert snapshot is not None
        counts = snapshot.similarities.positives
        return float(counts @ np.arange(len(counts)) / counts.sum())

    assert mean_bin(0.0) == 99.0  # the last of a hundred: cosines of 1
    assert mean_bin(0.5) < 99.0


def test_equal_keys_are_not_counted_as_negatives(tmp_path: Path) -> None:
    class Alike:
        """A transform in which all samples except the first share a key."""

        def __init__(self, transform: Transform) -> None:
            self._transform = transform

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transform, name)

        def plain_key_id(self, batch: Batch) -> Tensor:
            return torch.from_numpy((batch.sample_id == 100).astype(np.int64))

    made = snapshot_writer(tmp_path)
    alike = SnapshotWriter(**{**vars(made), "transform": Alike(made.transform)})  # type: ignore[arg-type]
    alike.write(tower(), CPU, step=0)
    snapshot = read_snapshot(Place(str(tmp_path)), FIRST)
    assert snapshot is not None
    assert snapshot.similarities.negatives.sum() == 2 * (NUM_ROWS - 1)


@pytest.mark.parametrize(("aspect", "size"), [(1.0, (64, 64)), (2.0, (64, 32)), (0.5, (32, 64))])
def test_a_thumbnail_has_the_proportions_of_the_original(aspect: float, size: tuple[int, int]) -> None:
    square = np.zeros((160, 160, 3), np.uint8)
    with Image.open(io.BytesIO(_thumbnail(square, aspect))) as picture:
        assert picture.size == size


def test_texts_are_restored_from_their_tokens() -> None:
    texts = [*invented_texts(50), "Zürich, 今日は", "two  spaces"]
    tokenizer = with_cls(train_tokenizer(texts, vocabulary_size=600))
    read = tokenizer.decode(tokenizer.encode(texts, 256))
    plain = [text.lower().replace(" ", "") for text in texts]
    # Restored texts have spaces before punctuation.
    assert [text.replace(" ", "") for text in read] == plain


def test_a_token_exchanged_with_the_padding_is_restored() -> None:
    library = tokenizers.Tokenizer(
        models.WordLevel({"sea": 0, "boat": 1, "[UNK]": 2, "[PAD]": 3}, unk_token="[UNK]")
    )
    library.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    library.decoder = decoders.Fuse()  # type: ignore[assignment]
    library.add_special_tokens(["[PAD]", "[UNK]"])
    tokenizer = Tokenizer(library.to_str())
    tokens = tokenizer.encode(["sea boat sea"], 8)
    assert tokens[0].tolist() == [3, 1, 3]  # 0 is the padding
    assert tokenizer.decode(tokens) == ["seaboatsea"]
