"""One chunk of rows on its way through the segments of a network, and back."""

from collections.abc import Iterable
from functools import partial, reduce
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import Node

from raycl.batchnorm.chunked.run import Values, run_segment
from raycl.batchnorm.chunked.segments import Network, Segment
from raycl.batchnorm.chunked.statistics import Moments, gradient_at_input, normalize
from raycl.recompute import Replays, sample


@final
class Statistics:
    """What is known of the whole batch: each BatchNorm's moments, and on the way back its sums."""

    def __init__(self) -> None:
        self.moments: dict[Node, Moments] = {}  # by the value they are taken of
        self.sums: dict[Node, Tensor] = {}  # by the call of the layer


@final
class Chunk:
    """Some rows, their values that wait for later segments, and gradients that wait for earlier ones."""

    def __init__(self, network: Network, rows: Tensor, statistics: Statistics) -> None:
        self._network = network
        self._statistics = statistics
        self._device = rows.device
        self._random_states: dict[int, list[Tensor]] = {}
        self._samples: dict[Node, Tensor] = {}
        self._noted: dict[Node, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[Node, Tensor] = {}
        self.values: Values = {network.trace.rows: rows}

    @torch.no_grad()
    def advance(self, segment: Segment) -> None:
        """Run a segment without a graph and keep what leaves it."""
        before = random_state(self._device)
        outputs = self._run(segment, {node: self.values[node] for node in segment.inputs})
        self._samples |= {node: sample(value) for node, value in outputs.items() if _has_rows(value)}
        self.values |= outputs
        after = random_state(self._device)
        if not all(torch.equal(*each) for each in zip(before, after, strict=True)):
            self._random_states[segment.index] = before

    @torch.no_grad()
    def repeat(self, segment: Segment) -> None:
        """Run a segment once more, for the values that were forgotten."""
        self._restore_random_state(segment)
        self.values = self._run(segment, {node: self.values[node] for node in segment.inputs}) | self.values

    def ask(self, node: Node, gradient: Tensor) -> None:
        """Add to the gradient at a value."""
        asked = self._gradients.get(node)
        self._gradients[node] = gradient if asked is None else asked + gradient

    @torch.enable_grad()
    def go_back(self, segment: Segment, learned: set[Node], replays: Replays) -> dict[Node, Tensor]:
        """Run a segment once more with a graph, and backward.

        Parameters receive their gradients, the values that the segment read are asked for theirs.
        ``replays`` receives some of its values beside those of the first time. Returns the sums of
        its BatchNorms, [2, channels] by call.
        """
        self._restore_random_state(segment)
        inputs = {node: _leaf(self.values[node], node in learned) for node in segment.inputs}
        outputs = self._run(segment, inputs, learned)
        for node in self._samples.keys() & outputs.keys():
            replays.add(sample(outputs[node]), self._samples.pop(node), partial(_describe, segment))
        gradients = {node: self._take_gradient(node, value) for node, value in outputs.items()}
        heads = [node for node, gradient in gradients.items() if gradient is not None]
        if heads:
            torch.autograd.backward([outputs[node] for node in heads], [gradients[node] for node in heads])
        for node, leaf in inputs.items():
            if isinstance(leaf, Tensor) and leaf is not self.values[node] and leaf.grad is not None:
                self.ask(node, leaf.grad)
        return {node: self._noted[node][1] for node in segment.nodes if node in self._noted}

    def forget(self, nodes: Iterable[Node]) -> None:
        """Free values."""
        for node in nodes:
            del self.values[node]

    def _run(self, segment: Segment, inputs: Values, learned: set[Node] | None = None) -> Values:
        normalize_given = partial(self._normalize, learned or set())
        return run_segment(self._network, segment, self.values, inputs, normalize_given)

    def _normalize(self, learned: set[Node], node: Node, x: Tensor) -> Tensor:
        source = node.all_input_nodes[0]

        def note(*grad_and_sums: Tensor) -> None:
            self._noted[node] = grad_and_sums  # pyright: ignore[reportArgumentType]

        layer, moments = self._network.trace.layers[node], self._statistics.moments[source]
        return normalize(x, layer, moments, note if source in learned else None)

    def _take_gradient(self, node: Node, value: Any) -> Tensor | None:
        """Return what later segments ask of a value, directly and through BatchNorms."""
        asked = [self._gradients.pop(node)] if node in self._gradients else []
        for call, layer in self._network.trace.layers.items():
            if call in self._noted and node is call.all_input_nodes[0]:
                grad, _ = self._noted.pop(call)
                moments, sums = self._statistics.moments[node], self._statistics.sums[call]
                asked.append(gradient_at_input(grad, value.detach(), layer, moments, sums))
        wanted = isinstance(value, Tensor) and value.requires_grad
        return reduce(torch.add, asked) if wanted and asked else None

    def _restore_random_state(self, segment: Segment) -> None:
        if segment.index in self._random_states:
            set_random_state(self._random_states[segment.index], self._device)


def random_state(device: torch.device) -> list[Tensor]:
    """Return the state of the generators that operations on a device draw from."""
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


def set_random_state(state: list[Tensor], device: torch.device) -> None:
    """Put back what :func:`random_state` returned."""
    torch.set_rng_state(state[0])
    for each in state[1:]:
        torch.cuda.set_rng_state(each, device)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0 and value.numel() > 0


def _describe(segment: Segment) -> str:
    names = [node.name for node in segment.nodes]
    return f"a chunk, at one of the operations {', '.join(names[:8])}{', ...' if names[8:] else ''},"


def _leaf(value: Any, is_learned: bool) -> Any:
    if is_learned and isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value
