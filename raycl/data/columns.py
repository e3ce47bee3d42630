"""The columns of a dataset: their roles, and the types of their values."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import pyarrow as pa

from raycl.data.images import is_image_struct
from raycl.data.labels import are_numbers, may_be_fractions
from raycl.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """The names of columns by role; ``None`` for absent contents, and for optional columns of the usual name.

    A dataset holds an ``image``, a ``text``, an ``image`` with its ``caption``, or pairs of ``query`` and
    ``document``. A text or a caption may be a list of texts with the same meaning. Pairs may have a list
    of ``negatives``, and ids for queries, documents and negatives. Rows of any kind may have a ``weight``.
    """

    image: str | None = "image"
    text: str | None = None
    caption: str | None = None
    query: str | None = None
    document: str | None = None
    negatives: str | None = None
    query_id: str | None = None
    document_id: str | None = None
    negative_ids: str | None = None
    weight: str | None = None
    label: str | None = None
    sample_id: str | None = None

    _usual: ClassVar[tuple[str, ...]] = ("label", "sample_id")  # read if present
    _usual_of_pairs: ClassVar[tuple[str, ...]] = ("negatives", "query_id", "document_id", "negative_ids")

    @property
    def contents(self) -> dict[str, str]:
        """The columns of contents by role; roles have the names of the fields."""
        named = {role: getattr(self, role) for role in _KINDS}
        return {role: name for role, name in named.items() if name is not None}

    @property
    def asked(self) -> dict[str, str]:
        """All named columns, by the name of the field."""
        return {role: name for role, name in vars(self).items() if name is not None}

    @property
    def usual(self) -> tuple[str, ...]:
        """The columns that are read if present, under the names of their roles."""
        of_pairs = self._usual_of_pairs if self.query is not None else ()
        return tuple(role for role in (*self._usual, *of_pairs) if getattr(self, role) is None)

    def of_content(self, role: str, *ids: str) -> "ColumnNames":
        """Return the columns without any content but one, under the name of its role if unnamed, and ids.

        Raises:
            ConfigError: Another content is named.
        """
        others = [each for each in self.contents if each not in (role, *ids)]
        for each in others:
            if getattr(self, each) != getattr(ColumnNames(), each):
                raise ConfigError(
                    f"data.columns.{each} has no effect, since the encoder takes {role}s, from data.columns.{role}; "
                    "remove it"
                )
        return replace(self, **{role: getattr(self, role) or role}, **dict.fromkeys(others))

    def found_in(self, names: Sequence[str], *, where: str) -> "ColumnNames":
        """Return the columns to read from a dataset with columns ``names``.

        Raises:
            DataError: A named column does not exist.
        """
        for role, name in self.asked.items():
            if name not in names:
                given = {each: each if each == each.strip() else f'"{each}"' for each in names}
                similar = [given[each] for each in names if each.strip().lower() == name.lower()]
                setting = shlex.quote(f"data.columns.{role}={similar[0] if similar else 'NAME'}")
                raise DataError(
                    f"{where} has no column {name!r}; it has {', '.join(given.values())}: "
                    f"name the right one with --set {setting}"
                )
        return replace(self, **{role: role for role in self.usual if role in names})

    def check_types(self, types: Mapping[str, pa.DataType], *, where: str) -> None:
        """Raise ``DataError`` unless the type of each column fits its role."""
        for role, name in self.contents.items():
            is_right, requirement = _KINDS[role]
            if not is_right(types[name]):
                raise DataError(
                    f"{requirement}, column {name!r} of {where} holds {types[name]}; "
                    f"name another with --set data.columns.{role}=NAME"
                )
        if self.label is not None:
            self.check_label_type(types[self.label], where=where)

    @property
    def labels_are_grades(self) -> bool:
        """Whether labels are grades of relevance, of pairs or of judgments by id, and not classes."""
        of_judgments = self.document_id is not None and self.image is None and self.text is None
        return self.query is not None or of_judgments

    def can_be_label(self, kind: pa.DataType) -> bool:
        """Whether a column of this type may hold labels: integers, booleans, text, or floats or decimals of integers.

        The values of floats and decimals are checked when the data are found.
        """
        return is_text(kind) or are_numbers(kind) or may_be_fractions(kind)

    def check_label_type(self, kind: pa.DataType, *, where: str) -> None:
        """Raise ``DataError`` unless the type is one of labels."""
        if not self.can_be_label(kind):
            raise self.label_error(kind, where=where)

    def label_error(self, found: object, *, where: str) -> DataError:
        """Return the error of a column that holds other values than labels."""
        return DataError(
            f"labels must be integers or text, column {self.label!r} of {where} holds "
            f"{found}; name another with --set data.columns.label=NAME"
        )


@final
class UnlabeledColumnNames(ColumnNames):
    """The columns of rows whose labels have no meaning: a column ``label`` is not read."""

    _usual: ClassVar[tuple[str, ...]] = ("sample_id",)


@final
class OptionalLabelColumnNames(ColumnNames):
    """The columns of rows that may lack the named column of labels, which other rows have."""

    def found_in(self, names: Sequence[str], *, where: str) -> ColumnNames:
        """Return the columns to read; raises ``DataError`` if another named column does not exist."""
        if self.label in names:
            return ColumnNames(**vars(self)).found_in(names, where=where)
        return UnlabeledColumnNames(**vars(self) | {"label": None}).found_in(names, where=where)


@final
class ColumnNamesWithoutNegatives(ColumnNames):
    """The columns of pairs without their explicit negatives: columns of the usual names are not read."""

    _usual_of_pairs: ClassVar[tuple[str, ...]] = ("query_id", "document_id")


@final
class CorpusColumnNames(ColumnNames):
    """The columns of texts of which a corpus has one or more."""

    _usual: ClassVar[tuple[str, ...]] = ()
    _usual_of_pairs: ClassVar[tuple[str, ...]] = ()

    def found_in(self, names: Sequence[str], *, where: str) -> ColumnNames:
        """Return the columns that exist; raises ``DataError`` if there is none."""
        if found := {role: name for role, name in self.contents.items() if name in names}:
            return CorpusColumnNames(**{"image": None, **found})
        raise DataError(
            f"{where} has none of the columns {', '.join(self.contents.values())}; it has {', '.join(names)}: "
            "rename its column of texts to text"
        )


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds strings."""
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_string = pa.types.is_string(values) or pa.types.is_large_string(values)
    return is_string or pa.types.is_string_view(values) or pa.types.is_null(values)


