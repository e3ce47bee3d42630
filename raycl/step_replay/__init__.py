"""A step of a run, made again from the nearest checkpoint and explained pair by pair."""
