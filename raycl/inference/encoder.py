"""The encoder of a run: the one it saved at its end, or the one in its last checkpoint."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from raycl.arguments import Address, as_address, check_type
from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml
from raycl.errors import ConfigError, StorageError
from raycl.inference.preflight import has_checkpoint, has_encoder
from raycl.models.build import build_encoder, complete_spec, encoder_specs, load_tokenizer
from raycl.models.encoder_io import (
    ImageEncoder,
    SavedEncoder,
    TextEncoder,
    load_state,
    read_encoder,
    whitened,
)
from raycl.models.registry import OWN, SideName, check_side, check_trusted, trained_own_network
from raycl.models.specs import EncoderSpec, HeadSpec, ImageEncoderSpec, TextEncoderSpec
from raycl.models.whitening import Whitening
from raycl.records import CHECKPOINTS, CONFIG, STATE, last_checkpoint
from raycl.storage import Place, absolute
from raycl.tokenization import Tokenizer, Vocabulary


def load_encoder(
    uri: Address,
    *,
    side: SideName = "query",
    network: nn.Module | None = None,
    trusted: Collection[str] | None = None,
) -> ImageEncoder | TextEncoder:
    """Load the encoder of the run at ``uri``, in evaluation mode.

    An unfinished run gives the encoder of its last checkpoint; stderr reports which. The folder of a checkpoint below
    ``checkpoints`` gives the encoder that it has. ``side`` selects one
    of two towers: ``query`` (or images), or ``key`` (documents or captions), which may share one encoder.
    Their projection heads are included. ``network`` is needed for an encoder that was passed to
    ``raycl.train`` as a module, which cannot be built from a name; the weights are loaded into a copy of it. A name such as
    ``package.module:function`` is code to import and call with arguments from the same file: its package
    must be in ``trusted``, which defaults to RAYCL_TRUSTED.

    Raises:
        StorageError: Encoder and checkpoint are missing, one is damaged, or the tokenizer does not match.
        ConfigError: The side is unknown, or the package is not trusted.
    """
    (saved,) = read_encoders(uri, [side], network=network, trusted=trusted)
    return saved.build(network, trusted=trusted)


def read_encoders(
    uri: Address,
    sides: Sequence[SideName],
    *,
    network: nn.Module | None = None,
    trusted: Collection[str] | None = None,
) -> list[SavedEncoder]:
    """Read the encoders of these sides, all from one checkpoint; arguments as in ``load_encoder``."""
    for side in sides:
        check_side(side)
    check_type("network", network, nn.Module, optional=True)
    if isinstance(trusted, str):
        raise ConfigError(f"trusted must be a list of packages, came {trusted!r}; give [{trusted!r}]")
    run = as_address("run", uri)
    if has_encoder(run) or not has_checkpoint(run):
        return [read_encoder(run, side=side) for side in sides]
    return read_checkpoint_encoders(run, sides, network=network, trusted=trusted)


Asked = Literal["image", "text"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointEncoder:
    """The tower that encodes keys, with the weights of ``checkpoint``, by the kind of samples that the run has."""

    recipe: str
    checkpoint: str
    encoders: dict[Asked, ImageEncoder | TextEncoder]

    def embed(self, kind: Asked, content: Any) -> np.ndarray:
        """Return the embedding of an encoded image, or of a text, with two towers of a query: unit float32 [dim].

        An image is prepared as for evaluation, without augmentation. Raises ``DataError`` for invalid content,
        ``ConfigError`` if the run has no samples of this kind.
        """
        if kind not in self.encoders:
            raise _without(self.recipe, kind)
        return normalize(self.encoders[kind].encode([content]), dim=1)[0].numpy()


def load_checkpoint_encoder(run: str, *, asked: Asked | None = None) -> CheckpointEncoder:
    """Load the tower that encodes the keys of the run: the momentum encoder if it has one.

    Raises:
        StorageError: The run does not exist, has no checkpoint yet, or cannot be read.
        ConfigError: The network cannot be built by name, or its package is not trusted; or the run has no content of
            the kind ``asked``.
    """
    opened = _open(run, asked=asked)
    config, head = opened.config, HeadSpec(**opened.config.projection_head.model_dump())
    weights, prefix = opened.state.get("tower", {}), ""
    if "momentum_encoder" in opened.state:
        weights, prefix = opened.state["momentum_encoder"], "tower."
        if config.uses_key_pool:  # the workers' momentum encoder has normalized few batches or none
            statistics = {
                f"tower.{name}": value
                for name, value in opened.state["tower"].items()
                if name.endswith(("running_mean", "running_var"))
            }
            weights = weights | statistics
    encoders: dict[Asked, ImageEncoder | TextEncoder] = {}
    for spec, of_side in opened.towers()[: 2 if config.data.kind == "image_text" else 1]:
        spec = spec.model_copy(update={"projection_head": head})
        if isinstance(spec, TextEncoderSpec):
            spec = spec.model_copy(update={"cut_at": config.text.max_length})
        try:
            built = opened.encoder(spec, weights, prefix + of_side).build()
        except StorageError as error:
            named = f"the weights of {opened.output / CHECKPOINTS / opened.name} do not fit the network that {CONFIG} names: "
            raise ConfigError(
                f"{'' if opened.own else named}the run trained a network of its user's own, which only that program can build; "
                "ask by --id or --vector"
            ) from error
        encoders["image" if isinstance(built, ImageEncoder) else "text"] = built
    return CheckpointEncoder(recipe=config.recipe, checkpoint=opened.name, encoders=encoders)


def read_checkpoint_encoders(
    run: str,
    sides: Sequence[SideName],
    *,
    network: nn.Module | None = None,
    trusted: Collection[str] | None = None,
) -> list[SavedEncoder]:
    """Read the encoders of these sides from the last checkpoint, which stderr reports, or from the checkpoint ``run``.

    Arguments and errors as in ``load_encoder``.
    """
    opened = _open(run, trusted, own_encoder=network is not None)
    if opened.output == Place(absolute(run)):  # no checkpoint is named
        step = opened.name.removeprefix("step-").partition("-")[0].lstrip("0") or "0"
        print(f"{run} has not finished: using its checkpoint after step {step}", file=sys.stderr)
    towers = opened.towers(network)
    by_side = {"query": towers[0], "key": towers[-1]}  # which may share one tower
    weights, prefix = opened.state.get("tower", {}), ""
    if "ema" in opened.state:
        weights, prefix = opened.state["ema"], "tower."
    return [
        opened.encoder(by_side[side][0].for_side(side), weights, prefix + by_side[side][1]) for side in sides
    ]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Opened:
    """A run, and the train state in its checkpoint ``name``; ``own`` if it trained a network of its user's own."""

    output: Place
    config: RunConfig
    name: str
    state: dict[str, Any]
    own: bool
    tokenizer: Tokenizer | None

    def towers(self, network: nn.Module | None = None) -> list[tuple[EncoderSpec, str]]:
        """Return the spec and the prefix of the weights of each tower; a missing network has no dimension."""
        vocabulary = None if self.tokenizer is None else Vocabulary(self.tokenizer)
        prefixes = ("query.", "key.") if self.config.has_two_towers else ("",)
        towers = []
        for spec, prefix in zip(encoder_specs(self.config, self.tokenizer), prefixes, strict=False):
            if self.own and network is None:
                towers.append((spec.model_copy(update={"name": OWN}), prefix))
                continue
            # Building a network seeds the generators, on GPUs only if this process uses them.
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            with torch.random.fork_rng(devices):
                encoder = build_encoder(self.config, spec, vocabulary) if network is None else network
            towers.append((complete_spec(spec, encoder, own=network is not None), prefix))
        return towers

    def encoder(self, spec: EncoderSpec, weights: Mapping[str, Tensor], prefix: str) -> SavedEncoder:
        """Return the encoder whose weights have this prefix."""
        assert isinstance(spec, ImageEncoderSpec | TextEncoderSpec), "there are no others"
        of_encoder = _weights_below(f"{prefix}encoder.", weights)
        if self.config.encoder.whitening is not None and spec.projection_head is None:
            whitening = Whitening(spec.representation_dim, shrinkage=self.config.encoder.whitening)
            whitening.load_state_dict(_weights_below(f"{prefix}whitening.", weights))
            spec, of_encoder = whitened(spec, of_encoder, whitening)
        return SavedEncoder(
            uri=self.output.uri,
            named_in=(self.output / CONFIG).uri,
            spec=spec,
            weights=of_encoder,
            head_weights=_weights_below(f"{prefix}projection_head.", weights),
            tokenizer=self.tokenizer if isinstance(spec, TextEncoderSpec) else None,
        )


