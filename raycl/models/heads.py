"""Projection heads: used by the loss, thrown away afterwards."""

from torch import nn

from raycl.errors import ConfigError


def build_projection_head(
    in_dim: int, *, num_layers: int, hidden_dim: int | None, dim: int, batchnorm: bool = True
) -> nn.Sequential:
    """Build SimCLR's head (Chen et al., 2020, section 4.2): representations to rows of ``dim``.

    Hidden layers are as wide as the representation unless ``hidden_dim`` says otherwise, each
    followed by BatchNorm (unless told otherwise, as in MoCo v2) and ReLU; one layer makes the head
    linear, and none leaves the representation as it is. Raises ``ConfigError`` if that is no row of ``dim``.
    """
    if num_layers == 0:
        if in_dim != dim:
            raise ConfigError(
                f"a head without layers leaves the representation of {in_dim} as it is, projection_head.dim is "
                f"{dim}: set it to {in_dim}, or projection_head.num_layers to 1"
            )
        return nn.Sequential()
    layers: list[nn.Module] = []
    width = hidden_dim or in_dim
    for _ in range(num_layers - 1):
        normalization = [nn.BatchNorm1d(width)] if batchnorm else []
        layers += [nn.Linear(in_dim, width, bias=not batchnorm), *normalization, nn.ReLU(inplace=True)]
        in_dim = width
    return nn.Sequential(*layers, nn.Linear(in_dim, dim))
