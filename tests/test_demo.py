"""The picture of the demo: a query of each digit, and the accuracy above each block of neighbors."""

import pyarrow as pa
import torch

from raycl.data.codecs import store_all
from raycl.data.images import ImageFormat
from raycl.data.in_memory import InMemoryDataset
from raycl.demo.run import NUM_NEIGHBORS, Representation, draw_neighbors
from tests.images import digit_files

NUM_TRAIN = 80


def digits(first: int, last: int) -> InMemoryDataset:
    images, labels = (each[first:last] for each in digit_files(last))
    formats = {"image": ImageFormat(size=16, channels=1)}
    decoded = {role: each.decode_all(images) for role, each in formats.items()}
    numbers = {"sample_id": pa.array(range(first, last)), "label": pa.array(labels)}
    return InMemoryDataset([pa.table(store_all(formats, decoded) | numbers)], formats)


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
