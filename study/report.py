"""report.py: write one HTML file about runs: results, curves, and the recorded episodes token by token.

    python -m study.report RUN... [-o FILE] [--png DIR]             # the file needs no server and no network
    python -m study.report episodes.jsonl --model CHECKPOINT        # only the viewer, e.g. for study.ask's --trace

A RUN is the folder of a training or an evaluation. Folders of one name share a color: a training and the evaluation of its
model (runs/toy/grpo, runs/toy/eval/grpo), and seeds. Seeds are one line: their mean, with a band of one standard deviation.

Deliberately missing: live updates, smoothing, and statistics beyond mean and deviation.
"""

import argparse
import base64
import hashlib
import io
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from episode import Episode, Prompt, Trajectory, episodes_of
from evals import results
from evals.tables import per_item
from grpo import token_advantages
from rewards import Anchor, turn_texts
from runtime.answers import final_answer
from runtime.config import ConfigError, UserError, read_tree
from runtime.lines import read_lines
from runtime.render import Renderer, load_tokenizer
from runtime.video import Clip, SizeRule, VideoError, Videos, uniform_indices
from runtime.visual import VisualContract
from tools import choose_video

STEPS = 10  # of a run whose episodes are on the page, evenly spread
EPISODES = 64  # of a step, at most
SIDE = 96  # pixels: longest side of a thumbnail
DPI = 160  # resolution of the panels
LINES = {  # folder of a row of the toy -> its line; titles and colors are the README's
    "sft": {"label": "cold start", "color": "#777777", "linestyle": "--"},
    "grpo": {"label": "accuracy-only GRPO", "color": "#0072b2"},
    "anchoring": {"label": "+ Exploration Anchoring", "color": "#d55e00"},
    "gating": {"label": "+ nFrames Gating", "color": "#009e73"},
    "paragrpo": {"label": "PARA-GRPO", "color": "#b8639a"},
}
# Panels: key -> title. The page has them even if no value changes. It folds the curves of all other keys of metrics.jsonl.
PANELS = {"accuracy": "accuracy", "calls": "κ: calls per episode", "well_formed": "exactly well-formed episodes"}
CURVES = {"well_formed": PANELS["well_formed"], "kappa": PANELS["calls"], "f": "format reward f"}


@dataclass
class RunData:
    """The data of one run for the page."""

    name: str  # of its folder
    rows: list[dict[str, float]] = field(default_factory=list)  # a training's metrics by "step", an evaluation's by "K"
    episodes: list[dict] = field(default_factory=list)  # as the page shows them; siblings follow each other
    pictures: dict[str, str] = field(default_factory=dict)  # of their frames: a hash of the pixels -> a data URI
    note: str = ""  # K of a training, or which arm of an evaluation is shown


# ------------------------------------------------------------------------------------------------ reading


def read_run_data(path: Path, model: Path | None = None) -> RunData:
    """Read a run's folder, or a JSONL file of episodes."""
    run = RunData(path.resolve().name.removesuffix(".jsonl"))
    config = {}
    files = [path]
    if not path.is_file():
        config = read_tree(path / "config.yaml")
        if (path / "metrics.jsonl").exists():  # of a training that has done a step
            run.rows = list(read_lines(path / "metrics.jsonl"))
            run.note = k_of_training(config)
        evaluated = [result for result in results.read_run(path).values() if result.records]
        if evaluated:
            add_evaluation(run, evaluated)
        files = sorted((path / "episodes").glob("*.jsonl"))
    if files:
        # Its episodes need the tokenizer of --model, or of the checkpoint that it started from or evaluated.
        checkpoint = model or Path(config.get("policy", config).get("checkpoint", ""))
        if not (checkpoint / "tokenizer_config.json").exists():
            raise ConfigError(f"{path}: the tokenizer of its episodes is not in {checkpoint}; pass --model CHECKPOINT")
        renderer = Renderer(load_tokenizer(checkpoint), VisualContract.load(checkpoint))
        read_episodes(run, files, config, renderer)
    return run


def k_of_training(config: dict) -> str:
    """Say from which values a training draws K, if its config has them."""
    try:
        ks = config["gating"] or [config["visual"]["overview_frames"]]
    except KeyError:  # of SFT, or of an older version
        return ""
    return f"K = {', '.join(map(str, ks))}"


def add_evaluation(run: RunData, evaluated: list[results.Results]) -> None:
    """Add the means of one arm over the items of all splits: a row per K."""
    arms = sorted({result.arm for result in evaluated})
    shown = "parallel" if "parallel" in arms else arms[0]  # another model has one arm, the name of its protocol
    if arms != ["parallel"]:
        run.note = ", not ".join([f"arm {shown}", *(arm for arm in arms if arm != shown)])
    by_k: dict[int, list[dict]] = {}
    for result in evaluated:
        if result.arm == shown:
            by_k.setdefault(result.k, []).extend(result.records)
    for k, records in by_k.items():
        accuracy = statistics.fmean(record["score"] for record in records)
        run.rows.append({"K": k, "accuracy": accuracy, **per_item(records)})


