"""Whole runs, and what faults do to them: a script, a moment and a disturbance -> the exit status, the last line, and what is left.
The same command then ends with the bits of the undisturbed run.

    python -m pytest tests/test_faults.py -m "slow or not slow"        # about four minutes of two cores
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from scripts import REPO, Forked, alive, children, figures, finish, metrics, rl_config, sft_config, start, wait_for
from short_runs import train_by_chance, train_scripted, use_stand_ins

import eval as evaluation
import rl
import rollout
from episode import Call
from runtime import config
from runtime.checkpoints import saved_step
from runtime.lines import read_lines
from runtime.script import run_script
from runtime.servers import SGLang
from runtime.weights import run_memory

# ------------------------------------------------------------------------------------------------ the commands

RL = {"steps": 3, "save_every": 1, "export_every": 1, "grpo": {"kl_coef": 0.1}}
RL["rollout"] = {"max_rounds": 1, "max_new_tokens": 24, "temperature": 1.0, "subagents": {"max_new_tokens": 8}}


def beside(servers: int) -> dict:
    return RL | {"rollout": RL["rollout"] | {"server_gpus": list(range(servers))}}


def eval_config(path: Path, toy_dir: Path, servers: int = 0) -> Path:
    """Write the config of an evaluation of 8 items, one at a time. Its replies are random, so that records differ."""
    rollout = {"temperature": 1.0, "max_new_tokens": 120, "concurrency": 1, "server_gpus": list(range(servers))}
    tree = {"run": str(path.with_suffix("")), "name": "toy", "checkpoint": str(toy_dir / "model"), "frames": [4]}
    tree |= {"splits": {"toy": str(toy_dir)}, "prompting": {"protocol": "direct"}, "rollout": rollout, "decoders": 1}
    path.write_text(yaml.safe_dump(tree))
    return path


@dataclass
class Job:
    """A command: how its config is written, and how it starts."""

    write: Callable[[Path, Path], Path]
    start: Callable[[Path], Forked]


def train_with_short_time_outs(cfg: Path) -> None:
    SGLang.request_timeout = 2.0
    train_by_chance(cfg)


def evaluate_beside_a_server(cfg: Path) -> None:
    use_stand_ins()
    evaluation.require_servers = lambda *_: None
    run_script(evaluation.main, config.load(evaluation.EvalConfig, cfg))


def fork(work: Callable[[Path], None], ranks: int = 1) -> Callable[[Path], Forked]:
    return lambda cfg: Forked(partial(work, cfg), ranks=ranks)


def torchrun(cfg: Path) -> subprocess.Popen:
    """Start a real torchrun, which restarts its ranks once."""
    os.environ["PYTHONPATH"] = f"{REPO}:{REPO}/tests"
    return start(str(REPO / "tests" / "short_runs.py"), cfg, ranks=2, anew=True, restarts=1)


RL_ALONE = Job(partial(rl_config, **RL), fork(train_by_chance))
RL_RANKS = Job(partial(rl_config, **RL), fork(train_by_chance, ranks=2))
RL_SERVER = Job(partial(rl_config, **beside(1)), fork(train_by_chance))
RL_SERVERS = Job(partial(rl_config, **beside(2)), fork(train_by_chance))
RL_SERVERS_RANKS = Job(partial(rl_config, **beside(2)), fork(train_with_short_time_outs, ranks=2))
SFT = Job(partial(sft_config, steps=6, save_every=1), partial(start, "sft.py"))
SFT_RANKS = Job(partial(sft_config, steps=6, save_every=1), partial(start, "sft.py", ranks=2))
EVAL = Job(eval_config, partial(start, "eval.py"))
EVAL_SERVER = Job(partial(eval_config, servers=1), fork(evaluate_beside_a_server))


def results(run: Path) -> dict:
    """Return what a run computed, without times."""
    found = {str(file.relative_to(run)): file.read_bytes() for file in run.glob("model*/**/*.safetensors")}
    for file in run.glob("*-K*.jsonl"):
        for record in read_lines(file):
            assert record["id"] not in found, "an item was asked twice"
            found[record["id"]] = record | {"seconds": 0}
    if (run / "metrics.jsonl").exists():
        found["metrics"] = figures(metrics(run))
    return found


@pytest.fixture(scope="module")
def undisturbed(toy_dir, tmp_path_factory) -> Callable[[Job], Path]:
    """undisturbed(job) -> the folder of its run, which is made once."""
    runs = {}

    def run(job: Job) -> Path:
        if id(job) not in runs:
            runs[id(job)] = tmp_path_factory.mktemp("undisturbed") / "run"
            finish(job.start(job.write(runs[id(job)].with_suffix(".yaml"), toy_dir)))
        return runs[id(job)]

    return run


# ------------------------------------------------------------------------------------------------ undisturbed


def test_a_run_writes_its_metrics_and_episodes_and_moves_the_weights_that_are_not_frozen(undisturbed, toy_dir):
    run = undisturbed(RL_ALONE)
    lines = metrics(run)
    assert [(line["step"], line["staleness"]) for line in lines] == [(0, 0), (1, 0), (2, 0)]
    assert all(line["grad_norm"] > 0 for line in lines)
    assert abs(lines[0]["kl"]) < 1e-6 < lines[2]["kl"]
    assert all(line["logprob_gap"] < 1e-4 for line in lines)
    assert all(line["share/K=4"] + line["share/K=8"] == 1 for line in lines)
    kept = (run / "episodes" / "step-000002.jsonl").read_text().splitlines()
    assert len(kept) == 4 and json.loads(kept[0])["rewards"]
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (toy_dir, run))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any(".visual." in name for name in moved)


def test_a_model_of_every_so_many_steps_is_what_a_run_of_these_steps_leaves(undisturbed):
    """A model is written before the state of its step: after a kill between the two, the resumed run writes it again."""
    run = undisturbed(RL_ALONE)
    first, second, last = sorted((run / "models").iterdir())
    assert [first.name, second.name, last.name] == ["step-000001", "step-000002", "step-000003"]
    written = {path.name: path.read_bytes() for path in last.iterdir()}
    assert written == {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    assert written["model.safetensors"] != (second / "model.safetensors").read_bytes()
    assert json.loads(written["rollout.json"]) == {"think_prefix": True}  # as it was trained
    assert last.stat().st_mtime < (run / "state" / "step-00000003").stat().st_mtime


@pytest.mark.slow
def test_two_processes_have_the_metrics_of_one(toy_dir, tmp_path):
    """The episodes are the same, because an engine's script says them."""
    told = []
    for ranks in (1, 2):
        cfg = rl_config(tmp_path / f"{ranks}.yaml", toy_dir, steps=3, grpo={"kl_coef": 0.1})
        finish(Forked(partial(train_scripted, cfg), ranks=ranks))
        told.append(metrics(cfg.with_suffix("")))
    assert all(line["kappa"] for line in told[0]) and any(line["R_acc"] for line in told[0])
    for one, two in zip(*told, strict=True):
        for name in ("R", "R_acc", "f", "kappa", "R_anchor", "loss", "kl", "entropy", "grad_norm", "learned_tokens"):
            assert two[name] == pytest.approx(one[name], abs=1e-4, rel=1e-4), name


