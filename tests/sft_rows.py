"""What the tests of SFT's rows share."""

from pathlib import Path

import numpy as np
from scripted import END, play, turns

from dialogues import parse_dialogue
from episode import Task
from runtime.render import THINK_PREFIX
from sft import encode_dialogue


def check_rows_of_a_rollout(renderer, videos, schemas, video: str, opening: str, report: str, thoughts) -> None:
    """Compare the ids of a rollout with those of rows with the same conversation. Reports are `tool` messages, or text in
    tags: all in one user turn, or one turn each."""
    said = turns(*(thought + END for thought in thoughts), report=report)
    [episode] = play(renderer, said, (Task("t", "What?", (video,), "oe", "red"),), videos=videos)
    main = episode.main
    assert [call.error for call in episode.calls] == ["", ""]
    film = {"type": "video_url", "video_url": {"url": video, "nframes": 4}}
    question = {"role": "user", "content": [film, {"type": "text", "text": "What?"}]}
    first, last = ({"role": "assistant", "content": opening + thought} for thought in thoughts)
    tagged = f"<tool_response>\n{report}\n</tool_response>"
    for role, reports in (("tool", [report] * 2), ("user", [tagged] * 2), ("user", [f"{tagged}\n{tagged}"])):
        told = [{"role": role, "content": content} for content in reports]
        row = {"messages": [question, first, *told, last]}
        learned = encode_dialogue(parse_dialogue(row, "file:0", Path("/nowhere")), videos, renderer, schemas)
        whole = main.all_ids
        assert learned.ids[: len(whole)] == whole
        assert renderer.decode(learned.ids[len(whole) :]).strip() == ""
        begins = len(main.prompt.ids)
        assert not any(learned.mask[:begins])
        mask = learned.mask[begins:]
        forced = len(renderer.encode(THINK_PREFIX))
        for start, _ in main.turns:  # SFT trains on the opening that a rollout forces
            assert mask[start : start + forced] == [1] * forced
            mask[start : start + forced] = [0] * forced
        assert mask[: len(main.ids)] == main.mask
        assert not any(mask[len(main.ids) :])
        assert np.array_equal(learned.clips[0].pixels, main.clips[0].pixels)
