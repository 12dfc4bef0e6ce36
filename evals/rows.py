"""rows.py: read configs/eval/rows.yaml, which has one row per model: how it is asked, and how the published run differs.

    cfg = rows.load(EvalConfig, "configs/eval/rows.yaml", ["row=conan", "way=own"])     # as eval.py does
    list_differences("Conan-7B (own)")   # what the published run of this model did that no key expresses

`row` picks a row, and `way` how it is asked: `table` (default) as in the paper's table, `own` as the model's authors do (our
agent: as rl.py trains it). A YAML file whose `base` is rows.yaml may set both. Neither is a setting of the run, so
RUN/config.yaml has neither.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from runtime.config import ConfigError, apply_override, load_tree, merge, read_tree, suggest

T = TypeVar("T")
ROWS_FILE = Path(__file__).parent.parent / "configs" / "eval" / "rows.yaml"
NOT_SETTINGS = ("like", "own", "differs")  # keys of a row


def load(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Load a config as config.load does. From a file with rows, take the row that the file or the overrides choose."""
    tree = read_tree(Path(path))
    if "rows" not in tree:
        return load_tree(cls, tree, overrides, path)
    left = []
    for override in overrides:
        if override.partition("=")[0] in ("row", "way"):
            apply_override(tree, override)
        else:
            left.append(override)
    tree.pop("groups", None)  # rows.yaml has them only for its `differs`
    shared = tree.pop("shared", {})
    rows = tree.pop("rows")
    row = str(tree.pop("row", ""))
    way = str(tree.pop("way", "table"))
    return load_tree(cls, merge(settings_of(rows, row, way, shared), tree), left, path)


def settings_of(rows: dict, row: str, way: str, shared: dict) -> dict:
    """Return the settings of a row that is asked in one way. Each layer is laid over the one before: `shared`, the row that it
    is `like`, the row, and with way=own the `own` of both."""
    layers = with_likes(rows, row)
    own_layers = [layer["own"] for layer in layers if "own" in layer]
    ways = ("table", "own") if own_layers else ("table",)
    if way not in ways:
        raise ConfigError(f"way = {way!r}: {row} is not asked in this way; {suggest(way, ways)}")
    if way == "own":
        layers += own_layers
    settings = functools.reduce(merge, [shared, *layers])
    settings = {key: value for key, value in settings.items() if key not in NOT_SETTINGS}

    # Each way has a folder and a row of the table of its own.
    settings["run"] = f"runs/eval/{row}"
    if way == "own":
        settings["run"] = f"runs/eval/own/{row}"
        settings["name"] = f"{settings.get('name', row)} (own)"
    return settings


def with_likes(rows: dict, row: str) -> list[dict]:
    """Return a row, and before it those on which it builds by `like`."""
    if row not in rows:
        raise ConfigError(f"row = {row!r}: no such row; {suggest(row, rows)}")
    layer = rows[row]
    if "like" not in layer:
        return [layer]
    return [*with_likes(rows, layer["like"]), layer]


def list_differences(name: str) -> list[str]:
    """List how the published run of a model differs from its row where no key can express it. `name`: the model's row in the
    table, such as "ParaVT-8B" or "ParaVT-8B (own)"."""
    rows = read_tree(ROWS_FILE)["rows"]
    for key in rows:
        row = functools.reduce(merge, with_likes(rows, key))
        if row.get("name") == name.partition(" (")[0]:
            return [text for group in row.get("differs", ()) for text in group]
    return []
