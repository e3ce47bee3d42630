"""The encoder of a run: the one it saved at its end, or the one in its last checkpoint."""

import os
import sys
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from raycl.inference.checkpoint_encoder import check_config_trusted, last_state, read_config
from raycl.inference.preflight import has_checkpoint, has_encoder
from raycl.models.build import build_encoder, complete_spec, encoder_specs, load_tokenizer
from raycl.models.encoder_io import ImageEncoder, SavedEncoder, TextEncoder, read_encoder
from raycl.models.registry import SideName, check_side
from raycl.models.specs import EncoderSpec, ImageEncoderSpec, TextEncoderSpec
from raycl.storage import Place, absolute
from raycl.tokenization import Vocabulary


def load_encoder(
    uri: str | os.PathLike[str],
    *,
    side: SideName = "query",
    network: nn.Module | None = None,
    trusted: Collection[str] | None = None,
) -> ImageEncoder | TextEncoder:
    """Load the encoder of the run at ``uri``, in evaluation mode.

    An unfinished run gives the encoder of its last checkpoint; stderr reports which. ``side`` selects one
    of two towers: ``query`` (or images), or ``key`` (documents or captions), which may share one encoder.
    Their projection heads are included. ``network`` is needed for an encoder that was passed to
    ``raycl.train`` as a module, which cannot be built from a name. A name such as
    ``package.module:function`` is code to import and call with arguments from the same file: its package
    must be in ``trusted``, which defaults to RAYCL_TRUSTED.

    Raises:
        StorageError: Encoder and checkpoint are missing, one is damaged, or the tokenizer does not match.
        ConfigError: The side is unknown, or the package is not trusted.
    """
    (saved,) = read_encoders(uri, [side], network=network, trusted=trusted)
    return saved.build(network, trusted=trusted)


def read_encoders(
    uri: str | os.PathLike[str],
    sides: Sequence[SideName],
    *,
    network: nn.Module | None = None,
    trusted: Collection[str] | None = None,
) -> list[SavedEncoder]:
    """Read the encoders of these sides, all from one checkpoint; arguments as in ``load_encoder``."""
    for side in sides:
        check_side(side)
    if has_encoder(uri) or not has_checkpoint(uri):
        return [read_encoder(str(uri), side=side) for side in sides]
    output = Place(absolute(uri))
    config, named_in = read_config(output)
    check_config_trusted(config, named_in, trusted, own_encoder=network is not None)
    checkpoint, state = last_state(output)
    step = checkpoint.removeprefix("step-").partition("-")[0].lstrip("0") or "0"
    print(f"{uri} has not finished: using its checkpoint after step {step}", file=sys.stderr)
    vocabulary = Vocabulary(load_tokenizer(output.uri)) if config.has_texts else None
    specs = []
    for spec in encoder_specs(config, vocabulary.tokenizer if vocabulary else None):
        with torch.random.fork_rng():  # building a network seeds the generator
            encoder = build_encoder(config, spec, vocabulary) if network is None else network
        specs.append(complete_spec(spec, encoder, own=network is not None))
    prefixes = ("query.", "key.") if config.has_two_towers else ("",)
    by_side = {"query": (specs[0], prefixes[0]), "key": (specs[-1], prefixes[len(specs) - 1])}
    weights = state.get("tower", {})
    return [_saved_encoder(output, named_in, *by_side[side], weights, vocabulary) for side in sides]


def _saved_encoder(
    output: Place,
    named_in: str,
    spec: EncoderSpec,
    prefix: str,
    weights: dict[str, Tensor],
    vocabulary: Vocabulary | None,
) -> SavedEncoder:
    """Return the encoder whose weights have this prefix."""
    assert isinstance(spec, ImageEncoderSpec | TextEncoderSpec), "there are no others"
    return SavedEncoder(
        uri=output.uri,
        named_in=named_in,
        spec=spec,
        weights=_weights_below(f"{prefix}encoder.", weights),
        head_weights=_weights_below(f"{prefix}projection_head.", weights),
        tokenizer=vocabulary.tokenizer if vocabulary and isinstance(spec, TextEncoderSpec) else None,
    )


def _weights_below(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
