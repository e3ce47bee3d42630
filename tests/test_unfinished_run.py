"""The encoder of an unfinished run comes from its last checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raycl
from raycl.config import RunConfig
from raycl.config.overrides import config_to_yaml
from raycl.errors import ConfigError, RayclError, StorageError
from raycl.inference.encoder import load_checkpoint_encoder, read_encoders
from raycl.inference.preflight import check_inputs
from raycl.models.build import build_encoder, build_towers, encoder_specs, save_towers
from raycl.models.encoder_io import ImageEncoder
from raycl.models.momentum import MomentumEncoder
from raycl.models.registry import OWN
from raycl.models.towers import Towers
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.training.preflight import describe_data, validate_run
from tests import pairs
from tests.pairs import vocabulary
from tests.settings import override_active
from tests.towers import save, trained

HEAD = {"projection_head.num_layers": 2, "projection_head.dim": 12, "projection_head.batchnorm": True}


def of_images(name: str, **settings: Any) -> RunConfig:
    small = {"encoder.name": "resnet10", "encoder.width": 0.125, "data.channels": 1, "projection_head.dim": 8}
    return override_active(recipe(name, image_size=16), small, settings)


def write_run(folder: Path, config: RunConfig, towers: Towers, *steps: int) -> str:
    """Write the files of an unfinished run, with a checkpoint after each of these steps."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config_to_yaml(config))
    if config.has_texts:
        (folder / "tokenizer.json").write_text(vocabulary().tokenizer.to_json())
    learner: dict[str, Any] = {"tower": towers.state_dict()}
    if config.key == "momentum_encoder":
        # The momentum encoder differs and is not a result.
        learner["momentum_encoder"] = MomentumEncoder(trained(config, seed=7)).state_dict()
    if config.ema_decay is not None:
        # The average is the result, and the last weights are not.
        learner = {"ema": MomentumEncoder(towers).state_dict(), "tower": trained(config, seed=8).state_dict()}
    for step in steps:
        checkpoint = folder / "checkpoints" / f"step-{step:08d}-evaluated"
        checkpoint.mkdir(parents=True)
        torch.save({"learner": learner if step == steps[-1] else {}}, checkpoint / "state.pt")
        latest = {
            "checkpoint_results": [],
            "latest_checkpoint_result": {"checkpoint_dir_name": checkpoint.name},
        }
        (folder / "checkpoints" / "checkpoint_manager_snapshot.json").write_text(json.dumps(latest))
    return str(folder)


def representations(run: str, side: Any) -> Tensor:
    encoder = raycl.load_encoder(run, side=side)
    if isinstance(encoder, ImageEncoder):
        images = torch.randint(
            256, (3, 16, 16, encoder.spec.channels), generator=torch.Generator().manual_seed(1)
        )
        return encoder.encode(images.byte())
    return encoder.encode(["a text", "and another one"])


