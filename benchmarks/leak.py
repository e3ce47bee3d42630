"""Measure the leakage of BatchNorm in finished MoCo runs: the pretext task with shared and other statistics.

    python benchmarks/leak.py --data cifar10/test.parquet runs/local runs/shuffled ...

For each run the last checkpoint's tower and momentum encoder see the same images, normalized in
groups of the same size: once a key in the company of its query, once in another. ``shared`` and
``apart`` are the shares of queries whose own key is the nearest among all keys of other groups.
"""

from typing import Any

import numpy as np
import torch
from claims.runs import probe_run
from measuring import describe_machine, make_parser, write_json

from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml
from raycl.data.sources import find_source
from raycl.records import CONFIG, read_metrics
from raycl.storage import Place
from raycl.training.preflight import column_names
from raycl.training.transforms import image_format


def read_images(config: RunConfig, data: str, num_images: int) -> tuple[torch.Tensor, np.ndarray]:
    """Decode the first images of a set; return pixels and ids."""
    source = find_source(data, column_names(config))
    decode, pixels, ids = image_format(config).decode, [], []
    for rows in source.read(source.fragments[0]):
        pixels += [decode(image)[0] for image in rows.values["image"]]
        ids += rows.sample_id.tolist()
    return torch.from_numpy(np.stack(pixels[:num_images])), np.array(ids[:num_images])


def measure(run: str, data: str, num_images: int, group_size: int, num_groupings: int) -> dict[str, Any]:
    place = Place(run)
    config = config_from_yaml((place / CONFIG).read_text())
    images, ids = read_images(config, data, num_images)
    found = probe_run(place, images, ids, group_size=group_size, num_groupings=num_groupings)
    judged = [line["knn_top1"] for line in read_metrics(place) if "knn_top1" in line]
    return {
        "run": place.name,
        "batchnorm": config.batchnorm,
        "workers": config.workers,
        "shared": found.shared,
        "apart": found.apart,
        "advantage": found.advantage,
        "periodic_knn": judged[-1] if judged else None,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("runs", nargs="+", help="outputs of MoCo runs")
    parser.add_argument("--data", required=True, help="images that the probe looks at")
    parser.add_argument("--num-images", type=int, default=1_024)
    parser.add_argument("--group-size", type=int, default=32, help="rows normalized together")
    parser.add_argument("--num-groupings", type=int, default=16)
    arguments = parser.parse_args()
    print(f"{'run':24} {'batchnorm':12} workers  shared   apart  advantage  periodic kNN")
    results = []
    for run in arguments.runs:
        row = measure(
            run, arguments.data, arguments.num_images, arguments.group_size, arguments.num_groupings
        )
        results.append(row)
        print(
            f"{row['run']:24} {row['batchnorm']:12} {row['workers']:7}  {row['shared']:6.3f}  {row['apart']:6.3f}  "
            f"{row['advantage']:9.3f}  {row['periodic_knn']}"
        )
    write_json(arguments.json, {"machine": describe_machine(), "runs": results})


if __name__ == "__main__":
    main()
