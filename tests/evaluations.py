"""Configs of small evaluations, and results as eval.py writes them.

write_results(folder, "lvbench", lines("110"))      # a run with three answers
"""

import json
from pathlib import Path

import pytest
import yaml

import eval as evaluation
from runtime.config import UserError


def line(id, score, *, video="", **more) -> dict:
    """Return a line of results."""
    plain = {
        "id": id, "videos": [video or f"v/{id}.mp4"], "kind": "mcq", "gold": "A",
        "said": "A", "answer": "A", "tagged": True, "duration": "", "prediction": "A", "score": float(score), "judged": False, "calls": [], "turns": 1, "tokens": 10,
        "subagent_tokens": 0, "critical_tokens": 10, "truncated": False, "seconds": 1.0, "error": "",
    }  # fmt: skip
    return plain | more


def lines(scores: str, **more) -> list[dict]:
    """Return lines of results, one per digit."""
    return [line(str(i), int(score), **more) for i, score in enumerate(scores)]


def write_results(folder, split, rows, *, name="toy", arm="parallel", k=64, total=0) -> Path:
    """Write a file of results into a run's folder, as eval.py does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"name": name}))
    record = folder / "run.json"
    items = json.loads(record.read_text())["items"] if record.exists() else {}
    record.write_text(json.dumps({"items": items | {split: total or len(rows)}}))
    path = folder / f"{split}-K{k}-{arm}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_eval_config(folder: Path, toy_dir: Path, **changes) -> Path:
    """Write the config of an evaluation in folder/run: each of the toy's 8 test items is asked once, and the whole reply is the
    answer."""
    sampling = {"temperature": 0, "think_prefix": True, "max_rounds": 1, "max_new_tokens": 24}
    tree = {
        "run": str(folder / "run"),
        "name": "toy",
        "checkpoint": str(toy_dir / "model"),
        "splits": {"toy": str(toy_dir)},
        "frames": [4],
        "prompting": {"protocol": "direct"},
        "rollout": sampling | {"subagents": {"max_new_tokens": 8}},
        "decoders": 1,
    }
    folder.mkdir(exist_ok=True)
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(tree | changes))
    return path


@pytest.fixture
def refused(capsys):
    """refused(cfg, match): an evaluation and its dry run refuse the config with the same sentence. Returns what they say."""

    def check(cfg: evaluation.EvalConfig, match: str) -> str:
        capsys.readouterr()
        with pytest.raises((UserError, FileNotFoundError, PermissionError), match=match) as error:
            evaluation.main(cfg)
        with pytest.raises((UserError, FileNotFoundError, PermissionError), match=match):
            evaluation.main(cfg, dry=True)
        return f"{error.value}\n{capsys.readouterr().out}"

    return check
