"""Projection heads, which only the loss uses."""

from torch import nn

from raycl.errors import ConfigError


def build_projection_head(
    in_dim: int, *, num_layers: int, hidden_dim: int | None, dim: int, batchnorm: bool = True
) -> nn.Sequential:
    """Build SimCLR's head (Chen et al., 2020, section 4.2): [batch, in_dim] to [batch, dim].

    Hidden layers are as wide as the representation unless ``hidden_dim`` is given. Each is followed by
    BatchNorm (unless ``batchnorm`` is False, as in MoCo v2) and ReLU. One layer makes the head linear;
    zero layers make it the identity, a ``ConfigError`` unless ``in_dim`` equals ``dim``.
    """
    if num_layers == 0:
        if in_dim != dim:
            raise ConfigError(
                f"a head without layers keeps the representation's {in_dim} columns, but projection_head.dim is "
                f"{dim}; set it to {in_dim}, or projection_head.num_layers to 1"
            )
        return nn.Sequential()
    layers: list[nn.Module] = []
    width = hidden_dim or in_dim
    for _ in range(num_layers - 1):
        normalization = [nn.BatchNorm1d(width)] if batchnorm else []
        layers += [nn.Linear(in_dim, width, bias=not batchnorm), *normalization, nn.ReLU(inplace=True)]
        in_dim = width
    return nn.Sequential(*layers, nn.Linear(in_dim, dim))
