"""Text encoders of Hugging Face's ``transformers``, read from a folder."""

import importlib
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from raycl.errors import ConfigError
from raycl.models.packed import PADDING, PackedTokens


@final
class HuggingFaceEncoder(nn.Module):
    """Encode tokens [batch, length] to [batch, dim] with the model in the folder ``path``.

    Nothing is downloaded, and no code that lies in the folder is run. ``pooling`` takes the mean over a row's tokens or its first one;
    ``pretrained=False`` takes the model's shape only and begins untrained. The model's own number
    for padding changes place with 0 (see :class:`~raycl.tokenization.tokenizer.Tokenizer`).

    Raises ``ConfigError`` if ``transformers`` is missing or the folder holds no such model.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        max_length: int,
        path: str,
        pooling: Literal["mean", "cls"] = "mean",
        pretrained: bool = True,
    ) -> None:
        super().__init__()
        if pooling not in ("mean", "cls"):
            raise ConfigError(f"unknown pooling {pooling!r}; give mean or cls")
        self._num_tokens, self._max_length, self._pooling = num_tokens, max_length, pooling
        self.model = _read_model(path, pretrained=pretrained)
        sizes = self.model.config
        self._padding = getattr(sizes, "pad_token_id", None) or PADDING
        longest = _longest_row(self.model, max_length)
        if num_tokens > sizes.vocab_size or max_length > longest:
            raise ConfigError(
                f"the model at {path} knows {sizes.vocab_size} tokens and rows of {longest}, came a tokenizer of "
                f"{num_tokens} and max_length={max_length}; use the folder's tokenizer.json and a smaller max_length"
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return representations [batch, dim]; raises ``ConfigError`` for tokens of another vocabulary."""
        rows = PackedTokens.checked(tokens, num_tokens=self._num_tokens, max_length=self._max_length)
        tokens = tokens[:, : rows.length]
        if self._padding != PADDING:
            moved = torch.where(tokens == self._padding, PADDING, tokens)
            tokens = torch.where(rows.real, moved, self._padding)
        output = self.model(input_ids=tokens, attention_mask=rows.real.long()).last_hidden_state
        return rows.mean(rows.packed(output)) if self._pooling == "mean" else output[:, 0]


def _longest_row(model: Any, default: int) -> int:
    """Return how many tokens of a row the model has places for; RoBERTa's begin behind that of padding."""
    places = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    taken = getattr(places, "padding_idx", None)
    longest = getattr(model.config, "max_position_embeddings", default)
    return longest if taken is None else longest - taken - 1


def _read_model(path: str, *, pretrained: bool) -> Any:
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "encoder.name transformers:PATH needs the package transformers, which is not installed; "
            "pip install 'raycl[transformers]'"
        ) from error
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"there is no model at {path!r} (no config.json); give a folder that save_pretrained wrote"
        )
    try:
        if pretrained:
            model = library.AutoModel.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        else:
            model = library.AutoModel.from_config(
                library.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False),
                trust_remote_code=False,
            )
    except Exception as error:  # whatever a damaged file leads to
        raise ConfigError(
            f"cannot read the model at {path!r}: {' '.join(str(error).split())[:200]}; save it again"
        ) from error
    if getattr(model, "pooler", None) is not None:
        # BERT's extra layer on [CLS]: unused here, and a parameter without gradient would stop DDP.
        model.pooler = None
    return model.float().train()
