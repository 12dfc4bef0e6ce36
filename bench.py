"""bench.py: every claim of speed as the ratio of two sides that do the same work, measured in one run.

    python bench.py                            # everything; on a GPU where there is one, else on the CPU
    python bench.py update decode --write      # some of it, into results/bench.md
    python bench.py plan configs/paragrpo_8b.yaml --mfu 0.25       # computed: seconds per step by split of 8 GPUs

The sides take turns (A B A B ...). A gain is the median over pairs of neighbours, with the least and the greatest: how
many times the left side's seconds (or bytes) are the right one's. Before the clock runs, both sides have run once and
their results were compared: gradient for gradient, token for token, frame for frame. A difference ends the program.

    bench_training.py    update, update_8b, sft, engine, sync
    bench_agents.py      dispatch, overhead, decode
    here                 startup (--help and --dry-run of every script), plan

Deliberately missing: other frameworks (each needs an environment of its own), the speed of SGLang itself.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import config
from compare import put_between_marks
from measure import REPO, Section, gpu, take_turns, toy_folder

RESULTS = REPO / "results" / "bench.md"


def benches() -> dict[str, Callable[[bool], Section]]:
    """By name, in the order of a run. Imported here: torch takes seconds, and `--help` has none to spend."""
    import transformers

    from bench_agents import decode, dispatch, overhead
    from bench_training import engine, sft, sync, update, update_8b

    transformers.utils.logging.disable_progress_bar()  # of weights that are read in no time
    run = (update, update_8b, sft, dispatch, overhead, decode, engine, sync, startup)
    return {bench.__name__: bench for bench in run}


def startup(quick: bool) -> Section:
    folder, rows = toy_folder(), []
    eight = ("policy.checkpoint=Qwen/Qwen3-VL-8B-Instruct", "policy.family=''")
    dry = {
        "sft.py": ("configs/sft_8b.yaml", f"data.sources=[{{path: {folder}/sft.parquet}}]"),
        "rl.py": ("configs/paragrpo_8b.yaml", f"data.sources=[{{path: {folder}/rl.parquet}}]", *eight),
        "eval.py": ("configs/eval/toy.yaml", f"checkpoint={folder}/model", f"splits.toy={folder}"),
    }
    scripts = sorted(path.name for path in REPO.glob("*.py") if '__name__ == "__main__"' in path.read_text())

    def start(*command: str) -> float:
        run = functools.partial(subprocess.run, [sys.executable, *command], cwd=REPO, check=True, capture_output=True)
        return median(take_turns(1 if quick else 3, run)[0])

    for script in ("video.py", "eval.py") if quick else scripts:
        seconds = start(script, "--help")
        row = {"script": script, "--help, s": seconds, "< 1 s": "yes" if seconds < 1 else "no"}
        if script in dry:
            seconds = start(script, *dry[script], "--dry-run")
            row |= {"--dry-run, s": seconds, "< 10 s": "yes" if seconds < 10 else "no"}
        rows.append(row)
    return Section("Whole processes, files in the page cache; promised: 1 s and 10 s", rows)


def plan(cfg, gpus: int, pace) -> Section:
    """Computed, not measured: the splits of an RLConfig's node at a plan.Pace."""
    from plan import AIM, RELEASED, UNCOUNTED, best_split, plan_splits

    splits, rows = plan_splits(cfg, gpus, pace), []
    for s in splits:
        row = {"train + rollout": f"{s.trainers} + {s.engines}", **dataclasses.asdict(s.step)}
        row |= {f"staleness {n}, s": s.step.seconds(n) for n in (0, 1)}
        row |= {"trainer, GiB": s.training_gib, "engine, GiB": s.engine_gib}
        rows.append(row | {"fits": "yes" if s.fits(cfg.gpu_gib) else "no"})
    said = (
        f"{cfg.batch_tasks} tasks x {cfg.group_size} episodes a step, {gpus} GPUs of {cfg.gpu_gib:g} GiB; seconds per "
        "phase and per step"
    )
    share = cfg.batch_tasks * cfg.group_size / 56
    for staleness in (0, 1):
        best = best_split(splits, staleness, cfg.gpu_gib)
        seconds = best.step.seconds(staleness)
        said += (
            f". Best at staleness {staleness}: {best.trainers} + {best.engines}, {seconds:.0f} s, "
            f"{RELEASED * share / seconds:.1f}x as fast as the release ({RELEASED:.0f} s for 56 episodes on 7 + 1); "
            f"the aim of {AIM * share:.0f} s is {'met' if seconds <= AIM * share else 'missed'}"
        )
    assumed = ", ".join(f"{name} = {value:g}" for name, value in dataclasses.asdict(pace).items())
    return Section(f"{said}. Assumed: {assumed}. Not counted: {UNCOUNTED}", rows)


# ------------------------------------------------------------------------------------------------ the command


def write(path: Path, title: str, text: str) -> None:
    """Put the section between its marks, or at the end; what people wrote around them stays."""
    put_between_marks(path, title, "bench.py", text, "Measurements")


def made() -> str:
    """The command, the commit, the machine and the versions."""
    import torch

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = info.partition("model name")[2].partition("\n")[0].strip("\t :") or platform.machine()
    load = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "av"))
    machine = ", ".join(filter(None, (gpu(), cpu, load)))
    return f"`{shlex.join(['python', *sys.argv])}` at commit {config.git_commit()}; {machine}; {versions}."


def asked_plan(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, dict[str, Callable[[], Section]]]:
    from plan import Pace, PlanError
    from rl import RLConfig

    parser.add_argument("plan", help="what a step costs, computed")
    parser.add_argument("config", help="a YAML file of rl.py")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override a value of the file")
    parser.add_argument("--gpus", type=int, default=8)
    fields = dataclasses.fields(Pace)
    for field in fields:
        parser.add_argument("--" + field.name.replace("_", "-"), type=float, default=field.default)
    args = parser.parse_intermixed_args()
    try:
        pace = Pace(**{field.name: getattr(args, field.name) for field in fields})
        section = plan(config.load(RLConfig, args.config, args.overrides), args.gpus, pace)
    except (config.ConfigError, PlanError) as error:
        sys.exit(f"error: {error}")
    return args, {f"plan of {args.config}": lambda: section}


def asked_benches(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, dict[str, Callable[[], Section]]]:
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the benches above; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does it run? The numbers mean nothing")
    args = parser.parse_intermixed_args()
    if args.quick and args.write:
        parser.error("--quick measures nothing worth keeping: leave out --write")
    known = benches()
    if unknown := set(args.names) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: there is only {', '.join(known)}, and `plan CONFIG`")
    where = (gpu() or "CPU") + ", quick: tiny shapes" * args.quick
    return args, {f"{name}, {where}": functools.partial(known[name], args.quick) for name in args.names or known}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="also into results/bench.md")
    args, jobs = (asked_plan if sys.argv[1:2] == ["plan"] else asked_benches)(parser)
    for title, job in jobs.items():
        text = job().text(title)
        print(f"{text}\n", flush=True)
        if args.write:
            write(RESULTS, title, f"{text}\n\n{made()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
