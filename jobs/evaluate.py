"""Judge a run as a submitted job: ``ray job submit --working-dir . -- python jobs/evaluate.py knn --run ...``.

Takes the flags of ``raycl evaluate``.
"""

import typer

from raycl.cli import evaluate, run

if __name__ == "__main__":
    run(lambda: typer.run(evaluate))
