"""docs/one_step.md: its figures are those of its record and of this code, and its calculations are right."""

import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scripted import Characters
from scripts import REPO

from episode import Episode, Group, Prompt, episodes_of
from grpo import assign_advantages, bundle_groups, token_losses
from metrics import add_format_metrics
from rewards import assign_rewards
from rl import RLConfig
from runtime import config
from runtime.lines import read_lines
from runtime.packing import pack_bundles
from runtime.video import Clip

PAGE = (REPO / "docs" / "one_step.md").read_text("utf-8")
RECORD, *EPISODES = read_lines(REPO / "docs" / "one_step.jsonl")


@dataclass
class Vocabulary(Characters):
    """A renderer for the recorded tokens."""

    texts: dict[str, str]  # by id
    image_pad: int
    ends_of_turn: list[int]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.texts[str(token)] for token in ids)


def code(text: str) -> str:
    return f"`{text!r}`".replace("|", "\\|")  # a bar would end the cell


def fenced(text: str) -> str:
    return f"```text\n{re.sub('<.vision_start.>(<.image_pad.>)+<.vision_end.>', '[frame]', text)}\n```"


def table(title: str) -> list[list[str]]:
    """Return the cells of the page's table below this line, with its header."""
    header, _, *rows = re.match(r"(?:\|.*\n)+", PAGE.split(f"\n{title}\n\n")[1])[0].splitlines()
    return [re.split(r" *(?<!\\)\| *", row)[1:-1] for row in (header, *rows)]


def test_the_pages_figures_are_what_the_code_makes_of_the_record():
    """The record holds the episodes and the log-probs of policy and reference. Rewards, struct(o) and advantages are computed."""
    settings = ["staleness=1", "grpo.kl_coef=0.01"]
    cfg = config.load(RLConfig, REPO / "configs" / "toy_paragrpo_full.yaml", settings)
    renderer = Vocabulary(**RECORD["vocabulary"])
    recorded_episodes = episodes_of(EPISODES)  # with the rewards and advantages of the run
    episodes = [Episode(e.task, e.k, replace(e.main, structural=[]), e.calls) for e in recorded_episodes]
    group = Group(episodes[0].task, episodes[0].k, episodes)
    assign_rewards([group], renderer, cfg.reward)
    add_format_metrics([group], renderer, cfg.reward)
    assign_advantages([group], cfg.grpo, cfg.reward.anchor)
    [bundle], n_tokens = bundle_groups([group], cfg.grpo)
    side = cfg.visual.cell  # a frame is one token
    bundle.prompt = Prompt(bundle.prompt.ids, [Clip(np.zeros((group.k, side, side, 3), np.uint8), ())])
    packed = pack_bundles([bundle], renderer.image_pad, side)

    # the prompt, and the episodes that the page shows
    assert fenced(renderer.decode(bundle.prompt.ids)) in PAGE
    for i in RECORD["shown"]:
        assert f"Episode {i + 1}:\n\n{fenced(renderer.decode(bundle.rows[i].ids))}" in PAGE

    # rewards and advantages, also as the run itself computed them
    names = ("R_acc", "R_fmt", "R_tool", "R", "R_anchor")
    rows = []
    for i, (episode, recorded) in enumerate(zip(episodes, recorded_episodes, strict=True), 1):
        known = {part: episode.rewards[part] for part in recorded.rewards}  # a fork's own terms are not recorded
        assert known == pytest.approx(recorded.rewards)
        figures = [episode.rewards[name] for name in names] + [recorded.advantage, recorded.anchor_advantage]
        assert [episode.advantage, episode.anchor_advantage] == pytest.approx(figures[5:])
        rows.append([f"episode {i}", *(f"{x:.3f}" for x in figures)])
    parts = np.array([[episode.rewards[name] for name in names] for episode in episodes])  # [G, 5]
    rows.append(["mean", *(f"{x:.4f}" for x in parts.mean(axis=0)), "", ""])
    rows.append(["std", *(f"{x:.4f}" for x in parts.std(axis=0, ddof=1)), "", ""])
    assert table("8 episodes:") == [["", *names, "A", "A_anchor"], *rows]

    # one turn, token by token
    torn = bundle.rows[RECORD["torn"]]
    rows = []
    for t in range(*torn.turns[-1]):
        token = code(renderer.decode([torn.ids[t]]))
        rows.append(
            [token, str(torn.mask[t]), str(torn.structural[t]), f"{torn.loss_weights[t]:.3f}" if torn.mask[t] else ""]
        )
    title = f"Episode {RECORD['torn'] + 1}, last turn:"
    assert table(title) == [["token", "mask", "struct", "A_t"], *rows]

    # the packed sequence
    rows = []
    for i, s in enumerate(packed.segments):
        name, sees = ("prompt", "") if i == 0 else (f"row {i}", f"{s.prompt_start}–{s.prompt_stop - 1}, ")
        first, last = packed.positions[0, [s.start, s.stop - 1]]
        rows.append([name, f"{s.start}–{s.stop - 1}", f"{first}–{last}", f"{sees}{s.start}–t"])
    assert table(f"{len(packed.ids)} tokens:") == [["segment", "tokens", "positions", "token t sees"], *rows]

    # the loss of three tokens, and the denominator
    pi, reference = torch.tensor(RECORD["logprobs"])  # each [N]
    behaviour, advantages = torch.from_numpy(packed.behaviour_logprobs), torch.from_numpy(packed.loss_weights)
    losses, stats = token_losses(pi, pi, behaviour, reference, advantages, cfg.grpo)
    columns = {"log π_behaviour": behaviour, "log π": pi, "log π_ref": reference, "A_t": advantages}
    columns |= {"w": (pi - behaviour).exp(), "w · KL": stats["kl"], "l": losses}
    rows = [[name, *(f"{column[n]:.4f}" for n in RECORD["three"])] for name, column in columns.items()]
    tokens = [code(renderer.decode([packed.targets[n]])) for n in RECORD["three"]]
    header = ["", *(f"{i}: {token}" for i, token in enumerate(tokens, 1))]
    assert table("Three tokens:") == [header, *rows]
    total, n = losses.sum().item(), RECORD["total_tokens"]
    assert f"Σ l / total_tokens = {total:.3f} / {n:.0f} = {total / n:.5f}, a sum over {n_tokens:.0f} tokens." in PAGE


def test_the_calculations_that_the_page_writes_out_are_right():
    lines = re.findall(r"^(\w+(?:\(\w+\))?) += (.+) = (-?[\d.]+)$", PAGE, re.M)
    assert len(lines) == 31
    for name, expression, result in lines:
        value = eval(expression, {"min": min, "exp": math.exp})
        assert value == pytest.approx(float(result), abs=6e-4), name
