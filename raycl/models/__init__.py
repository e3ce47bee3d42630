"""Encoders, projection heads and towers, and how an encoder is saved and loaded."""
