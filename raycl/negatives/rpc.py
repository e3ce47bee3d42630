"""Calls to the actors of a bank, repeated while an actor is away."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, TypeVarTuple, final

import ray
from ray import exceptions
from ray._private import state as ray_state

from raycl.errors import RayclError, RunError, ShardAwayError
from raycl.ray_runtime import cause_of

Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")

# Ray raises these for an actor that may come back, or whose answer was lost on the way.
_TRANSIENT = (exceptions.ActorUnavailableError, exceptions.ObjectLostError, exceptions.OutOfMemoryError)
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 1.0


@final
class ShardConnection:
    """One caller's connection to one actor of a bank.

    Give methods of the actor's class: ``connection.ask(QueueActor.push, ...)``. A call that is lost is
    sent again, so every method must be safe to call twice.
    """

    def __init__(self, actor: Any, name: str, *, timeout_s: float) -> None:
        """Keep the actor's handle, its name for errors, and how long to wait for an answer."""
        self.actor, self.name, self.timeout_s = actor, name, timeout_s
        self.incarnation = ""
        self.num_restarts = 0
        self.waited_s = 0.0

    def send(
        self, method: Callable[[Any, *Arguments], Answer], *arguments: *Arguments
    ) -> "PendingCall[Answer]":
        """Call a method of the actor without waiting."""
        return PendingCall(self, method.__name__, arguments)

    def ask(self, method: Callable[[Any, *Arguments], Answer], *arguments: *Arguments) -> Answer:
        """Call a method of the actor and wait for its answer; raises as ``PendingCall.result`` does."""
        return self.send(method, *arguments).result()

    def note_incarnation(self, incarnation: str) -> None:
        """Count a restart if the actor's process is another than at the last answer."""
        self.num_restarts += self.incarnation not in ("", incarnation)
        self.incarnation = incarnation


def ask_all(
    connections: Sequence[ShardConnection],
    method: Callable[[Any, *Arguments], Answer],
    *arguments: *Arguments,
) -> list[Answer]:
    """Call a method of all actors at once, and wait for their answers."""
    calls = [connection.send(method, *arguments) for connection in connections]
    return [call.result() for call in calls]


@final
class PendingCall(Generic[Answer]):
    """A call in flight."""

    def __init__(self, connection: ShardConnection, method: str, arguments: tuple[Any, ...]) -> None:
        self.connection, self._method, self._arguments = connection, method, arguments
        self._send()

    def result(self) -> Answer:
        """Wait for the answer; the call is repeated while the actor restarts.

        Raises ``ShardAwayError`` if the actor stays away or does not answer in time, and the actor's own errors.
        """
        started = time.monotonic()
        try:
            return self._with_retries(started + self.connection.timeout_s)
        finally:
            self.connection.waited_s += time.monotonic() - started

    def _send(self) -> None:
        self._reference = getattr(self.connection.actor, self._method).remote(*self._arguments)

    def _with_retries(self, deadline: float) -> Answer:
        backoff_s = _MIN_BACKOFF_S
        while True:
            try:
                return ray.get(self._reference, timeout=max(0.0, deadline - time.monotonic()))
            except exceptions.RayTaskError as error:
                if isinstance(error.cause, RayclError):
                    raise error.cause from error
                raise RunError(
                    f"the bank's shard {self.connection.name!r} failed in {self._method!r} with {error.cause!r}; its log "
                    "has the traceback, and --debug shows it"
                ) from error
            except exceptions.GetTimeoutError as error:
                raise self._failure(f"no answer within {self.connection.timeout_s:g} s") from error
            except exceptions.RayError as error:
                if not self._may_come_back(error) or time.monotonic() + backoff_s > deadline:
                    raise self._failure(cause_of(error)) from error
            time.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            self._send()

    def _may_come_back(self, error: exceptions.RayError) -> bool:
        if isinstance(error, _TRANSIENT):
            return True
        return actor_facts(self.connection.actor).get("State") not in (None, "DEAD")

    def _failure(self, reason: str) -> ShardAwayError:
        return ShardAwayError(
            f"the bank's shard {self.connection.name!r} did not answer {self._method!r}: {reason}; "
            "check that its node is alive, or raise bank.timeout_s"
        )


def actor_facts(actor: Any) -> dict[str, Any]:
    """Return Ray's record of an actor (State, NumRestarts, Address, Pid); empty if there is none."""
    # Ray's public state API needs its dashboard, which small clusters do not have.
    return ray_state.actors(actor._actor_id.hex()) or {}
