"""Activation checkpointing changes memory and time, and no value."""

import copy
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raycl.batchnorm import split_batchnorm
from raycl.errors import ConfigError
from raycl.gradient_cache import checkpoint_activations
from raycl.models.blocks import residual_blocks
from raycl.models.image import build_image_encoder
from raycl.models.text import build_text_encoder
from raycl.training.train_state import EmbedConfig
from tests.pretend_gpu import CPU
from tests.pretended_steps import CASES, CHUNKS, SMALL, Case, Worker
from tests.workers.test_step import build_tower

TOKENS = torch.tensor([[3, 4, 5, 9], [6, 7, 8, 0], [5, 5, 6, 7], [9, 0, 0, 0]])
HUGGING_FACE = ("bert", "roberta", "modernbert", "deberta", "qwen")
IMAGES = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def hugging_face(folder: Path, kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3}
    special = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "pad_token_id": 0}
    # Each block of ModernBERT has its own positions, a block of DeBERTa returns two values, and Qwen has a cache.
    config = {
        "bert": transformers.BertConfig,
        "roberta": transformers.RobertaConfig,
        "modernbert": transformers.ModernBertConfig,
        "deberta": transformers.DebertaV2Config,
        "qwen": partial(transformers.Qwen2Config, num_key_value_heads=2),
    }[kind]
    config(vocab_size=50, **sizes, **({} if kind == "roberta" else special)).save_pretrained(folder)
    arguments = {"pretrained": False}
    return build_text_encoder(f"transformers:{folder}", num_tokens=50, max_length=8, arguments=arguments)


def built(name: str, folder: Path) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name in HUGGING_FACE:
        return hugging_face(folder, name), TOKENS
    if name == "transformer":
        return build_text_encoder(name, num_tokens=50, max_length=8), TOKENS
    encoder = build_image_encoder(name.split()[0], image_size=32, width=0.25)
    if "shuffled" in name:
        split_batchnorm(encoder, 2)
    return encoder, IMAGES


def trained(encoder: nn.Module, rows: Tensor) -> list[Tensor]:
    """Return embeddings, gradients and buffers of two steps."""
    found: list[Tensor] = []
    for step in range(2):
        torch.manual_seed(step)  # of dropout
        encoder.zero_grad()
        output = encoder.train()(rows)
        output.square().sum().backward()
        found += [output.detach(), torch.rand(3)]  # the random state continues as without recomputation
        found += [each.grad.clone() for each in encoder.parameters() if each.grad is not None]
        found += [each.clone() for each in encoder.buffers()]
    return found


@pytest.mark.parametrize("every", [1, 2, 100])
@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "resnet18 shuffled", "vit_tiny", "transformer", *HUGGING_FACE]
)
def test_recomputed_activations_change_nothing_to_the_last_bit(name: str, every: int, tmp_path: Path) -> None:
    encoder, rows = built(name, tmp_path)
    state = copy.deepcopy(encoder.state_dict())
    expected = trained(encoder, rows)
    for chosen in (every, None):
        encoder.load_state_dict(state)
        checkpoint_activations(encoder, residual_blocks(encoder), every=chosen)
        calls = count_calls(encoder)
        found = trained(encoder, rows)
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
        assert encoder.state_dict().keys() == state.keys()
        assert calls() == (4 if chosen else 2)  # of the last block in two steps


def count_calls(encoder: nn.Module) -> Any:
    """Count the forward passes of a layer in the last block."""
    block = residual_blocks(encoder)[-1]
    layer = next(
        each for each in block.modules() if type(each).__name__.endswith(("Conv2d", "LayerNorm", "RMSNorm"))
    )
    calls: list[None] = []
    handle = layer.register_forward_hook(lambda *_: calls.append(None))

    def counted() -> int:
        handle.remove()
        return len(calls)

    return counted


def saved_bytes(encoder: nn.Module, rows: Tensor) -> int:
    """Return the bytes of the tensors that the graph of a forward pass holds, without parameters."""
    own = {each.untyped_storage().data_ptr() for each in encoder.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = encoder(rows)
    assert output.requires_grad
    return sum(held.values())


@pytest.mark.parametrize(("name", "most"), [("resnet50", 0.5), ("vit_tiny", 0.2), ("transformer", 0.2)])
def test_the_graph_holds_less_memory(name: str, most: float, tmp_path: Path) -> None:
    encoder, rows = built(name, tmp_path)
    before = saved_bytes(encoder, rows)
    checkpoint_activations(encoder, residual_blocks(encoder), every=1)
    assert saved_bytes(encoder, rows) < most * before


@pytest.mark.parametrize("num_layers", [2, 5])
def test_blocks_that_use_other_outputs_of_blocks_are_recomputed_one_by_one(num_layers: int) -> None:
    transformers = pytest.importorskip("transformers")
    # T5 computes the position bias in the first block and hands it on.
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": num_layers}
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=50, dropout_rate=0.0, **sizes))
    blocks = list(model.encoder.block)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(input_ids=TOKENS).last_hidden_state.square().sum().backward()
        return [each.grad.clone() for each in model.parameters()]

    expected = gradients()
    checkpoint_activations(model, blocks, every=1)
    assert all(a.equal(b) for a, b in zip(gradients(), expected, strict=True))
    checkpoint_activations(model, blocks, every=2)
    for _ in range(2):
        with pytest.raises(ConfigError, match="T5Block takes others from the block before it; set it to 1"):
            gradients()


