"""Images a second of the data path, two views each: raycl's beside DataLoaders, and what decoding alone takes.

    python benchmarks/data_path.py --data cifar10/train.parquet [--size 32] [--batch-size 256] [--seconds 20]
        [--cores 2] [--repeats 3] [--sides held stream ...] [--json FILE]
    python benchmarks/data_path.py --size 224            # JPEG photographs of 500 x 400, made here

No encoder: views are discarded. Every side is a process of its own, with all these cores, and may
use them as it does in training; the sides take turns. ``held`` is raycl with rows that were decoded
before the first epoch, as ``data.cache=materialize`` does; ``stream`` reads and decodes them again, in Ray
Data tasks, beside which views are drawn on one thread. ``lightly`` is a ``DataLoader`` with
``SimCLRTransform``, ``own views`` one that decodes in its workers and draws raycl's batched views there too,
and ``decoding`` one that decodes and resizes to a square and does nothing else. Rates are images over the
clock's time: of the stream over whole epochs after the first one, of all others after the first batches. Its
epochs are six times the rows of the file, of which it shuffles 4,096 at once.
"""

import argparse
import io
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from measuring import add_times, alternate, apart, make_parser, report, table
from training_steps import open_samples, write_images

WARMUP_BATCHES = 4
NUM_PHOTOS = 2_000
REPEATED = 6  # so that an epoch takes seconds and exceeds the shuffle buffer
SHUFFLED = 4_096


def images_per_second(side: str, flags: dict[str, Any]) -> float:
    """Take the rate from the sizes of batches, with 0 at the end of an epoch; in a process of its own."""
    options = argparse.Namespace(**flags)
    batches = SIDES[side](options)
    # Count whole epochs of a stream, after the first one: reading ahead in one shortens the next.
    in_epochs = side == "stream"
    for place, number in enumerate(batches, 1):
        if number == 0 if in_epochs else place == WARMUP_BATCHES:
            break
    began, num_images = time.perf_counter(), 0
    for number in batches:
        num_images += number
        is_end = number == 0 or not in_epochs
        if is_end and time.perf_counter() - began > options.seconds:
            break
    return num_images / (time.perf_counter() - began)


def raycl_batches(options: argparse.Namespace, *, stream: bool) -> Iterator[int]:
    """Draw the views of a run's batches, epoch after epoch, as its only worker does."""
    import torch

    import raycl
    from raycl.data.in_memory import InMemoryDataset
    from raycl.data.prefetch import Prefetched
    from raycl.data.sampler import BatchShard, InMemorySampler
    from raycl.ray_runtime import fetch_tables
    from raycl.training.process import prepare_process
    from raycl.training.transforms import build_formats, build_transform
    from raycl.training.views import ViewMaker

    # Beside tasks that read, a worker has a core of its own.
    prepare_process(1 if stream else options.cores)
    settings = {"data.cache": "stream" if stream else "materialize", "evaluation.every_epochs": 0}
    settings |= {"data.shuffle_buffer_size": SHUFFLED} if stream else {}
    config = raycl.override(raycl.recipe("simclr", image_size=options.size), settings)
    with open_samples(config, options.data) as samples:
        if stream:
            epochs: Any = samples.stream()
        else:
            [rows] = samples.rows_to_keep()
            formats = build_formats(config, None, samples.columns)
            epochs = InMemorySampler(rows=InMemoryDataset(fetch_tables(rows), formats), seed=0)
        views = ViewMaker.of(config, build_transform(config), torch.device("cpu"))
        share = BatchShard(batch_size=options.batch_size)
        for epoch in range(1_000):
            batches = epochs.epoch_batches(share, epoch=epoch, continues=epoch > 0, has_next=True)
            for drawn in views.views(Prefetched(batches)):
                yield len(drawn)
            yield 0


def loader_batches(options: argparse.Namespace, make: Any, collate: Any = None) -> Iterator[int]:
    """Let a DataLoader with a worker a core make batches of the file's images, epoch after epoch."""
    import torch
    from torch.utils.data import DataLoader

    images: Any = Encoded(options.data, make)
    loader = DataLoader(
        images,
        options.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=options.cores,
        persistent_workers=True,
        collate_fn=collate,
        worker_init_fn=lambda _: torch.set_num_threads(1),
    )
    while True:
        for batch in loader:
            yield len(batch[0])


