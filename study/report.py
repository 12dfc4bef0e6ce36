"""report.py: what runs did, as one HTML file: curves, a table, and the kept episodes token by token.

    python -m study.report RUN... [-o FILE] [--episodes 200]        # no server, no network: the file holds everything
    python -m study.report RUN... --png pictures                    # and pictures/curves.png, for a README
    python -m study.report episodes.jsonl --model CHECKPOINT        # only the viewer, e.g. of rollout.py's --trace
    write_page(path, [run, ...]); episode_page(path, episodes, renderer)    # from Python

Runs that differ in their seed alone are one line: their mean, with a band of one standard deviation. The viewer shows who
wrote each token, its log-prob, its advantage and whether it is structure, beside the frames that the agents saw.

report.html is the page without its data. What is missing or cut (a run that still goes on) becomes a note on it.

Deliberately missing: live updates, statistics beyond mean and standard deviation.
"""

import argparse
import base64
import dataclasses
import fnmatch
import hashlib
import io
import itertools
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data import Call, Episode, Task, Trajectory
from rewards import final_answer, structural_mask, turn_texts
from rollout import episode_of
from runtime.config import ConfigError, build, read_tree
from runtime.contract import ContractError, Renderer, VisualContract, load_tokenizer
from runtime.video import Frames, VideoError, Videos, uniform_indices
from tools import ToolError, choose_video

TEMPLATE = Path(__file__).with_name("report.html")
LAST = 10  # steps that the table averages
STYLE = {  # of PNGs
    "backend": "Agg", "savefig.dpi": 160, "font.size": 9, "legend.frameon": False, "lines.linewidth": 1.6, "lines.markersize": 4,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": 10,
    "axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.25, "grid.linewidth": 0.6,
}  # fmt: skip
COLORS = ("#0072b2", "#d55e00", "#009e73", "#b8639a", "#c98a00", "#3a9fd4", "#777777")  # of the curves, as on the page
SIDE = 96  # pixels: longest side of a thumbnail

# The panels: keys of metrics.jsonl or patterns of them. A panel whose key no run has is left out.
SECTIONS = {
    "Reward": "reward acc tool",
    "Format": "fmt strict anchor closure/*",
    "Calls": "kappa turns call_errors/* share/* call_gain/*",
    "Learning": "loss val_loss entropy kl clip_fraction gap grad_norm flat_groups lr",
    "Evaluation": "eval/* eval_no_tools/*",
    "Seconds": "seconds *_seconds",
    "More": "*",
}
TITLES = {  # of the keys that do not speak for themselves; {} is what comes after the last slash
    "acc": "accuracy",
    "fmt": "format reward f",
    "strict": "strictly well-formed",
    "kappa": "κ: executed calls per episode",
    "closure/*": "<{}>: share that is closed",
    "call_errors/*": "share of calls that ended as {}",
    "share/*": "K: share of the groups",
    "call_gain/*": "accuracy, called − skipped, {}",
    "eval/*": "held out, greedy: {}",
    "eval_no_tools/*": "held out, greedy, no tools: {}",
    "kl": "KL to the reference",
    "gap": "log-prob gap between trainer and engine",
}
COLUMNS = ["acc", "fmt", "strict", "kappa", "acc/K=4/called", "acc/K=4/skipped", "reward", "val_loss", "seconds"]