def read_episodes(run: RunData, files: list[Path], config: dict, renderer: Renderer) -> None:
    """Add the episodes of some steps to a run, with their frames if the videos are still there."""
    with Videos(workers=1) as videos:
        for i in uniform_indices(len(files), STEPS):
            step = re.search(r"step-(\d+)", files[i].name)  # the files of an evaluation have none
            for episode in episodes_of(itertools.islice(read_lines(files[i]), EPISODES)):
                try:
                    decode_frames(episode, videos, renderer.contract)
                except VideoError as error:
                    print(f"an episode is shown without frames: {error}")
                view = view_episode(episode, config, renderer, run.pictures)
                run.episodes.append(view | {"step": int(step[1]) if step else 0})


def decode_frames(episode: Episode, videos: Videos, contract: VisualContract) -> None:
    """Put the frames back into an episode that was read from a file. Raise VideoError if a video is gone or another one."""
    task = episode.task
    main = episode.main
    overview = zip(task.videos, main.prompt.clips)
    decoded = [decode_again(videos, path, clip, contract.frame_size) for path, clip in overview]
    main.prompt = Prompt(main.prompt.ids, decoded)

    # A call's frames went to its sub-agent. Without one (`tool_return: frames`), they went to the main agent, in call order.
    shown_to_main = []
    for call in episode.calls:
        if call.subagent:
            path = choose_video(task, call.arguments)
            prompt = call.subagent.prompt
            decoded = [decode_again(videos, path, clip, contract.crop_size) for clip in prompt.clips]
            call.subagent.prompt = Prompt(prompt.ids, decoded)
        elif call.window:
            shown_to_main.append(choose_video(task, call.arguments))
    crops = zip(shown_to_main, main.call_clips)
    main.call_clips = [decode_again(videos, path, clip, contract.crop_size) for path, clip in crops]


def decode_again(videos: Videos, path: str, clip: Clip, size_rule: SizeRule) -> Clip:
    """Decode the frames at a clip's times."""
    info = videos.info(path)
    indices = np.searchsorted(info.times, np.array(clip.times, float)).clip(max=info.n_frames - 1).tolist()
    decoded = videos.frames(path, indices, size_rule(info.width, info.height))
    if decoded.times != clip.times:
        raise VideoError(path, f"its frame times differ from the recorded {clip.times}: restore the original video")
    return decoded


# ------------------------------------------------------------------------------------------------ episodes


def view_episode(episode: Episode, config: dict, renderer: Renderer, pictures: dict[str, str]) -> dict:
    """Return an episode as the page shows it. Its new pictures are added to `pictures`."""
    # A run of an older version has other keys, so only those that the page needs are read.
    reward = config.get("reward", {})
    anchor = Anchor(lam=reward.get("anchor", {}).get("lam", 0.0))
    main = view_agent(episode.main, renderer, pictures, token_advantages(episode, anchor))
    subagents_learn = config.get("rollout", {}).get("subagents", {}).get("train")
    calls = []
    for call in episode.calls:
        report = call.subagent
        if report:
            advantages = [episode.advantage] * len(report.ids) if subagents_learn else ()
            report = view_agent(report, renderer, pictures, advantages)
        calls.append(vars(call) | {"subagent": report})
    return vars(episode) | {
        "task": vars(episode.task),
        "main": main,
        "calls": calls,
        "answer": final_answer(turn_texts(episode.main, renderer), reward.get("untagged_answer", "off")),
        "kappa": episode.n_executed,
    }


def view_agent(
    trajectory: Trajectory, renderer: Renderer, pictures: dict[str, str], advantages: Sequence[float] | np.ndarray = ()
) -> list[dict]:
    """Return an agent's tokens in blocks: the prompt, turns, and what the tools returned. An image's pads become one token,
    which has the time and the picture of the frame. Agents that learned have advantages, one per token."""
    ids = trajectory.all_ids
    text = renderer.decode(ids)
    starts = [start for start, _ in renderer.offsets(ids)] + [len(text)]
    frames = [frame for clip in trajectory.clips for frame in zip(clip.times, clip.pixels)]
    blocks: list[dict] = []
    for i, token in enumerate(ids):
        is_pad = token == renderer.image_pad
        if is_pad and i and ids[i - 1] == token:
            continue
        # If tokens share a character, the last one shows it.
        own = i - len(trajectory.prompt.ids)  # its index after the prompt
        view: dict[str, Any] = {"text": text[starts[i] : starts[i + 1]], "style": style_of(trajectory, own)}
        view["fact"] = f"id {token}"
        if own >= 0 and trajectory.mask[own]:
            view["fact"] += f", log p {trajectory.logprobs[own]:.4f}"
            if len(advantages):
                view["fact"] += f", advantage {advantages[own]:.3f}"
                view["advantage"] = float(advantages[own])
        if is_pad and frames:
            view["time"], pixels = frames.pop(0)
            view["picture"] = name_picture(pixels, pictures)
        name = view["style"] if view["style"] in ("prompt", "tools") else "turn"
        if not blocks or blocks[-1]["name"] != name:
            blocks.append({"name": name, "tokens": []})
        blocks[-1]["tokens"].append(view)
    return blocks


