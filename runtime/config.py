"""config.py: one YAML per run -> one frozen dataclass.

    cfg = config.load(SFTConfig, "configs/sft_8b.yaml", ["optim.lr=1e-5"])      # YAML + overrides -> dataclass
    config.save_run(cfg, cfg.run)                                               # RUN/config.yaml, which `load` reads back

A library would merge YAML and check types, too. This file adds four things: an error names the key, the value, the rule and
the nearest valid key; no error shows an API key; a config given to the wrong script is told the right one; no key stands twice. Defaults are in
the dataclasses and nowhere else. A YAML file may name a parent (`base: other.yaml`, relative to the file): mappings merge,
all other values replace.

Deliberately missing: interpolation, environment variables.
"""

import contextlib
import dataclasses
import difflib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
# Keys that tell which script a config is for.
SCRIPTS = {"batch_rows": "sft.py", "batch_tasks": "rl.py", "splits": "eval.py"}


class ConfigError(ValueError):
    """A config that cannot be used. The text tells its author how to fix it."""


class Loader(yaml.SafeLoader):
    """YAML whose keys are texts, each once in its mapping. YAML itself takes the last of two, and reads `on` as true."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            where = f"the key {key.value!r} in line {key.start_mark.line + 1}"
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise ConfigError(f"{where} is no text: quote it")
            if key.value in seen:
                raise ConfigError(f"{where} stands twice in its mapping: keep one of the two")
            seen.add(key.value)
        return node


def load(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read `path` and its bases, apply `key.sub=value` overrides, and build `cls`."""
    tree = read_tree(Path(path))
    hints = typing.get_type_hints(cls)
    for key, script in SCRIPTS.items():
        if key in tree and key not in hints:
            raise ConfigError(f"{path} is a config of {script}, as its `{key}` says; start {script} with it")
    for override in overrides:
        apply_override(tree, hints, override)
    try:
        return build(cls, tree, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def apply_override(tree: dict, hints: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in the tree of a config, whose fields have these type hints."""
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {safe_repr(key)}: write it as key.sub=value")
    # Walk down to the mapping that holds the last key.
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {safe_repr(override)}: {parent} is a value, it has no keys below it")
    # In a mapping of names, such as `splits`, a single name looks as if it would become the only one.
    others = sorted(node.keys() - {leaf})
    if others and parents and typing.get_origin(hints.get(parents[0])) is dict:
        raise ConfigError(f"{override}: {', '.join(others)} would stay; write '{parents[0]}={{{leaf}: {text}}}'")
    try:
        node[leaf] = yaml.load(text, Loader)
    except yaml.YAMLError:
        advice = f"the value is not YAML; quote it whole for the shell, as in '{key}=...'"
        raise ConfigError(f"override {safe_repr(override)}: {advice}") from None


def read_tree(path: Path, above: tuple[Path, ...] = ()) -> dict:
    """Return the merged mappings of a file and its bases, unchecked. `above`: the files that named it as their base."""
    if path.resolve() in above:
        raise ConfigError(f"{path}: its `base` leads back to it; remove one of the `base` lines")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader) or {}
    except (ConfigError, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        advice = "; indent with spaces, not with tabs" if "'\\t'" in str(error) else ""
        raise ConfigError(f"{path}: not a readable YAML file: {error}{advice}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, got {type(tree).__name__}")
    base = tree.pop("base", None)
    if base:
        below = path.parent / str(base)
        if not below.is_file():
            raise ConfigError(f"{path}: base: {base}: there is no {below}; write the path from the file that names it")
        tree = merge(read_tree(below, (*above, path.resolve())), tree)
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
    values = {}
    if defaults is not None:
        values |= vars(defaults)
    for key, value in tree.items():
        if key not in hints:
            # Suggest a key of a subsection, one with another prefix, or one of similar spelling.
            near = [f"{name}.{key}" for name, hint in hints.items() if key in getattr(hint, "__dataclass_fields__", ())]
            near += [name for name in hints if name.endswith(f"_{key}")]
            near += difflib.get_close_matches(str(key), hints, n=1)
            advice = f"did you mean {prefix}{near[0]}?" if near else f"{cls.__name__} has {', '.join(hints)}"
            raise ConfigError(f"{prefix}{key} = {safe_repr(value, prefix + key)}: unknown key; {advice}")
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
    origin, args = typing.get_origin(hint), typing.get_args(hint)

    # X | None, the only union that configs use
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _coerce(args[0], value, key, default)
    if value is None and hint is not object:
        raise ConfigError(f'{key}: the value is empty; give one ("" is an empty text)')

    # one of several words
    if origin is typing.Literal:
        if value is False and "off" in args:  # YAML reads a bare `off` as false
            value = "off"
        if value not in args or isinstance(value, bool):  # True is 1
            raise ConfigError(f"{key} = {safe_repr(value, key)}: must be one of {', '.join(map(repr, args))}")
        return value

    # a list
    if origin is tuple:
        if not isinstance(value, list | tuple):
            item = f"{{{dataclasses.fields(args[0])[0].name}: {value}}}" if dataclasses.is_dataclass(args[0]) else value
            raise ConfigError(f"{key} = {safe_repr(value, key)}: must be a list, as in [{item}]")
        return tuple(_coerce(args[0], item, f"{key}[{i}]") for i, item in enumerate(value))

    # a section, in place or in a file of its own
    if dataclasses.is_dataclass(hint):
        if isinstance(value, str) and value.endswith((".yaml", ".yml")):
            value = read_tree(Path(value))
        if not isinstance(value, dict):
            raise ConfigError(f"{key} = {safe_repr(value, key)}: must be a mapping")
        return build(hint, value, key + ".", default)

    # a mapping of names
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{key} = {safe_repr(value, key)}: must be a mapping")
        return {_coerce(args[0], k, key): _coerce(args[1], v, f"{key}.{k}") for k, v in value.items()}

    # a number, a text or a bool
    if hint is float and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            value = float(value)  # YAML reads 1e-4 (no dot) as a string
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{key} = {safe_repr(value, key)}: must be {hint.__name__}, not {type(value).__name__}")
    if hint in (int, float) and not 0 <= value < math.inf:  # NaN is neither
        raise ConfigError(f"{key} = {safe_repr(value, key)}: must be finite and not negative")
    return value


def suggest(name: str, names: Iterable[str]) -> str:
    """Advise what to write instead of a name that is none of `names`."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}"


def safe_repr(value: Any, key: str = "") -> str:
    """Return a value, or a whole override, as an error message shows it. An API key is never shown."""
    text = f"{key}{value}".lower()
    return "(not repeated: it may hold a key)" if text.startswith("api") or "key" in text else repr(value)


def differences(was: Any, now: Any, name: str = "") -> dict[str, str]:
    """Return the settings that differ, as {"rollout.temperature": "rollout.temperature: 0.0, now 0.7"}."""
    if was == now:
        return {}
    if not isinstance(was, dict) or not isinstance(now, dict):
        return {name: f"{name}: {was!r}, now {now!r}"}
    changed = {}
    for key in was | now:
        changed |= differences(was.get(key), now.get(key), f"{name}.{key}" if name else key)
    return changed


def refuse_below_1(cfg: Any, *names: str) -> None:
    """Refuse counts below 1. For a dataclass's __post_init__."""
    for name in names:
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name} = {getattr(cfg, name)}: must be at least 1")


# ------------------------------------------------------------------------------------------------ the run's copy of it


def save_run(cfg: Any, run_dir: str | Path, **more: str) -> None:
    """Write what is needed to repeat the run: config.yaml and run.json. `more` goes into run.json."""
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    # JSON turns tuples into lists, so the file is plain YAML that `load` reads back.
    text = yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(cfg))), sort_keys=False, allow_unicode=True)
    write_whole(run_dir / "config.yaml", text)  # `check_run` reads it before a run resumes
    # A run that continues with other code keeps the commits with which it began.
    path = run_dir / "run.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    commits = before.get("commits", [])
    if commits[-1:] != [git_commit()]:
        commits.append(git_commit())
    packages = {package.name: package.version for package in importlib.metadata.distributions()}
    run = {"command": sys.argv, "commits": commits, "python": sys.version, **more, "packages": packages}
    write_whole(path, json.dumps(run, indent=1))


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or, if the process or the machine dies, not at all."""
    unborn = path.with_name(path.name + ".new")
    with unborn.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # without it, a power cut may leave the renamed file empty
    unborn.rename(path)


def git_commit() -> str:
    """Return the commit that is checked out, with `+` when files (but results) differ from it, or "unknown"."""
    git = ["git", "-C", str(Path(__file__).parent.parent)]
    try:
        commit = subprocess.check_output(
            [*git, "rev-parse", "--short=12", "HEAD"], stderr=subprocess.DEVNULL, text=True
        )
        changed = subprocess.check_output([*git, "status", "--porcelain", "-uno", "--", ".", ":!results"])
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + ("+" if changed else "")
