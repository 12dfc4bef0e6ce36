"""records.py: write episodes to a file and read them back. One line of JSON is one episode: exact ids and readable text.

    dump(episode, file, renderer)
    episodes = load_episodes("episodes.jsonl", videos, contract)    # decodes their frames again

rl.py and eval.py write to RUN/episodes/, and `study.ask --trace` to a file. `study.report` shows the episodes, and
`study.replay` trains on them. A record has the fields of Episode, Task, Call and Trajectory in data.py. Deliberately missing:
pixels, and reading the records of another version of this code.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from data import Call, Episode, Group, Task, Trajectory, overview
from runtime.dataset import DataError
from runtime.render import Renderer
from runtime.video import Clip, Videos
from runtime.visual import ContractError, VisualContract
from tools import TOOLS, ClipForSubagent, run_tool


def dump(episode: Episode, file: TextIO, renderer: Renderer) -> None:
    """Write an episode as one line of JSON: exact ids, readable text, and the times of its frames, but no pixels."""

    def record_of(trajectory: Trajectory) -> dict:
        times = {name: times_of(getattr(trajectory, name)) for name in ("prompt_clips", "call_clips")}
        return vars(trajectory) | times | {"text": renderer.decode(renderer.compact(trajectory.ids))}

    calls = []
    for call in episode.calls:
        calls.append(vars(call) | {"subagent": call.subagent and record_of(call.subagent)})
    record = vars(episode) | {"task": vars(episode.task), "main": record_of(episode.main), "calls": calls}
    file.write(json.dumps(record) + "\n")
    file.flush()


def times_of(clips: Sequence[Clip]) -> list[list[float]]:
    return [list(clip.times) for clip in clips]


def keep_episodes(groups: Sequence[Group], renderer: Renderer, path: Path) -> None:
    """Write all episodes of the groups to a new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for group in groups:
            for episode in group.episodes:
                dump(episode, file, renderer)


def load_episodes(path: str | Path, videos: Videos | None = None, contract=None) -> list[Episode]:
    """Read the episodes of a file. With `videos`, decode their frames again; otherwise they have none."""
    return [episode_of(json.loads(line), videos, contract) for line in Path(path).read_text("utf-8").splitlines()]


def episode_of(record: dict, videos: Videos | None, contract: VisualContract | None) -> Episode:
    """Rebuild an episode from a record of `dump`."""
    _check_fields(record, Episode)
    _check_fields(record["main"].keys() - {"text"}, Trajectory)
    task_record = record["task"]
    task = Task(**task_record | {"videos": tuple(task_record["videos"]), "options": tuple(task_record["options"])})
    prompt_clips = []
    if videos and record["main"]["prompt_clips"]:  # empty if the task's video could not be read
        prompt_clips = overview(task, record["k"], videos, contract)
    calls, call_clips = [], []
    for call_record in record["calls"]:
        _check_fields(call_record, Call)
        window = call_record["window"] and tuple(call_record["window"])
        call = Call(**call_record | {"window": window, "subagent": None})
        # Run the recorded call again to get its frames.
        clips = []
        if videos and not call.error:
            result = run_tool(call, task, tuple(TOOLS), videos, contract)
            if isinstance(result, ClipForSubagent):
                clips = [result.frames]
        # The frames went to the call's sub-agent if it has one, otherwise to the main agent.
        if call_record["subagent"]:
            call = replace(call, subagent=_trajectory_of(call_record["subagent"], clips, [], videos))
        else:
            call_clips += clips
        calls.append(call)
    main = _trajectory_of(record["main"], prompt_clips, call_clips, videos)
    return Episode(**record | {"task": task, "main": main, "calls": calls})


def _trajectory_of(record: dict, prompt_clips: list, call_clips: list, videos: Videos | None) -> Trajectory:
    recorded = record["prompt_clips"] + record["call_clips"]
    if videos and times_of(prompt_clips + call_clips) != recorded:
        raise ContractError(f"the video's frame times differ from the recorded {recorded}: restore the original video")
    turns = [tuple(turn) for turn in record["turns"]]
    fields = record | {"prompt_clips": prompt_clips, "call_clips": call_clips, "turns": turns}
    del fields["text"]
    return Trajectory(**fields)


def _check_fields(names: Iterable[str], kind: type) -> None:
    """Refuse a record from a version of this code in which the type had other fields."""
    differ = set(names) ^ kind.__dataclass_fields__.keys()
    if differ:
        told = f"whose {kind.__name__} has other fields ({', '.join(sorted(differ))})"
        raise DataError(f"an episode of another version of this code, {told}: read it with that version, or run again")