def style_of(trajectory: Trajectory, i: int) -> str:
    """Return where token i after the prompt comes from: prompt (i < 0), forced (the opening of a turn), sampled (and perhaps
    structural) or tools."""
    if i < 0:
        return "prompt"
    if trajectory.mask[i]:
        return "sampled structural" if trajectory.structural and trajectory.structural[i] else "sampled"
    return "forced" if any(start <= i < end for start, end in trajectory.turns) else "tools"


def name_picture(pixels: np.ndarray, pictures: dict[str, str]) -> str:
    """Return the name of a frame, [H, W, 3] uint8, in `pictures`. Siblings show the same frames: each is encoded once."""
    name = hashlib.sha256(pixels.tobytes()).hexdigest()[:16]
    if name not in pictures:
        image = Image.fromarray(pixels)
        image.thumbnail((SIDE, SIDE))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=80, subsampling=0)
        pictures[name] = data_uri(file)
    return name


def data_uri(file: io.BytesIO) -> str:
    return "data:image;base64," + base64.b64encode(file.getvalue()).decode()


# ------------------------------------------------------------------------------------------------ curves


def points_of(runs: list[RunData], key: str, by: str) -> dict[str, dict[int, list[float]]]:
    """Return the values of a metric: the runs' name -> step or K (`by`) -> one value per run."""
    values: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        for row in run.rows:
            if by in row and math.isfinite(row.get(key, math.nan)):
                values.setdefault(run.name, {}).setdefault(int(row[by]), []).append(row[key])
    return values


def line_of(name: str) -> dict[str, str]:
    return LINES.get(name, {"label": name})


def draw_panels(runs: list[RunData], panels: dict[str, str], by: str) -> Figure:
    """Draw panels (key -> title) side by side."""
    figure = Figure(figsize=(3.9 * len(panels), 2.9), layout="constrained")
    for axis, (key, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        for name, values in points_of(runs, key, by).items():
            x = sorted(values)
            mean = np.array([np.mean(values[i]) for i in x])
            std = np.array([np.std(values[i], ddof=1) if len(values[i]) > 1 else 0.0 for i in x])
            [line] = axis.plot(x, mean, marker="o" if by == "K" else "", **line_of(name))
            axis.fill_between(x, mean - std, mean + std, color=line.get_color(), alpha=0.18, linewidth=0)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("overview frames K" if by == "K" else by)
        if by == "K":
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
        axis.grid(axis="y", alpha=0.25)
    entries = axis.get_legend_handles_labels()
    narrow = {"fontsize": 9, "handlelength": 1.4, "columnspacing": 1.2}  # two entries fit above one panel
    figure.legend(*entries, loc="outside upper left", ncols=2 * len(panels), frameon=False, **narrow)
    return figure


def draw_groups(runs: list[RunData], panels: dict[str, str], by: str) -> dict[str, list[dict]]:
    """Draw each panel as a picture of its own, as the page shows it. Group them by the prefix of their key, as in acc/K=4."""
    groups: dict[str, list[dict]] = {}
    for key, title in panels.items():
        figure = draw_panels(runs, {key: title}, by)
        file = io.BytesIO()
        figure.savefig(file, dpi=DPI)
        # A click is at an x between those of the picture's left and right edge.
        corners = [(0, 0), (figure.bbox.width, 0)]
        edges = figure.axes[0].transData.inverted().transform(corners)[:, 0].tolist()
        prefix = key.split("/")[0] if "/" in key else ""
        groups.setdefault(prefix, []).append({"title": title, "by": by, "picture": data_uri(file), "edges": edges})
    return groups


def draw_section(runs: list[RunData], panels: dict[str, str], by: str) -> dict:
    """Draw the panels that have values. At a single step or K, make a table."""
    runs = [run for run in runs if run.rows and by in run.rows[0]]
    notes = [f"{line_of(run.name)['label']}: {run.note}" for run in runs if run.note]
    shown = {key: title for key, title in panels.items() if points_of(runs, key, by)}
    section: dict[str, object] = {"table": [], "groups": {}}
    at = {int(row[by]) for run in runs for row in run.rows}
    if len(at) == 1:
        section["table"] = table_of(runs, panels, by, at.pop())
    elif shown:
        section["groups"] = draw_groups(runs, shown, by)
        notes += [f"no values: {title}" for title in panels.values() if title not in shown.values()]
    return section | {"note": "; ".join(dict.fromkeys(notes))}  # seeds say the same


def table_of(runs: list[RunData], panels: dict[str, str], by: str, x: int) -> list[list[str]]:
    """Return the rows of a table at one step or K: a header, then the means of the runs of each name."""
    table = [[f"{by} = {x}", *panels.values()]]
    for name in dict.fromkeys(run.name for run in runs):
        cells = [line_of(name)["label"]]
        for key in panels:
            values = points_of(runs, key, by).get(name, {}).get(x, [])
            deviation = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.2f}{deviation}" if values else "–")
        table.append(cells)
    return table


