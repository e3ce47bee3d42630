"""The doctor: checks whether a cluster, its storage, the data and a recipe are ready for a run."""
