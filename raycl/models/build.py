"""Encoders and towers from the configuration of a run, and the files of its encoder."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raycl.batchnorm import replace_batchnorm, split_batchnorm, synchronize
from raycl.config import RunConfig
from raycl.errors import ConfigError, StorageError
from raycl.models.custom import unused_parameters
from raycl.models.encoder_io import example_of, save_encoder
from raycl.models.image import representation_dim
from raycl.models.registry import KEY, OWN, TOKENIZER, VITS
from raycl.models.specs import EncoderSpec, HeadSpec, ImageEncoderSpec, TextEncoderSpec
from raycl.models.text import BagOfSubwords, text_representation_dim
from raycl.models.towers import Tower, Towers, TwoTowers, build_projection_head
from raycl.models.whitening import Whitening
from raycl.storage import Place
from raycl.tokenization import Tokenizer, Vocabulary

Network = TypeVar("Network", bound=nn.Module)


def encoder_specs(config: RunConfig, tokenizer: Tokenizer | None) -> list[EncoderSpec]:
    """Return the spec of each tower's encoder: one, or two for towers with different encoders.

    ``representation_dim`` is 0 until :func:`complete_spec` sets it. Texts need the tokenizer.
    """
    if config.data.kind == "image":
        return [_image_spec(config)]
    assert tokenizer is not None, "texts need a tokenizer"
    text = _text_spec(config, tokenizer)
    if config.data.kind == "image_text":
        return [_image_spec(config), text.for_side("key")]
    if config.separate_towers:
        # The query tower never sees texts as long as documents.
        return [text.model_copy(update={"cut_at": config.text.max_length}), text.for_side("key")]
    return [text]


def _image_spec(config: RunConfig) -> ImageEncoderSpec:
    mean, std = config.normalization
    return ImageEncoderSpec(
        stem=config.encoder.stem,
        width=config.encoder.width,
        image_size=config.data.image_size,
        channels=config.data.channels,
        stored_size=config.data.resolved_decode_size,
        max_pixels=config.data.max_pixels,
        mean=mean,
        std=std,
        **_common_fields(config, is_text=False),
    )


def _text_spec(config: RunConfig, tokenizer: Tokenizer) -> TextEncoderSpec:
    query_prompt, key_prompt = config.text.query_prompt, config.text.document_prompt
    if config.data.kind == "text":
        key_prompt = query_prompt
    elif config.data.kind == "image_text":
        query_prompt = key_prompt  # a text that asks for images is a caption
    return TextEncoderSpec(
        prompts={"query": query_prompt, "key": key_prompt} if query_prompt or key_prompt else {},
        num_tokens=tokenizer.num_tokens,
        max_length=config.text.longest,
        tokenizer=tokenizer.fingerprint,
        padding=tokenizer.padding,
        **_common_fields(config, is_text=True),
    )


def _common_fields(config: RunConfig, *, is_text: bool) -> dict[str, Any]:
    encoder = config.encoder_of_texts if is_text else config.encoder
    is_result = config.has_two_towers and config.projection_head.num_layers
    return {
        "name": encoder.name,
        "arguments": encoder.kwargs,
        "representation_dim": 0,
        "norm": config.batchnorm if config.batchnorm in ("layer", "group") else "batch",
        "projection_head": HeadSpec(**config.projection_head.model_dump()) if is_result else None,
    }


def build_encoder(config: RunConfig, spec: EncoderSpec, vocabulary: Vocabulary | None) -> nn.Module:
    """Build an untrained encoder; equal seeds give equal weights.

    A bag of subwords starts from the spellings and the token weights of the vocabulary.
    """
    torch.manual_seed(config.seed)
    encoder = spec.build("text_encoder" if config.data.kind == "image_text" else "encoder")
    if config.encoder.freeze_patches and spec.name in VITS:
        encoder.conv_proj.requires_grad_(False)  # pyright: ignore[reportCallIssue]
    if vocabulary is not None and vocabulary.weights is not None and isinstance(encoder, BagOfSubwords):
        if encoder.log_weights is not None:
            encoder.start_weights(torch.tensor(vocabulary.weights))
        if spec.name == "bag_of_subwords":  # another builder may have given vectors of its own
            encoder.start_vectors(vocabulary.tokenizer.spellings)
    return encoder


def complete_spec(spec: EncoderSpec, encoder: nn.Module, *, own: bool) -> EncoderSpec:
    """Return the spec to save with an encoder; ``own`` if the configuration cannot build it by name."""
    known = {"representation_dim": _representation_dim(spec, encoder)}
    return spec.model_copy(update=known | ({"name": OWN} if own else {}))


def _representation_dim(spec: EncoderSpec, encoder: nn.Module) -> int:
    """Return the width of an encoder's output; raises ``ConfigError`` if it rejects such samples."""
    if isinstance(spec, ImageEncoderSpec):
        return representation_dim(encoder, image_size=spec.image_size, channels=spec.channels)
    return text_representation_dim(encoder)


