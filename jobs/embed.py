"""Embed a data set in a submitted job: ``ray job submit --working-dir . -- python jobs/embed.py --run ...``.

Takes the flags of ``raycl embed``.
"""

from raycl.cli.main import embed, run_job

if __name__ == "__main__":
    run_job(embed)