def lightly_batches(options: argparse.Namespace) -> Iterator[int]:
    from lightly.transforms import SimCLRTransform

    transform = SimCLRTransform(input_size=options.size, gaussian_blur=0.0 if options.size <= 32 else 0.5)

    def views(content: bytes, _: int) -> Any:
        from PIL import Image

        with Image.open(io.BytesIO(content)) as image:
            return transform(image.convert("RGB"))

    return loader_batches(options, views)


def own_batches(options: argparse.Namespace) -> Iterator[int]:
    """Decode in the workers of a DataLoader, and draw raycl's views of a whole batch there."""
    import numpy as np

    import raycl
    from raycl.training.transforms import ImageTransform, image_format

    config = raycl.recipe("simclr", image_size=options.size)
    augmentation, decode = ImageTransform.of(config).augmentations[0], image_format(config).decode

    def drawn(rows: list[tuple[Any, float, int]]) -> Any:
        images, aspect, ids = (np.array(part) for part in zip(*rows, strict=True))
        return [augmentation(images, ids, seed=0, epoch=0, view=view, aspect=aspect) for view in (0, 1)]

    return loader_batches(options, lambda content, index: (*decode(content), index), drawn)


def decoding_batches(options: argparse.Namespace) -> Iterator[int]:
    import numpy as np

    import raycl
    from raycl.training.transforms import image_format

    decode = image_format(raycl.recipe("simclr", image_size=options.size)).decode
    return loader_batches(options, lambda content, _: decode(content)[0], lambda rows: [np.stack(rows)])


class Encoded:
    """The images of a Parquet file, each made into something when it is asked for."""

    def __init__(self, data: str, make: Any) -> None:
        self._images = pq.read_table(data, columns=["image"])["image"]
        self._make = make

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Any:
        return self._make(self._images[index].as_py(), index)


SIDES = {
    "held": partial(raycl_batches, stream=False),
    "stream": partial(raycl_batches, stream=True),
    "lightly": lightly_batches,
    "own views": own_batches,
    "decoding": decoding_batches,
}


def write_photos(path: Path) -> Path:
    """Write JPEGs of 500 x 400, parts of two photographs."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_images

    rng, photos = np.random.default_rng(0), []
    pictures = load_sample_images().images
    for number in range(NUM_PHOTOS):
        picture = pictures[number % 2]
        height = int(rng.integers(200, picture.shape[0]))
        width = height * 5 // 4
        top, left = int(rng.integers(picture.shape[0] - height)), int(rng.integers(picture.shape[1] - width))
        part = Image.fromarray(picture[top : top + height, left : left + width])
        photos.append(np.asarray(part.resize((500, 400))))
    return write_images(path, photos, NUM_PHOTOS, quality=90, rows_a_group=200)


def repeat_rows(given: Path, path: Path) -> Path:
    """Write the images of a file several times."""
    images = pq.read_table(given, columns=["image"])
    pq.write_table(pa.concat_tables([images] * REPEATED), path, row_group_size=500)
    return path


def main() -> None:
    flags: dict[str, Any] = {"size": 32, "batch_size": 256, "seconds": 20.0, "cores": 2, "repeats": 3}
    options = make_parser(__doc__, data=None, sides=list(SIDES), **flags).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = options.data or write_photos(Path(folder) / "photos.parquet")
        options.data = str(repeat_rows(Path(given), Path(folder) / "repeated.parquet"))

        def run(side: str) -> dict[str, float]:
            return {"images_per_second": apart(images_per_second, side, vars(options))}

        lines = alternate({side: partial(run, side) for side in options.sides}, options.repeats)
    add_times(lines, lines[0], "images_per_second")
    print(f"{options.size} pixels, batch {options.batch_size}, {options.cores} cores")
    titles = {"images_per_second": "images/s", "images_per_second_times": f"of {options.sides[0]}"}
    report(options, lines, table(lines, side="", **titles))


if __name__ == "__main__":
    main()
