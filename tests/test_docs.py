"""The README, CONTRIBUTING.md and the pages of docs/: the files, headings, configs, commands and figures that they name exist."""

import importlib
import re
import shlex

import pytest
from scripts import GONE, REPO, printed_by_node_sh

from runtime import config


def read(name: str) -> str:
    return (REPO / name).read_text("utf-8")


README, CONTRIBUTING, *_ = PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted(REPO.glob("docs/*.md"))]


def without_gone(text: str) -> str:
    """Leave out the lines about what a fork has removed."""
    return "".join(line for line in text.splitlines(keepends=True) if not GONE.search(line))


TEXT = {page: without_gone(page.read_text("utf-8")) for page in PAGES}
# What node.sh runs, as if a page listed it.
PAGES.append(REPO / "node.sh")
TEXT[PAGES[-1]] = f"```sh\n{without_gone(printed_by_node_sh())}```\n"
SCRIPTS = {path.name: path for room in (".", "runtime", "evals", "study") for path in REPO.glob(f"{room}/*[!_].py")}
CONFIGS = {"sft.py": "SFTConfig", "rl.py": "RLConfig", "eval.py": "EvalConfig"}
of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def module_of(name: str):
    return importlib.import_module(".".join(SCRIPTS[f"{name}.py"].relative_to(REPO).with_suffix("").parts))


def blocks(page, *kinds: str) -> list[str]:
    return [text for kind, text in re.findall(r"^```(\w*)\n(.*?)\n```$", TEXT[page], re.M | re.S) if kind in kinds]


def made_by(page) -> set[str]:
    """Return the files that a guide tells its reader to write."""
    return set(re.findall(r"^(?:\+\+\+ b/|# )(\S+/\S+\.\w+)$", "\n".join(blocks(page, "diff", "yaml", "python")), re.M))


@of_each_page
def test_the_files_that_a_page_names_are_there(page):
    folders = "configs|docs|results|runtime|evals|study|tests"
    paths = set(re.findall(rf"(?<![\w/.])(?:{folders})/[\w/.-]+\.(?:yaml|md|png|py|json)\b", TEXT[page]))
    paths |= {f"configs/{name}.yaml" for name in re.findall(r"`(\w+_(?:8b|2b)\w*)`", TEXT[page])}
    assert [path for path in paths - made_by(page) if not (REPO / path).is_file()] == []
    names = set(re.findall(r"`((?:\w+\.)+(?:py|yaml|md|html))`", TEXT[page])) - {"config.yaml"}  # of a run
    assert [name for name in names if not next(REPO.glob(f"[!.]*/**/{name}"), (REPO / name).is_file())] == []


@of_each_page
def test_a_link_leads_to_a_file_and_to_one_of_its_headings(page):
    for name, heading in re.findall(r"\]\((?!http)([^)#]*)#?([\w-]*)\)", TEXT[page]):
        there = page.parent / name if name else page
        assert there.is_file(), name
        headings = re.findall(r"^#+ (.*)$", there.read_text("utf-8"), re.M) if heading else [heading]
        assert heading in [re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings], heading


@of_each_page
def test_the_commands_of_a_page_are_commands(page):
    """Targets are in the Makefile, scripts and modules exist, configs load with the keys that are given."""
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.M))
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", TEXT[page], re.M)) <= targets
    assert {f"{module}.py" for module in re.findall(r"\bstudy\.(\w+)", TEXT[page])} <= SCRIPTS.keys()
    found = 0
    for command in "\n".join(blocks(page, "sh", "")).replace("\\\n", " ").splitlines():
        script = re.search(r"\b(?:python|torchrun)(?: --\S+)* (\w+\.py|-m \S+)((?: \S+)*)", command.partition("  #")[0])
        if not script or script[1] == "-m pytest":
            continue
        found += 1
        name, words = re.sub(r"-m study\.|\.py", "", script[1]) + ".py", shlex.split(script[2])
        assert "def main(" in SCRIPTS[name].read_text("utf-8"), command
        if name in CONFIGS and words[0] not in ("table", "ablation") and words[0] not in made_by(page):
            overrides = [word for word in words[1:] if "=" in word and not word.startswith("--")]
            load = module_of("rows").load if name == "eval.py" else config.load
            load(getattr(module_of(name.removesuffix(".py")), CONFIGS[name]), REPO / words[0], overrides)
    assert found >= {"README.md": 2, "node.md": 5, "node.sh": 9}.get(page.name, 0)


TERMS = re.search(r"^\| term \| where \|\n(.*?)\n\n", TEXT[README], re.M | re.S)[1]
ROUTE = re.search(r"^\| step \| function \|\n(.*?)^## ", TEXT[CONTRIBUTING], re.M | re.S)[1]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+\.)+\w+)`", TERMS + ROUTE))))
def test_what_the_tables_of_terms_and_of_the_route_name_is_there(name):
    """A name such as `rl.Sampler.sample` is a file, its class and a method."""
    module, *attributes = name.split(".")
    found = module_of(module)
    for attribute in attributes:
        fields = getattr(found, "__annotations__", {})  # a dataclass's fields without a default
        assert hasattr(found, attribute) or attribute in fields, name
        found = getattr(found, attribute, None)


def test_the_readmes_figures_are_those_of_the_results():
    """results/paradox.md has the means with their spread, results/bench.md the speed-ups."""
    figures = re.findall(r"-?\d+\.\d+ ± \d+\.\d+(?: \[[\d.]+\])?", TEXT[README])
    assert len(figures) > 10 and all(figure in read("results/paradox.md") for figure in figures)
    gains = re.findall(r"\b\d+(?:\.\d+)?x\b", TEXT[README])
    assert len(gains) >= 2 and all(f" {gain} " in read("results/bench.md") for gain in gains)


def test_pins_agree():
    """An outdated lock would install another SGLang than the code was written for."""
    pins, lock = (re.findall(r"^([\w.-]+)==([^\s;]+)", read(f"requirements.{kind}"), re.M) for kind in ("txt", "lock"))
    assert len(pins) > 12 and set(pins) <= set(lock) and len(lock) == len(dict(lock))
    assert f"requirements.lock` ({len(lock) + 1} pins)" in TEXT[README]  # and ./configs/cuda-tile
    hook = re.search(r"ruff-pre-commit\n +rev: v(\S+)", read(".pre-commit-config.yaml"))[1]
    assert all(f"\nruff=={hook}\n" in read(name) for name in ("requirements-cpu.txt", "requirements.txt"))
