"""Contrastive gradient accumulation: the exact gradient of a batch larger than memory."""

from raycl.accumulation.accumulate import accumulate

__all__ = ["accumulate"]
