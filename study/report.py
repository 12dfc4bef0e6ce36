"""report.py: write one HTML file about runs: results, curves, and the recorded episodes token by token.

    python -m study.report RUN... [-o FILE] [--png DIR]             # the file needs no server and no network
    python -m study.report episodes.jsonl --model CHECKPOINT        # only the viewer, e.g. for study.ask's --trace

A RUN is the folder of a training or an evaluation. Evaluations come first on the page. Runs that differ only in their
seed share one line: their mean, with a band of one standard deviation. The viewer shows each token's source, log-prob,
advantage and whether it is structural, next to the frames that the agents saw.
Deliberately missing: live updates, statistics beyond mean and deviation.
"""

import argparse
import base64
import contextlib
import fnmatch
import io
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data import Call, Episode, Task, Trajectory
from evals import results
from evals.tables import outcomes
from records import episode_of
from rewards import final_answer, shape_of, split_turn, turn_texts
from runtime.config import ConfigError, build, read_tree
from runtime.dataset import DataError
from runtime.render import Renderer, load_tokenizer
from runtime.video import VideoError, Videos, uniform_indices
from runtime.visual import ContractError, VisualContract
from tools import ToolError, choose_video

TEMPLATE = Path(__file__).with_name("report.html")
EPISODES = 200  # in the viewer, approximately, over all runs
STYLE = {  # of PNGs
    "backend": "Agg", "savefig.dpi": 160, "font.size": 9, "axes.titlelocation": "left", "axes.titlesize": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.25,
}  # fmt: skip
LINE_COLORS = ["#0072b2", "#d55e00", "#009e73", "#b8639a", "#c98a00", "#3a9fd4", "#777777"]  # as on the page
SIDE = 96  # pixels: longest side of a thumbnail
MAX_POINTS = 2000  # of a curve; a screen is about as wide

OUTCOMES = ("accuracy", "calls", "well_formed")  # of evaluations
# The panels by section: keys of metrics.jsonl, or patterns. Keys that no run has are left out.
SECTIONS = {
    "Format": "f f_release well_formed R_anchor closure/* surplus/* spam/*",
    "Calls": "kappa calling_rate parallel_rate turns calls/distinct critical_tokens all_tokens",
    "Sub-agents' reports": "report/ended report/tagged report/tokens",
    "Evaluation while training": "eval/* eval_no_tools/*",
    "Accuracy by K": "acc/K=*[0-9]",
    "Reward": "R R_acc R_tool",
    "Learning": "loss val_loss entropy kl clip_fraction logprob_gap grad_norm flat_groups lr",
    "Seconds": "seconds *_seconds",
    "More": "*",
}
TITLES = {  # for keys whose names do not explain themselves
    "R_acc": "accuracy at the drawn K",
    "accuracy": "accuracy after training",
    "calls": "κ: executed calls per episode",
    "f": "format reward f",
    "f_release": "f on the scale of the released code, and of the paper",
    "well_formed": "exactly well-formed",
    "kappa": "κ: executed calls per episode",
    "calling_rate": "episodes that call a tool",
    "parallel_rate": "calling episodes with several calls in one turn",
    "calls/distinct": "calls with a window that no earlier call mostly covers",
    "critical_tokens": "tokens on the critical path: the main agent's, and each turn's longest report",
    "all_tokens": "tokens of all agents",
    "report/ended": "reports that were not cut off",
    "report/tagged": "reports that contain tags",
    "kl": "KL to the reference",
    "logprob_gap": "log-prob gap between trainer and engine",
}


@dataclass
class RunData:
    """The data of one run for the page."""

    name: str
    pictures: dict[str, int]  # thumbnails of the page: data URI -> index
    renderer: Renderer | None = None  # for the episodes
    config: dict[str, Any] = field(default_factory=dict)  # as the run saved it
    metrics: list[dict[str, float]] = field(default_factory=list)  # by step
    outcomes: list[dict[str, float]] = field(default_factory=list)  # of its evaluation, by K
    steps: dict[int, list[dict]] = field(default_factory=dict)  # step -> groups of episodes, as JSON
    notes: list[str] = field(default_factory=list)  # what is missing, to show on the page


# ------------------------------------------------------------------------------------------------ reading


