"""BatchNorm over all workers, cures for its leakage, and a probe that measures the leakage."""

from raycl.batchnorm.leakage_probe import Leakage, leakage
from raycl.batchnorm.replace import replace_batchnorm
from raycl.batchnorm.shuffled import encode_shuffled
from raycl.batchnorm.split import SplitBatchNorm, split_batchnorm
from raycl.batchnorm.synchronized import SynchronizedBatchNorm, synchronize

__all__ = [
    "Leakage",
    "SplitBatchNorm",
    "SynchronizedBatchNorm",
    "encode_shuffled",
    "leakage",
    "replace_batchnorm",
    "split_batchnorm",
    "synchronize",
]
