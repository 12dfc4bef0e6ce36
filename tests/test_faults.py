"""Whole runs, and what faults do to them: a script, a moment and a disturbance -> the exit status, the last line, and what is left.
The same command then ends with the bits of the undisturbed run.

    python -m pytest tests/test_faults.py -m "slow or not slow"        # some minutes of two cores
"""

import contextlib
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
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from scripts import REPO, Forked, alive, children, figures, finish, metrics, rl_config, sft_config, start, wait_for
from short_runs import train_by_chance, train_scripted, use_stand_ins

import rl
import rollout
from episode import Call
from runtime import config
from runtime.checkpoints import saved_step
from runtime.lines import read_lines
from runtime.script import run_script
from runtime.weights import run_memory

# ------------------------------------------------------------------------------------------------ the commands

# Five steps: when the first is saved, the run must still need its decoders, which are two batches ahead.
RL = {"steps": 5, "save_every": 1, "export_every": 1, "grpo": {"kl_coef": 0.1}}
RL["rollout"] = {"max_rounds": 1, "max_new_tokens": 24, "temperature": 1.0, "subagents": {"max_new_tokens": 8}}
BESIDE_SERVERS = RL | {"rollout": RL["rollout"] | {"server_gpus": [0, 1]}}


def eval_config(path: Path, toy_dir: Path, **rollout) -> Path:
    """Write the config of an evaluation of 8 items, one at a time. Its replies are random, so that records differ."""
    rollout = {"temperature": 1.0, "max_new_tokens": 120, "concurrency": 1, "server_gpus": [], **rollout}
    tree = {"run": str(path.with_suffix("")), "name": "toy", "checkpoint": str(toy_dir / "model"), "frames": [4]}
    tree |= {"splits": {"toy": str(toy_dir)}, "prompting": {"protocol": "direct"}, "save_episodes": True}
    path.write_text(yaml.safe_dump(tree | {"rollout": rollout, "decoders": 1}))
    return path


def evaluate_beside_a_server(cfg: Path) -> None:
    import eval as evaluation  # a fork without it keeps the other rows

    use_stand_ins()
    evaluation.require_servers = lambda *_: None
    run_script(evaluation.main, config.load(evaluation.EvalConfig, cfg))


def train_with_a_bug(cfg: Path) -> None:
    rl.keep_episodes = lambda *_: 1 / 0
    train_by_chance(cfg)


def train_with_a_tool_that_hangs(cfg: Path) -> None:
    """Run rl.py with a model that calls a tool in every turn. The tool never returns."""
    rollout.parse_calls = lambda text, turn: [Call(turn, "crop_video", {})]
    rollout.run_tool = lambda *_: time.sleep(1e6)
    train_by_chance(cfg)


def fork(work: Callable[[Path], None], ranks: int = 1) -> Callable[[Path], Forked]:
    return lambda cfg: Forked(partial(work, cfg), ranks=ranks)


def torchrun(cfg: Path) -> subprocess.Popen:
    """Start a real torchrun, which restarts its ranks once."""
    return start(str(REPO / "tests" / "short_runs.py"), cfg, ranks=2, anew=True, restarts=1)


JOBS = {  # a command: how its config is written, and how it starts
    "rl": (partial(rl_config, **RL), fork(train_by_chance)),
    "rl on two ranks": (partial(rl_config, **RL), fork(train_by_chance, ranks=2)),
    "rl beside two servers": (partial(rl_config, **BESIDE_SERVERS), fork(train_by_chance)),
    "sft": (partial(sft_config, steps=6, save_every=1), partial(start, "sft.py")),
    "sft on two ranks": (partial(sft_config, steps=6, save_every=1), partial(start, "sft.py", ranks=2)),
    "eval": (eval_config, partial(start, "eval.py")),
    "eval beside a server": (partial(eval_config, server_gpus=[0]), fork(evaluate_beside_a_server)),
}


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
def undisturbed(toy_dir, tmp_path_factory) -> Callable[[str], Path]:
    """undisturbed(job) -> the folder of its run, which is made once."""

    @cache
    def run(job: str) -> Path:
        write, begin = JOBS[job]
        cfg = write(tmp_path_factory.mktemp("undisturbed") / "run.yaml", toy_dir)
        finish(begin(cfg))
        return cfg.with_suffix("")

    return run


# ------------------------------------------------------------------------------------------------ undisturbed


