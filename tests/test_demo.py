"""The picture of the demo: a query of each digit, and the accuracy above each block of neighbors."""

from pathlib import Path

import pyarrow as pa
import pytest
import torch

from raycl.data.codecs import store_all
from raycl.data.images import ImageFormat
from raycl.data.in_memory import InMemoryDataset
from raycl.demo.plan import plan_demo
from raycl.demo.run import NUM_NEIGHBORS, Representation, draw_neighbors
from tests.images import digit_files

NUM_TRAIN = 80


def digits(first: int, last: int) -> InMemoryDataset:
    images, labels = (each[first:last] for each in digit_files(last))
    formats = {"image": ImageFormat(size=16, channels=1)}
    decoded = {role: each.decode_all(images) for role, each in formats.items()}
    numbers = {"sample_id": pa.array(range(first, last)), "label": pa.array(labels)}
    return InMemoryDataset([pa.table(store_all(formats, decoded) | numbers)], formats)


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 8, 200])
def test_the_batch_divides_over_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    batch_size = plan_demo(str(tmp_path), workers=workers, epochs=1).config.stages[0].batch_size
    assert batch_size % workers == 0
    assert workers > 128 or 120 <= batch_size <= 128


def test_the_picture_has_a_query_of_each_digit_and_an_accuracy_above_each_block() -> None:
    train, test = digits(0, NUM_TRAIN), digits(NUM_TRAIN, 2 * NUM_TRAIN)
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(NUM_TRAIN, 4, generator=generator) for _ in range(2)]
    found = [Representation(name=name, train=vectors[0], test=vectors[1]) for name in ("before", "after")]
    scores = {"before": {"knn": 0.25}, "after": {"knn": 0.875}}
    figure = draw_neighbors(found, scores, train, test)
    assert len(figure.axes) == 10 * (1 + 2 * NUM_NEIGHBORS)
    texts = [text.get_text() for text in figure.texts]
    assert "nearest by before\nkNN accuracy 0.250" in texts
    assert "nearest by after\nkNN accuracy 0.875" in texts
