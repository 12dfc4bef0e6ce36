"""Record the group that docs/one_step.md works out: a short run of rl.py on the toy, from a cold start (half a minute).

    PYTHONPATH=. python tests/record_one_step.py runs/toy/sft/model toy_data docs/one_step.jsonl

The first line holds what the loss was given; then one line per episode, as rollout.dump writes it: exact ids, no pixels."""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import grpo
import rl
from data import Episode
from rollout import dump
from runtime import config
from study.one_step import CONFIG, SETTINGS


def record(checkpoint: str, toy: str, out: str) -> None:
    """Run rl.py, listen to its loss, and keep the group with K = 4 that has the most kinds of episodes."""
    groups = []
    logprobs = {}  # id of a training example -> [3, N]: of pi, pi_prox and pi_ref

    def make_examples(batch, renderer, *settings):
        examples, total_tokens = grpo.make_examples(batch, renderer, *settings)
        for i, (group, example) in enumerate(zip(batch, examples, strict=True)):
            # In the second minibatch r is not 1. After the first updates the sampler is not the reference.
            if group.k == 4 and i % 2 == 1 and max(group.episodes[0].main.versions) > 0:
                groups.append((group, example, renderer, total_tokens))
        return examples, total_tokens

    def examples_loss(scores, examples, total_tokens, prox, reference, cfg):
        columns = torch.stack([scores.logprobs, prox, reference]).split([len(e.advantages) for e in examples], dim=1)
        for example, column in zip(examples, columns, strict=True):
            logprobs[id(example)] = column.tolist()
        return grpo.examples_loss(scores, examples, total_tokens, prox, reference, cfg)

    rl.make_examples, rl.examples_loss = make_examples, examples_loss
    with tempfile.TemporaryDirectory() as run:
        paths = [f"run={run}", f"policy.checkpoint={checkpoint}", f"data.sources=[{{path: {toy}/rl.parquet}}]"]
        rl.main(config.load(rl.RLConfig, CONFIG, SETTINGS + paths))
    group, example, renderer, total_tokens = max(groups, key=lambda found: len(set(kinds(found[0].episodes))))

    # The page shows an episode of each kind (right, called), and the one whose two advantages pull apart most.
    first = {}
    for i, (right, called, _) in enumerate(kinds(group.episodes)):
        first.setdefault((right, called), i)
    apart = [episode.advantage * episode.anchor_advantage for episode in group.episodes]
    torn = apart.index(min(apart))
    # The three tokens: the largest |log r|, |log w| and |log pi_ref - log pi|, each another token.
    pi, prox, reference = np.array(logprobs[id(example)])
    three = []
    for size in (np.abs(pi - prox), np.abs(prox - example.behaviour_logprobs), np.abs(reference - pi)):
        size[three] = 0
        three.append(int(size.argmax()))

    texts = {token: renderer.decode([token]) for episode in group.episodes for token in episode.main.ids}
    given = {"commit": config.git_commit(), "shown": sorted({*first.values(), torn}), "torn": torn, "three": three}
    given |= {"total_tokens": total_tokens, "logprobs": logprobs[id(example)]}
    given["vocabulary"] = {"texts": texts, "image_pad": renderer.image_pad, "ends_of_turn": renderer.ends_of_turn}
    with open(out, "w", encoding="utf-8") as file:
        file.write(json.dumps(given) + "\n")
        for episode in group.episodes:
            episode.task = replace(episode.task, videos=tuple(Path(path).name for path in episode.task.videos))
            episode.calls = [replace(call, subagent=None) for call in episode.calls]
            dump(episode, file, renderer)


def kinds(episodes: list[Episode]) -> list[tuple]:
    return [(e.rewards["R_acc"] > 0, e.n_executed > 0, e.rewards["R_anchor"]) for e in episodes]


if __name__ == "__main__":
    record(*sys.argv[1:])
