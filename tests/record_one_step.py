"""Record the group that docs/one_step.md works out to the digit, and compute the page's figures from the record.

    python tests/record_one_step.py --write                               # docs/one_step.jsonl -> the page's figures; its prose stays
    python tests/record_one_step.py --record runs/toy/sft/model toy_data  # a short run of rl.py from a cold start -> the record

The record holds one group of a toy run: what the loss was given, then one line per episode, as records.dump writes it:
exact ids, no pixels. All other figures are computed with the functions that train."""

import json
import re
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpo
import rewards
import rl
from data import Episode, Group
from evals.tables import markdown, put_between_marks
from grpo import assign_advantages, make_train_groups, token_advantages, token_losses
from records import dump, episode_of
from rl import RLConfig
from runtime import config
from runtime.packing import pack_bundles
from runtime.render import Renderer, load_tokenizer
from runtime.video import Clip
from study.lab import Characters

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs" / "one_step.md"
RECORD = REPO / "docs" / "one_step.jsonl"
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
    (train_group,), n_tokens = make_train_groups([group], cfg.grpo, cfg.reward.anchor)
    side = cfg.visual.cell  # a frame is one token
    train_group.bundle.clips = [Clip(np.zeros((group.k, side, side, 3), np.uint8), ())]
    packed = pack_bundles([train_group.bundle], renderer.image_pad, side)

    # the prompt, and the episodes that the page shows
    texts["prompt"] = fenced(renderer.decode(train_group.bundle.prompt))
    shown = [f"Episode {i + 1}:\n\n{fenced(renderer.decode(train_group.bundle.suffixes[i]))}" for i in record["shown"]]
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
    advantages = token_advantages(episode, cfg.reward.anchor)
    rows = []
    for t in range(*main.turns[-1]):
        a = f"{advantages[t]:.3f}" if main.mask[t] else ""
        rows.append([code(renderer.decode([main.ids[t]])), main.mask[t], main.structural[t], a])
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
    behaviour, advantages = torch.from_numpy(train_group.behaviour_logprobs), torch.from_numpy(train_group.advantages)
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


def record(checkpoint: str, toy: str) -> None:
    """Run rl.py, listen to its loss, and keep the group with K = 4 that has the most kinds of episodes."""
    groups = []
    logprobs = {}  # id of a train group -> [3, N]: of pi, pi_prox and pi_ref

    def make_train_groups(batch, *settings):
        train_groups, total_tokens = grpo.make_train_groups(batch, *settings)
        for i, (group, train_group) in enumerate(zip(batch, train_groups, strict=True)):
            # In the second minibatch r is not 1. After the first updates the sampler is not the reference.
            if group.k == 4 and i % 2 == 1 and max(group.episodes[0].main.versions) > 0:
                groups.append((group, train_group, total_tokens))
        return train_groups, total_tokens

    def micro_batch_losses(output, micro, prox, reference, cfg):
        columns = torch.stack([output.logprobs, prox, reference]).split([len(g.advantages) for g in micro], dim=1)
        for train_group, column in zip(micro, columns, strict=True):
            logprobs[id(train_group)] = column.tolist()
        return losses_of(output, micro, prox, reference, cfg)

    losses_of = grpo.micro_batch_losses
    rl.make_train_groups, grpo.micro_batch_losses = make_train_groups, micro_batch_losses
    with tempfile.TemporaryDirectory() as run:
        paths = [f"run={run}", f"policy.checkpoint={checkpoint}", f"data.sources=[{{path: {toy}/rl.parquet}}]"]
        cfg = config.load(RLConfig, CONFIG, SETTINGS + paths)
        rl.main(cfg)
    renderer = Renderer(load_tokenizer(checkpoint), cfg.visual)
    group, train_group, total_tokens = max(groups, key=lambda found: len(set(kinds(found[0].episodes))))

    # The page shows an episode of each kind (right, called), and the one whose two advantages pull apart most.
    first = {}
    for i, (right, called, _) in enumerate(kinds(group.episodes)):
        first.setdefault((right, called), i)
    apart = [episode.advantage * episode.anchor_advantage for episode in group.episodes]
    torn = apart.index(min(apart))
    # The three tokens: the largest |log r|, |log w| and |log pi_ref - log pi|, each another token.
    pi, prox, reference = np.array(logprobs[id(train_group)])
    three = []
    for size in (np.abs(pi - prox), np.abs(prox - train_group.behaviour_logprobs), np.abs(reference - pi)):
        size[three] = 0
        three.append(int(size.argmax()))

    texts = {token: renderer.decode([token]) for episode in group.episodes for token in episode.main.ids}
    given = {"commit": config.git_commit(), "shown": sorted({*first.values(), torn}), "torn": torn, "three": three}
    given |= {"total_tokens": total_tokens, "logprobs": logprobs[id(train_group)]}
    given["vocabulary"] = {"texts": texts, "image_pad": renderer.image_pad, "ends_of_turn": renderer.ends_of_turn}
    with RECORD.open("w", encoding="utf-8") as file:
        file.write(json.dumps(given) + "\n")
        for episode in group.episodes:
            episode.task = replace(episode.task, videos=tuple(Path(path).name for path in episode.task.videos))
            episode.calls = [replace(call, subagent=None) for call in episode.calls]
            dump(episode, file, renderer)


def kinds(episodes: list[Episode]) -> list[tuple]:
    return [(e.rewards["R_acc"] > 0, e.n_executed > 0, e.rewards["R_anchor"]) for e in episodes]


def write() -> None:
    first, *lines = [json.loads(line) for line in RECORD.read_text("utf-8").splitlines()]
    for name, text in figures(first, [episode_of(line, None, None) for line in lines]).items():
        put_between_marks(PAGE, name, "record_one_step.py", text, "One step")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    elif sys.argv[1:2] == ["--record"]:
        record(*sys.argv[2:])
    else:
        sys.exit(__doc__)