def read_run(path: Path, name: str, pictures: dict[str, int], max_episodes: int, model: Path | None = None) -> RunData:
    """Read a run's folder or a JSONL file: about `max_episodes` episodes, from steps that are spread over the run."""
    run = RunData(name, pictures)
    files = [path]
    if not path.is_file():
        run.config = read_tree(path / "config.yaml")
        run.metrics = read_metrics(path / "metrics.jsonl")
        run.outcomes = read_outcomes(path)
        files = sorted((path / "episodes").glob("*.jsonl"))
    if not files:
        return run

    # Episodes need the tokenizer of --model, of the run's result, or of the checkpoint that it started from or evaluated.
    started = run.config.get("policy", run.config).get("checkpoint")  # an evaluation has it at the top
    candidates = [Path(folder) for folder in (model, path / "model", started) if folder]
    with_tokenizer = [folder for folder in candidates if (folder / "tokenizer_config.json").exists()]
    if not with_tokenizer:
        run.notes.append(f"{path}: no tokenizer found, so its episodes are left out; pass --model CHECKPOINT")
        return run
    checkpoint = with_tokenizer[0]
    visual = run.config.get("visual")
    contract = build(VisualContract, visual, "visual.") if visual else VisualContract.load(checkpoint)
    run.renderer = Renderer(load_tokenizer(checkpoint), contract)
    read_episodes(run, files, max_episodes)
    return run


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file. Skip an incomplete last line: it is still being written, or was cut off by a kill."""
    content = path.read_bytes()
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the finite numbers of each step. A run that has just started has none."""
    rows = []
    for row in read_lines(path) if path.exists() else []:
        rows.append({k: v for k, v in row.items() if isinstance(v, int | float) and math.isfinite(v)})
    return rows


def read_outcomes(path: Path) -> list[dict[str, float]]:
    """Read the results of an evaluation, if the folder has some: for each K, means over the items of all splits."""
    records: dict[int, list[dict]] = {}
    for result in results.read_run(path).values():
        if result.arm == "parallel":
            records.setdefault(result.k, []).extend(result.records)
    return [{"K": k, **outcomes(asked)} for k, asked in sorted(records.items())]


def join_evaluations(runs: list[RunData]) -> list[RunData]:
    """Give the outcomes of each evaluation to the run that trained its model. An evaluation without that run stands alone."""
    trained = {Path(run.config.get("run", ""), "model"): run for run in runs}
    joined = []
    for run in runs:
        model = Path(run.config.get("checkpoint", ""))
        if model in trained:
            trained[model].outcomes += run.outcomes
            run.outcomes = []
        if model not in trained or run.steps:
            joined.append(run)
    return joined


