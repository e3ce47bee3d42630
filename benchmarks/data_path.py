"""Images a second of the data path, two views each: raycl's beside DataLoaders, and what decoding alone takes.

    python benchmarks/data_path.py --data cifar10/train.parquet [--size 32] [--seconds 20] [--cores 2] [--json FILE]
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
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from measuring import describe_machine, make_parser, run_apart, write_json

WARMUP_BATCHES = 4
NUM_PHOTOS = 2_000
REPEATED = 6  # so that an epoch takes seconds and exceeds the shuffle buffer
SHUFFLED = 4_096


def main() -> None:
    options = read_options()
    if options.side is not None:
        print(measure(SIDES[options.side](options), options))
        return
    with tempfile.TemporaryDirectory() as folder:
        given = options.data or write_photos(Path(folder) / "photos.parquet")
        options.data = str(repeat_rows(Path(given), Path(folder) / "repeated.parquet"))
        rates: dict[str, list[float]] = {side: [] for side in options.sides}
        for _ in range(options.repeats):
            for side, measured in rates.items():
                measured.append(run_side(side, options))
                print(f"{side:10} {measured[-1]:10,.0f} images/s", flush=True)
    medians = {side: statistics.median(measured) for side, measured in rates.items()}
    print(
        f"\n{options.size} pixels, batch {options.batch_size}, {options.cores} cores, medians of {options.repeats}"
    )
    for side, rate in medians.items():
        others = [f"{rate / other:.2f} x {name}" for name, other in medians.items() if name != side]
        print(f"{side:10} {rate:10,.0f} images/s  {', '.join(others)}")
    report = {
        "settings": vars(options),
        "rates": rates,
        "medians": medians,
        "machine": describe_machine(),
    }
    write_json(options.json, report)


def measure(batches: Iterator[int], options: argparse.Namespace) -> float:
    """Return images per second, from the sizes of batches, with 0 at the end of an epoch."""
    # Count whole epochs of a stream, after the first one: reading ahead in one shortens the next.
    in_epochs = options.side == "stream"
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


def run_side(side: str, options: argparse.Namespace) -> float:
    words = ["--side", side, "--data", options.data, "--size", options.size, "--cores", options.cores]
    words += ["--batch-size", options.batch_size, "--seconds", options.seconds]
    return run_apart(__file__, *words)


def raycl_batches(options: argparse.Namespace, *, stream: bool) -> Iterator[int]:
    """Draw the views of a run's batches, epoch after epoch, as its only worker does."""
    import ray
    import torch

    import raycl
    from raycl.data.in_memory import InMemoryDataset
    from raycl.data.prefetch import Prefetched
    from raycl.data.sampler import BatchShard, InMemorySampler
    from raycl.data.sources import find_source
    from raycl.ray_runtime import connect_cluster, fetch_tables
    from raycl.training.coordinator import start_coordinator
    from raycl.training.data_module import DataModule
    from raycl.training.preflight import column_names
    from raycl.training.process import prepare_process
    from raycl.training.transforms import build_formats, build_transform
    from raycl.training.views import ViewMaker

    # Beside tasks that read, a worker has a core of its own.
    prepare_process(1 if stream else options.cores)
    config = raycl.override(
        raycl.recipe("simclr", image_size=options.size),
        {
            "data.cache": "stream" if stream else "materialize",
            "evaluation.every_epochs": 0,
        }
        | ({"data.shuffle_buffer_size": SHUFFLED} if stream else {}),
    )
    connect_cluster(None)
    with start_coordinator() as coordinator:
        source = find_source(options.data, column_names(config))
        samples = DataModule(config, coordinator, source, None)
        if stream:
            epochs: Any = samples.stream()
        else:
            rows = samples.rows_to_keep()
            assert rows is not None, "without a stream, every row is kept"
            tables = fetch_tables(rows)
            formats = build_formats(config, None, samples.columns)
            epochs = InMemorySampler(rows=InMemoryDataset(tables, formats), seed=0)
        views = ViewMaker.of(config, build_transform(config), torch.device("cpu"))
        share = BatchShard(batch_size=options.batch_size)
        for epoch in range(1_000):
            batches = epochs.epoch_batches(share, epoch=epoch, continues=epoch > 0, has_next=True)
            for drawn in views.views(Prefetched(batches)):
                yield len(drawn)
            yield 0
    ray.shutdown()


