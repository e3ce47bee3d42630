"""BatchNorm layers for rows of any shape, and their options."""

from typing import Any

import torch
from torch import nn

KINDS = {  # by the shape of the batch
    (12, 5): nn.BatchNorm1d,
    (12, 5, 7): nn.BatchNorm1d,
    (12, 5, 4, 3): nn.BatchNorm2d,
    (12, 5, 2, 3, 2): nn.BatchNorm3d,
}
SETTINGS: list[dict[str, Any]] = [
    {"momentum": None},
    {"momentum": 0.3, "eps": 1e-2},
    {"momentum": 0.0},
    {"affine": False},
    {"track_running_stats": False},
]


def make_layer(kind: type[nn.Module], dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Return a layer of five channels, each with its own weight and bias."""
    layer = kind(5, **settings)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.linspace(-1.0, 2.0, 5))
    return layer.to(dtype)
