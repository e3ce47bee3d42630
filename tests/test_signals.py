"""Signals of a run without workers: when training stops, and when signals are ignored."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ObjectLostError, RayActorError, RayError, RaySystemError

from raycl.storage import Place
from raycl.training.coordinator import send_heartbeats
from raycl.training.driver import GracefulShutdown
from raycl.training.driver import _failure as lose_group


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


ERRORS = [RayActorError(), ObjectLostError("0" * 56, None, ""), RaySystemError("no connection")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_heartbeats_and_stops_survive_every_error_of_ray(
    error: RayError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(answer: object, timeout: float) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    failed = [error, error]
    fake: Any = SimpleNamespace(get=get)
    monkeypatch.setattr("raycl.training.coordinator.ray", fake)
    monkeypatch.setattr("raycl.training.driver.ray", fake)
    coordinator: Any = SimpleNamespace(
        heartbeat=SimpleNamespace(remote=lambda: failed.pop() if failed else True)
    )
    with send_heartbeats(coordinator, interval_s=0.01) as stop_requested:
        assert stop_requested.wait(10)
    coordinator.request_stop = coordinator.progress = SimpleNamespace(remote=lambda: error)
    assert GracefulShutdown(coordinator, Place(str(tmp_path))).request_stop() == 0.0
    job: Any = SimpleNamespace(coordinator=coordinator, failure=None, output=Place(str(tmp_path)))
    assert lose_group(job, "no node", started=100.0).time == 100.0