def test_a_run_writes_its_metrics_and_episodes_and_moves_the_weights_that_are_not_frozen(undisturbed, toy_dir):
    run = undisturbed("rl")
    lines = metrics(run)
    assert [(line["step"], line["staleness"]) for line in lines] == [(step, 0) for step in range(5)]
    assert all(line["grad_norm"] > 0 for line in lines)
    assert abs(lines[0]["kl"]) < 1e-6 < lines[4]["kl"]
    assert all(line["logprob_gap"] < 1e-4 for line in lines)
    assert all(line["share/K=4"] + line["share/K=8"] == 1 for line in lines)
    kept = (run / "episodes" / "step-000004.jsonl").read_text().splitlines()
    assert len(kept) == 4 and json.loads(kept[0])["rewards"]
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (toy_dir, run))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any(".visual." in name for name in moved)


@pytest.mark.slow
def test_the_engine_of_each_rank_samples_with_the_new_weights(undisturbed):
    lines = metrics(undisturbed("rl on two ranks"))
    assert all(line["logprob_gap"] < 1e-4 and line["staleness"] == 0 for line in lines)


def test_a_model_of_every_so_many_steps_is_what_a_run_of_these_steps_leaves(undisturbed):
    """A model is written before the state of its step: after a kill between the two, the resumed run writes it again."""
    run = undisturbed("rl")
    *_, second_to_last, last = models = sorted((run / "models").iterdir())
    assert [model.name for model in models] == [f"step-00000{step}" for step in range(1, 6)]
    written = {path.name: path.read_bytes() for path in last.iterdir()}
    assert written == {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    assert written["model.safetensors"] != (second_to_last / "model.safetensors").read_bytes()
    assert json.loads(written["rollout.json"]) == {"think_prefix": True}  # as it was trained
    assert last.stat().st_mtime < (run / "state" / "step-00000005").stat().st_mtime


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


# ------------------------------------------------------------------------------------------------ disturbances
# disturb(process, the run's folder)


def nothing(process, run: Path) -> None:
    pass


def kill(process, run: Path) -> None:
    os.kill(process.pid, signal.SIGKILL)


def kill_rank(number: int) -> Callable:
    def kill_one(process, run: Path) -> None:
        first = int((run / ".lock").read_text().split()[1])
        [other] = {*children(process.pid)} - {first}
        os.kill([first, other][number], signal.SIGKILL)

    return kill_one


def terminate(process, run: Path) -> None:
    os.kill(process.pid, signal.SIGTERM)


def press_ctrl_c(process, run: Path) -> None:
    """One Ctrl-C in a hundred gets lost, because Python drops exceptions in destructors: then press it again."""
    for _ in range(2):
        if process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
            process.join(10)


def press_ctrl_c_as_helpers_hang(process, run: Path) -> None:
    """Stop decoders and servers, and press Ctrl-C when the run waits for them."""
    for pid in children(process.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    press_ctrl_c(process, run)


def send_to_servers(number: int, count: int) -> Callable:
    def send(process, run: Path) -> None:
        helpers = sorted(children(process.pid))
        servers = [pid for pid in helpers if "fake_sglang" in Path(f"/proc/{pid}/cmdline").read_text()]
        for pid in servers[:count]:
            os.kill(pid, number)

    return send


def fill_disk(process, run: Path) -> None:
    with open(run.parent / "film.mkv", "wb") as file, pytest.raises(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()


# ------------------------------------------------------------------------------------------------ the matrix


@dataclass
class Fault:
    job: str
    moment: str  # a file of the run that is there, as a glob pattern
    disturb: Callable
    status: int = 1
    last_line: str = r"^interrupted\. The same command resumes from what was saved in .*/run$"
    first: Callable[[Path], Forked] | None = None  # starts the run that is disturbed, if it is not the job's command


A_STEP, A_SAVE, SAMPLING, AN_ITEM = "state/step-00000001", "state/step-00000002.tmp", "snapshot", "episodes/*.jsonl"
A_BATCH = "episodes/step-000000.jsonl"  # it is written when the second batch is being sampled
KILLED = -signal.SIGKILL
ANY = ""  # a killed process has no last word, and after a full disk torch may have it
GOES_ON = "^done: "
NO_SERVER = "^error: no server is left"
A_BUG = "^ZeroDivisionError: division by zero$"

FAST = [
    Fault("rl", A_SAVE, terminate),
    Fault("rl beside two servers", A_BATCH, send_to_servers(signal.SIGKILL, 1), 0, GOES_ON),
]
SLOW = [
    Fault("rl", A_STEP, kill, KILLED, ANY),
    Fault("rl", A_SAVE, kill, KILLED, ANY),
    Fault("rl", "model.tmp", kill, KILLED, ANY),
    Fault("rl", A_STEP, press_ctrl_c),
    Fault("rl", A_SAVE, press_ctrl_c),
    Fault("rl", A_STEP, press_ctrl_c_as_helpers_hang),
    Fault("rl", SAMPLING, press_ctrl_c_as_helpers_hang, first=fork(train_with_a_tool_that_hangs)),
    Fault("rl", SAMPLING, nothing, 1, A_BUG, fork(train_with_a_bug)),
    Fault("rl on two ranks", A_STEP, kill_rank(0), 1, ANY),
    Fault("rl on two ranks", A_STEP, kill_rank(1), 1, ANY),
    Fault("rl on two ranks", A_STEP, kill_rank(0), 0, GOES_ON, torchrun),
    Fault("rl on two ranks", A_STEP, terminate, 1, "got signal: 15$", torchrun),
    Fault("rl beside two servers", A_BATCH, send_to_servers(signal.SIGSTOP, 1), 0, GOES_ON),
    Fault("rl beside two servers", A_BATCH, send_to_servers(signal.SIGKILL, 2), 1, NO_SERVER),
    Fault("rl beside two servers", A_BATCH, press_ctrl_c_as_helpers_hang),
    Fault("rl beside two servers", A_STEP, press_ctrl_c_as_helpers_hang),  # the run waits for a push of weights
    Fault("sft", A_SAVE, kill, KILLED, ANY),
    Fault("sft", A_STEP, press_ctrl_c),
    Fault("sft", A_STEP, press_ctrl_c_as_helpers_hang),
    Fault("sft", A_STEP, fill_disk, 1, ANY),
    Fault("sft on two ranks", A_STEP, fill_disk, 1, ANY),
    Fault("eval", AN_ITEM, kill, KILLED, ANY),
    Fault("eval", AN_ITEM, press_ctrl_c),
    Fault("eval beside a server", AN_ITEM, send_to_servers(signal.SIGKILL, 1), 1, NO_SERVER),
]


@pytest.fixture
def small_disk(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


CASES = [*FAST, *(pytest.param(fault, marks=pytest.mark.slow) for fault in SLOW)]


@pytest.mark.parametrize("fault", CASES, ids=lambda fault: f"{fault.job}, {fault.moment}, {fault.disturb.__name__}")
def test_a_fault_ends_a_run_as_it_should_and_the_same_command_ends_with_the_same_bits(
    fault, toy_dir, tmp_path, undisturbed, request, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", f"{REPO}:{REPO}/tests")  # for torchrun's ranks
    if not (REPO / f"{fault.job.split()[0]}.py").exists():
        pytest.skip("this fork has no such script")
    if fault.disturb is fill_disk:
        request.getfixturevalue("small_disk")
    expected = results(undisturbed(fault.job))
    write, begin = JOBS[fault.job]
    cfg, run = write(tmp_path / "run.yaml", toy_dir), tmp_path / "run"

    # Disturb the run at a random time after its moment. On a busy machine, a run may be over before that: try again.
    for _ in range(5):
        process = (fault.first or begin)(cfg)
        wait_for(lambda: any(run.glob(fault.moment)), process)
        if fault.moment in (A_STEP, AN_ITEM):
            time.sleep(0.2 * random.random())
        helpers = [child for pid in (process.pid, *children(process.pid)) for child in children(pid)]
        with contextlib.suppress(ProcessLookupError):
            fault.disturb(process, run)
        told, _ = process.communicate(60 if fault.status else 300)
        if process.returncode or not fault.status:
            break
        shutil.rmtree(run)

    # It ends soon, and leaves nothing behind. After kill -9, its weights stay in memory until it resumes.
    assert process.returncode == fault.status, told
    assert re.search(fault.last_line, told.splitlines()[-1]), told
    if fault.last_line.startswith(("^interrupted", "^error")):
        assert "Traceback" not in told
    if fault.last_line == A_BUG:
        assert "Traceback" in told
    if fault.job == "rl on two ranks" and fault.last_line == GOES_ON:
        assert "resumes after step" in told  # and does not begin anew, which would give the same bits
    wait_for(lambda: not any(map(alive, helpers)), seconds=20)
    if fault.last_line:
        assert not (run / "snapshot").exists() and not run_memory(run).exists()

    # The same command goes on from the newest state.
    if fault.status:
        (tmp_path / "film.mkv").unlink(missing_ok=True)
        done = saved_step(run / "state")
        told = finish(begin(cfg))
        if not fault.job.startswith("eval"):
            assert (f"step {done} " if done else "starts from ") in told
    assert results(run) == expected
    assert not [*run.rglob("*.tmp"), *run.rglob("*.old"), *run.glob("snapshot")] and not run_memory(run).exists()
