"""Experiment trackers: TensorBoard, MLflow, Weights & Biases. They never block training or make it fail."""
