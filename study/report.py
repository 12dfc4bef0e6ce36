"""report.py: write one HTML file about runs: results, curves, and the recorded episodes token by token.

    python -m study.report RUN... [-o FILE] [--png DIR]             # the file needs no server and no network
    python -m study.report episodes.jsonl --model CHECKPOINT        # only the viewer, e.g. for study.ask's --trace

A RUN is the folder of a training or an evaluation. Folders of one name share a line: a training and the evaluation of its
model (runs/toy/grpo, runs/toy/eval/grpo), and seeds. Their mean is drawn with a band of one standard deviation.
Deliberately missing: live updates, smoothing, and statistics beyond mean and deviation.
"""

import argparse
import base64
import io
import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from episode import Episode, Trajectory, episode_of
from evals import results
from rewards import turn_texts
from runtime.answers import final_answer
from runtime.config import ConfigError, read_tree
from runtime.dataset import DataError
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
# Panels: key -> title. The page folds the curves of all other keys of metrics.jsonl.
RESULTS = {"accuracy": "accuracy", "calls": "κ: calls per episode", "well_formed": "exactly well-formed episodes"}
CURVES = {"well_formed": RESULTS["well_formed"], "kappa": RESULTS["calls"], "f": "format reward f"}


@dataclass
class RunData:
    """The data of one run for the page."""

    name: str  # of its folder
    config: dict = field(default_factory=dict)  # as the run saved it
    metrics: list[dict[str, float]] = field(default_factory=list)  # of a training, by step
    outcomes: list[dict[str, float]] = field(default_factory=list)  # of an evaluation, by K
    episodes: list[dict] = field(default_factory=list)  # as the page shows them; siblings follow each other


# ------------------------------------------------------------------------------------------------ reading


def read_run(path: Path, model: Path | None = None) -> RunData:
    """Read a run's folder, or a JSONL file of episodes."""
    run = RunData(path.resolve().name.removesuffix(".jsonl"))
    files = [path]
    if not path.is_file():
        run.config = read_tree(path / "config.yaml")
        if (path / "metrics.jsonl").exists():  # of a training that has done a step
            run.metrics = [json.loads(line) for line in results.whole_lines(path / "metrics.jsonl")]
        run.outcomes = read_outcomes(path)
        files = sorted((path / "episodes").glob("*.jsonl"))
    if files:
        # Its episodes need the tokenizer of --model, or of the checkpoint that it started from or evaluated.
        checkpoint = model or Path(run.config.get("policy", run.config).get("checkpoint", ""))
        if not (checkpoint / "tokenizer_config.json").exists():
            raise ConfigError(f"{path}: the tokenizer of its episodes is not in {checkpoint}; pass --model CHECKPOINT")
        renderer = Renderer(load_tokenizer(checkpoint), VisualContract.load(checkpoint))
        run.episodes = read_episodes(files, run.config, renderer)
    return run


def read_episodes(files: list[Path], config: dict, renderer: Renderer) -> list[dict]:
    """Read the episodes of some steps as the page shows them, with their frames if the videos are still there."""
    views = []
    with Videos(workers=1) as videos:
        for i in uniform_indices(len(files), STEPS):
            step = re.search(r"step-(\d+)", files[i].name)  # the files of an evaluation have none
            for line in results.whole_lines(files[i])[:EPISODES]:
                episode = episode_of(json.loads(line))
                try:
                    decode_frames(episode, videos, renderer.contract)
                except VideoError as error:
                    print(f"an episode is shown without frames: {error}")
                views.append(view_episode(episode, config, renderer) | {"step": int(step[1]) if step else 0})
    return views


def read_outcomes(path: Path) -> list[dict[str, float]]:
    """Read the results of an evaluation, if the folder has some: for each K, means over the items of all splits."""
    records: dict[int, list[dict]] = {}
    for result in results.read_run(path).values():
        if result.arm == "parallel":
            records.setdefault(result.k, []).extend(result.records)
    return [{"K": k, **results.outcomes(asked)} for k, asked in sorted(records.items())]


def decode_frames(episode: Episode, videos: Videos, contract: VisualContract) -> None:
    """Put the frames back into an episode that was read from a file. Raise VideoError if a video is gone or another one."""
    task = episode.task
    main = episode.main
    overview = zip(task.videos, main.prompt_clips)
    main.prompt_clips = [decode_again(videos, path, clip, contract.frame_size) for path, clip in overview]

    # A call's frames went to its sub-agent. Without one (`tool_return: frames`), they went to the main agent, in call order.
    shown_to_main = []
    for call in episode.calls:
        if call.subagent:
            path = choose_video(task, call.arguments)
            clips = call.subagent.prompt_clips
            call.subagent.prompt_clips = [decode_again(videos, path, clip, contract.crop_size) for clip in clips]
        elif call.window:
            shown_to_main.append(choose_video(task, call.arguments))
    crops = zip(shown_to_main, main.call_clips)
    main.call_clips = [decode_again(videos, path, clip, contract.crop_size) for path, clip in crops]


