"""rl.py: PARA-GRPO, and plain GRPO as its special case.

    torchrun --standalone --nproc_per_node=4 rl.py configs/paragrpo_8b.yaml     # GPUs 4-7 sample, the others train
    python rl.py configs/toy_paragrpo.yaml                                      # the same code on a CPU
    python rl.py configs/toy_grpo.yaml steps=20                                 # accuracy-only GRPO, for contrast

A step draws one K for each of B tasks (nFrames gating), samples G episodes per task, rewards them, compares them within
their group (advantages), takes an AdamW step on the loss and gives the new weights to the engine. The run writes
RUN/metrics.jsonl, RUN/episodes/ (episodes as text and token ids), RUN/state/ (to resume from) and RUN/model/ (the result).

The equations are in grpo.py. Plain GRPO is the same loop without prefix, suffix, anchor and gating. With `staleness: 1`,
the next step's episodes are sampled while this step trains, so their weights are one update old. A resumed run samples its
first batch with the newest weights. It therefore repeats the uninterrupted run only with `staleness: 0` and the in-process
engine.

Deliberately missing: batches that are more than one update old, elastic training.
"""

import contextlib
import hashlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from data import parse_task
from episode import Group, Task, Trajectory, console_text, keep_episodes
from grpo import GRPOConfig, accumulate, assign_advantages, bundle_groups
from metrics import add_format_metrics, describe
from rewards import RewardConfig, assign_rewards
from rollout import AgentContext, RolloutConfig, overview, render_prompt, rollout
from runtime.answers import Judge
from runtime.api import ApiJudge
from runtime.checkpoints import load_policy, on_the_hub, write_weights
from runtime.config import ConfigError
from runtime.dataset import Dataset, Draw, require_rows
from runtime.distributed import (
    barrier,
    gather,
    init_distributed,
    local_size,
    mean_over_ranks,
    print0,
    rank,
    sum_over_ranks,
    world_size,
)
from runtime.engine import Engine, EngineError
from runtime.folder import hold_folder, require_folder
from runtime.open_engine import open_engine, require_servers
from runtime.packing import Bundle
from runtime.plan import Plan, plan_inprocess, plan_servers, plan_training
from runtime.policy import Policy
from runtime.render import Renderer, refuse_template
from runtime.run import Clock, Run, RunConfig, make_optimizer, optimizer_step, require_memory, require_weights, speed
from runtime.script import command_line, note_not_looked_up, open_checkpoint, read_all_rows, run_script
from runtime.servers import IMAGE_BYTES
from runtime.video import VideoError, Videos
from runtime.weights import WeightSync, snapshot_folders
from tools import schemas_of


@dataclass(frozen=True, kw_only=True)
class RLConfig(RunConfig):
    """One RL run."""

    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    grpo: GRPOConfig = GRPOConfig()
    gating: tuple[int, ...] = (4, 8, 16, 32, 64)
    """nFrames gating: K is drawn from these once per task and epoch. []: no gating, K = visual.overview_frames."""
    steps: int = 54
    batch_tasks: int = 8
    """B: tasks per step, over all ranks."""
    staleness: Literal[0, 1] = 0
    """0: sample, then train. 1: sample the next batch while this one trains, with weights that are one update old."""
    val_tasks: int = 64
    """Held-out tasks of `val`. Each is answered greedily at each K of `val_frames`, once with tools and once without."""
    val_frames: tuple[int, ...] = ()
    """Values of K at which each held-out task is asked. []: visual.overview_frames."""
    dump_groups: int = 1
    """Groups per step whose episodes are written to RUN/episodes/."""
    seed: int = 0
    """Seed of K and of the in-process engine's samples. `data.seed` orders the rows."""

    def __post_init__(self):
        if self.reward.untagged_answer == "prose":
            raise ValueError("reward.untagged_answer = 'prose' is for evaluation: use off, stated or fallback")
        temperature = self.rollout.temperature
        if temperature == 0:
            raise ValueError("rollout.temperature = 0: all episodes of a group would be the same; set it above 0")
        for name, value in vars(self.rollout).items():
            if value is None:
                raise ValueError(f"rollout.{name} = null: only for an evaluation; set a value, or leave out the key")
        subagents = self.rollout.subagents
        if subagents.train and subagents.temperature != temperature:
            raise ValueError(f"rollout.subagents.train needs rollout.subagents.temperature = {temperature}")
        if 0 in (*self.choices_of_k, *self.val_frames):
            raise ValueError(
                "gating, val_frames or visual.overview_frames is 0: an overview has at least 1 frame; gating = [] is off"
            )

    @property
    def think_prefix(self) -> bool:
        return bool(self.rollout.think_prefix)

    @property
    def choices_of_k(self) -> tuple[int, ...]:
        return self.gating or (self.visual.overview_frames,)


