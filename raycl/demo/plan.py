"""The plan of the demo, checked before torch is imported and Ray starts."""

from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.demo.digits import ANGLES, CANVAS
from raycl.errors import ConfigError
from raycl.gpus import cpu_has_bfloat16
from raycl.recipes import recipe
from raycl.records import CONFIG
from raycl.storage import Place

RUN = "run"


def plan_demo(output: str, *, workers: int, epochs: int) -> RunConfig:
    """Check the output, and return the configuration of the run below it.

    Raises ``ConfigError`` if it holds an earlier demo, or ``StorageError``.
    """
    config = _config(workers=workers, epochs=epochs)
    place = Place(output)
    if (place / RUN / CONFIG).exists():
        raise ConfigError(f"{output} holds an earlier demo; give another --output or remove it")
    place.check_writable()
    return config


def _config(*, workers: int, epochs: int) -> RunConfig:
    """Return SimCLR for the digits: a small ResNet; crops, angles and contrast, no flips."""
    return override(
        recipe("simclr", image_size=CANVAS, on_cpu=True),
        {
            "workers": workers,
            "precision": "bfloat16" if cpu_has_bfloat16() else "float32",
            "data.channels": 1,
            "augment.crop_scale": [0.4, 1.0],
            "augment.flip": 0.0,
            "augment.rotation": ANGLES[1],
            "stages.0.epochs": epochs,
            "stages.0.batch_size": max(workers, 128 // workers * workers),
            "stages.0.temperature": 0.15,
            "evaluation.num_test": 500,
        },
    )