def read_episodes(run: RunData, files: list[Path], max_episodes: int) -> None:
    """Fill run.steps from the files of a run. If there are too many, take some, evenly spread."""
    per_file = max(1, len(read_lines(files[0])))
    chosen = [files[i] for i in uniform_indices(len(files), max(1, max_episodes // per_file))]
    without_pictures = []  # the reasons
    with Videos(workers=1) as videos:
        for file in chosen:
            episodes = []
            for record in read_lines(file)[:max_episodes]:
                try:
                    episodes.append(episode_of(record, videos, run.renderer.contract))
                except DataError as error:
                    run.notes.append(f"{run.name}: its episodes are left out: {error}")
                    return
                except (VideoError, ToolError, ContractError) as error:
                    episodes.append(episode_of(record, None, None))
                    without_pictures.append(str(error))
            step = re.search(r"step-(\d+)", file.name)
            add_episodes(run, int(step[1]) if step else 0, episodes, videos)
    if without_pictures:
        missing = f"{len(without_pictures)} episodes are shown without pictures: {without_pictures[0]}"
        run.notes.append(f"{run.name}: {missing}")


# ------------------------------------------------------------------------------------------------ episodes


def add_episodes(run: RunData, step: int, episodes: Sequence[Episode], videos: Videos) -> None:
    """Add the episodes of one step, grouped by task and K."""
    groups: dict[tuple[str, int], dict] = {}
    for episode in episodes:
        task = episode.task
        key = (task.id, episode.k)
        if key not in groups:
            groups[key] = vars(task) | {"k": episode.k, "durations": [], "episodes": []}
            with contextlib.suppress(VideoError):  # a video is gone
                groups[key]["durations"] = [videos.info(path).duration for path in task.videos]
        groups[key]["episodes"].append(view_episode(episode, run))
    if groups:
        run.steps.setdefault(step, []).extend(groups.values())  # the files of an evaluation have no steps


def view_episode(episode: Episode, run: RunData) -> dict:
    """Return an episode as the page shows it."""
    reward = run.config.get("reward", {})
    anchor = reward.get("anchor", {})
    lam = anchor["lam"] if anchor.get("credit") == "struct" else 0.0
    texts = turn_texts(episode.main, run.renderer)
    fields = {name: getattr(episode, name) for name in ("error", "seconds", "rewards", "advantage")}
    return fields | {
        "answer": final_answer(texts, reward.get("untagged_answer", "off")),
        "shapes": [shape_of(split_turn(text)) for text in texts],
        "kappa": episode.n_executed,
        # A_t = advantage + anchor_advantage * [t is structural]. The page adds them up.
        "anchor_advantage": lam * episode.anchor_advantage,
        "subagents_learn": run.config.get("rollout", {}).get("subagents", {}).get("train", False),
        "overview": [len(clip) for clip in episode.main.prompt_clips],
        "main": view_agent(episode.main, run),
        "calls": [view_call(call, episode.task, run) for call in episode.calls],
    }


def view_call(call: Call, task: Task, run: RunData) -> dict:
    """Return a call as the page shows it."""
    fields = {name: getattr(call, name) for name in ("turn", "name", "text", "error", "window", "seconds")}
    return fields | {
        "arguments": json.dumps(call.arguments, ensure_ascii=False),
        # A call without a window may name no video.
        "video": task.videos.index(choose_video(task, call.arguments)) if call.window else None,
        "subagent": view_agent(call.subagent, run) if call.subagent else None,
    }


def view_agent(trajectory: Trajectory, run: RunData) -> dict:
    """Return an agent's tokens. The pads of an image become one token, whose picture is the next one in `images`.

    kinds: p prompt, f forced, s sampled, t from the tools."""
    text = run.renderer.decode(trajectory.ids)
    spans = run.renderer.offsets(trajectory.ids)
    in_turns = {i for start, end in trajectory.turns for i in range(start, end)}
    view = {"ids": [], "texts": [], "kinds": "", "logprobs": [], "structural": [], "images": []}
    for i, token in enumerate(trajectory.ids):
        if token == run.renderer.image_pad and i and trajectory.ids[i - 1] == token:
            continue

        # its source
        if trajectory.mask[i]:
            view["kinds"] += "s"
            view["logprobs"].append(round(trajectory.logprobs[i], 4))
        elif i in in_turns:
            view["kinds"] += "f"
        elif i < trajectory.prompt_length:
            view["kinds"] += "p"
        else:
            view["kinds"] += "t"
        if trajectory.structural and trajectory.structural[i]:
            view["structural"].append(len(view["ids"]))
        # Its text. If tokens share a character, the last one shows it.
        end = spans[i + 1][0] if i + 1 < len(spans) else len(text)
        view["ids"].append(token)
        view["texts"].append(text[spans[i][0] : end])
    for clip in trajectory.clips:
        for time, pixels in zip(clip.times, clip.pixels):
            view["images"].append([time, picture(pixels, run)])
    return view | {"finish": trajectory.finish}


def picture(pixels: np.ndarray, run: RunData) -> int:
    """Return the index of a frame ([H, W, 3] uint8) among the page's thumbnails. Add it if it is new."""
    image = Image.fromarray(pixels)
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80, subsampling=0)
    uri = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    return run.pictures.setdefault(uri, len(run.pictures))


# ------------------------------------------------------------------------------------------------ curves and table


def seed_groups(runs: Sequence[RunData]) -> list[tuple[str, list[RunData]]]:
    """Group runs whose configs differ only in seeds and in folders named after them. A group's name omits the seed."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        config = {key: value for key, value in run.config.items() if key != "run"}
        method = re.sub(r'"seed": \d+|\bseed\d+\b', "seed", json.dumps(config, sort_keys=True))
        groups.setdefault(method, []).append(run)
    named = []
    for members in groups.values():
        name = members[0].name
        if len(members) > 1:
            name = f"{re.sub(r'.?seed[0-9]+/?', '', name)} ({len(members)} seeds)"
        named.append((name, members))
    return named


def curves(groups: Sequence[tuple[str, list[RunData]]], key: str, by: str = "step") -> list[dict[str, Any]]:
    """Return a line per group that has the key: x is the step or K, y the mean over the runs with a value there, std (n - 1). A
    line of more than MAX_POINTS is thinned."""
    lines = []
    for g, (_, runs) in enumerate(groups):
        values: dict[int, list[float]] = {}
        for run in runs:
            for row in run.metrics if by == "step" else run.outcomes:
                if key in row:
                    values.setdefault(int(row[by]), []).append(row[key])
        x = sorted(values)
        x = [x[i] for i in uniform_indices(len(x), MAX_POINTS)] if x else []
        line = {"group": g, "x": x, "y": [statistics.fmean(values[s]) for s in x]}
        if len(runs) > 1:
            line["std"] = [statistics.stdev(values[s]) if len(values[s]) > 1 else 0.0 for s in x]
        if values:
            lines.append(line)
    return lines


def panel_sections(groups: Sequence[tuple[str, list[RunData]]]) -> list[dict]:
    """Return the panels of the page, each with a line per group that has its key. Evaluations come first."""
    panels = [{"key": key, "title": TITLES.get(key, key), "lines": curves(groups, key, "K")} for key in OUTCOMES]
    sections = []
    if panels[0]["lines"]:
        sections.append({"title": "Evaluations, by K, the number of overview frames", "by": "K", "panels": panels})
    keys = {key for _, runs in groups for run in runs for row in run.metrics for key in row} - {"step", "time"}
    for title, patterns in SECTIONS.items():
        panels = []
        for pattern in patterns.split():
            matches = fnmatch.filter(keys, pattern)
            matches.sort(key=lambda key: re.sub(r"\d+", lambda digits: digits[0].zfill(6), key))  # K=8 before K=16
            keys -= set(matches)
            for key in matches:
                panels.append({"key": key, "title": TITLES.get(key, key), "lines": curves(groups, key)})
        if panels:
            sections.append({"title": title, "folded": title in ("Learning", "Seconds", "More"), "panels": panels})
    return sections


# ------------------------------------------------------------------------------------------------ writing


def write_page(path: str | Path, runs: Sequence[RunData]) -> None:
    """Write one self-contained HTML file."""
    groups = seed_groups(runs)
    viewed = []
    for run in runs:
        if run.steps:
            viewed.append({"name": run.name, "pad": run.renderer.image_pad, "steps": sorted(run.steps.items())})
    content = {
        "notes": [note for run in runs for note in run.notes],
        "groups": [name for name, _ in groups],
        "sections": panel_sections(groups),
        "runs": viewed,
        "pictures": list(runs[0].pictures),  # all runs share them
    }
    content = json.loads(json.dumps(content), parse_constant=lambda name: None)  # a browser's JSON has no NaN
    # Text of models contains tags. Escaped, they cannot end the script element that holds the data.
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8")
    Path(path).write_text(page.replace("{{DATA}}", text), encoding="utf-8")


@contextlib.contextmanager
def png_axes(path: Path, count: int, size: tuple[float, float]) -> Iterator[np.ndarray]:
    """Yield axes side by side to draw on, then write them as a PNG with one legend. `size`: inches."""
    from matplotlib import pyplot, rc_context

    with rc_context(STYLE):
        figure, axes = pyplot.subplots(1, count, figsize=size, layout="constrained")
        yield axes
        legend = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
        figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=5)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        pyplot.close(figure)


def draw_png(path: Path, runs: Sequence[RunData]) -> None:
    """Draw accuracy by K after training, if it was evaluated, and format and calls while the runs train."""
    panels = {"accuracy": "K", "well_formed": "step", "kappa": "step", "f": "step"}  # key -> its x
    groups = seed_groups(runs)
    if not curves(groups, "accuracy", "K"):
        del panels["accuracy"]
    with png_axes(path, len(panels), (11, 2.7)) as axes:
        for axis, (key, by) in zip(axes, panels.items()):
            for line in curves(groups, key, by):
                x, y, std = line["x"], np.array(line["y"]), np.array(line.get("std", 0.0))
                color = LINE_COLORS[line["group"] % len(LINE_COLORS)]
                axis.fill_between(x, y - std, y + std, color=color, alpha=0.18, linewidth=0)
                axis.plot(x, y, color=color, label=groups[line["group"]][0])
                if by == "K":
                    axis.set_xticks(x)
            axis.set_title(TITLES[key])
            axis.set_xlabel("overview frames K" if by == "K" else by)
            axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]), top=None if key == "kappa" else 1.03)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or JSONL files of episodes")
    parser.add_argument("-o", "--out", type=Path, help="the page (default: report.html beside the runs)")
    parser.add_argument("--png", type=Path, metavar="DIR", help="also draw DIR/curves.png")
    parser.add_argument("--model", type=Path, help="checkpoint with the tokenizer and contract of the episodes")
    args = parser.parse_args()
    paths = [path.resolve() for path in args.runs]
    parent = Path(os.path.commonpath([path.parent for path in paths]))
    out = args.out or parent / "report.html"
    pictures = {}
    runs = []
    with_episodes = sum(path.is_file() or (path / "episodes").exists() for path in paths)
    try:
        for path in paths:
            name = path.relative_to(parent).as_posix()
            runs.append(read_run(path, name, pictures, EPISODES // max(1, with_episodes), args.model))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    runs = join_evaluations(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, runs)
    print(f"{out}: {len(runs)} runs, {out.stat().st_size / 2**20:.1f} MiB")
    if args.png:
        draw_png(args.png / "curves.png", runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
