"""The files of the encoder that a run leaves."""

from raycl.models.build import complete_spec, encoder_specs
from raycl.models.encoder_io import save_encoder
from raycl.models.registry import HEAD_WEIGHTS, KEY, SPEC, WEIGHTS
from raycl.models.specs import TextEncoderSpec
from raycl.models.towers import Towers
from raycl.training.job import Job

_OF_EACH = (WEIGHTS, HEAD_WEIGHTS, SPEC)
ENCODER_FILES = (*_OF_EACH, *(f"{KEY}/{name}" for name in _OF_EACH))  # all that may exist


def save_towers(towers: Towers, job: Job) -> None:
    """Write the encoder; for two towers, also the key encoder and the projection heads."""
    specs = encoder_specs(job.config, job.tokenizer)
    saved = list(zip(towers.towers, specs, (job.output, job.output / KEY), strict=False))
    # The spec of the first tower is written last: it marks the encoder of the run as saved.
    for tower, spec, folder in reversed(saved):
        save_encoder(
            tower.encoder,
            complete_spec(spec, tower.encoder, own=job.network is not None),
            folder,
            projection_head=None if spec.projection_head is None else tower.projection_head,
            tokenizer=job.tokenizer if isinstance(spec, TextEncoderSpec) else None,
        )
