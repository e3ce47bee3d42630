"""Evaluation of encoders: kNN, linear probe, retrieval and sentence similarity."""