def draw_others(runs: list[RunData]) -> dict:
    """Draw the other metrics of trainings. The note has those that never change."""
    rows = [row for run in runs for row in run.rows if "step" in row]
    others = {key for row in rows for key in row} - CURVES.keys() - {"step", "time"}
    constant = []
    changing = {}
    for key in sorted(others, key=lambda key: ("/" in key, key)):  # those without a prefix come first
        values = {row[key] for row in rows if math.isfinite(row.get(key, math.nan))}
        if len(values) > 1:
            changing[key] = key
        else:
            constant.append(f"{key} {min(values, default=math.nan):g}")
    note = f"never changes: {', '.join(constant)}" if constant else ""
    return {"note": note, "table": [], "groups": draw_groups(runs, changing, "step")}


# ------------------------------------------------------------------------------------------------ the page


def lead(runs: list[RunData]) -> str:
    """Return a sentence that says what the toy's three runs are and what to see, if all were evaluated at one K."""
    three = ("sft", "grpo", "paragrpo")
    calls = points_of(runs, "calls", "K")
    right = points_of(runs, "accuracy", "K")
    common = set.intersection(*(set(right.get(name, ())) for name in three))
    if not common:
        return ""
    k = min(common)
    start, plain, ours = (
        f"{100 * np.mean(right[name][k]):.0f} % right, {np.mean(calls[name][k]):.2f} calls" for name in three
    )
    trained = f"accuracy-only GRPO ends at {plain}, PARA-GRPO at {ours}"
    return f"What to see: from one cold start ({start} per episode with {k} frames), {trained}."


def write_page(path: str | Path, runs: list[RunData]) -> None:
    """Write one self-contained HTML file."""
    pictures: dict[str, str] = {}
    shown = []
    for run in runs:
        if run.episodes:
            pictures |= run.pictures
            shown.append(line_of(run.name) | {"name": run.name, "episodes": run.episodes})
    sections = {
        "After training": draw_section(runs, PANELS, "K"),
        "While training": draw_section(runs, CURVES, "step"),
        "Other metrics": draw_others(runs),
    }
    content = {
        "lead": lead(runs),
        "sections": {title: section for title, section in sections.items() if any(section.values())},
        "runs": shown,
        "pictures": pictures,
    }
    content = json.loads(json.dumps(content), parse_constant=lambda name: None)  # a browser's JSON has no NaN
    # Text of models contains tags. Escaped, they cannot end the script element that holds the data.
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    Path(path).write_text(page.replace("{{DATA}}", text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser("python -m study.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or JSONL files of episodes")
    parser.add_argument("-o", "--out", type=Path, help="the page (default: report.html beside the first run)")
    parser.add_argument("--png", type=Path, metavar="DIR", help="also draw DIR/curves.png and DIR/outcomes.png")
    parser.add_argument("--model", type=Path, help="checkpoint with the tokenizer and contract of the episodes")
    args = parser.parse_args()
    try:
        runs = [read_run_data(path, args.model) for path in args.runs]
    except UserError as error:
        sys.exit(f"error: {error}")
    runs.sort(key=lambda run: [*LINES, run.name].index(run.name))  # in the order of LINES; others come last
    out = args.out or args.runs[0].resolve().parent / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, runs)
    print(f"{out}: {len(runs)} runs, {out.stat().st_size / 2**20:.1f} MiB")
    if args.png:
        args.png.mkdir(parents=True, exist_ok=True)
        draw_panels(runs, CURVES, "step").savefig(args.png / "curves.png", dpi=DPI)
        draw_panels(runs, PANELS, "K").savefig(args.png / "outcomes.png", dpi=DPI)


if __name__ == "__main__":
    main()
