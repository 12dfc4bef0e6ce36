"""soak.py: 1,000 episodes against two SGLang servers, one of which is killed again and again.

    make soak                        # real servers, then stand-ins (fake_sglang.py), which die more often -> results/soak.md
    PYTHONPATH=. python tests/soak.py --stand-ins --episodes 100                                          # a short look

Every episode has to be answered or counted as failed, and nothing of ours may grow from step to step: memory, threads,
sockets, open files, frames in /dev/shm. At the end no server and no socket is left. In turns, one server is killed with all
its children whenever both have served for 30 seconds (stand-ins: 2); what a restart takes on the machine comes on top.

The model is untrained and would call no tool: the first turn of a main agent is sampled, but other words are put in.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from conftest import SMALL
from scripts import fake_server
from test_sglang import serve

from data import parse_task
from evals.tables import markdown, put_between_marks
from rollout import RolloutConfig, SubagentConfig, rollout
from runtime import config
from runtime.cleanup import memory_folder
from runtime.dataset import DataConfig, Dataset, Source
from runtime.render import THINK_PREFIX, Renderer, load_tokenizer
from runtime.servers import SGLang
from runtime.video import Videos
from study import toy

RESULT = Path(__file__).resolve().parent.parent / "results" / "soak.md"
GROUP, STEP = 4, 40  # episodes of a task and of a step
CACHE = 1 << 19  # bytes of frames that stay decoded, fewer than the tasks show: some clips are dropped all the time


def stand_ins(folder: Path, renderer: Renderer) -> SGLang:
    """Start servers that draw random tokens. They start at once, so they can be killed often."""
    return Calling(folder, renderer, gpus=(0, 1), launch=lambda port: fake_server(renderer, port))


class Calling(SGLang):
    """Servers of agents that make two calls in their first turn."""

    def generate(self, ids, frames, *, seed, shared_prefix=0, **rest):
        sample = super().generate(ids, frames, seed=seed, shared_prefix=shared_prefix, **rest)
        if ids[shared_prefix:] != self.renderer.encode(THINK_PREFIX):  # a sub-agent, or the turn that answers
            return sample
        starts = random.Random(seed).sample(range(0, 16, 4), 2)
        said = self.renderer.encode("</think>" + "".join(toy.call(start, start + 6) for start in starts) + "<|im_end|>")
        return replace(sample, ids=said, logprobs=[-1.0] * len(said), finish="stop")


def look() -> dict[str, float]:
    """Count what this process holds."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder is closed again
            files.append(os.readlink(f"/proc/self/fd/{name}").partition(":")[0])
    status = Path("/proc/self/status").read_text()
    return {
        "memory, MiB": int(status.partition("VmRSS:")[2].split()[0]) / 2**10,
        "threads": int(status.partition("Threads:")[2].split()[0]),
        "sockets": files.count("socket"),
        "other open files": len(files) - files.count("socket"),
        "frames in /dev/shm": len(list(memory_folder().glob("frames-*/*"))),
    }


def disturb(client: SGLang, every: float, ended: threading.Event, busy: list[dict], killed: list[int]) -> None:
    """Look every second, and kill one server after the other, each time both have served for `every` seconds."""
    served = 0
    while not ended.wait(1.0):
        busy.append(look())
        served += all(server.healthy for server in client._servers)
        if served >= every:
            killed.append(client._servers[len(killed) % 2].process.pid)
            os.killpg(killed[-1], signal.SIGKILL)
            served = 0


def play(folder: Path, real: bool, episodes: int, every: float) -> tuple[dict, dict[str, list]]:
    """Play all episodes. Return what came of them, and what this process held: before, at most at work, after the steps of
    the first and of the last third (means), and at the end."""
    renderer = Renderer(load_tokenizer(folder / "model"), toy.CONTRACT)
    rows = Dataset(DataConfig((Source(f"{folder}/rl.parquet"),)), parse_task)
    cfg = RolloutConfig(max_turns=1, max_new_tokens=12, concurrency=32, subagents=SubagentConfig(max_new_tokens=8))
    answered, failed, calls = 0, Counter(), Counter()
    before, busy, rest, killed, ended = look(), [], [], [], threading.Event()
    client = serve(folder / "model", renderer, (0, 1), Calling) if real else stand_ins(folder / "model", renderer)
    with contextlib.closing(client), Videos(workers=1, cache_bytes=CACHE) as videos:
        context = {"engine": client, "renderer": renderer, "videos": videos, "cfg": cfg, "progress": False}
        disturber = threading.Thread(target=disturb, args=(client, every, ended, busy, killed), daemon=True)
        disturber.start()
        began = time.monotonic()
        for step in range(math.ceil(episodes / STEP)):
            tasks = [task for task, *_ in rows.batch(step, min(STEP, episodes - step * STEP) // GROUP)]
            for group in rollout(tasks, [4] * len(tasks), GROUP, **context, step=step):
                for episode in group.episodes:
                    if episode.error:
                        failed[episode.error] += 1
                    elif episode.main.finish in ("stop", "length"):
                        answered += 1
                    calls.update(call.error or "reported" for call in episode.calls)
            seconds = time.monotonic() - began
            print(f"{answered} answered, {failed.total()} failed, {len(killed)} kills, {seconds:.0f} s", flush=True)
            del group, episode  # and what they show
            time.sleep(1)  # threads end
            rest.append(look())
        ended.set()
        disturber.join()
        groups = [*killed, *(server.process.pid for server in client._servers if server.process)]
    left = [group for group in groups if Path("/proc", str(group)).exists()]
    facts = {"episodes": episodes, "answered": answered, "failed": dict(failed), "calls": dict(calls)}
    facts |= {"kills": len(killed), "restarts": client.restarts, "servers left": len(left)}
    facts["minutes"] = round(seconds / 60, 1)
    held, after = {}, look()
    third = math.ceil(len(rest) / 3)
    for name in before:
        first, last = (fmean(sample[name] for sample in part) for part in (rest[:third], rest[-third:]))
        held[name] = [round(x) for x in (before[name], max(sample[name] for sample in busy), first, last, after[name])]
    return facts, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--stand-ins", action="store_true", help="instead of real servers")
    parser.add_argument("--write", action="store_true", help="into results/soak.md")
    args = parser.parse_args()
    commit = config.git_commit()
    with tempfile.TemporaryDirectory() as folder:
        toy.build_toy(Path(folder), sizes=SMALL)
        facts, held = play(Path(folder), not args.stand_ins, args.episodes, every=2 if args.stand_ins else 30)
    print(json.dumps([facts, held]))
    if args.write:
        name = "Stand-ins" if args.stand_ins else "Real servers"
        lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
        rows = [[name, *values] for name, values in held.items()]
        header = ["held", "before", "at most", "first third", "last third", "after"]
        table = markdown(f"#### {name}\n\n{lines}", header, rows)
        made = f"`make soak` at commit {commit}; {os.cpu_count()} cores, load {os.getloadavg()[2]:.1f}."
        put_between_marks(RESULT, name, "soak.py", f"{table}\n\n{made}", "The soak")

    assert facts["answered"] + sum(facts["failed"].values()) == facts["episodes"], "an episode is missing"
    assert not facts["servers left"], "a server outlived its client"
    for name, (before, _, first, last, after) in held.items():
        assert last <= 1.1 * first + 2, f"{name} grew from {first} to {last}"
        assert after <= before + 2 or name in ("memory, MiB", "threads"), f"{name}: {before} before, {after} after"


if __name__ == "__main__":
    main()