def loader_batches(options: argparse.Namespace, dataset: Any, collate: Any = None) -> Iterator[int]:
    """Let a DataLoader with a worker a core give batches, epoch after epoch."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset,
        options.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=options.cores,
        persistent_workers=True,
        collate_fn=collate,
        worker_init_fn=one_thread,
    )
    while True:
        for batch in loader:
            yield len(batch[0])


def one_thread(_: int) -> None:
    import torch

    torch.set_num_threads(1)


def lightly_batches(options: argparse.Namespace) -> Iterator[int]:
    from lightly.transforms import SimCLRTransform

    blur = 0.0 if options.size <= 32 else 0.5
    transform = SimCLRTransform(input_size=options.size, gaussian_blur=blur)

    def views(content: bytes, _: int) -> Any:
        from PIL import Image

        with Image.open(io.BytesIO(content)) as image:
            return transform(image.convert("RGB"))

    return loader_batches(options, Encoded(options.data, views))


def own_batches(options: argparse.Namespace) -> Iterator[int]:
    """Decode in the workers of a DataLoader, and draw raycl's views of a whole batch there."""
    import numpy as np

    import raycl
    from raycl.augment import ImageAugmentation

    config = raycl.recipe("simclr", image_size=options.size)
    mean, std = config.normalization
    augment = config.augment
    augmentation = ImageAugmentation(
        size=options.size,
        crop_scale=augment.crop_scale,
        brightness=augment.brightness,
        contrast=augment.contrast,
        saturation=augment.saturation,
        hue=augment.hue,
        blur=augment.blur,
        mean=mean,
        std=std,
    )
    decode = decoder(config)

    def drawn(rows: list[tuple[Any, float, int]]) -> Any:
        images, aspect, ids = (np.array(part) for part in zip(*rows, strict=True))
        return [augmentation(images, ids, seed=0, epoch=0, view=view, aspect=aspect) for view in (0, 1)]

    dataset = Encoded(options.data, lambda content, index: (*decode(content), index))
    return loader_batches(options, dataset, drawn)


def decoding_batches(options: argparse.Namespace) -> Iterator[int]:
    import numpy as np

    import raycl

    decode = decoder(raycl.recipe("simclr", image_size=options.size))
    dataset = Encoded(options.data, lambda content, _: decode(content)[0])
    return loader_batches(options, dataset, lambda rows: [np.stack(rows)])


def decoder(config: Any) -> Any:
    """Return what turns an encoded image into the square that raycl keeps."""
    from raycl.training.transforms import image_format

    return image_format(config).decode


class Encoded:
    """The images of a Parquet file, each made into something when it is asked for."""

    def __init__(self, data: str, make: Any) -> None:
        self._images = pq.read_table(data, columns=["image"])["image"]
        self._make = make

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Any:
        return self._make(self._images[index].as_py(), index)


def write_photos(path: Path) -> Path:
    """Write JPEGs of 500 x 400, parts of two photographs."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_images

    rng, files = np.random.default_rng(0), []
    pictures = load_sample_images().images
    for number in range(NUM_PHOTOS):
        picture = pictures[number % 2]
        height = int(rng.integers(200, picture.shape[0]))
        width = height * 5 // 4
        top, left = int(rng.integers(picture.shape[0] - height)), int(rng.integers(picture.shape[1] - width))
        part = Image.fromarray(picture[top : top + height, left : left + width]).resize((500, 400))
        stream = io.BytesIO()
        part.save(stream, "JPEG", quality=90)
        files.append(stream.getvalue())
    pq.write_table(pa.table({"image": files}), path, row_group_size=200)
    return path


def repeat_rows(given: Path, path: Path) -> Path:
    """Write the images of a file several times."""
    images = pq.read_table(given, columns=["image"])
    pq.write_table(pa.concat_tables([images] * REPEATED), path, row_group_size=500)
    return path


def read_options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--data", help="Parquet file with an image column; by default photographs made here")
    parser.add_argument("--size", type=int, default=32, help="pixels of a view's side")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a side, after the first batches")
    parser.add_argument("--cores", type=int, default=2, help="that a side uses")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


SIDES = {
    "held": lambda options: raycl_batches(options, stream=False),
    "stream": lambda options: raycl_batches(options, stream=True),
    "lightly": lightly_batches,
    "own views": own_batches,
    "decoding": decoding_batches,
}

if __name__ == "__main__":
    main()