def build_towers(
    config: RunConfig, vocabulary: Vocabulary | None = None, network: nn.Module | None = None
) -> Towers:
    """Build encoders and projection heads in training mode, with BatchNorm replaced as configured.

    A prediction head takes projections before their normalization.
    ``network`` is the user's own encoder, which replaces the only one. Raises ``ConfigError`` if the run
    has two, or if ``local_view`` finds no BatchNorm.
    """
    specs = encoder_specs(config, None if vocabulary is None else vocabulary.tokenizer)
    if network is not None and len(specs) > 1:
        raise ConfigError(
            "got one encoder for a run with two; name each by package.module:function in the configuration"
        )
    made = []
    for number, spec in enumerate(specs):
        encoder = build_encoder(config, spec, vocabulary) if network is None else network
        torch.manual_seed(config.seed + 1 + number)
        dim = _representation_dim(spec, encoder)
        _check_state(encoder)
        if isinstance(spec, ImageEncoderSpec):
            _check_image_sizes(config, encoder, dim)
        head = build_projection_head(dim, **config.projection_head.model_dump())
        whitening = None
        if config.data.kind == "image" and config.encoder.whitening is not None:
            whitening = Whitening(dim, shrinkage=config.encoder.whitening)
        made.append(Tower(encoder, head, normalize=not config.has_prediction_head, whitening=whitening))
    towers: Towers = TwoTowers(made[0], made[-1]) if config.has_two_towers else made[0]
    if config.batchnorm == "local_view" and not any(
        isinstance(each, _BatchNorm) for each in towers.modules()
    ):
        raise ConfigError(
            "batchnorm local_view acts only in a network with BatchNorm, and neither the encoder nor the projection "
            "head of this run has any; set it to local"
        )
    # The user's network may be in eval mode, which the momentum encoder would copy.
    return _with_batchnorm(towers, config).train()


def _check_state(encoder: nn.Module) -> None:
    """Raise ``ConfigError`` if an encoder has a state that its file cannot hold."""
    for name, value in encoder.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"the encoder has the state {name}, which is {type(value).__name__}, and encoders are saved as tensors; "
                "return a tensor from its get_extra_state()"
            )


def find_unused_parameters(
    config: RunConfig, towers: Towers, vocabulary: Vocabulary | None = None
) -> set[nn.Parameter]:
    """Return the trainable parameters without a part in the output of their encoder, such as a classifier's."""
    specs = encoder_specs(config, None if vocabulary is None else vocabulary.tokenizer)
    found = (
        unused_parameters(tower.encoder, example_of(spec))
        for tower, spec in zip(towers.towers, specs, strict=True)
    )
    return set[nn.Parameter]().union(*found)


def build_prediction_head(config: RunConfig) -> Tower | None:
    """Build the prediction head, which returns queries [batch, dim] of unit length; None without one."""
    if not config.has_prediction_head:
        return None
    torch.manual_seed(config.seed + 3)  # 1 and 2 are the projection heads
    dim = config.projection_head.dim
    head = build_projection_head(dim, **config.prediction_head.model_dump(), dim=dim)
    return _with_batchnorm(Tower(nn.Identity(), head), config)


def _with_batchnorm(network: Network, config: RunConfig) -> Network:
    """Replace BatchNorm in a network as configured."""
    if config.batchnorm == "synchronized":
        synchronize(network)
    elif config.batchnorm == "shuffled":
        split_batchnorm(network, config.rows_per_group(config.stages[0]))
    elif config.batchnorm not in ("local", "local_view"):
        replace_batchnorm(network, config.batchnorm)
    return network


def _check_image_sizes(config: RunConfig, encoder: nn.Module, dim: int) -> None:
    """Raise ``ConfigError`` unless an encoder takes the images of all sizes and gives as many numbers."""
    full = config.data.image_size
    by_size = {views.size or full: "augment.views" for views in config.views}
    for index, stage in enumerate(config.stages):
        if stage.image_size is not None:
            by_size = dict.fromkeys(config.views_by_size(stage), f"stages.{index}.image_size") | by_size
    for size, setting in by_size.items():
        if size == full:
            continue
        found = representation_dim(encoder, image_size=size, channels=config.data.channels, setting=setting)
        if found != dim:
            raise ConfigError(
                f"the encoder gives {found} numbers for images of {size} pixels ({setting}), and {dim} for "
                f"{full} (data.image_size); pool its output, or remove {setting}"
            )


def save_towers(
    towers: Towers, config: RunConfig, tokenizer: Tokenizer | None, output: Place, *, own: bool = False
) -> None:
    """Write the encoder; for two towers, also the key encoder and the projection heads.

    ``own`` is an encoder of the user's, which no name builds.
    """
    specs = encoder_specs(config, tokenizer)
    saved = list(zip(towers.towers, specs, (output, output / KEY), strict=False))
    # The spec of the first tower is written last: it marks the encoder of the run as saved.
    for tower, spec, folder in reversed(saved):
        save_encoder(
            tower.encoder,
            complete_spec(spec, tower.encoder, own=own),
            folder,
            projection_head=None if spec.projection_head is None else tower.projection_head,
            whitening=tower.whitening,
            tokenizer=tokenizer if isinstance(spec, TextEncoderSpec) else None,
        )


def load_tokenizer(uri: str) -> Tokenizer:
    """Read a ``tokenizer.json``, or the tokenizer of a run; raises ``StorageError`` or ``ConfigError``."""
    place = Place(uri)
    if not place.name.endswith(".json"):
        place = place / TOKENIZER
    if not place.exists():
        raise StorageError(f"found no tokenizer at {place}; give a tokenizer.json, or the output of a run")
    return Tokenizer(place.read_text())
