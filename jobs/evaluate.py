"""Evaluate a run in a submitted job: ``ray job submit --working-dir . -- python jobs/evaluate.py knn --run ...``.

Takes the flags of ``raycl evaluate``.
"""

from raycl.cli.main import evaluate, run_job

if __name__ == "__main__":
    run_job(evaluate)
