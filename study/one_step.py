"""one_step.py: compute the figures of docs/one_step.md, which works out one training step to the digit.

    python -m study.one_step          # docs/one_step.jsonl -> the figures of docs/one_step.md; its prose stays

The record holds one group of a toy run: exact ids, and the log-probs that entered its loss. Everything else is computed
here with the functions that train. Deliberately missing: pixels, and the recorder (tests/record_one_step.py).
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import rewards
from data import Episode, Group
from evals.tables import markdown, put_between_marks
from grpo import assign_advantages, make_examples, token_advantages, token_losses
from rl import RLConfig
from rollout import episode_of
from runtime import config
from runtime.packing import pack_bundles
from runtime.video import Frames
from study.lab import Characters

REPO = Path(__file__).resolve().parent.parent
CONFIG = REPO / "configs" / "toy_paragrpo_full.yaml"
# Two updates per batch, and weights that are one update old while sampling. Otherwise r and w would be 1.
SETTINGS = ["minibatches=2", "staleness=1", "grpo.kl_coef=0.01", "optim.lr=5.0e-5", "val=null"]
SETTINGS += ["optim.schedule=constant", "steps=8"]


@dataclass
class Vocabulary(Characters):
    """A renderer for the recorded tokens."""

    texts: dict[str, str]  # by id
    image_pad: int
    ends_of_turn: list[int]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.texts[str(token)] for token in ids)


def figures(record: dict, episodes: list[Episode]) -> dict[str, str]:
    """Return the page's figures by the names of their marks."""
    cfg = config.load(RLConfig, CONFIG, SETTINGS)
    renderer = Vocabulary(**record["vocabulary"])
    texts = {}
    group = Group(episodes[0].task, episodes[0].k, episodes)
    rewards.give_rewards([group], renderer, cfg.reward)
    assign_advantages([group], cfg.grpo, cfg.reward.anchor)
    (example,), n_tokens = make_examples([group], renderer, cfg.grpo, cfg.reward.anchor)
    side = cfg.visual.cell  # a frame is one token
    example.bundle.frames = [Frames(np.zeros((group.k, side, side, 3), np.uint8), ())]
    packed = pack_bundles([example.bundle], renderer.image_pad, side)

    # the prompt, and the episodes that the page shows
    texts["prompt"] = fenced(renderer.decode(example.bundle.prompt))
    shown = [f"Episode {i + 1}:\n\n{fenced(renderer.decode(example.bundle.suffixes[i]))}" for i in record["shown"]]
    texts["episodes"] = "\n\n".join(shown)

    # rewards and advantages
    names = ("R_acc", "R_fmt", "R_tool", "R", "R_anchor")
    rows = []
    parts = np.array([[e.rewards[name] for name in names] for e in episodes])  # [G, 5]
    for i, e in enumerate(episodes):
        rows.append([f"episode {i + 1}", *(f"{x:.3f}" for x in (*parts[i], e.advantage, e.anchor_advantage))])
    rows.append(["mean", *(f"{x:.4f}" for x in parts.mean(axis=0)), "", ""])
    rows.append(["std", *(f"{x:.4f}" for x in parts.std(axis=0, ddof=1)), "", ""])
    texts["advantages"] = markdown(f"{len(episodes)} episodes:", ["", *names, "A", "A_anchor"], rows)

    # one turn, token by token
    episode = episodes[record["torn"]]
    main = episode.main
    struct = rewards.structural_mask(main, renderer)
    advantages = token_advantages(episode, renderer, cfg.reward.anchor)
    rows = []
    for t in range(*main.turns[-1]):
        a = f"{advantages[t]:.3f}" if main.mask[t] else ""
        rows.append([code(renderer.decode([main.ids[t]])), main.mask[t], int(struct[t]), a])
    texts["tokens"] = markdown(f"Episode {record['torn'] + 1}, last turn:", ["token", "mask", "struct", "A_t"], rows)

    # the packed sequence: the prompt once, then the suffixes
    rows = []
    for i, s in enumerate(packed.segments):
        name, sees = ("prompt", "") if i == 0 else (f"suffix {i}", f"{s.prompt_start}–{s.prompt_stop - 1}, ")
        first, last = packed.positions[0, [s.start, s.stop - 1]]
        rows.append([name, f"{s.start}–{s.stop - 1}", f"{first}–{last}", f"{sees}{s.start}–t"])
    texts["layout"] = markdown(f"{len(packed.ids)} tokens:", ["row", "tokens", "positions", "token t sees"], rows)

    # the loss of three tokens, and the denominator
    pi, prox, reference = torch.tensor(record["logprobs"])  # each [N]
    behaviour, advantages = torch.from_numpy(example.behaviour_logprobs), torch.from_numpy(example.advantages)
    losses, stats = token_losses(pi, prox, behaviour, reference, advantages, cfg.grpo)
    columns = {"log π_behaviour": behaviour, "log π_prox": prox, "log π": pi, "log π_ref": reference, "A_t": advantages}
    columns |= {"w": (prox - behaviour).exp(), "r": (pi - prox).exp(), "w · r · KL": stats["kl"], "l": losses}
    rows = [[name, *(f"{column[n]:.4f}" for n in record["three"])] for name, column in columns.items()]
    header = ["", *(code(renderer.decode([packed.targets[n]])) for n in record["three"])]
    texts["losses"] = markdown("Three tokens:", header, rows)
    total = losses.sum().item()
    n = record["total_tokens"]
    texts["denominators"] = f"Σ l / N = {total:.3f} / {n:.0f} = {total / n:.5f}, a sum over {n_tokens:.0f} tokens."
    return texts


def code(text: str) -> str:
    return f"`{text!r}`".replace("|", "\\|")  # a bar would end the cell


def fenced(text: str) -> str:
    return f"```text\n{re.sub('<.vision_start.>(<.image_pad.>)+<.vision_end.>', '[frame]', text)}\n```"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    record, *lines = [json.loads(line) for line in (REPO / "docs" / "one_step.jsonl").read_text("utf-8").splitlines()]
    for name, text in figures(record, [episode_of(line, None, None) for line in lines]).items():
        put_between_marks(REPO / "docs" / "one_step.md", name, "study/one_step.py", text, "One step")


if __name__ == "__main__":
    main()
