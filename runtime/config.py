"""config.py: one YAML per run -> one frozen dataclass.

    cfg = config.load(SFTConfig, "configs/sft_8b.yaml", ["optim.lr=1e-5"])      # YAML + overrides -> dataclass

A library would also merge YAML and check types. This file adds four things: an error names the key, the value, the rule and
the nearest valid key; no error shows an API key; no key stands twice; no number is negative or infinite. Defaults are in the
dataclasses and nowhere else. A YAML file may name a parent (`base: other.yaml`, relative to the file): mappings merge, all
other values replace.

Deliberately missing: interpolation, environment variables.
"""

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


class UserError(ValueError):
    """An error that a user can fix. A script prints its text as one sentence, without a traceback."""


class ConfigError(UserError):
    """A config that cannot be used."""


class Loader(yaml.SafeLoader):
    """YAML whose keys stand once in their mapping. YAML itself takes the last of two."""

    def compose_mapping_node(self, anchor) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key.value, str):
                continue  # a mapping or a list, which YAML refuses as a key
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(
                    f"the key {key.value!r} in line {line} stands twice in its mapping: keep one of the two"
                )
            seen.add(key.value)
        return node


def load(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read `path` and its bases, apply `key.sub=value` overrides, and build `cls`."""
    return load_tree(cls, read_tree(Path(path)), overrides, path)


def load_tree(cls: type[T], tree: dict, overrides: Sequence[str], path: str | Path) -> T:
    """Apply the overrides to the tree of a file, and build `cls`."""
    for override in overrides:
        apply_override(tree, override)
    try:
        return build(cls, tree, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def apply_override(tree: dict, override: str) -> None:
    """Set one `key.sub=value` in the tree of a config."""
    key, equals, text = override.partition("=")
    if not equals:  # what follows a colon may be an API key
        raise ConfigError(f"override {key.partition(':')[0]}: write it as key.sub=value")
    # Walk down to the mapping that holds the last key.
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {key}: {parent} holds no mapping to change; write {parent}={{{leaf}: ...}}")
    try:
        node[leaf] = yaml.load(text, Loader)
    except yaml.YAMLError:
        raise ConfigError(f"override {key}: the value must be YAML") from None


def read_tree(path: Path) -> dict:
    """Return the merged mappings of a file and its bases, unchecked."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader) or {}
    except (ConfigError, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable YAML file: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping, not {type(tree).__name__}")
    base = tree.pop("base", None)
    if base:
        tree = merge(read_tree(path.parent / str(base)), tree)
    return tree


def merge(below: dict, above: dict) -> dict:
    """Lay one mapping over another: mappings merge, all other values replace."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def build(cls: type, tree: dict, prefix: str, defaults: Any = None) -> Any:
    """Build a dataclass from a mapping, and check each value against its type hint. Missing keys take their value from the
    instance `defaults`, if it is given."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    if defaults is not None:
        values |= vars(defaults)
    for key, value in tree.items():
        if key not in hints:
            raise ConfigError(f"{prefix}{key}: unknown key; {suggest(str(key), hints, prefix)}")
        default = values.get(key, getattr(cls, key, None))
        values[key] = _coerce(hints[key], value, prefix + key, default)
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise ConfigError(f"{prefix}{field.name}: required, but not given")
    try:
        return cls(**values)
    except ValueError as error:  # a rule in __post_init__
        raise ConfigError(f"{prefix.rstrip('.') + ': ' if prefix else ''}{error}") from None


def _coerce(hint: Any, value: Any, key: str, default: Any = None) -> Any:
    """Return a value as its type hint demands, or refuse it. A section takes its missing keys from the instance `default`."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    setting = f"{key} = {value!r}"
    if key.endswith(".key"):
        setting = key  # the value may be an API key

    # X | None, the only union that configs use
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _coerce(args[0], value, key, default)

    # one of several words
    if origin is typing.Literal:
        if value is False and "off" in args:  # YAML reads a bare `off` as false
            value = "off"
        if value not in args or isinstance(value, bool):  # True is 1
            raise ConfigError(f"{setting}: {suggest(str(value), list(map(str, args)))}")
        return value

    # a list
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{setting}: must be a list")
        return tuple(_coerce(args[0], item, f"{key}[{i}]") for i, item in enumerate(value))

    # a section, in place or in a file of its own
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if isinstance(value, str) and value.endswith((".yaml", ".yml")):
            value = read_tree(Path(value))
        if not isinstance(value, dict):
            raise ConfigError(f"{key}: must be a mapping, not {type(value).__name__}")
        return build(hint, value, key + ".", default)

    # a mapping of names
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{key}: must be a mapping, not {type(value).__name__}")
        return {_coerce(args[0], k, key): _coerce(args[1], v, f"{key}.{k}") for k, v in value.items()}

    # a number, a text or a bool
    if hint is float and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            value = float(value)  # YAML reads 1e-4 (no dot) as a string
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{setting}: must be {hint.__name__}, not {type(value).__name__}")
    if hint in (int, float) and not 0 <= value < math.inf:  # NaN is neither
        raise ConfigError(f"{setting}: must be finite and not negative")
    return value


def suggest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Advise what to write instead of a name that is none of `names`."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else f"choose from {', '.join(names)}"


def differences(was: Any, now: Any, name: str = "") -> dict[str, str]:
    """Return the settings that differ, as {"rollout.temperature": "rollout.temperature: 0.0, now 0.7"}."""
    if was == now:
        return {}
    if not isinstance(was, dict) or not isinstance(now, dict):
        return {name: f"{name}: {was!r}, now {now!r}"}
    changed: dict[str, str] = {}
    for key in was | now:
        changed |= differences(was.get(key), now.get(key), f"{name}.{key}" if name else key)
    return changed
