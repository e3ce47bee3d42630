"""The blocks of an encoder, and learning rates by block."""

from torch import nn

from raycl.models.text import HuggingFaceEncoder, TransformerLayer
from raycl.models.vision import BasicBlock, Bottleneck, EncoderBlock


def transformer_blocks(encoder: nn.Module) -> list[nn.Module]:
    """Return the blocks of a ViT or a transformer from the first to the last; none of another network."""
    if isinstance(encoder, HuggingFaceEncoder):
        number = encoder.model.config.num_hidden_layers
        lists = (each for each in encoder.modules() if isinstance(each, nn.ModuleList))
        return next((list(each) for each in lists if len(each) == number), [])
    return [each for each in encoder.modules() if isinstance(each, EncoderBlock | TransformerLayer)]


def residual_blocks(encoder: nn.Module) -> list[nn.Module]:
    """Return the blocks of a ResNet, a ViT or a transformer from the first to the last; none of another network."""
    of_resnet: list[nn.Module] = []
    of_resnet += (each for each in encoder.modules() if isinstance(each, BasicBlock | Bottleneck))
    return of_resnet or transformer_blocks(encoder)


def learning_rate_scales(encoder: nn.Module, decay: float) -> dict[nn.Parameter, float]:
    """Return the factor of the learning rate of each parameter, which decays towards the input (Bao et al., 2022).

    With n blocks, block i (from 0) has ``decay ** (n - i)``, and the embeddings of patches, tokens and
    positions have ``decay ** (n + 1)``. Other layers after the blocks have no factor; a network without blocks has none at all.
    """
    blocks = transformer_blocks(encoder)
    embeddings = {each.weight for each in encoder.modules() if isinstance(each, nn.Embedding)}
    layer_of = {each: index + 1 for index, block in enumerate(blocks) for each in block.parameters()}
    scales: dict[nn.Parameter, float] = {}
    for parameter in encoder.parameters() if blocks else ():
        # Embeddings are registered before the blocks, but some tables of positions after them (MPNet, DeBERTa), where the
        # final normalization is.
        if layer_of.keys() <= scales.keys() and parameter not in embeddings:
            continue
        scales[parameter] = decay ** (len(blocks) + 1 - layer_of.get(parameter, 0))
    return scales