def check_labels(columns: ColumnNames) -> None:
    """Raise if a dataset has both labels and a list of negatives or weights."""
    if columns.label is not None and columns.negatives is not None:
        raise DataError(
            f"the dataset has labels ({columns.label!r}) and lists of negatives ({columns.negatives!r}): "
            "remove one of the two columns"
        )
    if columns.label is not None and columns.weight is not None:
        raise DataError(
            f"the dataset has labels ({columns.label!r}), so that rows become pairs, which have no weight "
            f"({columns.weight!r}); remove data.columns.weight, or give pairs without labels"
        )


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    is_binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return is_binary or pa.types.is_fixed_size_binary(kind) or pa.types.is_null(kind)  # null: an empty file


def _is_image(kind: pa.DataType) -> bool:
    return _is_bytes(kind) or is_image_struct(kind) or is_text(kind)


def _is_one_text(kind: pa.DataType) -> bool:
    return is_text(kind) or _is_bytes(kind)  # UTF-8 that Arrow did not check


def _are_texts(kind: pa.DataType) -> bool:
    return pa.types.is_null(kind) or (is_list(kind) and _is_one_text(kind.value_type))  # type: ignore[attr-defined]


def _is_one_text_or_more(kind: pa.DataType) -> bool:
    return _is_one_text(kind) or _are_texts(kind)


def _is_id(kind: pa.DataType) -> bool:
    return is_text(kind) or is_number(kind)  # pandas makes floats of integers beside a missing one


def _are_ids(kind: pa.DataType) -> bool:
    return pa.types.is_null(kind) or (is_list(kind) and _is_id(kind.value_type))  # type: ignore[attr-defined]


def is_number(kind: pa.DataType) -> bool:
    """Whether a column holds integers, floating-point numbers or decimals."""
    return pa.types.is_integer(kind) or may_be_fractions(kind)


# The accepted types of each role, and the message for other types.
_KINDS: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "image": (_is_image, "images must be encoded bytes, structs of bytes and path, or paths"),
    "text": (_is_one_text_or_more, "texts must be strings, or lists of strings with the same meaning"),
    "caption": (_is_one_text_or_more, "captions must be strings, or lists of strings"),
    "query": (_is_one_text, "queries must be strings"),
    "document": (_is_one_text, "documents must be strings"),
    "negatives": (_are_texts, "negatives must be lists of strings"),
    "query_id": (_is_id, "ids must be numbers or text"),
    "document_id": (_is_id, "ids must be numbers or text"),
    "negative_ids": (_are_ids, "ids of negatives must be lists of numbers or text"),
    "weight": (is_number, "weights must be numbers"),
}
