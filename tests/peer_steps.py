"""The same 100 steps by raycl and by another library's own code, from equal weights and on equal batches.

``python -m tests.peer_steps > tests/peer_losses.json`` runs those of the libraries, which the extra ``bench`` installs.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.losses.example_ids import ExampleIds
from raycl.models.build import build_towers
from raycl.recipes import recipe
from raycl.tokenization import Vocabulary
from raycl.training.stages import stage_plans
from raycl.training.step import train_step
from raycl.training.stores import Store
from raycl.training.train_state import EmbedConfig, TrainState
from raycl.training.views import Views

STEPS = 100
ROWS = 16
NUM_TRAIN = 512
LENGTH = 6  # tokens of a text
TRANSFORMER = {"dim": 32, "num_layers": 1, "num_heads": 2, "hidden_dim": 64, "dropout": 0.0}
# Sizes only: small networks without dropout, whose masks differ between libraries, and the length of the run.
SIZES: dict[str, dict[str, Any]] = {
    "lightly:simclr": {"encoder.name": "resnet10", "encoder.width": 0.125, "stages.0.batch_size": 2 * ROWS},
    "open_clip:vit-b-32": {
        "data.image_size": 16,
        "encoder.name": "resnet10",
        "encoder.width": 0.125,
        "text_encoder.kwargs": TRANSFORMER,
        "projection_head.dim": 24,
        "stages.0.batch_size": ROWS,
        "stages.0.epochs": None,
        "stages.0.steps": 10 * STEPS,  # the first tenth is the warmup
    },
    "st:mnrl": {
        "encoder.kwargs": TRANSFORMER,
        "projection_head.dim": 32,
        "stages.0.epochs": None,
        "stages.0.steps": STEPS,
    },
}
PACKAGES = {
    "lightly:simclr": ("lightly",),
    "open_clip:vit-b-32": ("open-clip-torch",),
    "st:mnrl": ("sentence-transformers", "transformers"),
}


def configuration(name: str) -> RunConfig:
    """Return a configuration of another library with small networks."""
    return override(recipe(name, image_size=16), SIZES[name])


def towers(config: RunConfig) -> Any:
    """Build towers whose weights do not depend on the version of torch."""
    built = build_towers(config, Vocabulary.stand_in() if config.has_texts else None).double()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            draws = torch.from_numpy(rng.standard_normal(tuple(weight.shape)))
            if weight.ndim > 1:
                weight.copy_(draws / weight[0].numel() ** 0.5)
            else:
                weight.copy_(0.1 * draws + (name.endswith("weight")))
    return built


def batches(config: RunConfig, number: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs of both sides: views that share a part, which can be learned, or texts with the same words."""
    size, kind, side = config.stages[0].batch_size, config.data.kind, config.data.image_size
    for step in range(number):
        rng = np.random.default_rng(step + 1)
        sample = rng.standard_normal((size, 3, side, side))
        words = rng.integers(5, 60, (size, LENGTH))
        noise = (0.5 * rng.standard_normal((2, *sample.shape)) + sample).astype(np.float64)
        swapped = np.where(rng.random(words.shape) < 0.3, rng.integers(5, 60, words.shape), words)
        images = tuple(torch.from_numpy(each) for each in noise)
        if kind == "image":
            yield images[0], images[1]
        elif kind == "image_text":
            yield images[0], torch.from_numpy(swapped)
        else:
            yield torch.from_numpy(words), torch.from_numpy(swapped)


def losses_here(config: RunConfig) -> list[float]:
    """Return the losses of raycl's train step."""
    state = TrainState.build(config, towers(config), num_samples=NUM_TRAIN)
    stage, (plan,) = config.stages[0], stage_plans(config, num_train=[NUM_TRAIN])
    state.set_embed_config(EmbedConfig.of(config, stage))
    if state.temperature is not None:
        state.temperature.double()
    losses = []
    for step, (view_a, view_b) in enumerate(batches(config)):
        ids = np.arange(len(view_a)) + step * len(view_a)
        sample_id = torch.from_numpy(ids)
        example_ids = ExampleIds(query=sample_id, key=sample_id)
        objective = state.objective(config, stage, hinge_weight=0.0)
        output = train_step(
            state,
            Store(),
            objective,
            Views(view_a=view_a, view_b=view_b, sample_id=sample_id, ids=ids, example_ids=example_ids),
            step=step,
            learning_rate=plan.learning_rate(step),
            momentum=0.0,
            precision="float32",
        )
        losses.append(output.loss)
    return losses


