"""Microseconds of CPU time a view: raycl beside lightly and torchvision, on one thread.

    python benchmarks/augment.py [--quick] [--json FILE]

Images are parts of two photographs, decoded before the clock starts. The sides take turns; ``times`` is over
raycl. raycl draws the views of a whole batch; the others draw theirs one by one, and see fewer images in a turn.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measuring import add_times, alternate, make_parser, report, table, timed
from PIL import Image
from sklearn.datasets import load_sample_images

from raycl.augment import ImageAugmentation

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = ((32, 32, 256), (96, 120, 64), (224, 280, 32))  # size, stored size, batch size
NUM_ONE_BY_ONE = 24


def photos(number: int, size: int) -> np.ndarray:
    """Cut squares out of two photographs; uint8 [number, size, size, 3]."""
    rng, squares = np.random.default_rng(0), []
    pictures = load_sample_images().images
    for index in range(number):
        picture = pictures[index % len(pictures)]
        side = int(rng.integers(size, 400))
        top, left = (int(rng.integers(0, length - side)) for length in picture.shape[:2])
        part = Image.fromarray(picture[top : top + side, left : left + side])
        squares.append(np.asarray(part.resize((size, size))))
    return np.stack(squares)


def torchvision_view(size: int) -> Callable[[Any], Any]:
    """Return SimCLR's view in torchvision v2, of a PIL image or a uint8 tensor."""
    from torchvision.transforms import v2

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


def per_view(draw: Callable[[Any], Any], images: Any) -> Callable[[], dict[str, float]]:
    """Return a side that takes the microseconds of one view."""
    call = timed(lambda: draw(images))
    return lambda: {"us_per_view": 1e3 * call()["cpu_ms"] / len(images)}


def sides(size: int, stored: int, batch_size: int) -> dict[str, Callable[[], dict[str, float]]]:
    from lightly.transforms.simclr_transform import SimCLRTransform

    images = photos(batch_size, stored)
    ids = np.arange(batch_size)
    pictures = [Image.fromarray(image) for image in images[:NUM_ONE_BY_ONE]]
    tensors = [torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in images[:NUM_ONE_BY_ONE]]

    def one_by_one(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda some: [transform(image) for image in some]

    def batched(**settings: Any) -> Callable[[Any], Any]:
        augmentation = ImageAugmentation(size=size, mean=MEAN, std=STD, **settings)
        return lambda some: augmentation(some, ids, seed=0, epoch=0, view=0)

    simclr = one_by_one(SimCLRTransform(input_size=size).transforms[0])
    torchvision = one_by_one(torchvision_view(size))
    return {
        "raycl": per_view(batched(), images),
        "raycl, no blur": per_view(batched(blur=0.0), images),
        "lightly SimCLRTransform": per_view(simclr, pictures),
        "torchvision v2, PIL": per_view(torchvision, pictures),
        "torchvision v2, tensor": per_view(torchvision, tensors),
    }


def main() -> None:
    options = make_parser(__doc__, quick=False).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = []
    for size, stored, batch_size in SIZES:
        found = alternate(sides(size, stored, batch_size), 3 if options.quick else 15, warmup=1)
        add_times(found, found[0], "us_per_view")
        lines += [{"size": size, "stored": stored} | line for line in found]
    titles = {"size": "pixels", "stored": "of", "side": "", "us_per_view": "µs a view"}
    report(options, lines, table(lines, **titles, us_per_view_times="times"))


if __name__ == "__main__":
    main()
