"""BatchNorm over all workers, its cures where it leaks, and a probe that shows whether it does."""

from raycl.batchnorm.leakage_probe import Leakage, leakage
from raycl.batchnorm.replace import swap
from raycl.batchnorm.shuffled import encode_shuffled
from raycl.batchnorm.split import SplitBatchNorm, split_batchnorm
from raycl.batchnorm.synchronized import SynchronizedBatchNorm, synchronize

__all__ = [
    "Leakage",
    "SplitBatchNorm",
    "SynchronizedBatchNorm",
    "encode_shuffled",
    "leakage",
    "split_batchnorm",
    "swap",
    "synchronize",
]
