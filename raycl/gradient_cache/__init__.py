"""Gradient caching: the exact gradient of a batch larger than memory. Activation checkpointing."""

from raycl.gradient_cache.cache import embed_in_chunks
from raycl.gradient_cache.checkpointing import checkpoint_activations

__all__ = ["checkpoint_activations", "embed_in_chunks"]
