"""The banks of a Ray that runs, found from any process of its machines."""

from raycl.joining import join_running
from raycl.negatives import bank
from raycl.negatives.bank import Bank


def connect_bank(name: str, address: str | None = None) -> Bank:
    """Return the bank of this name, to be asked while training goes on.

    Joins the Ray at ``address`` (HOST:PORT), or in RAY_ADDRESS, or else the one on this machine,
    unless this process has joined one already; never starts one.

    Raises:
        ConfigError: There is no such bank, or no Ray to join, or several.
        RunError: The Ray or the bank does not answer.
    """
    join_running(address)
    return bank.connect_bank(name)


def list_banks(address: str | None = None) -> list[str]:
    """Return the names of all banks; joins a Ray, and raises, as ``connect_bank`` does."""
    join_running(address)
    return bank.list_banks()