SHOWN = (
    "R", "R_acc", "f", "well_formed", "kappa", "call_errors/crashed", "loss", "kl", "entropy", "logprob_gap", "grad_norm",
    "seconds",
)  # fmt: skip


def main(cfg: RLConfig, dry: bool = False) -> None:
    """Build the parts of a run, train to the last step, and export the policy. A dry run ends before the weights are loaded."""
    init_distributed()

    # Refuse what cannot work, in the order of cost. A dry run may be on another machine than the run.
    gpus = cfg.plan.gpus if dry else local_size()
    if dry or torch.cuda.is_available():
        require_memory(cfg.plan, plan_rl(cfg, gpus))
    ranks = gpus if dry else world_size()
    if cfg.batch_tasks < ranks:
        raise ConfigError(f"batch_tasks = {cfg.batch_tasks}: each of {ranks} ranks needs a task; raise it")
    if not dry or torch.cuda.is_available() or not cfg.rollout.server_gpus:
        require_servers(cfg.rollout, gpus)
    require_folder(cfg, cfg.policy.checkpoint)
    require_rows(parse_task, cfg.data, cfg.val)
    if dry and on_the_hub(cfg.policy.checkpoint):
        note_not_looked_up(cfg.policy.checkpoint)
    else:
        source, renderer = open_checkpoint(cfg.policy.checkpoint, cfg.visual, cfg.prompts)
        refuse_template(source, renderer, schemas_of(cfg.rollout.tools) if cfg.rollout.dispatch != "none" else {})
        require_weights(cfg, source)
    if dry:
        print0(f"ready: {cfg.run}")
        return

    with hold_folder(cfg, source):
        # Load the policy and the KL's reference. `Run` then restores policy and optimizer from the newest state.
        policy_cfg = replace(cfg.policy, checkpoint=str(source))
        policy = load_policy(policy_cfg, renderer.never_sampled)
        reference = None
        if cfg.grpo.kl_coef:
            reference = load_policy(policy_cfg, renderer.never_sampled, train=False)
            if policy.vision_frozen:  # both share one tower
                reference.model.model.visual = policy.vision
        run = Run(cfg, "rl", SHOWN, policy, make_optimizer(policy, cfg.optim))

        if run.steps_done < cfg.steps:
            with open_sampler(cfg, source, renderer) as (sampler, sync):
                # The engine starts with the checkpoint's weights. Servers that were already running may hold another run's.
                if run.steps_done or cfg.rollout.urls:
                    write_weights(policy, sync.snapshot(run.steps_done))
                    sync.publish(run.steps_done)
                train(cfg, policy, reference, sampler, sync, run)
        run.export()


