"""The README: what it says of files, functions, commands and configs is so."""

import importlib
import re

import pytest
from scripts import REPO

README = (REPO / "README.md").read_text(encoding="utf-8")
ROOMS = (".", "runtime", "evals", "study")
PATHS = {path.name: path for room in ROOMS for path in sorted(REPO.glob(f"{room}/*.py")) if path.name != "__init__.py"}


def test_every_file_of_the_tree_is_named():
    assert PATHS.keys() <= set(re.findall(r"\b\w+\.py\b", README))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(?:(?:runtime|evals|study)[./])?(\w+\.\w+)`", README))))
def test_what_it_names_is_there(name):
    """`rewards.score`: a function of that file; `protocols.yaml`: a file."""
    module, _, attribute = name.partition(".")
    if f"{module}.py" in PATHS and attribute not in ("py", "yaml", "md", "html"):
        dotted = ".".join(PATHS[f"{module}.py"].relative_to(REPO).with_suffix("").parts)
        assert hasattr(importlib.import_module(dotted), attribute) or is_key(attribute)
    elif attribute in ("py", "yaml", "md", "html"):
        assert next(REPO.rglob(name), None)


def is_key(attribute: str) -> bool:
    """`anchor.credit`, `rollout.gpus`: a key of the configs."""
    return any(re.search(rf"^    {attribute}:", path.read_text(encoding="utf-8"), re.M) for path in PATHS.values())


def test_every_path_that_it_names_is_there():
    paths = re.findall(r"\b(?:configs|docs|results|runtime|evals|study|tests)/[\w/.]+\.(?:yaml|md|png|py)", README)
    assert paths and all((REPO / path).is_file() for path in paths)


def test_every_config_that_it_names_is_there():
    named = set(re.findall(r"`(\w+_(?:8b|2b)\w*)`", README))
    assert named and all((REPO / "configs" / f"{name}.yaml").is_file() for name in named)


def test_its_commands_are_commands():
    """Scripts exist; targets are in the Makefile."""
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in re.findall(r"^make ([\w-]+)", README, re.M))
    scripts = re.findall(r"(?:python|torchrun)(?: -\S+)* (\w+\.py)", README)
    assert len(scripts) > 10 and set(scripts) <= PATHS.keys()


def test_its_figures_are_those_of_the_results():
    """Means with their spread stand in results/paradox.md, gains in results/bench.md."""
    study, bench = ((REPO / "results" / name).read_text(encoding="utf-8") for name in ("paradox.md", "bench.md"))
    figures = re.findall(r"-?\d+\.\d+ ± \d+\.\d+(?: \[[\d.]+\])?", README)
    assert len(figures) > 10 and all(figure in study for figure in figures)
    gains = re.findall(r"\b\d+(?:\.\d+)?x\b", README)
    assert len(gains) > 5 and all(f" {gain} " in bench for gain in gains)
