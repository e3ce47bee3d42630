"""Recipes for images."""

from typing import Any

from raycl.config import (
    AugmentConfig,
    BankConfig,
    DataConfig,
    EncoderConfig,
    HeadConfig,
    MomentumEncoderConfig,
    NegativesConfig,
    OptimizerConfig,
    PredictionHeadConfig,
    RunConfig,
    Stage,
)

SMALL = 64  # pixels; up to this size the papers use a 3x3 stem, weaker color jitter and no blur

# The views of InstDisc and MoCo v1: all images jittered, none blurred.
_FIRST_VIEWS = AugmentConfig(
    crop_scale=(0.2, 1.0), jitter=1.0, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.4, blur=0.0
)
_LINEAR = HeadConfig(num_layers=1)

# Of the recipes that train small images with Muon without a GPU
_SIMCLR_HEADS = ("simclr", "dcl", "sogclr", "supcon")
_MUON_RATES = {"simclr": 0.04, "dcl": 0.04, "sogclr": 0.04, "supcon": 0.04, "nnclr": 0.04}
_MUON_RATES |= {"moco_v2": 0.02, "clip": 0.02, "siglip": 0.02}


def for_cpu(config: RunConfig) -> RunConfig:
    """Return a recipe with the encoder, views and optimizer that train small images best in minutes on two cores.

    A ResNet-10 of half width whose stem halves the image takes a twentieth of the time of the papers' ResNet-18. The
    recipes of ``_MUON_RATES`` train with Muon, which learns more in the same steps than SGD or AdamW. Their
    representations are whitened, and the head of SimCLR and its variants is wider than this encoder's representation;
    captions have more regularization instead. Weight decay keeps the steps from becoming ever smaller than the growing
    weights. Other encoders, and images that are large or below 24 pixels, stay unchanged.
    """
    size, rate = config.data.image_size, _MUON_RATES.get(config.recipe)
    if config.encoder.name != "resnet18" or size < 24:
        return config
    small = {"name": "resnet10", "stem": "half" if size <= SMALL else "standard", "width": 0.5}
    if config.data.kind == "image_text":
        config = _regularized(config)
    else:
        small |= {"whitening": rate and 3.0}
        augment = config.augment.model_copy(update={"crop_scale": (0.2, 1.0)})
        config = config.model_copy(update={"augment": augment})
    if config.recipe in _SIMCLR_HEADS:
        head = config.projection_head.model_copy(update={"hidden_dim": 1_024})
        config = config.model_copy(update={"projection_head": head})
    config = config.model_copy(update={"encoder": config.encoder.model_copy(update=small)})
    return config if rate is None else _with_muon(config, rate)


def _regularized(config: RunConfig) -> RunConfig:
    """Return a recipe of captioned images with stronger views, and dropout and deletion of words."""
    views = {"crop_scale": (0.4, 1.0), "jitter": 0.8, "hue": 0.02}
    views |= dict.fromkeys(("brightness", "contrast", "saturation"), 0.3)
    return config.model_copy(
        update={
            "augment": config.augment.model_copy(update=views),
            "text_augment": config.text_augment.model_copy(update={"deletion": 0.15}),
            "text_encoder": config.text_encoder.model_copy(update={"kwargs": {"dropout": 0.2}}),
        }
    )


def _with_muon(config: RunConfig, learning_rate: float) -> RunConfig:
    decay = 0.1 if config.data.kind == "image_text" else 0.03
    optimizer = OptimizerConfig(name="muon", momentum=0.95, betas=(0.9, 0.95), weight_decay=decay)
    rate = {"learning_rate": learning_rate, "learning_rate_scaling": "square_root"}
    (stage,) = config.stages
    return config.model_copy(update={"optimizer": optimizer, "stages": (stage.model_copy(update=rate),)})


def for_gray(config: RunConfig) -> RunConfig:
    """Return a recipe with views of small gray images, such as glyphs and silhouettes.

    They are rotated by up to 15 degrees and never flipped, since a mirrored glyph is another one. Images above
    64 pixels stay unchanged.
    """
    if config.data.image_size > SMALL:
        return config
    views = {"crop_scale": (0.4, 1.0), "flip": 0.0, "rotation": 15.0}
    return config.model_copy(update={"augment": config.augment.model_copy(update=views)})