def losses_of_lightly(config: RunConfig) -> list[float]:
    """Train as lightly's examples/pytorch/simclr.py does."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    tower = towers(config)
    backbone = nn.Sequential(*list(tower.encoder.children())[:-1])
    dim = tower.projection_head[0].in_features
    head = SimCLRProjectionHead(dim, dim, 128).double()
    head.layers.load_state_dict(tower.projection_head.state_dict())
    criterion = NTXentLoss()
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.06)
    losses = []
    for views in batches(config):
        loss = criterion(*(head(backbone(view).flatten(start_dim=1)) for view in views))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of_open_clip(config: RunConfig) -> list[float]:
    """Train by open_clip's loop with its own defaults, except the length of the warmup."""
    from open_clip import ClipLoss
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP
    from open_clip_train.params import parse_args
    from open_clip_train.scheduler import cosine_lr
    from open_clip_train.train import train_one_epoch

    built = towers(config)
    args = parse_args(["--model", "ViT-B-32", "--precision", "fp32", "--device", "cpu"])
    args.rank = args.local_rank = 0
    args.world_size, args.distributed, args.distill, args.wandb = 1, False, False, False
    small = {"layers": 1, "width": 64}
    model = CustomTextCLIP(24, CLIPVisionCfg(**small), CLIPTextCfg(**small, heads=1), output_dict=True)
    model.visual, model.text = (nn.Sequential(*each.children()) for each in built.towers)
    model = model.double()
    # As its main.py: vectors are not decayed; here no matrix has a name that it would except.
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0},
            {"params": [each for each in model.parameters() if each.ndim > 1], "weight_decay": args.wd},
        ],
        lr=args.lr,
        betas=(args.beta1, args.beta2),
        eps=args.eps,
    )
    # Its warmup of w + 1 steps is the one of w steps here.
    scheduler = cosine_lr(optimizer, args.lr, STEPS + 1, 10 * STEPS)
    loss, losses = ClipLoss(), list[float]()
    loss.register_forward_hook(lambda _, __, output: losses.append(output["contrastive_loss"].item()))
    data = SimpleNamespace(set_epoch=lambda _: None, dataloader=_Loader(batches(config)))
    train_one_epoch(model, {"train": data}, loss, 0, optimizer, None, scheduler, None, args)
    return losses


class _Loader(list):
    """Batches with the numbers that open_clip logs."""

    num_batches, num_samples = STEPS, STEPS * ROWS


def losses_of_sentence_transformers(config: RunConfig) -> list[float]:
    """Train by its trainer with its own defaults, except the length of the run and the order of the rows."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.base.modules import InputModule
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments
    from torch.utils.data import SequentialSampler

    (tower,) = towers(config).towers

    class Tokens(InputModule):
        """raycl's tower, of texts that are token ids."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = tower.encoder

        def preprocess(self, inputs: list[str], *_: Any, **__: Any) -> dict[str, Any]:
            return {"input_ids": torch.tensor([[int(each) for each in text.split()] for text in inputs])}

        def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
            return features | {"sentence_embedding": self.encoder(features["input_ids"])}

        def save(self, *_: Any, **__: Any) -> None:
            pass

    class InOrder(DefaultBatchSampler):
        def __init__(self, dataset: Any, batch_size: int, drop_last: bool, **_: Any) -> None:
            super().__init__(SequentialSampler(dataset), batch_size, drop_last)  # pyright: ignore[reportArgumentType]

    model = SentenceTransformer(modules=[Tokens()], device="cpu").double()
    loss, losses = MultipleNegativesRankingLoss(model), list[float]()
    loss.register_forward_hook(lambda _, __, output: losses.append(output.item()))
    columns: dict[str, list[str]] = {"anchor": [], "positive": []}
    for pair in batches(config):
        for texts, rows in zip(columns.values(), pair, strict=True):
            texts += [" ".join(map(str, row)) for row in rows.tolist()]
    with TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder, max_steps=STEPS, batch_sampler=InOrder, use_cpu=True, report_to="none", save_strategy="no"
        )
        SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=Dataset.from_dict(columns), loss=loss
        ).train()
    return losses


PEERS: dict[str, Callable[[RunConfig], list[float]]] = {
    "lightly:simclr": losses_of_lightly,
    "open_clip:vit-b-32": losses_of_open_clip,
    "st:mnrl": losses_of_sentence_transformers,
}


def main() -> None:
    """Print the losses of all libraries, and their versions."""
    with contextlib.redirect_stdout(sys.stderr):  # a trainer prints there
        found = {
            name: {
                "versions": {each: version(each) for each in (*PACKAGES[name], "torch")},
                "losses": [round(each, 12) for each in PEERS[name](configuration(name))],
            }
            for name in PEERS
        }
    print(
        "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items()) + "\n}"
    )


if __name__ == "__main__":
    main()
