"""Reading and writing of settings as YAML and ``key.path=value``, with one-line errors."""

import ast
import copy
import difflib
import inspect
import json
import math
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from raycl.arguments import check_type
from raycl.config import RunConfig, Stage
from raycl.config.conditions import active_settings, flat, leaves, why_inactive
from raycl.config.run import LENIENT, TRAINED
from raycl.config.schema import Section, ViewsConfig, check_text_keys
from raycl.errors import ConfigError

MOST_VALUES = 100_000
_MOST_PATHS = 3  # that an error names for one unknown setting
_COMMENT_COLUMN, _COMMENT_WIDTH = 36, 90
# Names and values of older versions, in the order of their replacement.
RENAMED = {
    "recipe=image_text": "recipe=clip",
    "data.stored_size": "data.decode_size",
    "data.shuffle_rows": "data.shuffle_buffer_size",
    "data.max_bad_fraction": "data.max_invalid_fraction",
    "text.num_texts": "text.tokenizer_train_size",
    "encoder.arguments": "encoder.kwargs",
    "text_encoder.arguments": "text_encoder.kwargs",
    "key=slot": "key=memory_bank",
    "negatives.slot_momentum": "negatives.bank_momentum",
    "negatives.first_rows": "negatives.bank_init",
    "negatives.bank_init=embeddings": "negatives.bank_init=encoder",
    "bank.held_by": "bank.location",
    "bank.location=workers": "bank.location=worker",
    "batchnorm=as_is": "batchnorm=local",
    "stages.N.loss=bidirectional": "stages.N.loss=clip",
    "stages.N.discount_frequent": "stages.N.logq_correction",
    "stages.N.kept_chunks": "stages.N.cached_chunks",
    "stages.N.milestone_every": "stages.N.activation_checkpoint_every",
    "stages.N.learning_rate_over": "stages.N.learning_rate_scope",
    "evaluation.portrait": "evaluation.num_snapshot_samples",
    "monitor.grace": "monitor.initial_patience",
    "checkpoints.every_s": "checkpoints.interval_s",
    "floor": "baseline",  # of `raycl evaluate`
}


def config_from_dict(
    values: Mapping[str, Any], *, drops_inactive: bool = False, trained: bool = False
) -> RunConfig:
    """Validate a tree of plain values.

    A setting without effect may have its default only, unless such settings are dropped. A run that has
    ``trained`` may also have settings that exclude each other. Raises ``ConfigError`` naming the key.
    """
    try:
        check_text_keys(values)
        text = json.dumps(values, default=_plain)
        if not (drops_inactive or trained):
            return RunConfig.model_validate_json(text)
        run = RunConfig.model_validate_json(text, context=TRAINED if trained else LENIENT)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except TypeError as error:
        raise ConfigError(f"the configuration contains a value that YAML cannot represent: {error}") from None
    # Repeated, since a dropped setting may be the condition of another one.
    active = active_settings(run)
    return (
        run if active == json.loads(text) else config_from_dict(active, drops_inactive=True, trained=trained)
    )


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: a path, or numbers of numpy or torch; raises ``TypeError`` for others."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.80} is {type(value).__name__}; give numbers, text and lists")


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_DATE = "tag:yaml.org,2002:timestamp"
_NULLS = ("null", "Null", "NULL", "~")


class _Loader(yaml.SafeLoader):
    """Reads numbers and dates as YAML 1.2 does: 1e-4 is a number and 2026-01-31 text.

    In YAML 1.1, 1e-4 is text, 2:8 is 128 and 010 is 8.
    """

    yaml_implicit_resolvers: ClassVar = {
        first: [each for each in pairs if each[0] not in (_INT, _FLOAT, _DATE)]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^([-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("+-.0123456789"),
)
_Loader.add_implicit_resolver(_INT, re.compile(r"^[-+]?(0|[1-9][\d_]*|0x[\da-fA-F]+)$"), list("+-0123456789"))


def _read_yaml(text: str) -> Any:
    """Return the values; raises ``yaml.YAMLError``, also for a key given twice and aliases of too many values."""
    loader: Any = _Loader(text)
    try:
        node = loader.get_single_node()
        if _num_values(node, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"its aliases repeat more than {MOST_VALUES:,} values")
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except ValueError as error:  # such as a number of thousands of digits
        raise yaml.YAMLError(error) from None
    finally:
        loader.dispose()


def _num_values(node: Any, known: dict[int, float]) -> float:
    """Return the number of values of a node with all aliases expanded; infinite if it contains itself.

    Raises ``yaml.YAMLError`` for a key that is given twice, of which PyYAML takes the last.
    """
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        if isinstance(node, yaml.MappingNode):
            names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := [name for name, number in names.items() if number > 1]:
                raise yaml.YAMLError(f"it gives {twice[0]!r} twice")
        known[id(node)] = math.inf  # stays so for a node that contains itself
        pairs = [each for pair in node.value for each in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_num_values(each, known) for each in pairs)
    return known[id(node)]


def config_from_yaml(text: str, *, name: str = "the configuration", trained: bool = False) -> RunConfig:
    """Read a run from YAML of this or an older version; raises ``ConfigError``.

    A setting without effect may have its default only. In a file of an older version it is dropped, so that old
    runs can be resumed. With ``trained``, as to evaluate or show a run, it is dropped, and settings that exclude
    each other are accepted.
    """
    check_type("the YAML", text, str)
    try:
        values = _read_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name} must contain keys and values, got {type(values).__name__}; see `raycl recipes simclr`"
        )
    values = _with_new_names(values)
    # Older versions wrote all sections; today no run has these three, since two towers have no momentum encoder.
    is_old = {"text", "augment", "momentum_encoder"} <= values.keys()
    return config_from_dict(values, drops_inactive=is_old, trained=trained)


