"""A line to one shard: one call in flight, asked again while the shard is away."""

import time
from typing import Any, final

import ray
from ray import exceptions
from ray._private import state as ray_state

from raycl.errors import RayclError, RunError, first_line
from raycl.negatives.messages import Reply

# What Ray raises for a shard that may come back, or whose answer was lost on the way.
_PASSING = (exceptions.ActorUnavailableError, exceptions.ObjectLostError, exceptions.OutOfMemoryError)
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.05, 1.0


@final
class ShardConnection:
    """One caller's line to one shard.

    A call that is lost is made again, so what it asks for must bear being done twice.
    """

    def __init__(self, actor: Any, name: str, *, timeout_s: float) -> None:
        """Take the actor's handle, its name for errors, and how long to wait for an answer."""
        self._actor, self._name, self._timeout_s = actor, name, timeout_s
        self._call: tuple[Any, ...] = ()
        self._reference: Any = None
        self._has_restarted = False
        self.incarnation = ""
        self.num_restarts = 0
        self.waited_s = 0.0

    def send(self, method: str, *arguments: Any) -> None:
        """Make a call without waiting; the one before must have been collected."""
        assert not self._call, f"{self._call[0]} is still in flight"
        self._call = (method, *arguments)
        self._issue()

    def collect(self) -> Any:
        """Wait for the answer to the call in flight; None if there is none.

        Raises:
            RunError: The shard stays away, or gives no answer in time.
            RayclError: What the shard itself raises.
        """
        if not self._call:
            return None
        started = time.monotonic()
        try:
            reply = self._patiently(started + self._timeout_s)
        finally:
            self.drop()
            self.waited_s += time.monotonic() - started
        self._note(reply.incarnation)
        return reply.value

    def ask(self, method: str, *arguments: Any) -> Any:
        """Make a call and wait for its answer; raises what ``collect`` raises."""
        self.send(method, *arguments)
        return self.collect()

    def drop(self) -> None:
        """Forget the call in flight."""
        self._call, self._reference = (), None

    def has_restarted(self) -> bool:
        """Whether the shard has begun a new life since this was asked last."""
        restarted, self._has_restarted = self._has_restarted, False
        return restarted

    def _issue(self) -> None:
        self._reference = self._actor.call.remote(*self._call)

    def _patiently(self, deadline: float) -> Reply:
        nap_s = _SHORTEST_NAP_S
        while True:
            try:
                return ray.get(self._reference, timeout=max(0.0, deadline - time.monotonic()))
            except exceptions.RayTaskError as error:
                raise self._own(error) from error
            except exceptions.GetTimeoutError as error:
                raise self._gone(f"no answer within {self._timeout_s:g} s") from error
            except exceptions.RayError as error:
                if not self._may_come_back(error) or time.monotonic() + nap_s > deadline:
                    raise self._gone(first_line(error)) from error
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
            self._issue()

    def _may_come_back(self, error: exceptions.RayError) -> bool:
        return isinstance(error, _PASSING) or actor_facts(self._actor).get("State") not in (None, "DEAD")

    def _note(self, incarnation: str) -> None:
        if self.incarnation and incarnation != self.incarnation:
            self._has_restarted = True
            self.num_restarts += 1
        self.incarnation = incarnation

    def _own(self, error: exceptions.RayTaskError) -> RayclError:
        cause = error.cause
        return cause if isinstance(cause, RayclError) else self._gone(f"it failed with {cause!r}")

    def _gone(self, reason: str) -> RunError:
        return RunError(
            f"the bank's shard {self._name!r} did not answer {self._call[0]!r}: {reason}; look whether its node is "
            "alive, or raise bank.timeout_s"
        )


def actor_facts(actor: Any) -> dict[str, Any]:
    """Return what Ray knows of an actor (State, NumRestarts, Address, Pid); empty if nothing."""
    # Ray's public state API needs its dashboard, which small clusters go without.
    return ray_state.actors(actor._actor_id.hex()) or {}
