"""Recipes for texts, and for pairs with at least one text."""

from raycl.config import (
    AugmentConfig,
    BankConfig,
    DataConfig,
    EncoderConfig,
    HeadConfig,
    MomentumEncoderConfig,
    NegativesConfig,
    OptimizerConfig,
    RunConfig,
    Stage,
    TextAugmentConfig,
    TextConfig,
)

DIM = 256  # output of raycl's text encoders, used as the embedding without a head
WIDE = 1_024
_WIDE_BAG = EncoderConfig(name="bag_of_subwords", kwargs={"dim": WIDE, "hidden_dim": 0})
_NO_WIDE_HEAD = HeadConfig(num_layers=0, dim=WIDE)
_NO_HEAD = HeadConfig(num_layers=0, dim=DIM)
_ADAMW = OptimizerConfig(name="adamw", betas=(0.9, 0.98), weight_decay=0.01)


def of_words(config: RunConfig) -> RunConfig:
    """Return a recipe of sentences with a wide bag of subwords in place of its transformer.

    The bag starts close to TF-IDF and improves on it in a minute on two cores, where a transformer that starts at
    random stays below TF-IDF (STS in ``docs/results.md``).
    """
    (stage,) = config.stages
    stage = stage.model_copy(update={"epochs": 10, "learning_rate": 2e-2, "temperature": 0.03})
    return config.model_copy(
        update={"encoder": _WIDE_BAG, "projection_head": _NO_WIDE_HEAD, "stages": (stage,)}
    )


def of_other_encoder(config: RunConfig) -> RunConfig:
    """Return a recipe of pairs with the learning rate of ``simcse``, for an encoder other than a bag of subwords."""
    (stage,), (of_sentences,) = config.stages, simcse().stages
    stage = stage.model_copy(update={"learning_rate": of_sentences.learning_rate})
    return config.model_copy(update={"stages": (stage,)})


def simcse(image_size: int = 224) -> RunConfig:
    """SimCSE (Gao et al., 2021): classify a sentence under another dropout mask in the batch."""
    return RunConfig(
        recipe="simcse",
        data=DataConfig(kind="text"),
        text=TextConfig(max_length=32),
        encoder=EncoderConfig(name="transformer"),
        projection_head=_NO_HEAD,
        batchnorm="local",
        optimizer=_ADAMW,
        stages=(
            Stage(
                epochs=1,
                batch_size=256,
                loss="info_nce",
                temperature=0.05,
                learning_rate=3e-4,
                learning_rate_scaling="square_root",
                warmup_epochs=0.1,
            ),
        ),
    )


def esimcse(image_size: int = 224) -> RunConfig:
    """ESimCSE (Wu et al., 2022): SimCSE with repeated words and a short queue of negatives."""
    plain = simcse()
    return plain.model_copy(
        update={
            "recipe": "esimcse",
            "text_augment": TextAugmentConfig(repetition=0.32),
            "key": "momentum_encoder",
            "momentum_encoder": MomentumEncoderConfig(momentum=0.995),
            # Two and a half batches, as in the paper.
            "negatives": NegativesConfig(in_batch=True, store="queue", capacity=640),
            "bank": BankConfig(dtype="float16"),
        }
    )


def two_tower(image_size: int = 224) -> RunConfig:
    """Two towers on click logs: classify the clicked document among the batch and skipped documents.

    A wide bag of subwords without hidden layers starts close to TF-IDF, improves on it in minutes,
    and generalizes to other questions (MedQuAD and LiveQA in ``docs/results.md``).
    """
    return RunConfig(
        recipe="two_tower",
        data=DataConfig(kind="pairs"),
        text=TextConfig(max_length=64, max_document_length=512),
        encoder=_WIDE_BAG,
        projection_head=_NO_WIDE_HEAD,
        batchnorm="local",
        optimizer=_ADAMW,
        stages=(
            Stage(
                epochs=10,
                batch_size=256,
                loss="clip",
                temperature=0.05,
                learning_rate=2e-2,
                learning_rate_scaling="square_root",
                warmup_epochs=1.0,
            ),
        ),
    )


def clip(image_size: int = 224) -> RunConfig:
    """CLIP (Radford et al., 2021): classify captions among images and images among captions."""
    is_small = image_size <= 96
    return RunConfig(
        recipe="clip",
        data=DataConfig(kind="image_text", image_size=image_size),
        text=TextConfig(max_length=32),
        # Captions may mention colors, so views have no color jitter.
        augment=AugmentConfig(crop_scale=(0.5, 1.0), flip=0.5, jitter=0.0, grayscale=0.0, blur=0.0),
        encoder=EncoderConfig(name="resnet18" if is_small else "resnet50"),
        text_encoder=EncoderConfig(name="bag_of_subwords"),
        projection_head=HeadConfig(num_layers=1, dim=DIM),
        learn_temperature=True,
        optimizer=OptimizerConfig(name="adamw", betas=(0.9, 0.98), weight_decay=0.1),
        stages=(
            Stage(
                epochs=30,
                batch_size=256,
                loss="clip",
                temperature=0.07,
                learning_rate=2e-3 if is_small else 5e-4,
                learning_rate_scaling="square_root",
                warmup_epochs=1.0,
            ),
        ),
    )


def siglip(image_size: int = 224) -> RunConfig:
    """SigLIP (Zhai et al., 2023): tell for each image and each caption whether they are a pair.

    Temperature and bias start at the paper's values, all else is ``clip``.
    """
    base = clip(image_size)
    stage = base.stages[0].model_copy(update={"loss": "siglip", "temperature": 0.1})
    return base.model_copy(update={"recipe": "siglip", "stages": (stage,)})
