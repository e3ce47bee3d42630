"""Embed a set as a submitted job: ``ray job submit --working-dir . -- python jobs/embed.py --run ...``.

Takes the flags of ``raycl embed``.
"""

import typer

from raycl.cli import embed, run

if __name__ == "__main__":
    run(lambda: typer.run(embed))
