"""jobs.py: the runs of the study on the toy, and how they are run. (study/paradox.py has the commands and the tables.)

One set of runs serves four questions:

    gate        is every cold start sound? five seeds on two numeric paths, two seeds on two more; see gate.py
    contrast    does the paradox appear, and its cure work, on each of those five seeds and two paths?
    rows        which part of the method does what? the method and its halves on five seeds, the rest on two
    faults      do the released code's faults stop the calls under the full reward? see faults.py

A seed draws everything: the clips, the initial weights, the order of the rows, the samples. All rows of a seed have the
same budget, and the same cold start unless their name says otherwise. What they are called, and which reward they have:

    grpo, paragrpo           R = R_acc: accuracy-only GRPO, and what anchoring and gating make of it
    grpo_full, ...           the paper's full reward, which pays for tags and for calls at every K

Deliberately missing: tuning. No row has settings of its own beyond what its name says.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from runtime.config import git_commit, read_tree

SEEDS, FEW = range(5), range(2)  # of the contrast, and of all else
# A CPU rounds in its own way, and small differences grow: what holds on one path may be luck. The environment of each.
PATHS = {
    "": {},  # the CPU's own
    "old": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "threads": {"OMP_NUM_THREADS": "2"},
}
CONTRAST = ("", "old")
GREEDY, SAMPLED, ALONE = (4, 8, 16, 32, 64), (4, 16, 64), (4, 64)  # K of the evaluations
LIMIT = 64  # test tasks of each


@dataclass(frozen=True)
class Variant:
    """One row of the tables: a training by RL; without a config, a cold start or the untrained model."""

    name: str
    title: str
    config: str = ""
    changes: tuple[str, ...] = ()  # of the config; of a cold start, the flags of `toy.py build`
    start: str = "sft"
    prefix: bool = True  # the think prefix, as trained
    paper: str = ""  # its row in the paper's tables
    faults: str = ""  # of the released code, see faults.py
    arm: str = "parallel"  # how its calls are dispatched, see eval.py


UNTRAINED = Variant("base", "untrained", prefix=False, paper="Qwen3-VL-8B")
STARTS = (
    Variant("sft", "cold start", prefix=False, paper="+SFT"),
    Variant("sft_sequential", "cold start, one call per turn", changes=("--one-by-one",), prefix=False, arm="sequential"),
    Variant("sft_tidy", "cold start without loose formats", changes=("--p-loose", "0"), prefix=False),
    Variant("sft_no_tools", "cold start without tools, either", changes=("--p-loose", "0", "--p-tool", "0"), prefix=False),
)  # fmt: skip
MAIN = (
    Variant("grpo", "GRPO, accuracy only", "toy_grpo", prefix=False, paper="SFT+GRPO"),
    Variant("paragrpo", "PARA-GRPO", "toy_paragrpo", paper="Full PARA-GRPO"),
)
HALVES = (
    Variant("anchoring", "+ Exploration Anchoring", "toy_anchoring", paper="+Exploration Anchoring"),
    Variant("gating", "+ nFrames Gating", "toy_gating", prefix=False, paper="+nFrames Gating"),
)
OTHERS = (
    Variant("grpo_full", "GRPO, full reward", "toy_grpo_full", prefix=False, paper="SFT+GRPO"),
    Variant("paragrpo_full", "PARA-GRPO, full reward", "toy_paragrpo_full", paper="Full PARA-GRPO"),
    Variant("no_tool_reward", "PARA-GRPO, full reward, - R_tool", "toy_no_tool_reward", paper="-R_tool"),
    Variant("no_gamma", "PARA-GRPO, - gamma", "toy_no_gamma", paper="-gamma penalty"),
    # It cannot start where the others do: their cold start never saw one call after another.
    Variant("sequential", "PARA-GRPO, one call per turn", "toy_paragrpo", ("rollout.dispatch=sequential",), "sft_sequential", arm="sequential"),
    Variant("prefix_only", "prefix and gating, no anchor", "toy_paragrpo", ("reward.anchor.credit=off",)),
    Variant("anchor_only", "anchor and gating, no prefix", "toy_paragrpo", ("rollout.think_prefix=false",), prefix=False),
    Variant("credit_sequence", "full reward, credit: sequence", "toy_paragrpo_full", ("reward.anchor.credit=sequence",)),
    Variant("grpo_tidy_start", "GRPO, from the tidy start", "toy_grpo", start="sft_tidy", prefix=False),
    Variant("paragrpo_tidy_start", "PARA-GRPO, from there", "toy_paragrpo", start="sft_tidy"),
    Variant("grpo_no_tool_start", "GRPO, full reward, without tools before", "toy_grpo_full", start="sft_no_tools", prefix=False),
    Variant("paragrpo_no_tool_start", "PARA-GRPO, full reward, from there", "toy_paragrpo_full", start="sft_no_tools"),
)  # fmt: skip
PREFIXED = ("rollout.think_prefix=true",)
FAULTY = (
    Variant("fault_splice", "+ responses spliced by length", "toy_grpo_full", prefix=False, faults="splice"),
    Variant("fault_siblings", "+ a bad call discards its siblings", "toy_grpo_full", prefix=False, faults="siblings"),
    Variant("fault_unanswered", "+ the last calls are not answered", "toy_grpo_full", prefix=False, faults="unanswered"),
    Variant("no_faults_prefix", "with the think prefix", "toy_grpo_full", PREFIXED),
    Variant("fault_unseen", "with it, + rewards do not see it", "toy_grpo_full", PREFIXED, faults="unseen"),
    Variant("faults_all", "all four, without the prefix", "toy_grpo_full", prefix=False, faults="splice,unseen,siblings,unanswered"),
    Variant("faults_all_prefix", "all four, with it", "toy_grpo_full", PREFIXED, faults="splice,unseen,siblings,unanswered"),
)  # fmt: skip
ROWS = {row.name: row for row in (UNTRAINED, *STARTS, *MAIN, *HALVES, *OTHERS, *FAULTY)}
# How calls are dispatched in table C: (row, arm). The two cold starts teach the same calls, so their budgets are equal; RL
# moves them apart.
DISPATCH = (
    ("sft", "parallel"),
    ("sft_sequential", "sequential"),
    ("paragrpo", "parallel"),
    ("sequential", "sequential"),
    ("paragrpo", "sequential"),
)
# Whose samples are asked for what a call is worth, and both with the think prefix and without.
NECESSITY, PREFIX = ("sft", "paragrpo"), ("sft", "grpo", "paragrpo", "prefix_only", "anchor_only")


# ------------------------------------------------------------------------------------------------ the jobs


@dataclass(frozen=True)
class Job:
    """One process of the study."""

    name: str
    command: tuple[str, ...]
    needs: str = ""  # the job that must have ended well before
    path: str = ""  # of PATHS
    seconds: int = 30  # that it takes, about: for the progress
    run: Path | None = None  # of a training, whose metrics say how far it is
    steps: int = 0


@dataclass(frozen=True)
class Place:
    """One seed on one numeric path: where its runs lie, and the jobs that make them."""

    root: Path
    seed: int
    path: str = ""

    @property
    def name(self) -> str:
        return f"seed{self.seed}-{self.path}" if self.path else f"seed{self.seed}"

    @property
    def folder(self) -> Path:
        return self.root / self.name

    def data(self, start: str = "sft") -> Path:
        return self.root / "data" / f"seed{self.seed}-{start}"

    def cold_start(self, start: str) -> list[Job]:
        """Build the toy that the start learns from, which all paths share, and train on it."""
        toy, run = self.data(start), self.folder / start
        flags = ("--seed", str(self.seed), *ROWS[start].changes)
        build = Job(f"data-{toy.name}", ("-m", "study.toy", "build", str(toy), *flags))
        cfg = read_tree(Path("configs/toy_sft.yaml"))
        sources = [source | {"path": str(toy / Path(source["path"]).name)} for source in cfg["data"]["sources"]]
        changes = [f"run={run}", f"policy.checkpoint={toy}/model", f"data.sources={json.dumps(sources)}"]
        changes += [f"data.seed={self.seed}", f"val.sources=[{{path: {toy}/sft_val.parquet}}]"]
        command = ("sft.py", "configs/toy_sft.yaml", *changes)
        return [build, Job(f"{self.name}-{start}", command, build.name, self.path, 300, run, cfg["steps"])]

    def gate(self) -> Job:
        command = ("-m", "study.gate", f"{self.folder}/sft/model", str(self.data()), "--seed", str(self.seed))
        command += ("--output", f"{self.folder}/gate.json")
        return Job(f"{self.name}-gate", command, f"{self.name}-sft", self.path, 60)

    def rl(self, row: Variant) -> Job:
        run = self.folder / row.name
        changes = [f"run={run}", f"policy.checkpoint={self.folder / row.start / 'model'}", f"seed={self.seed}"]
        changes += ["val=null", *row.changes, f"data.sources=[{{path: {self.data()}/rl.parquet}}]"]
        changes += [f"data.seed={self.seed}"]
        script = ("-m", "study.faults", row.faults) if row.faults else ("rl.py",)
        config = f"configs/{row.config}.yaml"
        command, steps = (*script, config, *changes), read_tree(Path(config))["steps"]
        return Job(f"{self.name}-{row.name}", command, f"{self.name}-{row.start}", self.path, 150, run, steps)

    def evals(self, row: Variant, sampled_only: bool = False) -> list[Job]:
        """Sample, as in training; decode greedily at every K; for table C, one episode at a time, so that its seconds are
        its own."""
        asked = [("sampled", SAMPLED, (row.arm,), row.prefix)]
        if not sampled_only:
            asked.append(("greedy", GREEDY, (row.arm, "none") if row.name in NECESSITY else (row.arm,), row.prefix))
            if row.name in PREFIX:
                asked.append(("sampled", SAMPLED, (row.arm,), not row.prefix))
            alone = tuple(arm for name, arm in DISPATCH if name == row.name)
            if alone:
                asked.append(("alone", ALONE, alone, row.prefix))

        jobs = []
        made_by, model = f"{self.name}-{row.name}", self.folder / row.name / "model"
        if row is UNTRAINED:
            made_by, model = f"data-{self.data().name}", self.data() / "model"
        for kind, ks, arms, prefix in asked:
            run = self.folder / "eval" / evaluation(row.name, kind, prefix)
            changes = [f"run={run}", f"name={row.name}", f"checkpoint={model}", f"frames={list(ks)}"]
            changes += [f"arms=[{', '.join(arms)}]", f"rollout.think_prefix={str(prefix).lower()}"]
            # The same reading of answers for every row: that of the accuracy-only reward.
            changes += [f"rollout.temperature={int(kind == 'sampled')}", "grading.untagged_answer=true"]
            changes += [f"splits.toy={self.data()}", f"limit={LIMIT}"]
            if kind == "alone":
                changes.append("rollout.concurrency=1")
            command = ("eval.py", "configs/eval/toy.yaml", *changes)
            jobs.append(Job(f"{self.name}-eval-{run.name}", command, made_by, self.path))
        return jobs


def evaluation(name: str, kind: str, prefix: bool) -> str:
    return f"{name}-{kind}" if prefix else f"{name}-{kind}-bare"


def demo_jobs(root: Path) -> list[Job]:
    at = Place(root, 0)
    jobs = at.cold_start("sft") + [at.rl(row) for row in MAIN]
    for row in (ROWS["sft"], *MAIN):
        jobs += at.evals(row, sampled_only=True)
    return jobs


def study_jobs(root: Path) -> list[Job]:
    """List all jobs in the order of their importance."""
    jobs = []
    # Gate and contrast.
    for path in CONTRAST:
        for seed in SEEDS:
            at = Place(root, seed, path)
            jobs += [*at.cold_start("sft"), at.gate(), *(at.rl(row) for row in MAIN)]
            for row in (ROWS["sft"], *MAIN):
                jobs += at.evals(row, sampled_only=True)
    for path in [path for path in PATHS if path not in CONTRAST]:
        for seed in FEW:
            at = Place(root, seed, path)
            jobs += [*at.cold_start("sft"), at.gate()]
    # The rows, and the faults.
    for seed in SEEDS:
        at = Place(root, seed)
        jobs += [at.rl(row) for row in HALVES]
        for row in (ROWS["sft"], *MAIN, *HALVES):
            jobs += at.evals(row)
    for row in (*FAULTY, *OTHERS):
        for seed in FEW:
            at = Place(root, seed)
            if row.start != "sft":
                jobs += [*at.cold_start(row.start), *at.evals(ROWS[row.start])]
            jobs.append(at.rl(row))
            if row not in FAULTY:
                jobs += at.evals(row)
    jobs += Place(root, 0).evals(UNTRAINED)
    return list(dict.fromkeys(jobs))  # rows share their cold starts


def select(jobs: Sequence[Job], part: str) -> list[Job]:
    """Keep the jobs whose name contains `part`, and those that they need."""
    wanted = set()
    for job in reversed(jobs):
        if part in job.name or job.name in wanted:
            wanted |= {job.name, job.needs}
    return [job for job in jobs if job.name in wanted]


# ------------------------------------------------------------------------------------------------ running them


def run_jobs(jobs: Sequence[Job], root: Path) -> bool:
    """Run what is not done, one process per core. False if something failed; its log says why."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the jobs end with us, as after Ctrl-C
    done, logs = root / "done", root / "logs"
    done.mkdir(parents=True, exist_ok=True)
    logs.mkdir(parents=True, exist_ok=True)
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    waiting = [job for job in jobs if not (done / job.name).exists()]
    running: dict[Job, subprocess.Popen] = {}
    good = True
    ended = sum(job.seconds for job in jobs) - sum(job.seconds for job in waiting)
    look = "{percentage:3.0f}% |{bar:20}| {elapsed}, {remaining} to go: {desc}"
    bar = tqdm(total=sum(job.seconds for job in jobs), initial=ended, bar_format=look, disable=None)  # none in a pipe
    try:
        while True:
            # Start what is ready.
            ready = [job for job in waiting if not job.needs or (done / job.needs).exists()]
            for job in ready[: len(os.sched_getaffinity(0)) - len(running)]:
                waiting.remove(job)
                with (logs / f"{job.name}.log").open("ab") as log:
                    running[job] = subprocess.Popen(
                        [sys.executable, *job.command], stdout=log, stderr=log, env=one_thread | PATHS[job.path]
                    )
            if not running:  # what still waits needs a job that failed
                return good
            # Show how far they are.
            bar.n = ended + sum(job.seconds * part_done(job) for job in running)
            bar.set_description_str(", ".join(progress_of(job) for job in running))
            time.sleep(0.5)
            # Collect what has ended.
            for job, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[job]
                ended += job.seconds
                if process.returncode == 0:
                    (done / job.name).write_text(git_commit())
                    tqdm.write(f"done: {job.name}")
                else:
                    good = False
                    tqdm.write(f"failed: {job.name}, see {logs / job.name}.log")
    finally:
        bar.close()
        for process in running.values():
            process.kill()


def steps_done(job: Job) -> int:
    if job.run is None or not (job.run / "metrics.jsonl").exists():
        return 0
    return (job.run / "metrics.jsonl").read_bytes().count(b"\n")


def part_done(job: Job) -> float:
    return steps_done(job) / job.steps if job.steps else 0.0


def progress_of(job: Job) -> str:
    return f"{job.name}, step {steps_done(job)} of {job.steps}" if job.steps else job.name
