"""Examples and defaults of other libraries: a recipe, and the settings in which they differ from it.

``docs/migration.md`` has the sources of the values, and the settings without a counterpart.
"""

from typing import Any

LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "lightly:simclr": (
        "simclr",
        {
            "precision": "float32",
            "augment.brightness": 0.8,
            "augment.contrast": 0.8,
            "augment.saturation": 0.8,
            "augment.hue": 0.2,
            "augment.blur": 0.0,
            "encoder.name": "resnet18",
            "encoder.stem": "standard",
            "projection_head.batchnorm": "all",
            "batchnorm": "local_view",
            "optimizer.name": "sgd",
            "optimizer.momentum": 0.0,
            "optimizer.weight_decay": 0.0,
            "stages.0.epochs": 10,
            "stages.0.temperature": 0.5,
            "stages.0.learning_rate": 0.06,
            "stages.0.learning_rate_scaling": "none",
            "stages.0.learning_rate_schedule": "constant",
            "stages.0.warmup_epochs": 0.0,
        },
    ),
    "open_clip:vit-b-32": (
        "clip",
        {
            "data.image_size": 224,
            "text.max_length": 77,
            "text.vocabulary_size": 49_408,
            "augment.crop_scale": [0.9, 1.0],
            "augment.flip": 0.0,
            "augment.mean": [0.48145466, 0.4578275, 0.40821073],
            "augment.std": [0.26862954, 0.26130258, 0.27577711],
            "encoder.name": "vit_base_32",
            "encoder.stem": "standard",
            "text_encoder.name": "transformer",
            "text_encoder.kwargs": {
                "dim": 512,
                "num_layers": 12,
                "num_heads": 8,
                "hidden_dim": 2_048,
                "dropout": 0.0,
            },
            "projection_head.dim": 512,
            "optimizer.weight_decay": 0.2,
            "stages.0.epochs": 32,
            "stages.0.batch_size": 64,
            "stages.0.learning_rate": 5e-4,
            "stages.0.learning_rate_scaling": "none",
            "stages.0.warmup_epochs": 3.2,  # the most; 10,000 steps there
        },
    ),
    "st:mnrl": (
        "two_tower",
        {
            "precision": "float32",
            "text.max_length": 512,
            "encoder.name": "transformer",
            "encoder.kwargs": {"dim": 768, "num_layers": 12, "num_heads": 12, "hidden_dim": 3_072},
            "projection_head.dim": 768,
            "optimizer.betas": [0.9, 0.999],
            "optimizer.weight_decay": 0.0,
            "optimizer.max_grad_norm": 1.0,
            "stages.0.epochs": 3,
            "stages.0.batch_size": 8,
            "stages.0.loss": "info_nce",
            "stages.0.learning_rate": 5e-5,
            "stages.0.learning_rate_scaling": "none",
            "stages.0.learning_rate_schedule": "linear",
            "stages.0.warmup_epochs": 0.0,
        },
    ),
}
