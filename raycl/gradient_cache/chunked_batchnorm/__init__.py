"""BatchNorm over the whole batch when the batch passes through the network in chunks."""

from raycl.gradient_cache.chunked_batchnorm.passes import ChunkedBatchNorm

__all__ = ["ChunkedBatchNorm"]