def _with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return a file's values under their current names."""
    values = copy.deepcopy(values)
    num_stages = len(values["stages"]) if isinstance(values.get("stages"), list) else 0
    for old, new in RENAMED.items():
        for index in range(num_stages if "stages.N." in old else 1):
            _rename(values, old.replace(".N.", f".{index}."), new)
    return values


def _rename(values: Any, old: str, new: str) -> None:
    """Rename one setting or one value within its section."""
    path, _, old_value = old.partition("=")
    *parents, name = path.split(".")
    for parent in parents:
        values = values[int(parent)] if isinstance(values, list) else values.get(parent)
        if not isinstance(values, dict | list):
            return
    new_path, _, new_value = new.partition("=")
    new_name = new_path.rpartition(".")[2]
    if isinstance(values, dict) and name in values and (not old_value or values[name] == old_value):
        if name != new_name and new_name in values:
            return  # both names: the old one is refused as unknown
        value = values.pop(name)
        values[new_name] = new_value or value


def config_to_yaml(config: RunConfig, *, comments: bool = False) -> str:
    """Write the settings that have an effect in a run as YAML that ``config_from_yaml`` reads back.

    With ``comments``, each setting has one, the beginning of its documentation.
    """
    check_type("config", config, RunConfig)
    values = active_settings(config)
    if not comments:
        return yaml.safe_dump(values, sort_keys=False)
    return "".join(
        f"{line:{_COMMENT_COLUMN}}  # {comment}\n" for line, comment in _commented(RunConfig, values)
    )


