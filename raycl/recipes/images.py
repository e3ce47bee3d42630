"""Recipes for images."""

from raycl.config import (
    AugmentConfig,
    DataConfig,
    EncoderConfig,
    OptimizerConfig,
    RunConfig,
    Stage,
)

SMALL = 64  # pixels: up to here the papers take a 3x3 stem, weaker color jitter and no blur


def simclr(image_size: int = 224) -> RunConfig:
    """SimCLR (Chen et al., 2020): the other view among all views of the batch.

    Large images follow the paper's section 2 with the square-root rule of its appendix B.1;
    small ones its appendix B.9 on CIFAR-10 with plain SGD.
    """
    return _small_simclr(image_size) if image_size <= SMALL else _large_simclr(image_size)


def _large_simclr(image_size: int) -> RunConfig:
    return RunConfig(
        recipe="simclr",
        data=DataConfig(image_size=image_size),
        stages=(
            Stage(
                epochs=100,
                batch_size=256,
                temperature=0.1,
                learning_rate=1.2,
                learning_rate_scaling="square_root",
            ),
        ),
    )


def _small_simclr(image_size: int) -> RunConfig:
    return RunConfig(
        recipe="simclr",
        data=DataConfig(image_size=image_size),
        augment=AugmentConfig(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, blur=0.0),
        encoder=EncoderConfig(name="resnet18"),
        optimizer=OptimizerConfig(name="sgd", weight_decay=5e-4),
        stages=(
            Stage(
                epochs=200,
                batch_size=256,
                temperature=0.2,
                learning_rate=0.12,
                warmup_epochs=5.0,
            ),
        ),
    )
