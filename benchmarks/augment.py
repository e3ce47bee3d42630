"""Measure microseconds a view against lightly and torchvision, on one thread.

    python benchmarks/augment.py [--json FILE] [--quick]

Every measure is processor time, not wall time, so that a busy machine disturbs it less; the
contenders take turns, and the table shows medians. Images are decoded before the clock starts.
"""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightly.transforms.simclr_transform import SimCLRTransform
from measuring import make_parser, take_turns, write_json
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2

from raycl.augment import ImageAugmentation

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = ((32, 32, 256), (96, 120, 64), (224, 280, 32))  # size, stored size, batch size
ROUNDS, QUICK_ROUNDS = 15, 3
NUM_PER_SAMPLE = 24  # images that the contenders who go one by one see in a round


def photos(num: int, size: int) -> np.ndarray:
    """Cut ``num`` squares out of two photographs; uint8 [num, size, size, 3]."""
    rng = np.random.default_rng(0)
    pictures = load_sample_images().images
    squares = []
    for index in range(num):
        picture = pictures[index % len(pictures)]
        side = int(rng.integers(size, 400))
        top, left = (int(rng.integers(0, length - side)) for length in picture.shape[:2])
        part = Image.fromarray(picture[top : top + side, left : left + side])
        squares.append(np.asarray(part.resize((size, size))))
    return np.stack(squares)


def torchvision_pipeline(size: int) -> Callable[[Any], Any]:
    """Build SimCLR's view from torchvision v2; takes a PIL image or a uint8 tensor."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(0.08, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(max(3, 2 * (size // 20) + 1), (0.1, 2.0))], 0.5),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def contenders(size: int, stored: int, batch_size: int) -> dict[str, Callable[[], int]]:
    """Return, by name, functions that make views and say how many."""
    images = photos(batch_size, stored)
    ids = np.arange(batch_size)
    few = images[:NUM_PER_SAMPLE]
    pictures = [Image.fromarray(image) for image in few]
    tensors = [torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in few]

    def batched(augmentation: ImageAugmentation) -> Callable[[], int]:
        return lambda: len(augmentation(images, ids, seed=0, epoch=0, view=0))

    def one_by_one(transform: Callable[[Any], Any], inputs: list[Any]) -> Callable[[], int]:
        return lambda: len([transform(image) for image in inputs])

    simclr = SimCLRTransform(input_size=size).transforms[0]
    return {
        "raycl": batched(ImageAugmentation(size=size, mean=MEAN, std=STD)),
        "raycl, no blur": batched(ImageAugmentation(size=size, blur=0.0, mean=MEAN, std=STD)),
        "lightly SimCLRTransform": one_by_one(simclr, pictures),
        "torchvision v2, PIL": one_by_one(torchvision_pipeline(size), pictures),
        "torchvision v2, tensor": one_by_one(torchvision_pipeline(size), tensors),
    }


def measure(functions: dict[str, Callable[[], int]], *, rounds: int) -> dict[str, float]:
    """Return the median microseconds of processor time a view, by name."""
    return {
        name: statistics.median(1e6 * turn.cpu_s / turn.value for turn in turns)
        for name, turns in take_turns(functions, rounds).items()
    }


def main() -> None:
    """Measure every size, print the table, and write it as JSON where asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    rows = []
    for size, stored, batch_size in SIZES:
        functions = contenders(size, stored, batch_size)
        medians = measure(functions, rounds=QUICK_ROUNDS if arguments.quick else ROUNDS)
        print(f"\n{stored} -> {size} pixels, batch of {batch_size}")
        print(f"{'':26}{'us a view':>10}{'times raycl':>13}")
        for name, median in medians.items():
            ratio = median / medians["raycl"]
            print(f"{name:26}{median:10.1f}{ratio:13.1f}", flush=True)
            rows.append(
                {
                    "size": size,
                    "stored": stored,
                    "name": name,
                    "us_per_view": median,
                    "times": ratio,
                }
            )
    write_json(arguments.json, {"torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
