"""The tower of a run that may still go on: encoder and projection head of its last checkpoint."""

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
from raycl.data.images import BrokenImageError
from raycl.errors import ConfigError, DataError, StorageError
from raycl.models.encoder_io import load_state
from raycl.models.momentum import MomentumEncoder
from raycl.models.towers import Towers
from raycl.models.trust import check_trusted
from raycl.storage import Place, absolute
from raycl.tokenization import BrokenTextError, Vocabulary, padded_rows, read_text
from raycl.training import build
from raycl.training.checkpoint import STATE
from raycl.training.modality import ImageTowerBuilder
from raycl.training.resume import CHECKPOINTS, CONFIG, LISTED, copied_list, load_tokenizer

_ATTEMPTS, _NAP_S = 3, 0.5


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointEncoder:
    """The side of a run that encodes keys, in evaluation mode, as of ``checkpoint``."""

    tower: Towers
    vocabulary: Vocabulary | None
    config: RunConfig
    checkpoint: str

    @torch.inference_mode()
    def embed_image(self, content: bytes) -> np.ndarray:
        """Return the embedding of an image file's content, float32 [dim], of unit length.

        The image is prepared as the periodic judge does, without any randomness. Raises ``DataError``
        if it cannot be decoded, ``ConfigError`` if the run has no images.
        """
        if self.config.data.kind in ("text", "pairs"):
            raise ConfigError(
                f"the run of recipe {self.config.recipe} has texts and no images; ask by --text"
            )
        try:
            pixels, _ = ImageTowerBuilder(self.config).image_format().decode(content)
        except BrokenImageError as error:
            raise DataError(f"the image cannot be used: {error}; give a picture file") from error
        mean, std = self.config.normalization
        image = center_view(pixels[None], size=self.config.data.image_size, mean=mean, std=std)
        return self.tower.towers[0](image)[0].numpy()

    @torch.inference_mode()
    def embed_text(self, text: str) -> np.ndarray:
        """Return the embedding of a text, of a query where there are two towers, float32 [dim], of unit length.

        Raises ``DataError`` if it is no text, ``ConfigError`` if the run has none.
        """
        if self.vocabulary is None:
            raise ConfigError(
                f"the run of recipe {self.config.recipe} has images and no texts; ask by --image"
            )
        try:
            tokens = self.vocabulary.tokenizer.encode([read_text(text)], self.config.text.max_length)
        except BrokenTextError as error:
            raise DataError(f"the text cannot be used: {error}; give another one") from None
        of_texts = self.tower.towers[-1 if self.config.data.kind == "image_text" else 0]
        return of_texts(torch.from_numpy(padded_rows(tokens)))[0].numpy()


def load_tower(run: str) -> CheckpointEncoder:
    """Load what encodes the keys of the run at ``run``: the momentum encoder where there is one.

    Raises:
        StorageError: There is no run, or no checkpoint yet, or it cannot be read.
        ConfigError: The run's network cannot be built by its name, or its package is not trusted.
    """
    output = Place(absolute(run))
    config = read_config(output)
    check_config_trusted(config, output)
    checkpoint, state = last_state(output)
    vocabulary = Vocabulary(load_tokenizer(output.uri)) if config.has_texts else None
    towers = build.towers(config, build.modality(config, vocabulary))
    try:
        filled = _fill(towers, state).eval()
        return CheckpointEncoder(tower=filled, vocabulary=vocabulary, config=config, checkpoint=checkpoint)
    except (RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the weights of {output / CHECKPOINTS / checkpoint} do not fit the network that {CONFIG} names: the run "
            "trained a network of its user's own, which only that program can build; ask by --id or --vector"
        ) from error


def read_config(output: Place) -> RunConfig:
    """Return the configuration of the run at ``output``; raises ``StorageError`` or ``ConfigError``."""
    return config_from_yaml((output / CONFIG).read_text(), name=(output / CONFIG).uri)


def check_config_trusted(
    config: RunConfig, output: Place, trusted: Collection[str] | None = None, *, own_encoder: bool = False
) -> None:
    """Refuse code that the configuration names: ``ConfigError``; ``own_encoder`` takes the place of its encoder."""
    where, kind = str(output / CONFIG), config.data.kind
    if not own_encoder:
        check_trusted(config.encoder.name, where, trusted, is_text=kind in ("text", "pairs"))
    if kind == "image_text":
        check_trusted(config.text_encoder.name, where, trusted, is_text=True)


def _fill(tower: Towers, state: dict[str, Any]) -> Towers:
    if "momentum_encoder" not in state:
        tower.load_state_dict(state["tower"])
        return tower
    follower = MomentumEncoder(tower)
    follower.load_state_dict(state["momentum_encoder"])
    return follower.tower  # type: ignore[return-value]


def last_state(output: Place) -> tuple[str, dict[str, Any]]:
    """Return the name of the last whole checkpoint and the learner's state in it."""
    name = last_checkpoint(output)
    while True:
        try:
            place = output / CHECKPOINTS / name / STATE
            return name, load_state(place.read_bytes(), str(place)).get("learner", {})
        except StorageError:
            # A run that goes on removes a checkpoint when there is a newer one.
            before, name = name, last_checkpoint(output)
            if name == before:
                raise


def last_checkpoint(output: Place) -> str:
    """Return the name of the last checkpoint that is there whole; raises ``StorageError`` if none is."""
    folder = output / CHECKPOINTS
    latest = _read_list(folder).get("latest_checkpoint_result") if (folder / LISTED).exists() else None
    if latest is None:
        raise StorageError(f"the run at {output} has no checkpoint yet; repeat the command after its first")
    return latest["checkpoint_dir_name"]


def _read_list(folder: Place) -> dict[str, Any]:
    listed = folder / LISTED
    for _ in range(_ATTEMPTS):
        try:
            return json.loads(listed.read_text())
        except json.JSONDecodeError:
            time.sleep(_NAP_S)  # Ray writes the file in its place: it may be half there
    copy = copied_list(folder)
    if copy is not None:
        return copy
    raise StorageError(f"cannot read {listed}: it is no list of checkpoints; repeat the command")
