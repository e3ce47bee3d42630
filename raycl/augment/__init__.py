"""Random views of a batch, a function of (seed, epoch, sample_id, view) alone."""

from raycl.augment.images import ImageAugmentation, center_view, two_views
from raycl.augment.rng import uniforms
from raycl.augment.text import TextAugmentation

__all__ = ["ImageAugmentation", "TextAugmentation", "center_view", "two_views", "uniforms"]
