"""Pretrain in a submitted job: ``ray job submit --working-dir . -- python jobs/train.py simclr --data ...``.

Takes the flags of ``raycl train``.
"""

from raycl.cli.main import run_job, train

if __name__ == "__main__":
    run_job(train)
