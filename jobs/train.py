"""Pretrain as a submitted job: ``ray job submit --working-dir . -- python jobs/train.py simclr --data ...``.

Takes the flags of ``raycl train``.
"""

import typer

from raycl.cli import run, train

if __name__ == "__main__":
    run(lambda: typer.run(train))
