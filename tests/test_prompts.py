"""Own words in place of our prompts: one file reaches every agent in training and sampling, and stays with the checkpoint."""

import dataclasses
import re

import pytest
import yaml
from scripted import END, TASK, MemoryVideos, crop, play, turns
from scripts import sft_config

import sft
from dialogues import Dialogue, Media
from runtime import config, script
from runtime.prompts import Prompts, fill, subagent_system_prompt, system_prompt
from runtime.render import Renderer
from runtime.visual import ContractError
from sft import SFTConfig, encode_dialogue
from tools import TOOLS

TEXTS = {
    "system": "Watch, call and answer.",
    "system_without_tools": "Watch and answer.",
    "subagent_system": "You see {start} to {end} of a video.",
    "subagent_request": 'Sum up these {duration} seconds as {"what": ...}.',
}
FILM = Media("/data/v.mp4")
SCHEMAS = [TOOLS["crop_video"].schema]


def asked(renderer: Renderer, own: Prompts, **cfg) -> list[str]:
    """Return what the main agent and its sub-agent read in a rollout under these words, frames as #."""
    said = turns("Closer.</think>" + crop(4, 9.5) + END, "Seen.</think><answer>a</answer>" + END)
    [episode] = play(Renderer(renderer.tokenizer, renderer.contract, own), said, **cfg)
    return [read(renderer, t.prompt.ids) for t in [episode.main, *episode.subagents]]


def learned(renderer: Renderer, own: Prompts, agent: str, question: str = TASK.question, media=FILM) -> str:
    """Return what an SFT row with these words begins with."""
    row = Dialogue("d", agent, question, (media,), ({"role": "assistant", "content": ["a cat"]},))
    ids = encode_dialogue(row, MemoryVideos(), Renderer(renderer.tokenizer, renderer.contract, own), SCHEMAS).ids
    return read(renderer, ids)


def read(renderer: Renderer, ids: list[int]) -> str:
    return re.sub(r"<\|vision_start\|>.*?<\|vision_end\|>", "#", renderer.decode(ids))


def test_every_agent_reads_the_own_words_in_rollouts_and_in_sft_rows(renderer):
    own = Prompts(**TEXTS)
    main, sub = asked(renderer, own)
    assert TEXTS["system"] in main and system_prompt(True) not in main and "crop_video" in main
    assert "You see 4.0 to 9.5 of a video." in sub and 'Sum up these 5.5 seconds as {"what": ...}.' in sub
    [direct] = asked(renderer, own, dispatch="none")
    assert TEXTS["system_without_tools"] in direct and TEXTS["system"] not in direct

    window = dataclasses.replace(FILM, start=4, end=9.5)
    opening = "<|im_start|>assistant\n"
    assert learned(renderer, own, "main").startswith(main.removesuffix(opening))
    assert learned(renderer, own, "direct").startswith(direct.removesuffix(opening))
    assert learned(renderer, own, "sub", "", window).startswith(sub.removesuffix(opening))


def test_a_window_can_be_written_as_minutes_and_seconds():
    text = "{start_minutes}-{end_minutes}, until {end}, {minutes}"
    assert fill(text, (59.99, 6001.2)) == "00:59-100:01, until 6001.2, {minutes}"


@pytest.mark.parametrize("before, between", [(None, "#\n"), ("", "#")])
def test_the_line_break_before_the_question_can_be_left_out(renderer, before, between):
    own = Prompts(before_question=before)
    for read_first in (asked(renderer, own)[0], learned(renderer, own, "main")):
        assert f"{between}{TASK.question}<|im_end|>" in read_first


def test_a_text_that_is_not_replaced_is_ours(renderer):
    main, sub = asked(renderer, Prompts())
    assert subagent_system_prompt() in sub
    assert asked(renderer, Prompts(subagent_request="Go.")) == [main, sub.replace("What happens here?", "Go.")]
    # A tool's own texts go first.
    own = Prompts(**TEXTS).subagent_messages(None, (4.0, 9.5), renderer.contract, "What is read out?", "You read.")
    assert [own[0]["content"], own[1]["content"][1]] == ["You read.", "\nWhat is read out?"]


@pytest.mark.parametrize("text, tool", [("", "crop_video"), ("Mine: <tools>look()</tools>, called in <tool_call>.", "look()")])  # fmt: skip
def test_a_system_text_may_be_empty_or_declare_the_tools_itself(renderer, text, tool):
    main, _ = asked(renderer, Prompts(text))
    assert main.count("<tools>") == 1  # declared once in any case
    assert text in main and tool in main and system_prompt(True) not in main


def test_a_checkpoint_keeps_the_words_that_it_was_trained_with(toy_dir, tmp_path):
    """SFT writes them. A run under other words is refused with both, and the same file is accepted."""
    words = tmp_path / "words.yaml"
    words.write_text(yaml.safe_dump(TEXTS))
    cfg = config.load(SFTConfig, sft_config(tmp_path / "sft.yaml", toy_dir, steps=1, batch_rows=2, prompts=str(words)))
    sft.main(cfg)
    model = str(tmp_path / "sft" / "model")
    assert Prompts.load(model) == cfg.prompts == Prompts(**TEXTS)
    _, renderer = script.open_checkpoint(model, cfg.visual, cfg.prompts)
    assert renderer.prompts == cfg.prompts
    other = dataclasses.replace(cfg.prompts, system="Hi.")
    with pytest.raises(ContractError, match=r"prompts.system: 'Watch, call and answer.'.*'Hi.'"):
        script.open_checkpoint(model, cfg.visual, other)
    other.refuse_unlike(toy_dir / "model")  # a checkpoint that was not trained here accepts any words
