"""The key tower in the last checkpoint of a run, which may still be training."""

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from raycl.augment.images import center_view
from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml
from raycl.data.images import InvalidImageError
from raycl.errors import ConfigError, DataError, StorageError
from raycl.models.build import build_towers, encoder_specs, load_tokenizer
from raycl.models.encoder_io import load_state
from raycl.models.momentum import MomentumEncoder
from raycl.models.registry import check_trusted
from raycl.models.specs import ImageEncoderSpec
from raycl.models.towers import Towers
from raycl.records import CHECKPOINT_LIST, CHECKPOINTS, CONFIG, STATE, copied_list
from raycl.storage import Place, absolute
from raycl.tokenization import InvalidTextError, Vocabulary, padded_rows, read_text

_LIST_ATTEMPTS, _LIST_WAIT_S = 3, 0.5


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointEncoder:
    """The tower that encodes keys, in evaluation mode, with the weights of ``checkpoint``."""

    tower: Towers
    vocabulary: Vocabulary | None
    config: RunConfig
    checkpoint: str

    @torch.inference_mode()
    def embed_image(self, content: bytes) -> np.ndarray:
        """Return the embedding of an encoded image, float32 [dim], of unit length.

        The image is prepared as for evaluation, without augmentation. Raises ``DataError`` if it cannot
        be decoded, ``ConfigError`` if the run has no images.
        """
        spec = encoder_specs(self.config, self.vocabulary.tokenizer if self.vocabulary else None)[0]
        if not isinstance(spec, ImageEncoderSpec):
            raise ConfigError(
                f"the run of recipe {self.config.recipe} has texts and no images; ask by --text"
            )
        try:
            pixels, _ = spec.image_format().decode(content)
        except InvalidImageError as error:
            raise DataError(f"the image cannot be used: {error}; give a picture file") from error
        image = center_view(pixels[None], size=spec.image_size, mean=spec.mean, std=spec.std)
        return self.tower.towers[0](image)[0].numpy()

    @torch.inference_mode()
    def embed_text(self, text: str) -> np.ndarray:
        """Return the embedding of a text, with two towers of a query, float32 [dim], of unit length.

        Raises ``DataError`` for an invalid text, ``ConfigError`` if the run has no texts.
        """
        if self.vocabulary is None:
            raise ConfigError(
                f"the run of recipe {self.config.recipe} has images and no texts; ask by --image"
            )
        try:
            tokens = self.vocabulary.tokenizer.encode([read_text(text)], self.config.text.max_length)
        except InvalidTextError as error:
            raise DataError(f"the text cannot be used: {error}; give another one") from None
        tower = self.tower.towers[-1 if self.config.data.kind == "image_text" else 0]
        return tower(torch.from_numpy(padded_rows(tokens)))[0].numpy()


def load_checkpoint_encoder(run: str) -> CheckpointEncoder:
    """Load the tower that encodes the keys of the run: the momentum encoder if it has one.

    Raises:
        StorageError: The run does not exist, has no checkpoint yet, or cannot be read.
        ConfigError: The network cannot be built by name, or its package is not trusted.
    """
    output = Place(absolute(run))
    config, named_in = read_config(output)
    check_config_trusted(config, named_in)
    checkpoint, state = last_state(output)
    vocabulary = Vocabulary(load_tokenizer(output.uri)) if config.has_texts else None
    towers = build_towers(config, vocabulary)
    try:
        tower = _load_key_tower(towers, state).eval()
    except (RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the weights of {output / CHECKPOINTS / checkpoint} do not fit the network that {CONFIG} names: the run "
            "trained a network of its user's own, which only that program can build; ask by --id or --vector"
        ) from error
    return CheckpointEncoder(tower=tower, vocabulary=vocabulary, config=config, checkpoint=checkpoint)


def read_config(output: Place) -> tuple[RunConfig, str]:
    """Return the configuration of a run and its address; raises ``StorageError`` or ``ConfigError``."""
    place = output / CONFIG
    return config_from_yaml(place.read_text(), name=place.uri), place.uri


def check_config_trusted(
    config: RunConfig, named_in: str, trusted: Collection[str] | None = None, *, own_encoder: bool = False
) -> None:
    """Raise ``ConfigError`` if the configuration names code outside the ``trusted`` packages.

    ``own_encoder`` skips the name of the encoder, which a module replaces.
    """
    kind = config.data.kind
    if not own_encoder:
        check_trusted(config.encoder.name, named_in, trusted, is_text=kind in ("text", "pairs"))
    if kind == "image_text":
        check_trusted(config.text_encoder.name, named_in, trusted, is_text=True)


def last_state(output: Place) -> tuple[str, dict[str, Any]]:
    """Return the name of the last complete checkpoint and the train state in it."""
    name = last_checkpoint(output)
    while True:
        try:
            place = output / CHECKPOINTS / name / STATE
            return name, load_state(place.read_bytes(), str(place)).get("learner", {})
        except StorageError:
            # A training run deletes a checkpoint once it has a newer one.
            previous, name = name, last_checkpoint(output)
            if name == previous:
                raise


def last_checkpoint(output: Place) -> str:
    """Return the name of the last complete checkpoint; raises ``StorageError`` if there is none."""
    folder = output / CHECKPOINTS
    latest = (
        _read_list(folder).get("latest_checkpoint_result") if (folder / CHECKPOINT_LIST).exists() else None
    )
    if latest is None:
        raise StorageError(f"the run at {output} has no checkpoint yet; repeat the command after its first")
    return latest["checkpoint_dir_name"]


def _read_list(folder: Place) -> dict[str, Any]:
    place = folder / CHECKPOINT_LIST
    for _ in range(_LIST_ATTEMPTS):
        try:
            return json.loads(place.read_text())
        except json.JSONDecodeError:
            time.sleep(_LIST_WAIT_S)  # Ray rewrites the file in place, so it may be incomplete
    copy = copied_list(folder)
    if copy is not None:
        return copy
    raise StorageError(f"cannot read {place}: the list of checkpoints is damaged; repeat the command")


def _load_key_tower(tower: Towers, state: dict[str, Any]) -> Towers:
    if "momentum_encoder" not in state:
        tower.load_state_dict(state["tower"])
        return tower
    momentum_encoder = MomentumEncoder(tower)
    momentum_encoder.load_state_dict(state["momentum_encoder"])
    return momentum_encoder.tower  # type: ignore[return-value]