def train(
    cfg: RLConfig, policy: Policy, reference: Policy | None, sampler: "Sampler", sync: WeightSync, run: Run
) -> None:
    """Train to the last step: sample, reward, update, sync, evaluate, log, save."""
    renderer = sampler.renderer
    judge = ApiJudge(cfg.reward.judge)
    held_out = read_held_out(cfg)

    # A thread samples the batches in order. With staleness 1 it is one step ahead of training.
    print0(f"sampling the first batch: {cfg.batch_tasks} x {cfg.grpo.group_size} episodes")
    for ahead in range(1 + cfg.staleness):
        sampler.start(run.steps_done + ahead)
    for step in range(run.steps_done, cfg.steps):
        clock = Clock()

        # Sample: get this rank's groups of episodes.
        groups, sampling_seconds = sampler.get(step)
        clock.lap("rollout")

        # Reward the episodes, compare them within their group, and collect what to train on.
        assign_rewards(groups, renderer, cfg.reward, judge)
        add_format_metrics(groups, renderer, cfg.reward)
        refuse_empty(groups, step)
        assign_advantages(groups, cfg.grpo, cfg.reward.anchor)
        bundles, total_tokens = bundle_groups(groups, cfg.grpo, cfg.rollout.subagents.train)
        barrier()  # a rank that is ahead waits here, not inside NCCL
        clock.lap("reward")

        # Update. Before the first update, check that the trainer computes the engine's log-probs.
        if step == run.steps_done:
            require_agreement(policy, groups, cfg.rollout.temperature, cfg.rollout.subagents.temperature)
        measured = accumulate(policy, reference, bundles, total_tokens, cfg.rollout.temperature, cfg.grpo)
        refuse_infinite_gap(measured["logprob_gap"], step)
        measured["grad_norm"] = 0.0
        if measured["learned_tokens"]:  # otherwise no rank has a group to learn from, and AdamW would only decay
            measured["grad_norm"] = optimizer_step(policy, run.optimizer, cfg.optim, step, cfg.steps)
        clock.lap("train")

        # Sync: write the new weights while the engine may still sample, and load them once it has finished.
        write_weights(policy, sync.snapshot(step + 1))
        clock.lap("export")
        sampler.wait_until_idle()
        clock.lap("wait")
        sync.publish(step + 1)
        clock.lap("publish")

        # Gather what this step measured. `seconds` ends with the sync: it includes no evaluation, log or save.
        measured |= clock.seconds | {"sampling_seconds": sampling_seconds}
        measured |= describe(groups, cfg.choices_of_k, step)
        measured |= measure_run(sampler, policy, bundles, clock)

        # Evaluate, and start to sample a later batch while this step is logged and saved.
        if cfg.val and run.is_time(step, cfg.eval_every):
            measured |= evaluate(held_out, sampler, cfg, judge)
        sampler.start(step + 1 + cfg.staleness)

        # Log.
        if rank() == 0:
            path = run.folder / "episodes" / f"step-{step:06d}.jsonl"
            keep_episodes(groups[: cfg.dump_groups], renderer.readable, path)
            if step % 10 == 0:
                print0(console_text(groups[0].episodes[0], renderer.readable))
        run.log(step, measured)

        # Save.
        run.refuse_broken_end(step, measured)
        run.save(step)


def measure_run(sampler: "Sampler", policy: Policy, bundles: Sequence[Bundle], clock: Clock) -> dict[str, float]:
    """Return a step's speed, and how many rows and servers are left out. All ranks call it."""
    tokens = sum(map(len, bundles))
    measured = speed(policy.cfg, tokens, clock.seconds["train_seconds"])
    measured |= sum_over_ranks({"bad_rows": len(sampler.dataset.bad)})
    if sampler.cfg.rollout.uses_servers:
        measured["servers"] = min(gather(len(sampler.engine.servers)))  # a rank stops using a server that fails
    return measured


# ------------------------------------------------------------------------------------------------ rollouts


class Sampler:
    """Samples this rank's batches in a thread, in the order in which they are started."""

    def __init__(self, cfg: RLConfig, engine: Engine, renderer: Renderer, videos: Videos):
        self.cfg = cfg
        self.engine = engine
        self.renderer = renderer
        self.videos = videos
        self.dataset = Dataset(cfg.data, parse_task)
        self.stopped = threading.Event()
        self.thread = ThreadPoolExecutor(1, "sampler")
        self.decoding = ThreadPoolExecutor(1, "look ahead")
        self.batches: dict[int, Future] = {}  # step -> a batch that was started and not yet taken

    def start(self, step: int) -> None:
        """Start to sample the batch of a step. Steps after the last one are ignored."""
        if step < self.cfg.steps:
            self.batches[step] = self.thread.submit(self.sample, step)

    def get(self, step: int) -> tuple[list[Group], float]:
        """Wait for the batch of a step. Return this rank's groups and how many seconds sampling took."""
        return self.batches.pop(step).result()

    def wait_until_idle(self) -> None:
        """Wait until no rank samples. Then the weights may change: all tokens of a batch come from one version."""
        wait(self.batches.values())
        barrier()

    def sample(self, step: int) -> tuple[list[Group], float]:
        """Sample the batch of a step, and report rows that turn out to be unusable."""
        cfg = self.cfg
        started = time.perf_counter()
        draws, ks = self.draw(step)

        # The decoders have little to do while this batch is sampled, so they decode the next batch's overviews.
        if step + 1 < cfg.steps:
            self.decoding.submit(self.look_ahead, *self.draw(step + 1))

        context = AgentContext(self.engine, self.renderer, self.videos, cfg.rollout, stopped=self.stopped)
        tasks = [draw.item for draw in draws]
        copies = [draw.copy for draw in draws]
        groups = rollout(context, tasks, ks, cfg.grpo.group_size, cfg.seed, step, copies)

        # If a prompt cannot be rendered, its row is a bad row.
        for draw, group in zip(draws, groups):
            first = group.episodes[0]
            if first.error_kind == "RowError":
                self.dataset.reject(draw.origin, first.error_text)
        return groups, time.perf_counter() - started

    def draw(self, step: int) -> tuple[list[Draw[Task]], list[int]]:
        """Draw this rank's rows of a step, and K for each (nFrames gating)."""
        cfg = self.cfg
        draws = self.dataset.batch(step, cfg.batch_tasks, rank(), world_size())
        ks = [draw_k(draw.item.id, draw.epoch, cfg.choices_of_k, cfg.seed) for draw in draws]
        return draws, ks

    def look_ahead(self, draws: list[Draw[Task]], ks: list[int]) -> None:
        """Decode a batch's overviews into the cache of `videos`."""
        for draw, k in zip(draws, ks):
            with contextlib.suppress(VideoError):  # the request that needs it raises again
                overview(draw.item, k, self.videos, self.renderer.contract)

    def close(self) -> None:
        self.stopped.set()
        for executor in (self.thread, self.decoding):  # do not wait: a tool or a decoder may never return
            executor.shutdown(wait=False, cancel_futures=True)


