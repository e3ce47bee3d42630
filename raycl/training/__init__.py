"""The execution of a run: the step, the training loop, and its launch on Ray Train."""
