"""Signals of a run without workers: when training stops, and when signals are ignored."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycl.storage import Place
from raycl.training.driver import GracefulShutdown


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Install a handler for SIGTERM, as commands do."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_signals_stop_the_workers_only_during_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(GracefulShutdown, "request_stop", lambda _: float(asked.set() or 0))
    with GracefulShutdown(None, Place(str(tmp_path))) as signals:
        with pytest.raises(KeyboardInterrupt):  # no worker could save
            send_sigterm()
        signals.begin()
        send_sigterm()
        assert asked.wait(10)
        assert signals.last_signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):  # a second signal ends the process
            send_sigterm()
        signals.end()
        send_sigterm()  # while the result is written
    with pytest.raises(KeyboardInterrupt):
        send_sigterm()
