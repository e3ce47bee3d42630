"""Gradient caching: the exact gradient of a batch larger than memory."""

from raycl.gradient_cache.cache import embed_in_chunks

__all__ = ["embed_in_chunks"]