# ------------------------------------------------------------------------------------------------ moments


def steps_done(run: Path) -> int:
    """Return how many steps or items a run has finished."""
    files = [*run.glob("metrics.jsonl"), *run.glob("*-K*.jsonl")]
    return sum(file.read_bytes().count(b"\n") for file in files)


def at_once(run: Path) -> bool:
    return True


def after_a_step(run: Path) -> bool:
    return steps_done(run) >= 1


def amid_a_save(run: Path) -> bool:
    return any((run / "state").glob("step-*.tmp")) and any((run / "state").glob("step-????????"))


def amid_the_export(run: Path) -> bool:
    return (run / "model.tmp").exists()


def before_a_push(run: Path) -> bool:
    """The weights are being written that the servers will load."""
    return run.exists() and run_memory(run).exists() and (run_memory(run) / "weights-2").exists()


def as_it_samples(run: Path) -> bool:
    return run.exists() and run_memory(run).exists()


# ------------------------------------------------------------------------------------------------ disturbances
# disturb(process, run) -> a function that repairs the damage before the same command is run again, or None


def send(number: int) -> Callable:
    return lambda process, run: os.kill(process.pid, number)


def kill_rank(number: int) -> Callable:
    def disturb(process, run: Path) -> None:
        first = int((run / ".lock").read_text().split()[1])
        [other] = set(children(process.pid)) - {first}
        os.kill([first, other][number], signal.SIGKILL)

    return disturb


def servers_of(process) -> list[int]:
    """Return a run's servers, in the order of their GPUs."""
    helpers = [child for pid in (process.pid, *children(process.pid)) for child in children(pid)]
    return sorted(pid for pid in {*helpers} if "fake_sglang" in Path(f"/proc/{pid}/cmdline").read_text())


