"""Contrastive losses: they map tensors to a scalar, without communication and without a [batch, batch] matrix."""

from raycl.losses.clip import clip
from raycl.losses.dcl import dcl
from raycl.losses.distillation import distillation
from raycl.losses.gcl import gcl
from raycl.losses.hinge import hinge
from raycl.losses.info_nce import info_nce
from raycl.losses.nce import NormalizingConstant, nce, noise_mass
from raycl.losses.nnclr import nnclr
from raycl.losses.nt_xent import nt_xent
from raycl.losses.objective import proximal_term
from raycl.losses.poly_view import poly_view
from raycl.losses.siglip import siglip
from raycl.losses.supcon import supcon

__all__ = [
    "NormalizingConstant",
    "clip",
    "dcl",
    "distillation",
    "gcl",
    "hinge",
    "info_nce",
    "nce",
    "nnclr",
    "noise_mass",
    "nt_xent",
    "poly_view",
    "proximal_term",
    "siglip",
    "supcon",
]
