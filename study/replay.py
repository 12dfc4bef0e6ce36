"""replay.py: one training step on recorded episodes, without an engine. If a run goes wrong, is it the servers or the trainer?

    python -m study.replay configs/paragrpo_2b_1gpu.yaml runs/paragrpo_2b/episodes/step-000000.jsonl [key.sub=value ...]
    torchrun --standalone --nproc_per_node=4 -m study.replay configs/paragrpo_8b.yaml EPISODES     # 8B needs four GPUs

It prints loss, gradient norm and the gap between the trainer's log-probs and the recorded ones, and writes nothing. The gap
should be small where `policy.checkpoint` is what sampled the file: step-000000 is of the checkpoint that the run began with.
"""

import sys
from functools import partial

from data import Group
from grpo import assign_advantages, make_train_groups, update
from records import load_episodes
from rewards import give_rewards
from rl import RLConfig
from runtime.api import Judge
from runtime.checks import USER_ERRORS, Checklist, find_checkpoint
from runtime.distributed import init_distributed, print0, rank, world_size
from runtime.plan import plan_rl
from runtime.policy import load, make_optimizer, optimizer_step
from runtime.render import Renderer, load_tokenizer
from runtime.run import check_room
from runtime.script import command_line, run_script
from runtime.video import Videos


def replay(cfg: RLConfig, path: str) -> None:
    init_distributed()
    source = find_checkpoint(cfg.policy.checkpoint)
    cfg.visual.check(source)
    renderer = Renderer(load_tokenizer(source), cfg.visual, cfg.prompts)
    check_room(cfg, Checklist(), lambda cfg: plan_rl(cfg)[:1])  # the trainer's

    # Read the groups, decode their frames again, and share them out over the ranks. Then take the step as rl.train does.
    groups: dict[str, Group] = {}
    with Videos(cfg.workers) as videos:
        for episode in load_episodes(path, videos, cfg.visual):
            groups.setdefault(episode.task.id, Group(episode.task, episode.k, [])).episodes.append(episode)
    mine = list(groups.values())[rank() :: world_size()]
    give_rewards(mine, renderer, cfg.reward, Judge(cfg.reward.judge))
    assign_advantages(mine, cfg.grpo, cfg.reward.anchor)
    train_groups, total_tokens = make_train_groups(mine, cfg.grpo, cfg.reward.anchor, cfg.rollout.subagents.train)
    policy = load(cfg.policy, renderer.never_sampled)
    reference = load(cfg.policy, renderer.never_sampled, train=False) if cfg.grpo.kl_coef else None
    take_step = partial(optimizer_step, policy, make_optimizer(policy, cfg.optim), cfg.optim, 0, cfg.steps)
    temperature = cfg.rollout.temperature
    measured = update(policy, reference, take_step, train_groups, total_tokens, cfg.minibatches, temperature, cfg.grpo)
    for name in ("loss", "grad_norm", "logprob_gap", "learned_tokens"):
        print0(f"{name:<16}{measured[name]:.6g}")


def main() -> None:
    path = sys.argv.pop(2) if len(sys.argv) > 2 else "EPISODES"
    cfg, _ = command_line(RLConfig, __doc__)
    run_script(partial(replay, path=path), cfg, *USER_ERRORS)


if __name__ == "__main__":
    main()
