"""Own words in place of our prompts: one file reaches every agent in training and sampling, and stays with the checkpoint."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import yaml
from scripted import END, TASK, MemoryVideos, crop, play, turns
from scripts import sft_config

import sft
from dialogues import Dialogue, Media
from rl import RLConfig
from rollout import RolloutConfig
from runtime import config, script
from runtime.prompts import Prompts, fill, subagent_system_prompt, system_prompt
from runtime.render import Renderer
from runtime.visual import ContractError
from sft import SFTConfig, encode_dialogue
from study import ask
from tools import TOOLS

TEXTS = {
    "system": "Watch, call and answer.",
    "system_without_tools": "Watch and answer.",
    "subagent_system": "You see {start} to {end} of a video.",
    "subagent_request": 'Sum up these {duration} seconds as {"what": ...}.',
}
SCHEMAS = [TOOLS["crop_video"].schema]


def asked(renderer: Renderer, **cfg) -> list[str]:
    """Return what the main agent and its sub-agent read in a rollout, frames as #."""
    [episode] = play(
        renderer, turns("Closer.</think>" + crop(4, 9.5) + END, "Seen.</think><answer>a</answer>" + END), **cfg
    )
    return [read(renderer, t.prompt.ids) for t in [episode.main, *episode.subagents]]


def read(renderer: Renderer, ids: list[int]) -> str:
    return re.sub(r"<\|vision_start\|>.*?<\|vision_end\|>", "#", renderer.decode(ids))


def test_every_agent_reads_the_own_words_in_rollouts_and_in_sft_rows(renderer):
    own = Renderer(renderer.tokenizer, renderer.contract, Prompts(**TEXTS))
    main, sub = asked(own)
    assert TEXTS["system"] in main and system_prompt(True) not in main and "crop_video" in main
    assert "You see 4.0 to 9.5 of a video." in sub and 'Sum up these 5.5 seconds as {"what": ...}.' in sub
    [direct] = asked(own, dispatch="none")
    assert TEXTS["system_without_tools"] in direct and TEXTS["system"] not in direct

    said = ({"role": "assistant", "content": ["a cat"]},)
    film = Media("/data/v.mp4")
    for agent, prompt, question, media in (
        ("main", main, TASK.question, film),
        ("direct", direct, TASK.question, film),
        ("sub", sub, "", dataclasses.replace(film, start=4, end=9.5)),
    ):
        row = Dialogue("d", agent, question, (media,), said)
        learned = encode_dialogue(row, MemoryVideos(), own, SCHEMAS).ids
        assert read(own, learned).startswith(prompt.removesuffix("<|im_start|>assistant\n"))


def test_a_window_can_be_written_as_minutes_and_seconds():
    text = "{start_minutes}-{end_minutes}, until {end}, {minutes}"
    assert fill(text, (59.99, 6001.2)) == "00:59-100:01, until 6001.2, {minutes}"


@pytest.mark.parametrize("before, asked_after", [(None, "#\n"), ("", "#")])
def test_the_line_break_before_the_question_can_be_left_out(renderer, before, asked_after):
    own = Renderer(renderer.tokenizer, renderer.contract, Prompts(before_question=before))
    assert f"{asked_after}{TASK.question}<|im_end|>" in asked(own)[0]
    row = Dialogue("d", "main", TASK.question, (Media("/data/v.mp4"),), ({"role": "assistant", "content": ["a"]},))
    learned = encode_dialogue(row, MemoryVideos(), own, SCHEMAS).ids
    assert f"{asked_after}{TASK.question}<|im_end|>" in read(own, learned)


def test_a_text_that_is_not_replaced_is_ours(renderer):
    ours = asked(renderer)
    assert subagent_system_prompt() in ours[1]
    one = Renderer(renderer.tokenizer, renderer.contract, Prompts(subagent_request="Go."))
    assert asked(one) == [ours[0], ours[1].replace("What happens here?", "Go.")]
    # A tool's own texts go first.
    own = Prompts(**TEXTS).subagent_messages(None, (4.0, 9.5), renderer.contract, "What is read out?", "You read.")
    assert [own[0]["content"], own[1]["content"][1]] == ["You read.", "\nWhat is read out?"]


def test_a_system_text_may_be_empty_or_declare_the_tools_itself(renderer):
    """The tools are declared once in any case."""
    for text, declared in (("", "crop_video"), ("Mine: <tools>look()</tools>, called in <tool_call>.", "look()")):
        main, _ = asked(Renderer(renderer.tokenizer, renderer.contract, Prompts(text)))
        assert main.count("<tools>") == 1
        assert text in main and declared in main
        assert system_prompt(True) not in main


def test_a_checkpoint_keeps_the_words_that_it_was_trained_with(toy_dir, tmp_path):
    """SFT writes them, RL under other words is refused with both, and the same file is accepted."""
    words = tmp_path / "words.yaml"
    words.write_text(yaml.safe_dump(TEXTS))
    cfg = config.load(SFTConfig, sft_config(tmp_path / "sft.yaml", toy_dir, steps=1, batch_rows=2, prompts=str(words)))
    sft.main(cfg)
    model = Path(cfg.run) / "model"
    assert Prompts.load(model) == cfg.prompts == Prompts(**TEXTS)

    rl = RLConfig(run="r", policy=cfg.policy, data=cfg.data, visual=cfg.visual, prompts=cfg.prompts)
    rl = dataclasses.replace(rl, policy=dataclasses.replace(cfg.policy, checkpoint=str(model)))
    _, renderer = script.open_checkpoint(str(model), rl.visual, rl.prompts)
    assert renderer.prompts == Prompts(**TEXTS)
    other = dataclasses.replace(rl, prompts=dataclasses.replace(rl.prompts, system="Hi."))
    with pytest.raises(ContractError, match=r"prompts.system: 'Watch, call and answer.', now 'Hi.'"):
        script.open_checkpoint(str(model), other.visual, other.prompts)
    other.prompts.refuse_unlike(toy_dir / "model")  # a checkpoint that was not trained here accepts any words


def test_a_file_of_words_with_another_name_is_refused(toy_dir, tmp_path):
    words = tmp_path / "words.yaml"
    words.write_text("sytem: Hello.\n")
    with pytest.raises(config.ConfigError, match="prompts.sytem: unknown key; did you mean prompts.system?"):
        config.load(SFTConfig, sft_config(tmp_path / "sft.yaml", toy_dir, prompts=str(words)))


def test_ask_uses_the_checkpoints_words_or_a_files(toy_dir, tmp_path, monkeypatch):
    shutil.copytree(toy_dir / "model", tmp_path / "model")
    Prompts(system="Trained.").save(tmp_path / "model")
    (tmp_path / "words.yaml").write_text("system: Asked.")
    monkeypatch.setattr(ask, "open_engine", lambda *_: None)
    for file, system in ((None, "Trained."), (tmp_path / "words.yaml", "Asked.")):
        context = ask.open_context(tmp_path / "model", file, None, RolloutConfig())
        assert context.renderer.prompts == Prompts(system=system)