def simclr(image_size: int = 224) -> RunConfig:
    """SimCLR (Chen et al., 2020): classify the other view among all views of the batch.

    Large images follow the paper's section 2 with the square-root rule of its appendix B.1;
    small images follow appendix B.9 on CIFAR-10, with plain SGD.
    """
    return _small_simclr(image_size) if image_size <= SMALL else _large_simclr(image_size)


def dcl(image_size: int = 224) -> RunConfig:
    """DCL (Yeh et al., 2022): SimCLR without the positive in the denominator, for small batches.

    Temperatures, epochs, and the learning rate of small images are the paper's, all else is ``simclr``.
    """
    if image_size <= SMALL:
        return _simclr_with("dcl", image_size, epochs=200, temperature=0.07, learning_rate=0.03)
    return _simclr_with("dcl", image_size, epochs=200, temperature=0.1)


def sogclr(image_size: int = 224) -> RunConfig:
    """SogCLR (Yuan et al., 2022): SimCLR whose negatives are the whole data set, for small batches.

    The weight of the stored partition functions, 1 - gamma, is the paper's, all else is ``simclr``.
    """
    negatives = NegativesConfig(store="partition", bank_momentum=0.1)
    return _simclr_with("gcl", image_size).model_copy(update={"recipe": "sogclr", "negatives": negatives})


def supcon(image_size: int = 224) -> RunConfig:
    """SupCon (Khosla et al., 2020): SimCLR with labels; all views of a class are positives.

    The temperature is the paper's, all else is ``simclr``.
    """
    return _simclr_with("supcon", image_size, temperature=0.1)


def moco_v1(image_size: int = 224) -> RunConfig:
    """MoCo (He et al., 2020): classify the momentum encoder's key among a queue of keys.

    Large images follow the paper's section 4. Small images use the settings of the authors'
    CIFAR-10 demonstration: a short queue, a faster momentum encoder, more weight decay.
    """
    return _moco(
        image_size,
        recipe="moco_v1",
        augment=_FIRST_VIEWS,
        head=_LINEAR,
        temperature=0.07,
        learning_rate_schedule="step",
    )


