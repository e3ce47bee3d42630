"""Export to timm: its networks load the exported weights and compute raycl's vectors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torchvision.models import VisionTransformer

from raycl.errors import ConfigError
from raycl.inference.encoder import load_encoder
from raycl.inference.export import export_encoder
from raycl.models.specs import HeadSpec
from tests.encoders import write_images_run
from tests.images import photograph
from tests.test_export import assert_same_images

timm = pytest.importorskip("timm")

NETWORKS: dict[str, dict[str, Any]] = {
    "resnet18": {"stem": "standard"},
    "resnet50": {"stem": "standard", "representation_dim": 2048, "channels": 1},
    "vit_tiny": {"representation_dim": 192},  # patches of 4 pixels
    "vit_base_32": {"stem": "standard", "width": 0.25, "representation_dim": 192},
    "vit_small": {"stem": "standard", "width": 0.5, "representation_dim": 192, "channels": 1},
}


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny"])
def test_timm_has_the_layer_that_whitens(name: str, tmp_path: Path) -> None:
    run = write_images_run(tmp_path / "run", name, whitened=True, **NETWORKS[name])
    theirs = eval(export_encoder(run, str(tmp_path / "out"), to="timm"), {"timm": timm})
    assert_same_images(theirs, run)


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [
        # Heads do not depend on the network: those of the slowest one are drills.
        pytest.param(name, head, marks=[pytest.mark.drill] * (name == "resnet50" and head is not None))
        for name in NETWORKS
        for head in (None, 0, 1)
    ],
)
def test_timm_gives_the_same_vectors_as_raycl(name: str, num_layers: int | None, tmp_path: Path) -> None:
    dim = NETWORKS[name].get("representation_dim", 512)
    head = None if num_layers is None else HeadSpec(num_layers=num_layers, dim=7 if num_layers else dim)
    run = write_images_run(tmp_path / "run", name, head=head, **NETWORKS[name])
    code = export_encoder(run, str(tmp_path / "out"), to="timm")
    assert code == f"timm.create_model('local-dir:{tmp_path / 'out'}', pretrained=True)"
    theirs = eval(code, {"timm": timm})
    assert_same_images(theirs, run)
    encoder: Any = load_encoder(run)
    kind = "L" if encoder.spec.channels == 1 else "RGB"
    images = [Image.fromarray(each).convert(kind) for each in (photograph(), photograph()[:60, :90])]
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    with torch.inference_mode():
        found = theirs.eval()(torch.stack([prepare(image) for image in images]))
    assert F.cosine_similarity(found, encoder.encode(images)).min() >= 0.999  # resized by other code


def test_timm_adds_a_classifier_to_an_exported_encoder(tmp_path: Path) -> None:
    run = write_images_run(tmp_path / "run", "vit_tiny", representation_dim=192)
    export_encoder(run, str(tmp_path / "out"), to="timm")
    network = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, num_classes=10)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        representation = network.eval().forward_head(network.forward_features(images), pre_logits=True)
        torch.testing.assert_close(representation, load_encoder(run)(images), rtol=0, atol=1e-5)  # pyright: ignore[reportArgumentType]
    assert network(images).shape == (3, 10)


def own_vit(**_: Any) -> nn.Module:
    vit = VisionTransformer(32, 8, 2, 2, 64, 128)
    vit.heads = nn.Identity()  # type: ignore[assignment]
    return vit


def test_a_vit_of_the_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYCL_TRUSTED", "tests")
    run = write_images_run(tmp_path / "run", "tests.test_export_timm:own_vit", representation_dim=64)
    for package in ("timm", "torchvision"):
        message = f"to {package}: the network tests.test_export_timm:own_vit is your own; load it with raycl"
        with pytest.raises(ConfigError, match=message):
            export_encoder(run, str(tmp_path / "out"), to=package)
