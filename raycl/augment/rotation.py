"""Rotation of a whole batch about the center of each image."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotate square images [n, channels, size, size] counterclockwise by ``degrees`` [n].

    Bilinear; pixels from outside the image are 0, as in torchvision's ``RandomRotation``.
    """
    angle = torch.deg2rad(degrees.to(images.device))
    cosine, sine, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    # The source position of each pixel of the result; y points down.
    turn = torch.stack([cosine, -sine, zero, sine, cosine, zero], dim=1).view(-1, 2, 3)
    where = F.affine_grid(turn, list(images.shape), align_corners=False)
    return F.grid_sample(images, where, align_corners=False)
