"""Ask a bank as a submitted job: ``ray job submit --working-dir . -- python jobs/bank.py stats NAME``.

Takes the commands and flags of ``raycl bank``: from a machine that is no node of the cluster this is
the way to ask.
"""

from raycl.cli.bank import bank
from raycl.cli.main import run_job

if __name__ == "__main__":
    run_job(bank)
