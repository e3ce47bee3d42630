"""The encoder of a run: the one it saved, or before its end that of its last checkpoint."""

import sys
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from raycl.models.encoder_io import ImageEncoder, SavedEncoder, SideName, TextEncoder, read_encoder
from raycl.models.registry import SPEC, check_side
from raycl.models.specs import EncoderSpec, ImageEncoderSpec, TextEncoderSpec
from raycl.storage import Place, absolute
from raycl.tokenization import Vocabulary
from raycl.training.resume import CHECKPOINTS, CONFIG, LISTED


def load_encoder(
    uri: str,
    *,
    side: SideName = "query",
    network: nn.Module | None = None,
    trusted: Collection[str] | None = None,
) -> ImageEncoder | TextEncoder:
    """Load the encoder of the run at ``uri``, in evaluation mode.

    A run that has not finished has that of its last checkpoint; stderr says which. With two towers ``side``
    says which: that of queries (or images), or that of keys (documents or captions), which may be the same;
    their projection heads are a part of them. ``network`` is needed only for an encoder that was passed to
    ``raycl.train`` as a module and so cannot be built from its name. A name such as ``package.module:function``
    is code to import and call, with arguments from the same file: it must be of one of the ``trusted``
    packages, without them those in RAYCL_TRUSTED.

    Raises:
        StorageError: There is neither an encoder nor a checkpoint, one is damaged, or its tokenizer is another one.
        ConfigError: There is no such side, or a package is not trusted.
    """
    (saved,) = read_encoders(uri, [side], network=network, trusted=trusted)
    return saved.build(network, trusted=trusted)


def read_encoders(
    uri: str,
    sides: Sequence[SideName],
    *,
    network: nn.Module | None = None,
    trusted: Collection[str] | None = None,
) -> list[SavedEncoder]:
    """Read the encoders of these sides, all of one checkpoint; arguments are those of ``load_encoder``."""
    for side in sides:
        check_side(side)
    output = Place(absolute(str(uri)))
    if (output / SPEC).exists() or not (output / CHECKPOINTS / LISTED).exists():
        return [read_encoder(uri, side=side) for side in sides]
    # They import Ray Train, which a saved encoder does without.
    from raycl.inference.checkpoint_encoder import check_config_trusted, last_state, read_config
    from raycl.training import build
    from raycl.training.checkpoint import encoder_specs
    from raycl.training.resume import load_tokenizer

    config = read_config(output)
    check_config_trusted(config, output, trusted, own_encoder=network is not None)
    checkpoint, state = last_state(output)
    step = checkpoint.removeprefix("step-").partition("-")[0].lstrip("0") or "0"
    print(f"{uri} has not finished: using its checkpoint after step {step}", file=sys.stderr)
    vocabulary = Vocabulary(load_tokenizer(output.uri)) if config.has_texts else None
    modality = build.modality(config, vocabulary)
    with torch.random.fork_rng():  # a network that is built is seeded
        encoders = [side.encoder() if network is None else network for side in modality.sides]
    specs = encoder_specs(config, modality, encoders, own=network is not None)
    towers = ("query.", "key.") if config.has_two_towers else ("",)
    by_side = {"query": (specs[0], towers[0]), "key": (specs[-1], towers[len(specs) - 1])}
    return [_saved(output, *by_side[side], state.get("tower", {}), vocabulary) for side in sides]


def _saved(
    output: Place, spec: EncoderSpec, tower: str, weights: dict[str, Tensor], vocabulary: Vocabulary | None
) -> SavedEncoder:
    """Return the encoder whose weights have names that begin with ``tower``."""
    assert isinstance(spec, ImageEncoderSpec | TextEncoderSpec), "there are no others"
    return SavedEncoder(
        uri=output.uri,
        named_in=str(output / CONFIG),
        spec=spec,
        weights=_below(f"{tower}encoder.", weights),
        head_weights=_below(f"{tower}projection_head.", weights),
        tokenizer=vocabulary.tokenizer if vocabulary and isinstance(spec, TextEncoderSpec) else None,
    )


def _below(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