def _without(recipe: str, asked: Asked) -> ConfigError:
    other = "text" if asked == "image" else "image"
    return ConfigError(f"the run of recipe {recipe} has {other}s and no {asked}s; ask by --{other}")


def _open(
    run: str,
    trusted: Collection[str] | None = None,
    *,
    own_encoder: bool = False,
    asked: Asked | None = None,
) -> _Opened:
    """Read a run; raise ``ConfigError`` if its configuration names code outside the ``trusted`` packages.

    ``own_encoder`` skips the name of the encoder, which a module replaces, as does a run that trained one. A run
    without content of the kind ``asked`` is refused before its checkpoints are read: it may have none yet.
    """
    given = Place(absolute(run))
    is_checkpoint = (given / STATE).exists()
    output = given.parent.parent if is_checkpoint else given
    place = output / CONFIG
    config = config_from_yaml(place.read_text(), name=place.uri, trained=True)
    has = {"image": config.data.kind in ("image", "image_text"), "text": config.has_texts}
    if asked is not None and not has[asked]:
        raise _without(config.recipe, asked)
    own = trained_own_network(output)
    if not (own_encoder or own):
        is_text = config.data.kind in ("text", "pairs")
        check_trusted(config.encoder.name, place.uri, trusted, is_text=is_text)
    if config.data.kind == "image_text":
        check_trusted(config.text_encoder.name, place.uri, trusted, is_text=True)
    name, state = (given.name, _state_in(given)) if is_checkpoint else _last_state(output)
    return _Opened(
        output=output,
        config=config,
        name=name,
        state=state,
        own=own,
        tokenizer=load_tokenizer(output.uri) if config.has_texts else None,
    )


def _last_state(output: Place) -> tuple[str, dict[str, Any]]:
    """Return the name of the last complete checkpoint and the train state in it."""
    name = last_checkpoint(output)
    while True:
        try:
            return name, _state_in(output / CHECKPOINTS / name)
        except StorageError:
            # A training run deletes a checkpoint once it has a newer one.
            previous, name = name, last_checkpoint(output)
            if name == previous:
                raise


def _state_in(checkpoint: Place) -> dict[str, Any]:
    place = checkpoint / STATE
    return load_state(place.read_bytes(), str(place)).get("learner", {})


def _weights_below(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