def decode_again(videos: Videos, path: str, clip: Clip, size_rule: SizeRule) -> Clip:
    """Decode the frames at a clip's times."""
    info = videos.info(path)
    indices = np.searchsorted(info.times, clip.times).clip(max=info.n_frames - 1).tolist()
    decoded = videos.frames(path, indices, size_rule(info.width, info.height))
    if decoded.times != clip.times:
        raise VideoError(path, f"its frame times differ from the recorded {clip.times}: restore the original video")
    return decoded


# ------------------------------------------------------------------------------------------------ episodes


def view_episode(episode: Episode, config: dict, renderer: Renderer) -> dict:
    """Return an episode as the page shows it."""
    reward = config.get("reward", {})
    anchor = reward.get("anchor", {})
    lam = anchor["lam"] if anchor.get("credit") == "struct" else 0.0
    subagents_learn = config.get("rollout", {}).get("subagents", {}).get("train")
    # A_i,t = A_i + lambda * A_anchor_i * 1[t in struct(o_i)]: of other and of structural tokens
    of_main = (episode.advantage, episode.advantage + lam * episode.anchor_advantage)
    of_reports = (episode.advantage if subagents_learn else 0.0, 0.0)
    calls = []
    for call in episode.calls:
        calls.append(vars(call) | {"subagent": call.subagent and view_agent(call.subagent, of_reports, renderer)})
    return vars(episode) | {
        "task": vars(episode.task),
        "main": view_agent(episode.main, of_main, renderer),
        "calls": calls,
        "answer": final_answer(turn_texts(episode.main, renderer), reward.get("untagged_answer", "off")),
        "kappa": episode.n_executed,
    }


def view_agent(trajectory: Trajectory, advantages: tuple[float, float], renderer: Renderer) -> list[dict]:
    """Return an agent's tokens in blocks: the prompt, turns, and what the tools returned. An image's pads become one token,
    which has the time and the picture of the frame."""
    text = renderer.decode(trajectory.ids)
    starts = [start for start, _ in renderer.offsets(trajectory.ids)] + [len(text)]
    frames = [frame for clip in trajectory.clips for frame in zip(clip.times, clip.pixels)]
    blocks = []
    for i, token in enumerate(trajectory.ids):
        is_pad = token == renderer.image_pad
        if is_pad and i and trajectory.ids[i - 1] == token:
            continue
        name = block_name(trajectory, i)
        # If tokens share a character, the last one shows it.
        view = {"text": text[starts[i] : starts[i + 1]]} | token_view(trajectory, i, name, advantages)
        if is_pad and frames:
            view["time"], pixels = frames.pop(0)
            view["picture"] = thumbnail(pixels)
        if not blocks or blocks[-1]["name"] != name:
            blocks.append({"name": name, "tokens": []})
        blocks[-1]["tokens"].append(view)
    return blocks


def block_name(trajectory: Trajectory, i: int) -> str:
    """Return the block of token i: prompt, turn (with a forced <think>) or tools."""
    if trajectory.mask[i] or any(start <= i < end for start, end in trajectory.turns):
        return "turn"
    return "prompt" if i < trajectory.prompt_length else "tools"


def token_view(trajectory: Trajectory, i: int, block: str, advantages: tuple[float, float]) -> dict:
    """Return the style of token i, the fact that the page shows under the pointer, and its advantage if it was sampled."""
    fact = f"id {trajectory.ids[i]}"
    if not trajectory.mask[i]:
        return {"style": "forced" if block == "turn" else block, "fact": fact}
    structural = bool(trajectory.structural and trajectory.structural[i])
    advantage = advantages[structural]
    return {
        "style": "sampled structural" if structural else "sampled",
        "fact": f"{fact}, log p {trajectory.logprobs[i]:.4f}, advantage {advantage:.3f}",
        "advantage": advantage,
    }


def thumbnail(pixels: np.ndarray) -> bytes:
    """Return a frame, [H, W, 3] uint8, as a small JPEG."""
    image = Image.fromarray(pixels)
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80, subsampling=0)
    return file.getvalue()


def data_uri(picture: bytes) -> str:
    return "data:image;base64," + base64.b64encode(picture).decode()


# ------------------------------------------------------------------------------------------------ curves


class Curve(NamedTuple):
    """A metric of the runs of one name."""

    x: list[int]  # steps or K
    mean: np.ndarray  # over the runs
    std: np.ndarray  # with n - 1


def curves(runs: list[RunData], key: str, by: str = "step") -> dict[str, Curve]:
    """Return the curve of each name whose runs have the key."""
    values: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        for row in run.metrics if by == "step" else run.outcomes:
            if math.isfinite(row.get(key, math.nan)):
                values.setdefault(run.name, {}).setdefault(int(row[by]), []).append(row[key])
    by_name = {}
    for name, at_x in values.items():
        x = sorted(at_x)
        std = [np.std(at_x[s], ddof=1) if len(at_x[s]) > 1 else 0.0 for s in x]
        by_name[name] = Curve(x, np.array([np.mean(at_x[s]) for s in x]), np.array(std))
    return by_name