@pytest.mark.parametrize("layer", [nn.AvgPool2d(2), nn.Hardtanh(0.0, 0.5, inplace=True)])
def test_a_layer_between_blocks_is_refused_above_one_block_at_a_time(layer: nn.Module) -> None:
    encoder = build_image_encoder("resnet10", image_size=32, width=0.125)
    blocks = residual_blocks(encoder)
    network = nn.Sequential(encoder.conv1, blocks[0], layer, *blocks[1:])
    expected = network(IMAGES)
    checkpoint_activations(network, blocks, every=1)
    assert network(IMAGES).equal(expected)
    checkpoint_activations(network, blocks, every=2)
    for _ in range(2):
        with pytest.raises(ConfigError, match="BasicBlock takes something else than the result of the block"):
            network(IMAGES)


def test_no_graph_is_left_after_the_backward_pass() -> None:
    encoder = build_image_encoder("resnet10", image_size=32, width=0.125)
    checkpoint_activations(encoder, residual_blocks(encoder), every=2)
    encoder(IMAGES).sum().backward()
    copy.deepcopy(encoder)  # which torch refuses for tensors with a graph


def test_a_copy_of_a_network_recomputes_with_its_own_weights() -> None:
    encoder = build_image_encoder("resnet10", image_size=32, width=0.125)
    checkpoint_activations(encoder, residual_blocks(encoder), every=2)
    copied = copy.deepcopy(encoder)
    with torch.no_grad():
        for each in encoder.parameters():
            each.zero_()
    assert copied(IMAGES).any() and not encoder(IMAGES).any()


def gated(block: nn.Module, rows: Tensor) -> Tensor:
    return type(block).forward(block, rows) * block.gate


@pytest.mark.parametrize("every", [1, 2])
def test_a_forward_method_set_on_a_block_stays_and_is_recomputed(every: int) -> None:
    encoder = build_image_encoder("resnet10", image_size=32, width=0.125)
    blocks = residual_blocks(encoder)
    for block in blocks:
        block.gate = nn.Parameter(torch.tensor(0.5))
        block.forward = MethodType(gated, block)
    state = copy.deepcopy(encoder.state_dict())
    expected = trained(encoder, IMAGES)
    for chosen in (None, every, every, None):
        encoder.load_state_dict(state)
        checkpoint_activations(encoder, blocks, every=chosen)
        assert all(a.equal(b) for a, b in zip(trained(encoder, IMAGES), expected, strict=True))
    assert all(block.forward == MethodType(gated, block) for block in blocks)


VIT = {"encoder.name": "vit_tiny", "encoder.width": 0.2, "projection_head.batchnorm": False}


@pytest.mark.parametrize(
    "case",
    [
        CASES["simclr"],
        Case("simclr", SMALL | CHUNKS | {"batchnorm": "group"}),
        CASES["moco_v2"],
        CASES["simcse"],
        CASES["simcse chunks"],
        Case("simclr", VIT | CHUNKS),
    ],
    ids=["resnet", "resnet in chunks", "moco", "transformer", "transformer in chunks", "vit in chunks"],
)
def test_steps_are_equal_to_the_last_bit(case: Case) -> None:
    every = case.settings | {"stages.0.activation_checkpoint_every": 1}
    losses, weights = [], []
    for each in (case, Case(case.recipe, every)):
        worker = Worker(each, device=CPU)
        for step, views in enumerate(worker.maker.views(worker.batches(2))):
            torch.manual_seed(step)
            losses.append(worker.step(views, step).loss)
        weights.append([weight.detach() for weight in worker.weights()])
        block = residual_blocks(worker.learner.tower.towers[0].encoder)[0]
        assert ("forward" in vars(block)) == (each is not case)
    assert losses[:2] == losses[2:]
    assert all(a.equal(b) for a, b in zip(*weights, strict=True))


def test_a_network_without_blocks_is_refused_in_one_line() -> None:
    worker = Worker(CASES["simclr"], device=CPU)
    worker.learner.tower = build_tower()
    with pytest.raises(ConfigError, match="needs the blocks of a ResNet, a ViT or a transformer, got none"):
        worker.learner.set_embed_config(EmbedConfig(activation_checkpoint_every=1))
