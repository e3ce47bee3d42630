"""The leakage of BatchNorm in finished MoCo runs: the pretext task with shared and other statistics.

    python benchmarks/leak.py --data cifar10/test.parquet runs/local runs/shuffled ... [--num-images 1024]
        [--group-size 32] [--num-groupings 16] [--json FILE]

For each run the last checkpoint's tower and momentum encoder see the same images, normalized in
groups of the same size: once a key in the company of its query, once in another. ``shared`` and
``apart`` are the shares of queries whose own key is the nearest among all keys of other groups.
"""

import argparse

import numpy as np
import torch
from claims.runs import probe_run
from measuring import Line, make_parser, report, table

from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml
from raycl.data.discovery import find_source
from raycl.records import CONFIG, read_metrics
from raycl.storage import Place
from raycl.training.preflight import column_names
from raycl.training.transforms import image_format


def read_images(config: RunConfig, data: str, number: int) -> tuple[torch.Tensor, np.ndarray]:
    """Decode the first images of a set; return pixels and ids."""
    source = find_source(data, column_names(config))
    decode, pixels, ids = image_format(config).decode, [], []
    for rows in source.read(source.fragments[0]):
        pixels += [decode(image)[0] for image in rows.values["image"]]
        ids += rows.sample_id.tolist()
    return torch.from_numpy(np.stack(pixels[:number])), np.array(ids[:number])


def probe(run: str, options: argparse.Namespace) -> Line:
    place = Place(run)
    config = config_from_yaml((place / CONFIG).read_text())
    images, ids = read_images(config, options.data, options.num_images)
    groups = {"group_size": options.group_size, "num_groupings": options.num_groupings}
    found = probe_run(place, images, ids, **groups)
    knn = [line["knn_top1"] for line in read_metrics(place) if "knn_top1" in line]
    line = {"side": place.name, "batchnorm": config.batchnorm, "workers": config.workers}
    line |= {"shared": found.shared, "apart": found.apart, "advantage": found.advantage}
    return line | {"periodic_knn": knn[-1] if knn else None}


def main() -> None:
    parser = make_parser(__doc__, data=str, num_images=1_024, group_size=32, num_groupings=16)
    parser.add_argument("runs", nargs="+", help="outputs of MoCo runs")
    options = parser.parse_args()
    lines = [probe(run, options) for run in options.runs]
    keys = ("batchnorm", "workers", "shared", "apart", "advantage")
    report(
        options, lines, table(lines, side="run", **{key: key for key in keys}, periodic_knn="periodic kNN")
    )


if __name__ == "__main__":
    main()
