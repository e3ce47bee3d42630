"""Mine hard negatives in a submitted job: ``ray job submit --working-dir . -- python jobs/mine.py --run ...``.

Takes the flags of ``raycl mine``.
"""

from raycl.cli.main import mine, run_job

if __name__ == "__main__":
    run_job(mine)