def draw_k(task_id: str, epoch: int, choices: Sequence[int], seed: int = 0) -> int:
    """Draw K from a hash, so that all processes, and all episodes of the task's group, get the same K."""
    # K ~ Uniform(choices)
    digest = hashlib.sha256(f"{seed}/{epoch}/{task_id}".encode()).digest()
    return choices[int.from_bytes(digest[:8], "big") % len(choices)]


@contextlib.contextmanager
def open_sampler(cfg: RLConfig, source: Path, renderer: Renderer) -> Iterator[tuple[Sampler, WeightSync]]:
    """Open engine, video decoders and the folders of weights and frames for the length of the block."""
    image_bytes = IMAGE_BYTES if cfg.rollout.uses_servers else 0
    with snapshot_folders(cfg.run, source, image_bytes) as (snapshots, frames):
        logs = Path(cfg.run) / "logs"
        with (
            Videos(cfg.workers) as videos,
            # It closes before the decoders: requests in flight then fail, and their batch is not needed.
            contextlib.closing(open_engine(source, renderer, cfg.rollout, logs, frames)) as engine,
            contextlib.closing(Sampler(cfg, engine, renderer, videos)) as sampler,
        ):
            yield sampler, WeightSync(snapshots, engine, cfg.rollout)


# ------------------------------------------------------------------------------------------------ evaluation


def read_held_out(cfg: RLConfig) -> list[Task]:
    """Return this rank's share of the held-out tasks."""
    if not cfg.val:
        return []
    val = Dataset(cfg.val, parse_task)
    draws = val.batch(0, min(cfg.val_tasks, len(val)), rank(), world_size())
    return [draw.item for draw in draws]


def evaluate(tasks: Sequence[Task], sampler: Sampler, cfg: RLConfig, judge: Judge) -> dict[str, float]:
    """Return greedy accuracy, kappa and format on held-out tasks at each K of `val_frames`, with tools and without."""
    asked, ks = [], []
    for task in tasks:
        for k in cfg.val_frames or (cfg.visual.overview_frames,):
            asked.append(task)
            ks.append(k)
    seen: dict[str, list[float]] = defaultdict(list)
    subagents = replace(cfg.rollout.subagents, temperature=0.0)
    # Ask all tasks at each K, with tools and then without.
    for name, dispatch in (("eval", cfg.rollout.dispatch), ("eval_no_tools", "none")):
        greedy = replace(cfg.rollout, temperature=0.0, subagents=subagents, dispatch=dispatch)
        # The context has an event `stopped` of its own. A failed batch sets the sampler's, which must not end the evaluation.
        groups = rollout(AgentContext(sampler.engine, sampler.renderer, sampler.videos, greedy), asked, ks, 1)
        assign_rewards(groups, sampler.renderer, cfg.reward, judge)
        for group in groups:
            [episode] = group.episodes
            seen[f"{name}/failed_rate"].append(bool(episode.error_kind))
            if episode.error_kind:
                continue
            rewards = episode.rewards
            values = {"acc": rewards["R_acc"], "well_formed": rewards["well_formed"], "kappa": episode.n_executed}
            for part, value in values.items():
                seen[f"{name}/{part}"].append(value)
                seen[f"{name}/{part}/K={group.k}"].append(value)
    return mean_over_ranks(seen)


# ------------------------------------------------------------------------------------------------ checks of a step

