"""Which columns a run reads."""

from raycl.config import RunConfig
from raycl.data.columns import ColumnNames

_PAIRS = ("query", "document", "negatives", "query_id", "document_id", "negative_ids")
_ROLES = {"image": ("image",), "text": ("text",), "image_text": ("image", "caption"), "pairs": _PAIRS}


def column_names(config: RunConfig) -> ColumnNames:
    """Return the columns to read; those of another kind of samples are left alone."""
    named = config.data.columns.model_dump()
    unused = {role for roles in _ROLES.values() for role in roles} - set(_ROLES[config.data.kind])
    return ColumnNames(**named | dict.fromkeys(unused))