@dataclass
class Pictures:
    """The thumbnails of a page, each distinct one once."""

    uris: list[str] = field(default_factory=list)
    _known: dict[bytes, int] = field(default_factory=dict)

    def add(self, pixels: np.ndarray) -> int:
        """[H, W, 3] uint8 -> its place in `uris`; -1 for a frame whose pixels are gone."""
        from PIL import Image

        if not pixels.size:
            return -1
        key = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()
        if key not in self._known:
            image, file = Image.fromarray(pixels), io.BytesIO()
            image.thumbnail((SIDE, SIDE))
            image.save(file, "JPEG", quality=80, subsampling=0)
            self._known[key] = len(self.uris)
            self.uris.append("data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode())
        return self._known[key]


@dataclass
class RunData:
    """One run, as the page needs it."""

    name: str
    pictures: Pictures  # of the page
    renderer: Renderer | None = None  # for the episodes
    config: dict[str, Any] = field(default_factory=dict)  # as the run saved it
    metrics: list[dict[str, float]] = field(default_factory=list)  # by step
    steps: dict[int, list[dict]] = field(default_factory=dict)  # step -> groups of episodes, ready for JSON
    vocabulary: dict[int, str] = field(default_factory=dict)  # of the tokens that occur
    notes: list[str] = field(default_factory=list)  # what is missing or broken

    def setting(self, key: str, default: Any) -> Any:
        """config["a"]["b"] for "a.b"."""
        value = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return default if value is None else value


# ------------------------------------------------------------------------------------------------ reading


def read_run(path: Path, name: str, pictures: Pictures, most: int = 200, model: Path | None = None) -> RunData:
    """A run's folder, or a JSONL file of episodes; about `most` of the episodes, from steps spread over the run."""
    run = RunData(name, pictures)
    if path.is_dir():
        try:
            run.config = read_tree(path / "config.yaml")
        except ConfigError as error:
            run.notes.append(f"{error}; so this run is not grouped with others")
        run.metrics = read_metrics(path / "metrics.jsonl", run.notes)
    files = sorted((path / "episodes").glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        if "rollout" in run.config:
            run.notes.append(f"{path}/episodes: no episodes were kept (dump_groups)")
        return run
    home = path if path.is_dir() else path.parent.parent  # RUN/episodes/step-000010.jsonl
    places = [model] if model else [home / "model", Path(str(run.setting("policy.checkpoint", home / "model")))]
    source = next((place for place in places if (place / "tokenizer_config.json").exists()), None)
    if source is None:
        tried = " or ".join(dict.fromkeys(map(str, places)))
        run.notes.append(f"{path}: no tokenizer in {tried}, so its episodes are left out; pass --model CHECKPOINT")
        return run
    try:
        visual = run.setting("visual", None)
        contract = build(VisualContract, visual, "visual.") if visual else VisualContract.load(source)
        run.renderer = Renderer(load_tokenizer(source), contract)
    except (OSError, ValueError) as error:
        run.notes.append(f"{path}: the tokenizer in {source} cannot be used, so its episodes are left out: {error}")
    else:
        read_episodes(run, files, most)
    return run


def read_metrics(path: Path, notes: list[str]) -> list[dict[str, float]]:
    """Finite numbers by key; `call_gain/K=4` is what calling adds to the accuracy at that K."""
    rows: dict[int, dict[str, float]] = {}
    if not path.exists():
        notes.append(f"{path}: no such file, so this run has no curves")
        return []
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, KeyError, TypeError):
            notes.append(f"{path}, line {number}: cut off or not metrics, so it is left out: {line[:40]!r}")
            continue
        row = {k: v for k, v in row.items() if isinstance(v, int | float) and math.isfinite(v)}
        for key in list(row):
            other = key.removesuffix("called") + "skipped"
            if re.fullmatch(r"acc/K=\d+/called", key) and other in row:
                row[f"call_gain/{key.split('/')[1]}"] = row[key] - row[other]
        rows[step] = row
    return [rows[step] for step in sorted(rows)]


def read_episodes(run: RunData, files: list[Path], most: int) -> None:
    """Fill run.steps from the files of a run, or from some of them, evenly spread."""
    each = max(1, files[0].read_text("utf-8", errors="replace").count("\n"))
    chosen = [files[i] for i in uniform_indices(len(files), max(1, most // each))]
    if len(chosen) < len(files):
        run.notes.append(f"{run.name}: the viewer has {len(chosen)} of {len(files)} steps (see --episodes)")
    bare = []  # why episodes have no pictures
    with Videos(workers=1) as videos:
        for file in chosen:
            episodes = []
            for number, line in enumerate(file.read_text("utf-8", errors="replace").splitlines(), 1):
                try:
                    episode, reason = read_episode(line, videos, run.renderer.contract)
                except (ValueError, KeyError, TypeError) as error:
                    run.notes.append(f"{file}, line {number}: cut off or no episode ({error!r:.80}), so it is left out")
                    continue
                episodes.append(episode)
                bare += [reason] if reason else []
            step = re.search(r"step-(\d+)", file.name)
            add_episodes(run, int(step[1]) if step else 0, episodes)
    if bare:
        run.notes.append(f"{run.name}: {len(bare)} episodes are shown without pictures: {bare[0]}")


def read_episode(line: str, videos: Videos, contract: VisualContract) -> tuple[Episode, str]:
    """An episode with its frames, or with the times of its frames alone and the reason why."""
    try:
        return episode_of(json.loads(line), videos, contract), ""
    except (VideoError, ToolError, ContractError) as error:
        reason = str(error)
    record = json.loads(line)
    times = [agent["frames"] for agent in (record["main"], *(call["agent"] for call in record["calls"])) if agent]
    episode = episode_of(record, None, None)
    for agent, clips in zip(episode.trajectories, times, strict=True):
        agent.frames = [Frames(np.zeros((len(clip), 0, 0, 3), np.uint8), tuple(clip)) for clip in clips]
    return episode, reason


# ------------------------------------------------------------------------------------------------ episodes


def add_episodes(run: RunData, step: int, episodes: Sequence[Episode]) -> None:
    """The episodes of one step, by the task and K that they share."""
    groups: dict[tuple[str, int], dict] = {}
    for episode in episodes:
        shared = dataclasses.asdict(episode.task) | {"k": episode.k, "episodes": []}
        group = groups.setdefault((episode.task.id, episode.k), shared)
        group["episodes"].append(view_episode(episode, run))
    if groups:
        run.steps.setdefault(step, []).extend(groups.values())


def view_episode(episode: Episode, run: RunData) -> dict:
    """An episode as the page shows it."""
    turns = turn_texts(episode.main, run.renderer)
    anchored = run.setting("reward.anchor.credit", "off") == "struct"
    shown = {name: getattr(episode, name) for name in ("error", "seconds", "reward", "advantage")}
    return shown | {
        "answer": final_answer(turns, run.setting("reward.untagged_answer", False)),
        "kappa": episode.executed,
        # A_t = advantage + anchor_advantage * [t is structural]: the page adds them up.
        "anchor_advantage": run.setting("reward.anchor.scale", 0.0) * episode.anchor_advantage * anchored,
        "subagents_learn": run.setting("rollout.subagents.train", False),
        "overview": [len(clip) for clip in episode.main.frames[: len(episode.task.videos)]],
        "main": view_agent(episode.main, run, structural_mask(episode.main, run.renderer)),
        "calls": [view_call(call, episode.task, run) for call in episode.calls],
    }


def view_call(call: Call, task: Task, run: RunData) -> dict:
    shown = {name: getattr(call, name) for name in ("turn", "name", "text", "error", "window", "seconds")}
    return shown | {
        "arguments": json.dumps(call.arguments, ensure_ascii=False),
        "video": task.videos.index(choose_video(task, call.arguments)),
        "agent": view_agent(call.agent, run) if call.agent else None,
    }


def view_agent(agent: Trajectory, run: RunData, structural: Sequence[bool] = ()) -> dict:
    """An agent's tokens; the pads of an image are one token, whose picture is the next of `images`.

    kinds: p prompt, f forced, s sampled, t from the tools. `odd`: tokens whose text is not the vocabulary's, since they
    are bytes of a character (the last of them shows it)."""
    spans, text = run.renderer.offsets(agent.ids), run.renderer.decode(agent.ids)
    spoken = {i for start, end in agent.turns for i in range(start, end)}
    ids, kinds, logprobs, chosen, odd = [], [], [], [], {}
    for i, token in enumerate(agent.ids):
        if token == run.renderer.image_pad and i and agent.ids[i - 1] == token:
            continue
        last = i + 1 == len(spans) or spans[i + 1] != spans[i]
        said = text[slice(*spans[i])] if last else ""
        if run.vocabulary.setdefault(token, said) != said:
            odd[len(ids)] = said
        if i < len(structural) and structural[i]:
            chosen.append(len(ids))
        if agent.mask[i]:
            logprobs.append(round(agent.logprobs[i], 4) if math.isfinite(agent.logprobs[i]) else None)
        kinds.append("s" if agent.mask[i] else "f" if i in spoken else "p" if i < agent.prompt_length else "t")
        ids.append(token)
    shots = [[time, run.pictures.add(shot)] for clip in agent.frames for time, shot in zip(clip.times, clip.pixels)]
    told = {"ids": ids, "kinds": "".join(kinds), "structural": chosen, "odd": odd, "finish": agent.finish}
    return told | {"images": shots, "logprobs": logprobs}  # log-probs of the sampled tokens


# ------------------------------------------------------------------------------------------------ curves and table


def seed_groups(runs: Sequence[RunData]) -> list[tuple[str, list[RunData]]]:
    """Runs whose configs are equal but for seeds and folders named after them, under the name without its seed."""
    groups: dict[str, list[RunData]] = {}
    for i, run in enumerate(runs):
        config = {key: value for key, value in run.config.items() if key != "run"}
        method = re.sub(r'"seed": \d+|\bseed[-_]?\d+\b', "seed", json.dumps(config, sort_keys=True, default=str))
        groups.setdefault(method if run.config else str(i), []).append(run)
    bare = lambda name: re.sub(r"(^|[-_/. ])(seed|s)?[-_=]?\d+(?=[-_/. ]|$)", "", name).strip("-_/. ")  # noqa: E731
    many = lambda members: f"{bare(members[0].name) or members[0].name} ({len(members)} seeds)"  # noqa: E731
    return [(many(members) if len(members) > 1 else members[0].name, members) for members in groups.values()]


def curve(runs: Sequence[RunData], key: str) -> dict[str, list] | None:
    """{x: steps, y: mean, std} over the runs that have the key at that step; the std is the sample's (n - 1)."""
    values: dict[int, list[float]] = {}
    for run in runs:
        for row in run.metrics:
            if key in row:
                values.setdefault(int(row["step"]), []).append(row[key])
    if not values:
        return None
    x = sorted(values)
    found = {"x": x, "y": [statistics.fmean(values[s]) for s in x]}
    if len(runs) > 1:
        found["std"] = [statistics.stdev(values[s]) if len(values[s]) > 1 else 0.0 for s in x]
    return found


def sections(groups: Sequence[tuple[str, list[RunData]]]) -> list[dict]:
    """The panels of the page, each with a line per group that has its key."""
    rows = [row for _, runs in groups for run in runs for row in run.metrics]
    keys = {key for row in rows for key in row if row[key] or not key.startswith("call_errors/")} - {"step"}
    shown = []
    for section, patterns in SECTIONS.items():
        panels = []
        for pattern in patterns.split():
            found = fnmatch.filter(keys, pattern)
            found.sort(key=lambda key: re.sub(r"\d+", lambda digits: digits[0].zfill(6), key))  # K=8 before K=16
            keys -= set(found)
            if pattern == "share/*":
                panels += [histogram(groups, found)] if found else []
                continue
            for key in found:
                title = TITLES[pattern].format(key.rpartition("/")[2]) if pattern in TITLES else key.replace("_", " ")
                lines = [c | {"group": g} for g, (_, runs) in enumerate(groups) if (c := curve(runs, key))]
                panels.append({"key": key, "title": title, "kind": "line", "lines": lines})
        if panels:
            shown.append({"title": section, "panels": panels})
    return shown


def histogram(groups: Sequence[tuple[str, list[RunData]]], keys: list[str]) -> dict:
    """Mean share of each K over all steps; a step that does not mention a K drew none."""
    lines = []
    for g, (_, runs) in enumerate(groups):
        rows = [row for run in runs for row in run.metrics if any(key in row for key in keys)]
        if rows:
            y = [statistics.fmean(row.get(key, 0.0) for row in rows) for key in keys]
            lines.append({"group": g, "x": [key.removeprefix("share/K=") for key in keys], "y": y})
    return {"key": "share", "title": TITLES["share/*"], "kind": "bars", "lines": lines}


def table(groups: Sequence[tuple[str, list[RunData]]]) -> dict:
    """A row per group: the mean of each run's last steps, then [mean, std] of these over the runs."""
    rows = []
    for g, (_, runs) in enumerate(groups):
        cells = []
        for key in COLUMNS:
            means = [statistics.fmean(v) for run in runs if (v := [r[key] for r in run.metrics[-LAST:] if key in r])]
            std = statistics.stdev(means) if len(means) > 1 else None
            cells.append([statistics.fmean(means), std] if means else None)
        if any(cells):
            rows.append({"group": g, "steps": min(len(run.metrics) for run in runs), "cells": cells})
    return {"columns": COLUMNS, "rows": rows, "last": LAST}


# ------------------------------------------------------------------------------------------------ writing


def write_page(path: str | Path, runs: Sequence[RunData]) -> None:
    """One HTML file that needs nothing else; its runs share their pictures."""
    groups = seed_groups(runs)
    content = {
        "notes": [note for run in runs for note in run.notes],
        "groups": [name for name, _ in groups],
        "sections": sections(groups),
        "table": table(groups),
        "runs": [
            {"name": r.name, "pad": r.renderer.image_pad, "vocabulary": r.vocabulary, "steps": sorted(r.steps.items())}
            for r in runs
            if r.steps
        ],
        "pictures": runs[0].pictures.uris,
    }
    # What models write holds tags: as < it cannot end the script element that carries it.
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8")
    Path(path).write_text(page.replace("{{DATA}}", text), encoding="utf-8")


def episode_page(path: str | Path, episodes: Sequence[Episode], renderer: Renderer, name: str = "episodes") -> None:
    """The viewer alone, of episodes in memory."""
    run = RunData(name, Pictures(), renderer)
    add_episodes(run, 0, episodes)
    write_page(path, [run])


def draw_png(path: Path, runs: Sequence[RunData]) -> None:
    """f, strict, kappa and accuracy of the runs that have them."""
    from matplotlib import pyplot, rc_context

    shown, groups = ("fmt", "strict", "kappa", "acc"), seed_groups(runs)
    with rc_context(STYLE):
        figure, axes = pyplot.subplots(1, len(shown), figsize=(11, 2.7), layout="constrained")
        for axis, key in zip(axes, shown):
            drawn = [(name, line) for name, members in groups if (line := curve(members, key))]
            for (name, line), color in zip(drawn, itertools.cycle(COLORS)):
                x, y, std = line["x"], np.array(line["y"]), np.array(line.get("std", 0.0))
                axis.fill_between(x, y - std, y + std, color=color, alpha=0.18, linewidth=0)
                axis.plot(x, y, color=color, label=name)
            # Not comparable across runs: with gating many episodes have few frames, where only a call helps.
            axis.set_title(TITLES[key] + ", at the K that is drawn" * (key == "acc"))
            axis.set_xlabel("step")
            lowest = min((y for _, line in drawn for y in line["y"]), default=0)
            axis.set_ylim(bottom=min(0, lowest - 0.03), top=None if key == "kappa" else 1.03)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=4)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or JSONL files of episodes")
    parser.add_argument("-o", "--out", type=Path, help="the page (default: report.html in the runs' common folder)")
    parser.add_argument("--png", type=Path, metavar="DIR", help="also draw DIR/curves.png")
    parser.add_argument("--episodes", type=int, default=200, help="at most about this many in the viewer, of all runs")
    parser.add_argument("--model", type=Path, help="a checkpoint whose tokenizer and contract the episodes have")
    args = parser.parse_args()
    if args.episodes < 1:
        parser.error(f"--episodes {args.episodes}: at least 1")
    given = [path for path in args.runs if path.suffix != ".html"]  # runs/* may hold an earlier page
    missing = [str(path) for path in given if not path.exists()]
    if missing or not given:
        sys.exit(f"error: no such run: {missing}; pass folders with metrics.jsonl, or JSONL files of episodes")
    whole = [path.resolve() for path in given]
    parent = Path(os.path.commonpath([path.parent for path in whole]))
    folder = Path(os.path.commonpath([path if path.is_dir() else path.parent for path in whole]))
    out = args.out or folder / "report.html"
    if out.resolve() == TEMPLATE.resolve() or any(path.is_file() for path in out.parents):
        sys.exit(f"error: {out} is the page's template, or lies below a file; choose another file with -o")
    if strange := [str(p) for p in given if p.is_dir() and not {"config.yaml", "metrics.jsonl"} & set(os.listdir(p))]:
        sys.exit(f"error: no config.yaml and no metrics.jsonl in {strange}; name the folders of runs")
    with_episodes = sum(path.is_file() or (path / "episodes").is_dir() for path in whole)
    pictures, share = Pictures(), args.episodes // max(1, with_episodes)
    runs = [read_run(p, q.relative_to(parent).as_posix(), pictures, share, args.model) for p, q in zip(given, whole)]
    print("".join(f"note: {note}\n" for run in runs for note in run.notes), end="")
    if not any(run.metrics or run.steps for run in runs):
        sys.exit(f"error: neither curves nor episodes in {', '.join(map(str, given))}; {out} is left as it is")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, runs)
    kept = sum(len(group["episodes"]) for run in runs for groups in run.steps.values() for group in groups)
    print(f"{out}: {len(runs)} runs, {kept} episodes, {out.stat().st_size / 2**20:.1f} MiB")
    if args.png:
        draw_png(args.png / "curves.png", runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
