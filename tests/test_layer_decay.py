"""Learning rates that decay by block, against the table of BEiT (Bao et al., 2022)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.models.blocks import learning_rate_scales, transformer_blocks
from raycl.models.build import build_towers
from raycl.models.image import build_image_encoder
from raycl.models.text import build_text_encoder
from raycl.optim import build_optimizer, set_learning_rate
from raycl.recipes import recipe
from raycl.training.train_state import TrainState
from tests.pairs import vocabulary

DECAY = 0.5


def named_scales(encoder: nn.Module) -> dict[str, float | None]:
    scales = learning_rate_scales(encoder, DECAY)
    return {name: scales.get(each) for name, each in encoder.named_parameters()}


def below(scales: dict[str, Any], *prefixes: str) -> set[Any]:
    return {scale for name, scale in scales.items() if name.startswith(prefixes)}


def test_a_vit_decays_from_its_last_block_to_its_patch_embedding() -> None:
    scales = named_scales(build_image_encoder("vit_tiny", image_size=32))
    assert below(scales, "class_token", "conv_proj.", "encoder.pos_embedding") == {DECAY**13}
    for block in range(12):
        assert below(scales, f"encoder.layers.encoder_layer_{block}.") == {DECAY ** (12 - block)}
    assert below(scales, "encoder.ln.") == {None}


def test_a_transformer_decays_from_its_last_layer_to_its_embeddings() -> None:
    scales = named_scales(build_text_encoder("transformer", num_tokens=50, max_length=8))
    assert below(scales, "token_embedding.", "position_embedding.") == {DECAY**5}
    assert [below(scales, f"layers.{layer}.") for layer in range(4)] == [{DECAY ** (4 - n)} for n in range(4)]
    assert below(scales, "norm.") == {None}


def test_a_model_of_hugging_face_decays_by_its_layers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3}
    transformers.BertConfig(vocab_size=50, **sizes).save_pretrained(tmp_path)
    name, arguments = f"transformers:{tmp_path}", {"pretrained": False}
    encoder = build_text_encoder(name, num_tokens=50, max_length=8, arguments=arguments)
    scales = named_scales(encoder)
    assert below(scales, "model.embeddings.") == {DECAY**4}
    assert [below(scales, f"model.encoder.layer.{n}.") for n in range(3)] == [{DECAY**3}, {DECAY**2}, {DECAY}]


@pytest.mark.parametrize(
    ("kind", "table"),
    [("MPNet", "model.encoder.relative_attention_bias."), ("DebertaV2", "model.encoder.rel_embeddings.")],
)
def test_tables_of_positions_behind_the_blocks_decay_as_embeddings(
    kind: str, table: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3}
    relative = {"relative_attention": True, "norm_rel_ebd": "layer_norm"} if kind == "DebertaV2" else {}
    getattr(transformers, f"{kind}Config")(vocab_size=50, **sizes, **relative).save_pretrained(tmp_path)
    arguments = {"pretrained": False}
    encoder = build_text_encoder(f"transformers:{tmp_path}", num_tokens=50, max_length=8, arguments=arguments)
    scales = named_scales(encoder)
    assert below(scales, "model.embeddings.") == below(scales, table) == {DECAY**4}
    assert [below(scales, f"model.encoder.layer.{n}.") for n in range(3)] == [{DECAY**3}, {DECAY**2}, {DECAY}]
    assert below(scales, "model.encoder.LayerNorm.") <= {None}


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "muon"])
def test_the_first_step_is_scaled_by_block(name: Any) -> None:
    def parameters(scaled: bool) -> Iterator[torch.Tensor]:
        torch.manual_seed(0)
        encoder = build_text_encoder("transformer", num_tokens=20, max_length=4).double()
        scales = learning_rate_scales(encoder, DECAY) if scaled else None
        before = [each.detach().clone() for each in encoder.parameters()]
        optimizer = build_optimizer(name, encoder, learning_rate_scales=scales)
        set_learning_rate(optimizer, 0.1)
        encoder.eval()(torch.tensor([[3, 4, 5], [6, 7, 0]])).square().sum().backward()
        optimizer.step()
        yield from (each.detach() - then for each, then in zip(encoder.parameters(), before, strict=True))

    encoder = build_text_encoder("transformer", num_tokens=20, max_length=4)
    scales = learning_rate_scales(encoder, DECAY)
    for each, moved, unscaled in zip(encoder.parameters(), parameters(True), parameters(False), strict=True):
        torch.testing.assert_close(moved, scales.get(each, 1.0) * unscaled, rtol=1e-9, atol=1e-15)
        assert unscaled.any()


def test_heads_and_a_tower_without_blocks_keep_the_full_rate() -> None:
    small = {"encoder.name": "resnet10", "encoder.width": 0.125, "text_encoder.name": "transformer"}
    config = override(recipe("clip", image_size=32), small | {"optimizer.layer_decay": DECAY})
    towers = build_towers(config, vocabulary())
    state = TrainState.build(config, towers, num_samples=None)
    found = {each: group["lr_scale"] for group in state.optimizer.param_groups for each in group["params"]}
    key = towers.towers[1]
    full = [*towers.towers[0].parameters(), *key.projection_head.parameters()]
    assert {found[each] for each in full} == {1.0}
    assert len({found[each] for each in key.encoder.parameters()}) == len(transformer_blocks(key.encoder)) + 2


def test_a_checkpoint_with_other_groups_of_parameters_is_refused_in_one_line() -> None:
    small = {"encoder.name": "resnet10", "encoder.width": 0.125, "text_encoder.name": "transformer"}
    config = override(recipe("clip", image_size=32), small)
    decayed = override(config, {"optimizer.layer_decay": DECAY})
    earlier, state = (
        TrainState.build(each, build_towers(each, vocabulary()), num_samples=None)
        for each in (config, decayed)
    )
    with pytest.raises(
        ConfigError, match="the optimizer of the checkpoint does not fit .*; use that version of raycl"
    ):
        state.load_state_dict(earlier.state_dict())


def test_an_encoder_without_blocks_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="layer_decay acts only with a ViT or a transformer.*; remove it"):
        override(recipe("simclr", image_size=32), {"optimizer.layer_decay": DECAY})
    config = override(
        recipe("simclr", image_size=32), {"encoder.name": "vit_tiny", "optimizer.layer_decay": DECAY}
    )
    own = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8))
    with pytest.raises(ConfigError, match="layer_decay needs the blocks of a ViT or a transformer, got none"):
        TrainState.build(config, build_towers(config, None, own), num_samples=None)