def _commented(section: type[Section], values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a section, each with its comment; a list of numbers or of views is on one line."""
    comments = _comments(section)
    for name, value in values.items():
        kind = _section_at(section, name)
        is_list, is_inline = kind is Stage, kind in (None, ViewsConfig)
        yield f"{name}: {_inline(value)}" if is_inline else f"{name}:", comments[name]
        for inner in [] if is_inline else value if is_list else [value]:
            for number, (line, comment) in enumerate(_commented(kind, inner)):
                yield f"{'- ' if is_list and number == 0 else '  '}{line}", comment


def _inline(value: Any) -> str:
    text = yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=math.inf)
    return text.removesuffix("...\n").strip()


def _comments(section: type[Section]) -> dict[str, str]:
    """Return the first sentence of the text below each setting in the source, shortened."""
    comments = dict[str, str]()
    for owner in reversed(section.__mro__[: section.__mro__.index(Section)]):
        tree: Any = ast.parse(inspect.getsource(owner))
        for setting, text in pairwise(tree.body[0].body):
            match setting, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                    first = re.split(r"\.\s+(?=[A-Z0-9`])", said.replace("``", "").rstrip("."), maxsplit=1)[0]
                    comments[name] = textwrap.shorten(first, _COMMENT_WIDTH, placeholder=" ...")
    return comments


def override(config: RunConfig, settings: Sequence[str] | Mapping[str, Any]) -> RunConfig:
    """Return the run with ``key.path=value`` settings replaced; values are YAML.

    A mapping replaces the settings that it names, while a list and ``kwargs`` are replaced as a whole. Changing
    ``encoder.name`` clears ``encoder.kwargs``. Settings of ``config`` that no longer have an effect return to their
    defaults. Raises ``ConfigError`` for an unknown key, a wrong type, an invalid value or a setting that would have no
    effect.
    """
    check_type("config", config, RunConfig)
    return override_pairs(config, pairs_of(settings))


def override_pairs(config: RunConfig, pairs: Sequence[tuple[str, Any]]) -> RunConfig:
    """Return the run with settings replaced one after another, each a path and a value; see ``override``."""
    if dict(pairs).get("recipe", config.recipe) != config.recipe:
        raise ConfigError(
            "recipe is the name of the run's recipe, no setting; start from the other one: raycl train NAME"
        )
    values = config.model_dump(mode="json")
    for side in ("encoder", "text_encoder"):
        known = getattr(config, side).name
        if dict(flat_pairs(pairs)).get(f"{side}.name", known) != known:
            values[side]["kwargs"] = {}  # arguments of the previous encoder
    for path, value in flat_pairs(pairs):
        _set(values, path, copy.deepcopy(value))  # a later path may lie within it
    changed = config_from_dict(values, drops_inactive=True)
    _check_active(changed, pairs)
    return changed


def _check_active(config: RunConfig, pairs: Sequence[tuple[str, Any]]) -> None:
    """Raise ``ConfigError`` if a given setting has no effect; in a given section, it may have its default."""
    values = leaves(config)
    for path, value in pairs:
        stage = re.match(r"stages\.(\d+)\.", path)
        if stage and int(stage[1]) >= len(config.stages):
            continue  # a later setting removed this stage
        for setting, given in flat(value, path).items():
            is_default = setting != path and values.get(setting) == given
            if not is_default and (problem := why_inactive(config, setting)):
                raise ConfigError(problem)


def differences(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two runs: key path to (before, after)."""
    old, new = (leaves(config) for config in (before, after))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def pairs_of(settings: Sequence[str] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return paths and values of settings; raises ``ConfigError`` for others than ``key.path=value`` or a mapping."""
    if isinstance(settings, Mapping):
        for path in settings:
            check_type("a setting's path", path, str)
        return [(path, _without_sections(value)) for path, value in settings.items()]
    if not isinstance(settings, Iterable):
        raise ConfigError(f"settings must be a dict or a list of key.path=value, came {settings!r:.60}")
    return list(map(parse_setting, [settings] if isinstance(settings, str) else settings))


def _without_sections(value: Any) -> Any:
    """Return a value with its sections as mappings, also in lists and mappings."""
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {name: _without_sections(inner) for name, inner in value.items()}
    return [_without_sections(inner) for inner in value] if isinstance(value, list | tuple) else value


def flat_pairs(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield a pair for each setting of a section's mapping; other values stay whole. Raises ``ConfigError``.

    The length of a stage, ``epochs`` or ``steps``, replaces the other one.
    """
    for path, value in pairs:
        if not isinstance(value, dict) or not _is_section(path):
            yield path, value
        elif value:
            has_length = re.fullmatch(r"stages\.\d+", path) and (value.get("epochs") or value.get("steps"))
            named = {"epochs": None, "steps": None} | value if has_length else value
            yield from flat_pairs((f"{path}.{name}", inner) for name, inner in named.items())
        else:
            raise ConfigError(f"{path} is an empty mapping, which sets nothing; remove it")


def _is_section(path: str) -> bool:
    """Return whether a path is one of a section, or of an entry of a list of them."""
    section: Any = RunConfig
    for part in path.split("."):
        if not part.isdecimal():
            section = _section_at(section, part) if section and part in section.model_fields else None
    return section is not None


def parse_setting(setting: str) -> tuple[str, Any]:
    """Split ``key.path=value``; the value is YAML. Raises ``ConfigError``."""
    check_type("a setting", setting, str)
    path, equals, value = setting.partition("=")
    if not equals or not path:
        raise ConfigError(
            f"--set takes key.path=value, got {setting!r}; for example stages.0.temperature=0.2"
        )
    try:
        parsed = _read_yaml(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {path}: {value!r} is not valid YAML; quote it") from None
    if parsed is None and value.partition("#")[0].strip() not in _NULLS:
        problem = "is a comment of YAML; quote it" if value.strip() else "is no value; give null for none"
        raise ConfigError(f"--set {path}: {value!r} {problem}")
    return path.strip(), parsed


def _set(values: Any, path: str, value: Any) -> None:
    names = path.split(".")
    for depth, name in enumerate(names[:-1], start=1):
        child = _child(values, names[:depth], path)
        # Paths below free-form arguments create missing keys.
        new = {} if ".kwargs." in f".{path}" and not names[depth].isdecimal() else None
        values = values.setdefault(child, new) if isinstance(values, dict) else values[child]
        if values is None and names[depth].isdecimal():
            owner = ".".join(names[:depth])
            raise ConfigError(
                f"{path} sets an entry of {owner}, which is not given; give the whole list, {owner}=[...]"
            )
        if not isinstance(values, dict | list):
            raise ConfigError(f"unknown key {path}: {name} is a single value, {values!r}")
    values[_child(values, names, path)] = value


def _child(values: Any, names: Sequence[str], path: str) -> Any:
    """Return the key or index of the last name; it must exist, except within free-form arguments.

    A setting exists also in an entry of a list that was given in part.
    """
    name = names[-1]
    if isinstance(values, list):
        if not (name.isdecimal() and values and int(name) <= len(values)):
            raise ConfigError(f"unknown key {path}: {name!r} is not an index from 0 to {len(values)}")
        if int(name) == len(values):
            values.append(copy.deepcopy(values[-1]))  # a new stage starts as a copy of the last
        return int(name)
    if name in values or ".kwargs." in f".{path}":
        return name
    if name not in (allowed := _names_at(names[:-1])):
        raise ConfigError(_unknown_in_run(path, allowed))
    return name


def _one_line(error: ValidationError) -> str:
    # pydantic also reports a tuple whose only item is invalid as too short.
    problems = [
        each for each in error.errors(include_url=False) if each["type"] != "too_short"
    ] or error.errors()
    # An unknown name first: it may be a misspelled one that is missing.
    problems.sort(key=lambda each: each["type"] != "extra_forbidden")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return _describe(problems[0]) + more


def _describe(problem: ErrorDetails) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        if "." in str(problem["loc"][-1]) and re.sub(r"\.\d+\.", ".0.", path) in _setting_paths(RunConfig):
            section, _, name = path.rpartition(".")
            return f"unknown key {path}; in a file, write {name} as a key of {section}"
        return _unknown_in_run(path, _names_at(problem["loc"][:-1]))
    if problem["type"] == "missing":
        return f"{path} is missing; it has no default"
    if new := present_name(f"{path}={problem['input']}"):
        return f"{path}={problem['input']} is now {new}"
    if problem["type"] == "string_type" and isinstance(problem["input"], int | float):
        remedy = f'quote it: --set \'{path}="TEXT"\', or "TEXT" in a file'
        return f"{path} must be text, got {problem['input']!r}; {remedy}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{path}: {message}" if path else message
    return f"{path}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def present_name(setting: str) -> str | None:
    """Return the current name of a setting or ``setting=value`` of an older version; None if it was not renamed."""
    index = re.search(r"(?<=stages\.)\d+(?=\.)", setting)
    new = RENAMED.get(re.sub(r"(?<=stages\.)\d+(?=\.)", "N", setting))
    return new and new.replace(".N.", f".{index[0]}." if index else ".N.")


def unknown_setting(path: str, allowed: Sequence[str]) -> str:
    """Return an error message for an unknown setting, with the closest allowed name."""
    name = path.rpartition(".")[2]
    if new := present_name(path):
        return f"unknown key {path}; it is now {new}"
    last = {each.rpartition(".")[2]: each for each in allowed}
    close = difflib.get_close_matches(name, last, n=1)
    hint = f"; did you mean {last[close[0]]}?" if close else ""
    return f"unknown key {path}{hint} (allowed: {', '.join(allowed)})"


def _unknown_in_run(path: str, allowed: Sequence[str]) -> str:
    """Return an error message for an unknown setting of a run, with the path if other sections have its name."""
    name = path.rpartition(".")[2]
    found = [each for each in _setting_paths(RunConfig) if each.rpartition(".")[2] == name]
    if "." in path and path.partition(".")[0] not in RunConfig.model_fields:  # such as stage.0.temprature
        found = found or difflib.get_close_matches(path, list(_setting_paths(RunConfig)), n=1, cutoff=0.8)
    if present_name(path) or not 1 <= len(found) <= _MOST_PATHS:
        return unknown_setting(path, allowed)
    return f"unknown key {path}; did you mean {' or '.join(found)}?"


def _setting_paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all settings, of the first stage for all stages; ``augment.views`` is one setting."""
    for name in section.model_fields:
        kind = _section_at(section, name)
        if kind is None or kind is ViewsConfig:
            yield prefix + name
        else:
            yield from _setting_paths(kind, f"{prefix}{name}.{'0.' if kind is Stage else ''}")


def _names_at(path: Sequence[int | str]) -> list[str]:
    """Return the keys of the section at ``path``; none of a single value."""
    section: Any = RunConfig
    for part in path:
        if not str(part).isdecimal():
            section = _section_at(section, str(part))
    return [] if section is None else list(section.model_fields)


def _section_at(section: type[Section], name: str) -> Any:
    """Return the class of a section in a section, or of the entries of a list; None for a single value."""
    kind = {"stages": Stage, "views": ViewsConfig}.get(name, section.model_fields[name].annotation)
    return kind if inspect.isclass(kind) and issubclass(kind, Section) else None
