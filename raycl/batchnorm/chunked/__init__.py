"""BatchNorm over the whole batch when the batch passes through the network in chunks."""

from raycl.batchnorm.chunked.chunked import ChunkedBatchNorm

__all__ = ["ChunkedBatchNorm"]
