"""Query a bank in a submitted job: ``ray job submit --working-dir . -- python jobs/bank.py stats NAME``.

Takes the commands and flags of ``raycl bank``. Use it from a machine outside the cluster.
"""

from raycl.cli.bank import bank
from raycl.cli.main import run_job

if __name__ == "__main__":
    run_job(bank)
