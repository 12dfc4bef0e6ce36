"""Imports go one way. A fork may remove files of the method and rooms, and add anything beside them; a file that it adds to a
room keeps the room's rule."""

import ast
import graphlib
import re

from scripts import REPO, imports_of

ROOMS = ("runtime", "evals", "study")
METHOD = ("episode", "data", "tools", "rollout", "rewards", "metrics", "grpo", "rl", "dialogues", "sft", "eval")
FILES = [path for path in REPO.glob("*.py") if path.stem in METHOD]
FILES += [path for room in ROOMS for path in REPO.glob(f"{room}/*.py")]
# What each room may import. The data types are a room of their own, on the ground floor: of the runtime, they import only the
# video's Clip and the writer of lines. `eval` is the only script of the method that may import from evals.
ROOMS_BELOW = ["types", "runtime", "method", "evals", "study"]
MAY_IMPORT = {room: set(ROOMS_BELOW[: i + 1]) for i, room in enumerate(ROOMS_BELOW)}
MAY_IMPORT["types"] = {"runtime"}
MODULES = {".".join(path.relative_to(REPO).with_suffix("").parts) for path in FILES}


def room_of(module: str) -> str:
    if module == "episode":
        return "types"
    return module.partition(".")[0] if "." in module else "method"


IMPORTS = {".".join(path.relative_to(REPO).with_suffix("").parts): imports_of(path) & MODULES for path in FILES}


def test_no_file_imports_itself_in_a_circle():
    graphlib.TopologicalSorter(IMPORTS).prepare()


def test_imports_go_from_study_to_evals_to_the_method_to_the_runtime():
    for module, names in IMPORTS.items():
        room = "evals" if module == "eval" else room_of(module)
        assert {room_of(name) for name in names} <= MAY_IMPORT[room], (module, names)


def test_the_method_reads_in_one_direction():
    order = [module for module in METHOD[:8] if module in IMPORTS]
    for i, module in enumerate(order):
        assert not IMPORTS[module] & set(order[i:]), module
    assert "eval" not in set().union(*(names for module, names in IMPORTS.items() if room_of(module) != "study"))
    assert not any(path.read_text() for room in ROOMS for path in REPO.glob(f"{room}/__init__.py"))


def test_tools_rollout_and_rewards_know_no_ranks_and_rewards_reach_no_http_client():
    """The caller passes a judge in. Until then, a reward is arithmetic that a test can read without a network."""
    for module in ("tools", "rollout", "rewards"):
        assert "runtime.distributed" not in IMPORTS[module]
        assert "torch.distributed" not in (REPO / f"{module}.py").read_text()
    reached, left = set(), {"rewards"}
    while left:
        module = left.pop()
        reached.add(module)
        left |= IMPORTS[module] - reached
        assert "import requests" not in (REPO / f"{module.replace('.', '/')}.py").read_text(), module


def test_few_types_are_ignored_and_each_says_why():
    lines = [line for path in FILES for line in path.read_text(encoding="utf-8").splitlines()]
    ignored = [line for line in lines if "# type: ignore" in line]
    assert len(ignored) <= 10
    for line in ignored:
        assert re.search(r"# type: ignore\[[a-z, -]+\]  # \w", line), line


def test_a_function_says_which_config_it_takes():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.arg) and node.arg == "cfg":
                assert node.annotation is not None and ast.unparse(node.annotation) != "Any", (path, node.lineno)
