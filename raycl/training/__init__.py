"""The run, performed: the step, the loop over steps, and its launch on Ray Train."""
