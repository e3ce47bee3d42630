"""Contrastive losses: tensors in, a scalar out; they know no ranks and hold no B x B."""

from raycl.losses.nt_xent import nt_xent

__all__ = ["nt_xent"]