GAP_LIMIT = 0.5  # largest mean |trainer's - engine's log-prob|: rounding stays far below, a wrong image is above


def refuse_empty(groups: Sequence[Group], step: int) -> None:
    """Refuse a step in which no episode ran on any rank. Otherwise the run would go on without learning, and its states would
    replace good ones."""
    errors = sum(gather([episode.error for group in groups for episode in group.episodes]), [])
    if all(errors):
        reason = errors[-1] if errors else "no row of the batch can be used"
        raise EngineError(f"step {step + 1}: none of its {len(errors)} episodes ran; the last error: {reason}")


def require_agreement(
    policy: Policy, groups: Sequence[Group], temperature: float, subagent_temperature: float = 0.0
) -> None:
    """Refuse a first batch whose log-probs the trainer does not reproduce."""
    # Check one episode: the shortest with a call, since crops differ in size from the overview; else the shortest.
    ran = [episode for group in groups for episode in group.ran]
    main, report = [], []
    if ran:
        episode = min(ran, key=lambda episode: (not episode.n_executed, episode.main.length))
        main = [episode.main]
        report = episode.subagents[:1]

    # All ranks compute both gaps, even without an episode. A greedy report's log-probs are those of temperature 1.
    main_gap = logprob_gap(policy, main, temperature)
    report_gap = logprob_gap(policy, report, subagent_temperature or 1.0)
    largest = np.max(gather([main_gap, report_gap]))  # np.max keeps a NaN, which max() can drop
    if not largest <= GAP_LIMIT:  # or NaN
        raise EngineError(
            f"trainer and engine disagree: their log-probs differ by {largest:.3f} on average; "
            "the engine's images, weights, temperature or banned tokens differ from the trainer's"
        )
    print0(f"trainer and engine agree: their log-probs differ by {largest:.4f} on average")


def logprob_gap(policy: Policy, rows: Sequence[Trajectory], temperature: float) -> float:
    """Return the mean |trainer's - engine's log-prob| of the sampled tokens; 0 if there are none. All ranks call it."""
    with torch.no_grad():
        output = policy([Bundle(row.prompt, [row]) for row in rows], temperature)
    gaps = (output.logprobs - output.behaviour_logprobs).abs()
    return gaps.sum().item() / max(1, len(gaps))


def refuse_infinite_gap(gap: float, step: int) -> None:
    """Refuse a step whose mean log-prob gap over all ranks is infinite or NaN, as it is if one token's gap is."""
    if not math.isfinite(gap):
        raise EngineError(
            f"step {step + 1}: log-probs of trainer and engine differ by {gap:.2f} on average: "
            "one of the two has broken weights; lower optim.lr"
        )


# ------------------------------------------------------------------------------------------------ before the run


def plan_rl(cfg: RLConfig, gpus: int) -> list[Plan]:
    """Plan the GPUs of a node: `gpus` that train and, if they are others, those that sample."""
    rollout = cfg.rollout
    # The longest micro-batch: a full one, or one episode that fills its context.
    longest = max(cfg.grpo.train_tokens, rollout.max_context)
    training = plan_training(cfg.policy, gpus, longest, reference=cfg.grpo.kl_coef > 0)
    if rollout.urls:
        return [training]
    if rollout.server_gpus:
        # Episodes of this node that run at once.
        nodes = max(1, world_size() // local_size())
        of_this_node = math.ceil(cfg.batch_tasks / nodes) * cfg.grpo.group_size
        episodes = min(of_this_node, rollout.at_once * gpus)
        engine = plan_servers(cfg.policy, rollout, cfg.visual, episodes, cfg.grpo.group_size, rollout.max_new_tokens)
        if not set(rollout.gpus) & set(range(gpus)):
            return [training, engine]
    else:
        engine = plan_inprocess(cfg.policy, rollout.max_batch_tokens)
    return [Plan("training and engine on one GPU", training.held | engine.held, training.used | engine.used)]


def check_row(
    row: dict, name: str, root: Path, cfg: RLConfig, renderer: Renderer, videos: Videos
) -> tuple[int, list[str]]:
    """Return the length of a row's prompt at the largest K, and no oddities."""
    context = AgentContext(Engine(), renderer, videos, cfg.rollout)
    return len(render_prompt(parse_task(row, name, root), max(cfg.choices_of_k), context).ids), []


if __name__ == "__main__":
    cfg, args = command_line(RLConfig, __doc__)
    work = partial(read_all_rows, check_row=check_row) if args.check_data else partial(main, dry=args.dry_run)
    run_script(work, cfg)