def draw_panels(runs: list[RunData], panels: dict[str, str], by: str) -> Figure:
    """Draw panels (key -> title) side by side."""
    figure = Figure(figsize=(3.9 * len(panels), 2.9), layout="constrained")
    for axis, (key, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        for name, (x, mean, std) in curves(runs, key, by).items():
            [line] = axis.plot(x, mean, marker="o" if by == "K" else "", **LINES.get(name, {"label": name}))
            axis.fill_between(x, mean - std, mean + std, color=line.get_color(), alpha=0.18, linewidth=0)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("overview frames K" if by == "K" else by)
        if by == "K":
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
        axis.grid(axis="y", alpha=0.25)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper left", ncols=2 * len(panels), frameon=False)
    return figure


def sections_of(runs: list[RunData]) -> dict[str, list[dict]]:
    """Return the page's panels by section. Panels whose values are all equal are left out."""
    keys = {key for run in runs for row in run.metrics for key in row} - CURVES.keys() - {"step", "time"}
    others = {key: key for key in sorted(keys)}
    drawn = {}
    for section, panels in {"After training": RESULTS, "While training": CURVES, "Other metrics": others}.items():
        by = "K" if panels is RESULTS else "step"
        for key, title in panels.items():
            values = set()
            for curve in curves(runs, key, by).values():
                values.update(curve.mean)
            if len(values) > 1:
                drawn.setdefault(section, []).append(panel_of(runs, key, title, by))
    return drawn


def panel_of(runs: list[RunData], key: str, title: str, by: str) -> dict:
    """Draw one panel, as the page shows it."""
    figure = draw_panels(runs, {key: title}, by)
    file = io.BytesIO()
    figure.savefig(file, dpi=DPI)
    # A click is at an x between those of the picture's left and right edge.
    corners = [(0, 0), (figure.bbox.width, 0)]
    edges = figure.axes[0].transData.inverted().transform(corners)[:, 0].tolist()
    return {"title": title, "by": by, "picture": data_uri(file.getvalue()), "edges": edges}


# ------------------------------------------------------------------------------------------------ the page


def lead(runs: list[RunData]) -> str:
    """Return a sentence on what to see, if both methods were evaluated."""
    by_name = curves(runs, "accuracy", "K")
    if not {"grpo", "paragrpo"} <= by_name.keys():
        return ""
    k = by_name["grpo"].x[0]
    before = by_name["grpo"].mean[0]
    after = by_name["paragrpo"].mean[0]
    claim = "from one cold start, accuracy-only GRPO stops calling and loses its tags; PARA-GRPO keeps both"
    return f"What to see: {claim}, and with {k} frames it answers {after:.2f} right instead of {before:.2f}."


def number_pictures(episodes: list[dict], numbers: dict[bytes, int]) -> None:
    """Put a picture's number in place of each picture, and new pictures into `numbers`."""
    for episode in episodes:
        for agent in [episode["main"], *(call["subagent"] for call in episode["calls"])]:
            for block in agent or ():  # a call can have no sub-agent
                for token in block["tokens"]:
                    if "picture" in token:
                        token["picture"] = numbers.setdefault(token["picture"], len(numbers))


def write_page(path: str | Path, runs: list[RunData]) -> None:
    """Write one self-contained HTML file. The episodes' pictures become numbers."""
    numbers: dict[bytes, int] = {}  # siblings show the same pictures, and the page holds each once
    shown = []
    for run in runs:
        if run.episodes:
            number_pictures(run.episodes, numbers)
            shown.append(LINES.get(run.name, {"label": run.name}) | {"episodes": run.episodes})
    content = {"lead": lead(runs), "sections": sections_of(runs), "runs": shown}
    content = json.loads(json.dumps(content), parse_constant=lambda name: None)  # a browser's JSON has no NaN
    content["pictures"] = [data_uri(picture) for picture in numbers]
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
        runs = [read_run(path, args.model) for path in args.runs]
    except (ConfigError, DataError) as error:
        sys.exit(f"error: {error}")
    runs.sort(key=lambda run: [*LINES, run.name].index(run.name))  # in the order of LINES; others come last
    out = args.out or args.runs[0].resolve().parent / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, runs)
    print(f"{out}: {len(runs)} runs, {out.stat().st_size / 2**20:.1f} MiB")
    if args.png:
        args.png.mkdir(parents=True, exist_ok=True)
        draw_panels(runs, CURVES, "step").savefig(args.png / "curves.png", dpi=DPI)
        draw_panels(runs, RESULTS, "K").savefig(args.png / "outcomes.png", dpi=DPI)


if __name__ == "__main__":
    main()
