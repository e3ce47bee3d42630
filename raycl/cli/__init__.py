"""The commands of ``raycl``, by typer."""