def moco_v2(image_size: int = 224) -> RunConfig:
    """MoCo v2 (Chen et al., 2020b): MoCo with an MLP head, blur and a cosine schedule.

    The head has no BatchNorm, as in the authors' code. Small images are as in ``moco_v1``.
    """
    is_small = image_size <= SMALL
    views = {"crop_scale": (0.2, 1.0), "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
    return _moco(
        image_size,
        recipe="moco_v2",
        augment=AugmentConfig(**views, blur=0.0 if is_small else 0.5),
        head=HeadConfig(num_layers=2, batchnorm=False),
        temperature=0.1 if is_small else 0.2,
        learning_rate_schedule="cosine",
    )


def moco_v3(image_size: int = 224) -> RunConfig:
    """MoCo v3 (Chen et al., 2021): a ViT, whose prediction of each view is classified among the keys of the batch.

    Large images follow the paper's section 5 with the views of SimCLR. Small images use a batch, heads and an
    encoder of their size.
    """
    is_small = image_size <= SMALL
    return RunConfig(
        recipe="moco_v3",
        data=DataConfig(image_size=image_size),
        augment=AugmentConfig(
            brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, blur=0.0 if is_small else 0.5
        ),
        encoder=EncoderConfig(name="vit_tiny" if is_small else "vit_small", freeze_patches=True),
        projection_head=HeadConfig(num_layers=3, hidden_dim=1_024 if is_small else 4_096, dim=256),
        prediction_head=PredictionHeadConfig(num_layers=2, hidden_dim=1_024 if is_small else 4_096),
        key="momentum_encoder",
        momentum_encoder=MomentumEncoderConfig(momentum=0.99, final_momentum=1.0),
        optimizer=OptimizerConfig(name="adamw", weight_decay=0.1),
        stages=(
            Stage(
                epochs=300,
                batch_size=256 if is_small else 4_096,
                loss="info_nce",
                temperature=0.2,
                learning_rate=1.5e-4,
                warmup_epochs=40.0,
            ),
        ),
    )


def nnclr(image_size: int = 224) -> RunConfig:
    """NNCLR (Dwibedi et al., 2021): classify the queue's nearest row of a view among the predictions of the other.

    Large images follow the paper's section 4. Small images are as in ``simclr``, with heads and a queue of their
    size.
    """
    is_small = image_size <= SMALL
    stage: dict[str, Any] = {}
    if not is_small:
        stage = {
            "epochs": 1_000,
            "batch_size": 4_096,
            "learning_rate": 0.3,
            "learning_rate_scaling": "linear",
        }
    heads = {
        "projection_head": HeadConfig(num_layers=3, hidden_dim=512 if is_small else 2_048, dim=256),
        "prediction_head": PredictionHeadConfig(num_layers=2, hidden_dim=1_024 if is_small else 4_096),
    }
    negatives = NegativesConfig(store="queue", capacity=4_096 if is_small else 98_304)
    base = _simclr_with("nnclr", image_size, **stage)
    return base.model_copy(update={"negatives": negatives, **heads})


def instance_discrimination(image_size: int = 224) -> RunConfig:
    """InstDisc (Wu et al., 2018): distinguish the sample's slot of a memory bank from random slots.

    For small images the slots start at embeddings and the normalizing constant is updated: with random
    slots and the constant of the first batch, as in the paper, short runs do not learn.
    """
    is_small = image_size <= SMALL
    return RunConfig(
        recipe="instance_discrimination",
        data=DataConfig(image_size=image_size),
        augment=_FIRST_VIEWS,
        encoder=EncoderConfig(name="resnet18" if is_small else "resnet50"),
        projection_head=_LINEAR,
        key="memory_bank",
        negatives=NegativesConfig(
            store="memory_bank",
            bank_init="encoder" if is_small else "random",
            normalizer_momentum=0.9 if is_small else None,
        ),
        batchnorm="local",
        optimizer=OptimizerConfig(name="sgd", weight_decay=5e-4 if is_small else 1e-4),
        stages=(
            Stage(
                epochs=200,
                batch_size=256,
                loss="nce",
                temperature=0.1 if is_small else 0.07,
                learning_rate=0.06 if is_small else 0.03,
                learning_rate_schedule="step",
                warmup_epochs=0.0,
            ),
        ),
    )


def _moco(
    image_size: int,
    *,
    recipe: str,
    augment: AugmentConfig,
    head: HeadConfig,
    temperature: float,
    learning_rate_schedule: str,
) -> RunConfig:
    is_small = image_size <= SMALL
    return RunConfig(
        recipe=recipe,
        data=DataConfig(image_size=image_size),
        augment=augment,
        encoder=EncoderConfig(name="resnet18" if is_small else "resnet50"),
        projection_head=head,
        key="momentum_encoder",
        momentum_encoder=MomentumEncoderConfig(momentum=0.99 if is_small else 0.999),
        negatives=NegativesConfig(in_batch=False, store="queue", capacity=4_096 if is_small else 65_536),
        # 256 float16 keys fit inside the call to the actor: half the time, half the memory.
        bank=BankConfig(dtype="float16"),
        batchnorm="shuffled",
        optimizer=OptimizerConfig(name="sgd", weight_decay=5e-4 if is_small else 1e-4),
        stages=(
            Stage(
                epochs=200,
                batch_size=256,
                loss="info_nce",
                temperature=temperature,
                learning_rate=0.03,
                learning_rate_schedule=learning_rate_schedule,  # pyright: ignore[reportArgumentType]
                warmup_epochs=0.0,
            ),
        ),
    )


def _simclr_with(loss: str, image_size: int, **stage: Any) -> RunConfig:
    base = simclr(image_size)
    changed = base.stages[0].model_copy(update={"loss": loss, **stage})
    return base.model_copy(update={"recipe": loss, "stages": (changed,)})


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