@pytest.mark.parametrize(
    "config",
    [
        of_images("simclr"),
        of_images("simclr", batchnorm="group"),
        of_images("moco_v2"),
        pairs.small_config("simcse"),
        pairs.small_config(settings=HEAD),
        pairs.small_config(settings={"separate_towers": True, **HEAD}),
        pairs.small_config("clip"),
        of_images("simclr", ema_decay=0.999),
        pairs.small_config(settings={"separate_towers": True, "ema_decay": 0.999, **HEAD}),
    ],
    ids=["simclr", "group norm", "moco", "simcse", "one tower", "two towers", "clip", "average", "averages"],
)
def test_the_last_checkpoint_gives_the_encoder_that_a_finished_run_would_save(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = tmp_path / "finished"
    unfinished = write_run(tmp_path / "unfinished", config, save(config, finished), 5, 12)
    check_inputs(unfinished)
    for side in ("query", "key"):
        (saved,), (restored,) = (read_encoders(run, [side]) for run in (str(finished), unfinished))
        assert saved.spec == restored.spec
        assert torch.equal(representations(str(finished), side), representations(unfinished, side))
    lines = capsys.readouterr().err.splitlines()
    assert set(lines) == {f"{unfinished} has not finished: using its checkpoint after step 12"}


def test_a_checkpoint_may_be_given_in_place_of_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = pairs.small_config(settings={"separate_towers": True, **HEAD})
    best, last = trained(config, seed=1), trained(config, seed=2)
    write_run(tmp_path / "best", config, best, 5)
    run = Path(write_run(tmp_path / "run", config, last, 12))
    (tmp_path / "best" / "checkpoints" / "step-00000005-evaluated").rename(
        run / "checkpoints" / "step-00000005"
    )
    save(config, run)  # the encoder of the last step
    checkpoint = str(run / "checkpoints" / "step-00000005")
    check_inputs(checkpoint)
    for side in ("query", "key"):
        assert torch.equal(
            representations(checkpoint, side),
            representations(write_run(tmp_path / side, config, best, 5), side),
        )
        assert not torch.equal(representations(checkpoint, side), representations(str(run), side))
    assert str(run) not in capsys.readouterr().err
    with pytest.raises(StorageError, match="found no encoder"):
        check_inputs(str(run / "checkpoints"))


def test_a_truncated_list_of_checkpoints_is_replaced_by_its_copy(tmp_path: Path) -> None:
    config = of_images("simclr")
    run = write_run(tmp_path / "run", config, trained(config), 5)
    listed = tmp_path / "run" / "checkpoints" / "checkpoint_manager_snapshot.json"
    result = {"checkpoint_dir_name": "step-00000005-evaluated"}
    copy = {"checkpoint_results": [result], "latest_checkpoint_result": result}
    (listed.parent / "checkpoint_list.json").write_text(json.dumps(copy))
    listed.write_text('{"latest')
    assert isinstance(raycl.load_encoder(run), ImageEncoder)


def test_a_users_own_module_must_be_passed_again(tmp_path: Path) -> None:
    config = of_images("simclr")
    linear, other = nn.Linear(256, 24), nn.Linear(256, 24)
    towers = build_towers(config, None, nn.Sequential(nn.Flatten(), linear))
    run = write_run(tmp_path / "run", config, towers, 5)
    with pytest.raises(
        StorageError, match="do not fit the network.*network of your own, pass it as network="
    ):
        raycl.load_encoder(run)
    with pytest.raises(StorageError, match="do not fit the network.*pass the same one"):
        raycl.load_encoder(run, network=nn.Sequential(nn.Flatten(), nn.Linear(256, 20)))
    encoder = raycl.load_encoder(run, network=nn.Sequential(nn.Flatten(), other))
    assert torch.equal(next(encoder.parameters()), linear.weight)
    assert not torch.equal(other.weight, linear.weight)  # a copy was loaded
    assert encoder.spec.representation_dim == 24


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_users_own_module_with_the_names_and_shapes_of_the_built_one_must_be_passed_again(
    is_finished: bool, named: bool, tmp_path: Path
) -> None:
    config = of_images("simclr")
    (spec,) = encoder_specs(config, None)
    own = build_encoder(config, spec, None)
    towers = build_towers(config, None, own)
    run = write_run(tmp_path / "run", config, towers, 5)
    if is_finished:
        save_towers(towers, config, None, Place(run), own=True)
    else:
        described = describe_data([], [9], None, streamed=False, own_network=True)
        (tmp_path / "run" / "data.json").write_text(json.dumps(described))
    asked = f"{run}/checkpoints/step-00000005-evaluated" if named else run
    with pytest.raises(StorageError, match="trained a network of your own; pass it as network= in Python"):
        raycl.load_encoder(asked)
    with pytest.raises(ConfigError, match="trained a network of your own, which no other package knows"):
        raycl.export_encoder(asked, tmp_path / "exported")
    with pytest.raises(
        ConfigError, match="^the run trained a network of its user's own.*by --id or --vector"
    ):
        load_checkpoint_encoder(asked)
    with pytest.raises(ConfigError, match=r"and --resume would build resnet10; pass the network as encoder="):
        validate_run(config, output=run, resume=True).__enter__()
    assert raycl.load_encoder(asked, network=own).spec.name == OWN


def test_untrusted_code_and_an_unknown_side_are_refused(tmp_path: Path) -> None:
    config = of_images("simclr", **{"encoder.name": "tests.cluster.networks:small"})
    plain = of_images("simclr")
    run = write_run(tmp_path / "run", config, trained(plain), 5)
    with pytest.raises(ConfigError, match="asks to import 'tests.cluster.networks'"):
        raycl.load_encoder(run, trusted=[])
    with pytest.raises(ConfigError, match="unknown side 'left'"):
        raycl.load_encoder(run, side="left")  # pyright: ignore[reportArgumentType]


def test_a_run_without_a_checkpoint_has_no_encoder(tmp_path: Path) -> None:
    config = of_images("simclr")
    run = write_run(tmp_path / "run", config, trained(config))
    for look in (raycl.load_encoder, check_inputs):
        with pytest.raises(RayclError, match=r"found no encoder at .* \(no encoder.json, no checkpoint\)"):
            look(run)
