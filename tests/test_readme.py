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


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+\.)+(?:py|yaml|md|html))`", README))))
def test_the_files_that_it_names_are_there(name):
    assert next(REPO.rglob(name), None)


WHERE = re.search(r"^\| term \| where \|\n(.*?)\n\n", README, re.M | re.S)[1]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+\.)+\w+)`", WHERE))))
def test_what_the_table_of_terms_names_is_there(name):
    """`rl.Sampler.sample`: a method of a class of that file."""
    module, *attributes = name.split(".")
    found = importlib.import_module(".".join(PATHS[f"{module}.py"].relative_to(REPO).with_suffix("").parts))
    for attribute in attributes:
        fields = getattr(found, "__annotations__", {})  # of a dataclass, those without a default
        assert hasattr(found, attribute) or attribute in fields, name
        found = getattr(found, attribute, None)


def test_every_path_that_it_names_is_there():
    paths = re.findall(r"\b(?:configs|docs|results|runtime|evals|study|tests)/[\w/.]+\.(?:yaml|md|png|py)", README)
    assert paths and all((REPO / path).is_file() for path in paths)


def test_every_config_that_it_names_is_there():
    named = set(re.findall(r"`(\w+_(?:8b|2b)\w*)`", README))
    assert named and all((REPO / "configs" / f"{name}.yaml").is_file() for name in named)


def test_its_commands_are_commands():
    """Scripts and modules exist; targets are in the Makefile."""
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in re.findall(r"^make ([\w-]+)", README, re.M))
    scripts = re.findall(r"(?:python|torchrun)(?: --\S+)* (\w+\.py)", README)
    modules = re.findall(r"python -m study\.(\w+)", README)
    assert len(scripts) > 8 and set(scripts) <= PATHS.keys()
    assert len(modules) > 5 and {f"{module}.py" for module in modules} <= PATHS.keys()
    assert all("def main()" in PATHS[f"{module}.py"].read_text(encoding="utf-8") for module in modules)


def test_its_figures_are_those_of_the_results():
    """Means with their spread stand in results/paradox.md, gains in results/bench.md."""
    study, bench = ((REPO / "results" / name).read_text(encoding="utf-8") for name in ("paradox.md", "bench.md"))
    figures = re.findall(r"-?\d+\.\d+ ± \d+\.\d+(?: \[[\d.]+\])?", README)
    assert len(figures) > 10 and all(figure in study for figure in figures)
    gains = re.findall(r"\b\d+(?:\.\d+)?x\b", README)
    assert len(gains) > 5 and all(f" {gain} " in bench for gain in gains)


def test_the_lock_holds_what_the_requirements_pin_and_every_package_once():
    """A lock that was not renewed would install another SGLang than the one that the code was written for."""
    pins, locked = (
        re.findall(r"^([\w.-]+)==([^\s;]+)", (REPO / name).read_text(encoding="utf-8"), re.M)
        for name in ("requirements.txt", "requirements.lock")
    )
    assert len(pins) > 12 and set(pins) <= set(locked)
    names = [name for name, _ in locked]
    assert len(names) == len(set(names)) and f"pins all {len(names) + 1} packages" in README  # and ./configs/cuda-tile
