"""Experiment trackers: TensorBoard, MLflow, Weights & Biases. They never block training or make it fail."""

from raycl.tracking.base import MetricsRecord, Tracker
from raycl.tracking.trackers import Trackers, check_trackers, open_trackers

__all__ = ["MetricsRecord", "Tracker", "Trackers", "check_trackers", "open_trackers"]