def to_server(number: int, *which: int) -> Callable:
    def disturb(process, run: Path) -> None:
        servers = servers_of(process)
        for i in which:
            os.kill(servers[i], number)

    return disturb


def press_ctrl_c(process, run: Path) -> None:
    """One Ctrl-C in a hundred gets lost, because Python drops exceptions in destructors: then press it again."""
    for _ in range(2):
        if process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
            process.join(10)


def hang_and_press_ctrl_c(helpers: Callable) -> Callable:
    """Stop processes, and press Ctrl-C when the run waits for them."""

    def disturb(process, run: Path) -> None:
        for pid in helpers(process):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1)
        press_ctrl_c(process, run)

    return disturb


def decoders_of(process) -> list[int]:
    return children(process.pid)


def nothing(process, run: Path) -> None:
    pass


def fill_disk(process, run: Path) -> Callable:
    film = run.parent / "film.mkv"
    with open(film, "wb") as file, pytest.raises(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    return film.unlink


def close_folder(process, run: Path) -> Callable:
    """Put a file in place of RUN/episodes, where no episode can be written."""
    episodes, away = run / "episodes", run / "away"
    episodes.rename(away)
    episodes.touch()

    def repair() -> None:
        episodes.unlink()
        away.rename(episodes)

    return repair


def delete_newest_state(process, run: Path) -> Callable:
    return lambda: shutil.rmtree(max((run / "state").glob("step-????????")))


# Runs that need no disturbance from outside.


def train_with_a_bug(cfg: Path) -> None:
    rl.keep_episodes = lambda *_: 1 / 0
    train_by_chance(cfg)


def train_with_a_tool_that_hangs(cfg: Path) -> None:
    """Run rl.py with a model that calls a tool in every turn. The tool never returns."""
    rollout.parse_calls = lambda text, turn: [Call(turn, "crop_video", {})]
    rollout.run_tool = lambda *_: time.sleep(1e6)
    train_by_chance(cfg)


def sft_with_a_broken_state(cfg: Path) -> Forked:
    process, state = SFT.start(cfg), cfg.with_suffix("") / "state"
    wait_for(lambda: len([*state.glob("step-????????")]) == 2, process)
    process.kill()
    process.join()
    newest = max(state.glob("step-????????")) / "__0_0.distcp"
    newest.write_bytes(newest.read_bytes()[:-100])
    return SFT.start(cfg)


# ------------------------------------------------------------------------------------------------ the matrix

INTERRUPTED = r"^interrupted\. The same command resumes from what was saved in .*/run$"


@dataclass
class Fault:
    job: Job
    moment: Callable[[Path], bool]
    disturb: Callable
    status: int = 1
    last_line: str = INTERRUPTED
    first: Callable[[Path], Forked] | None = None  # starts the run that is disturbed, if not `job` does
    pause: float = 0.0  # longest time in seconds between the moment and the disturbance


KILLED = -signal.SIGKILL
ANY = ""  # a killed process has no last word; torch's reports may come after ours
NO_SERVER = "^error: no server is left"
DAMAGED = r"^error: .*-\d+ cannot be read .* resume from step-\d+$"
A_BUG = "^ZeroDivisionError: division by zero$"

FAST = {
    "rl-sigterm": Fault(RL_ALONE, after_a_step, send(signal.SIGTERM), pause=1),
    "rl-one_of_two_servers_dies": Fault(RL_SERVERS, after_a_step, to_server(signal.SIGKILL, 0), 0, "^done: "),
}
SLOW = {
    "rl-kill": Fault(RL_ALONE, after_a_step, send(signal.SIGKILL), KILLED, ANY, pause=1),
    "rl-kill_amid_a_save": Fault(RL_ALONE, amid_a_save, send(signal.SIGKILL), KILLED, ANY),
    "rl-kill_amid_the_export": Fault(RL_ALONE, amid_the_export, send(signal.SIGKILL), KILLED, ANY),
    "rl-ctrl_c": Fault(RL_ALONE, after_a_step, press_ctrl_c, pause=1),
    "rl-ctrl_c_amid_a_save": Fault(RL_ALONE, amid_a_save, press_ctrl_c),
    "rl-ctrl_c_as_decoders_hang": Fault(RL_ALONE, after_a_step, hang_and_press_ctrl_c(decoders_of)),
    "rl-ctrl_c_as_a_tool_hangs": Fault(
        RL_ALONE, as_it_samples, hang_and_press_ctrl_c(lambda process: ()), first=fork(train_with_a_tool_that_hangs)
    ),
    "rl-a_bug_of_ours": Fault(RL_ALONE, as_it_samples, nothing, 1, A_BUG, fork(train_with_a_bug)),
    "rl-a_folder_that_cannot_be_written": Fault(RL_ALONE, after_a_step, close_folder, 1, "^error: .*/run/episodes"),
    "ranks-kill_rank_0": Fault(RL_RANKS, after_a_step, kill_rank(0), 1, ANY, pause=1),
    "ranks-kill_rank_1": Fault(RL_RANKS, after_a_step, kill_rank(1), 1, ANY, pause=1),
    "ranks-torchrun_restarts_them": Fault(RL_RANKS, after_a_step, kill_rank(0), 0, "^done: ", torchrun, pause=1),
    "ranks-torchrun_sigterm": Fault(
        RL_RANKS, after_a_step, send(signal.SIGTERM), 1, "got signal: 15$", torchrun, pause=1
    ),
    "rl-the_only_server_dies": Fault(RL_SERVER, after_a_step, to_server(signal.SIGKILL, 0), 1, NO_SERVER),
    "rl-one_of_two_servers_hangs": Fault(RL_SERVERS_RANKS, after_a_step, to_server(signal.SIGSTOP, 0), 0, "^done: "),
    "rl-ctrl_c_as_servers_hang": Fault(RL_SERVERS, after_a_step, hang_and_press_ctrl_c(servers_of)),
    "rl-ctrl_c_as_servers_hang_that_get_weights": Fault(RL_SERVERS, before_a_push, hang_and_press_ctrl_c(servers_of)),
    "sft-kill_amid_a_save": Fault(SFT, amid_a_save, send(signal.SIGKILL), KILLED, ANY),
    "sft-ctrl_c": Fault(SFT, after_a_step, press_ctrl_c, pause=0.2),
    "sft-ctrl_c_as_decoders_hang": Fault(SFT, after_a_step, hang_and_press_ctrl_c(decoders_of)),
    "sft-a_broken_state": Fault(SFT, at_once, delete_newest_state, 1, DAMAGED, sft_with_a_broken_state),
    "sft-a_full_disk": Fault(SFT_RANKS, after_a_step, fill_disk, 1, ANY),
    "eval-kill": Fault(EVAL, after_a_step, send(signal.SIGKILL), KILLED, ANY, pause=0.2),
    "eval-ctrl_c": Fault(EVAL, after_a_step, press_ctrl_c, pause=0.2),
    "eval-the_only_server_dies": Fault(EVAL_SERVER, after_a_step, to_server(signal.SIGKILL, 0), 1, NO_SERVER),
}
CASES = [pytest.param(fault, id=name) for name, fault in FAST.items()]
CASES += [pytest.param(fault, id=name, marks=pytest.mark.slow) for name, fault in SLOW.items()]


@pytest.fixture
def folder(request, tmp_path):
    """A folder for a run: on a small disk, if the disk is to be filled."""
    if "full_disk" not in request.node.name:
        yield tmp_path
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.parametrize("fault", CASES)
def test_a_fault_ends_a_run_as_it_should_and_the_same_command_ends_with_the_same_bits(
    fault, toy_dir, folder, undisturbed, request
):
    expected = results(undisturbed(fault.job))
    cfg, run = fault.job.write(folder / "run.yaml", toy_dir), folder / "run"

    # Disturb the run.
    process = (fault.first or fault.job.start)(cfg)
    wait_for(lambda: fault.moment(run), process)
    time.sleep(fault.pause * random.Random(request.node.name).random())
    assert process.poll() is None, "the run ended before its moment"
    helpers = [child for pid in (process.pid, *children(process.pid)) for child in children(pid)]
    repair = fault.disturb(process, run)

    # It ends soon, and leaves nothing behind. After kill -9, its weights stay in memory until it resumes.
    told = finish(process, fault.status, seconds=60 if fault.status else 300)
    assert re.search(fault.last_line, told.splitlines()[-1]), told
    if fault.last_line.startswith(("^interrupted", "^error")):
        assert "Traceback" not in told
    wait_for(lambda: not any(map(alive, helpers)), seconds=20)
    if fault.last_line:
        assert not (run / "snapshot").exists() and not run_memory(run).exists()

    # The same command goes on from the newest state.
    if fault.status:
        if repair:
            repair()
        done = saved_step(run / "state")
        told = finish(fault.job.start(cfg))
        if fault.job not in (EVAL, EVAL_SERVER):
            assert (f"step {done} " if done else "starts from ") in told
    assert results(run) == expected
    assert not [*run.rglob("*.tmp"), *run.rglob("*.old"), *run.glob("snapshot")] and not run_memory(run).exists()
