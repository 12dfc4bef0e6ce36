"""rollout.py: the agent. One question in, one Episode out; hundreds of them at once, each in a thread of its own.

    groups = rollout(tasks, ks, 8, engine=engine, renderer=renderer, videos=videos, cfg=cfg, seed=0, step=12)
    dump(episode, file, renderer); episodes = load("episodes.jsonl", videos, contract)

    python rollout.py --model M --video v.mp4 "What is written on the door?"     # watch the agent work
    python rollout.py doctor --model M --video v.mp4                             # prove the invariants on this model

An episode, and what of it is learned (mask 1):

    prompt     system, tools, K stamped frames, question           0
    turn       forced "<think>\\n"                                  0
               sampled: thoughts, then calls or the answer         1
    reports    one <tool_response> per call, in order, one turn    0
    turn       ...

Tokens are only ever appended: the sampled ids exactly as the engine returned them, then the tokenised delta. The calls of
a turn run in parallel threads: each decodes its window and asks a sub-agent (the same engine and weights, a fresh
context). Whatever goes wrong in a call becomes a text that the model reads and an error that we count (Call.error).

Deliberately missing: rewards, and what to do with an episode. An episode whose video or engine failed has `error` set.
"""

import sys

if (
    __name__ == "__main__"
):  # the commands, before this file's own imports: what is loaded as a script is not loaded again
    from study.ask import main

    sys.exit(main())

import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm import tqdm

import data
from data import Call, Episode, Group, Task, Trajectory
from runtime.contract import ContractError, Rendered, Renderer, VisualContract
from runtime.engine import Engine, EngineError, Sample
from runtime.servers import SGLang
from runtime.video import VideoError, Videos
from tools import TOOLS, Look, ToolError, parse_calls, use

THINK_PREFIX = "<think>\n"
NO_CALLS_LEFT = "No calls are left. Give the final answer now."
OVER_LIMIT = "This call was not run: at most {} calls may run in one turn."
TIMEOUT = "This call took too long and was given up."
NO_REPORT = "(empty report)"


@dataclass(frozen=True)
class SubagentConfig:
    """The agents that look at crops."""

    see_question: bool = False
    """Show them the question (the paper does not)."""
    max_new_tokens: int = 512
    """Longest report."""
    temperature: float = 0.0
    """0: greedy."""
    train: bool = False
    """Their trajectories join the loss with their episode's advantage (the paper: no)."""


@dataclass(frozen=True)
class RolloutConfig:
    """How an agent works, and who samples its tokens."""

    tools: tuple[str, ...] = ("crop_video",)
    """Names from tools.py that the main agent is offered."""
    dispatch: Literal["parallel", "sequential", "none"] = "parallel"
    """parallel: all calls of a turn at once; sequential: one call per turn, the same number in all; none: no tools."""
    tool_return: Literal["subagent", "frames"] = "subagent"
    """What a look at the video returns: a sub-agent's report, or (evaluation only) its frames."""
    think_prefix: bool = True
    """Open every turn of the main agent with `<think>`."""
    max_turns: int = 3
    """Rounds of calls; then the agent must answer."""
    max_calls: int = 5
    """Calls that run in one turn; the rest get an error text."""
    max_new_tokens: int = 2048
    """Per turn. A turn that is cut off ends the episode."""
    max_context: int = 32_768
    """Tokens of the longest trajectory."""
    temperature: float = 0.7
    """Of the main agent; 0: greedy."""
    call_timeout: float = 600.0
    """Seconds after which a call is given up; long enough for a server's restart."""
    concurrency: int = 256
    """Episodes that run at the same time."""
    subagents: SubagentConfig = field(default_factory=SubagentConfig)
    gpus: tuple[int, ...] = ()
    """One SGLang server is started and supervised on each."""
    urls: tuple[str, ...] = ()
    """SGLang servers that already run (with SGLANG_VLM_CACHE_SIZE_MB=0 if the vision tower trains: their cache of image
    embeddings outlives a weight update). Neither gpus nor urls: the model runs in this process."""
    server_args: tuple[str, ...] = ()
    """More flags for `sglang.launch_server`."""
    max_batch_tokens: int = 131_072
    """In this process: rows times length of the largest batch, which bounds the memory of its keys."""

    def __post_init__(self):
        unknown = [name for name in self.tools if name not in TOOLS]
        if unknown:
            raise ValueError(f"tools = {unknown}: there is only {', '.join(TOOLS)}")
        if self.dispatch != "none" and not self.tools:
            raise ValueError("tools = []: use `dispatch: none` for an agent without tools")
        for name in ("max_calls", "max_new_tokens", "max_context", "call_timeout", "concurrency"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive")
        if self.max_turns < 0 or self.temperature < 0 or self.subagents.temperature < 0:
            raise ValueError("max_turns, temperature and subagents.temperature must not be negative")

    @property
    def rounds(self) -> tuple[int, int]:
        """(rounds of calls, calls per round)."""
        return {
            "parallel": (self.max_turns, self.max_calls),
            "sequential": (self.max_turns * self.max_calls, 1),
            "none": (0, 0),
        }[self.dispatch]

    @property
    def schemas(self) -> list[dict] | None:
        return [TOOLS[name].schema for name in self.tools] if self.dispatch != "none" else None


@dataclass(frozen=True)
class Stage:
    """What every agent works with."""

    engine: Engine
    renderer: Renderer
    videos: Videos
    cfg: RolloutConfig
    observe: Callable[[str, Any], None] = lambda event, what: None  # turn | look | report: for whoever watches
    stopped: threading.Event = field(default_factory=threading.Event)


class Stopped(Exception):
    """The run is being ended; this episode is not finished."""


def derive(*parts: Any) -> int:
    """A seed that is the same in every process."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


# ------------------------------------------------------------------------------------------------ one episode


def opening(task: Task, k: int, stage: Stage) -> Rendered:
    """The prompt of a task, which all rollouts of its group share."""
    frames = data.overview(task, k, stage.videos, stage.renderer.contract)
    messages = data.main_messages(task, frames, with_tools=stage.cfg.dispatch != "none")
    return stage.renderer.render(messages, stage.cfg.schemas, generate=True)


def run_episode(stage: Stage, task: Task, k: int, prompt: Rendered, seed: int) -> Episode:
    cfg, renderer = stage.cfg, stage.renderer
    episode = Episode(task, k, open_trajectory(prompt), seed=seed)
    main, started = episode.main, time.perf_counter()
    rounds, per_round = cfg.rounds
    try:
        for turn in range(rounds + 1):
            text = _speak(stage, main, derive(seed, turn))
            stage.observe("turn", text)
            calls = parse_calls(text, turn)
            if main.finish == "length" or turn == rounds or not calls:
                break
            answers = _answer(stage, task, calls, per_round, derive(seed, turn, "calls"))
            contents = [content for _, content in answers]
            if turn == rounds - 1:
                contents[-1] = [*contents[-1], f"\n{NO_CALLS_LEFT}"]
            if not append(stage, main, renderer.continuation(contents)):  # reports that do not fit were never read
                break
            episode.calls += [call for call, _ in answers]
    except (EngineError, VideoError, Stopped) as error:
        episode.error = f"{type(error).__name__}: {error}"
    episode.seconds = time.perf_counter() - started
    return episode


def open_trajectory(prompt: Rendered) -> Trajectory:
    n = len(prompt.ids)
    return Trajectory(list(prompt.ids), [0] * n, [0.0] * n, [-1] * n, list(prompt.frames), prompt_length=n)


def _extend(trajectory: Trajectory, ids: list[int], sample: Sample | None = None) -> None:
    """The only way in which a trajectory grows."""
    trajectory.ids += ids
    trajectory.mask += [int(sample is not None)] * len(ids)
    trajectory.logprobs += sample.logprobs if sample else [0.0] * len(ids)
    trajectory.versions += [sample.version if sample else -1] * len(ids)


def append(stage: Stage, agent: Trajectory, delta: Rendered) -> bool:
    """What the agent reads next. False, with nothing appended, if its context has no room: the turn counts as cut off."""
    end = stage.renderer.end_of_turn
    close = [] if agent.ids[-1] == end else [end]  # the turn ended with another stop token, such as </tool_call>
    if len(agent.ids) + len(close) + len(delta.ids) + 16 > stage.cfg.max_context:
        agent.finish = "length"
        return False
    _extend(agent, close + delta.ids)
    agent.frames += delta.frames
    return True


def _speak(stage: Stage, main: Trajectory, seed: int) -> str:
    """One turn of the main agent, appended to its trajectory -> its text, forced opening included."""
    cfg, renderer = stage.cfg, stage.renderer
    start = len(main.ids)
    if cfg.think_prefix:
        _extend(main, renderer.encode(THINK_PREFIX))
    stop = (renderer.end_of_turn,)
    if cfg.dispatch == "sequential":
        stop += (renderer.tokenizer.convert_tokens_to_ids("</tool_call>"),)
    sample_turn(stage, main, cfg.max_new_tokens, cfg.temperature, seed, stop)
    main.turns.append((start, len(main.ids)))
    return renderer.decode(main.ids[start:])


def sample_turn(
    stage: Stage, agent: Trajectory, most: int, temperature: float, seed: int, stop: tuple[int, ...]
) -> None:
    if stage.stopped.is_set():
        raise Stopped("the run was ended")
    room = stage.cfg.max_context - len(agent.ids)
    if room <= 0:
        raise EngineError(f"a prompt of {len(agent.ids)} tokens fills max_context = {stage.cfg.max_context}; raise it")
    sample = stage.engine.generate(
        agent.ids,
        agent.frames,
        max_new_tokens=min(most, room),
        temperature=temperature,
        seed=seed,
        stop=stop,
        shared=agent.prompt_length,
    )
    if forbidden := set(sample.ids) & set(stage.renderer.never_sampled):
        raise ContractError(f"the engine sampled tokens {sorted(forbidden)}, which stand for pixels and are banned")
    _extend(agent, sample.ids, sample)
    agent.finish = sample.finish


# ------------------------------------------------------------------------------------------------ calls

Answer = tuple[Call, list]  # what came of a call, and what the main agent reads: texts and Frames


def _answer(stage: Stage, task: Task, calls: list[Call], allowed: int, seed: int) -> list[Answer]:
    """All calls of one turn -> an answer to each, in call order."""
    runnable = [i for i, call in enumerate(calls) if not call.error]
    for i in runnable[allowed:]:
        calls[i].error, calls[i].text = "over_limit", OVER_LIMIT.format(allowed)
    # Each thread works on a copy: one that is given up must not write into what the model has read.
    jobs = {
        i: lambda i=i: _run_call(stage, task, dataclasses.replace(calls[i]), derive(seed, i))
        for i in runnable[:allowed]
    }
    done = dict(zip(jobs, together(stage.engine, list(jobs.values()), stage.cfg.call_timeout)))
    answers = []
    for i, call in enumerate(calls):
        if i in jobs and done[i] is None:
            call.error, call.text, call.seconds = "timeout", TIMEOUT, stage.cfg.call_timeout
        answers.append(done.get(i) or (call, [call.text]))
        if answers[-1][0] is call:
            stage.observe("report", call)
    return answers


def _run_call(stage: Stage, task: Task, call: Call, seed: int) -> Answer:
    started, frames = time.perf_counter(), []
    try:
        found = use(call, task, stage.cfg.tools, stage.videos, stage.renderer.contract)
        if isinstance(found, str):
            call.text = found
        else:
            call.window = found.window
            stage.observe("look", call)
            if stage.cfg.tool_return == "frames":
                frames = [found.frames]
            else:
                call.agent = _report(stage, task, found, seed)
                call.text = _last_words(call.agent, stage.renderer)
    except ToolError as error:
        call.error, call.text = error.kind, str(error)
    except EngineError:
        call.error, call.text = "failed", "The sub-agent could not answer."
    call.seconds = time.perf_counter() - started
    stage.observe("report", call)
    return call, [*frames, call.text]


def _report(stage: Stage, task: Task, look: Look, seed: int) -> Trajectory:
    """A sub-agent: the same weights, a fresh context, and only these frames."""
    cfg = stage.cfg.subagents
    messages = data.subagent_messages(look.frames, task.question if cfg.see_question else None)
    agent = open_trajectory(stage.renderer.render(messages, generate=True))
    sample_turn(stage, agent, cfg.max_new_tokens, cfg.temperature, seed, (stage.renderer.end_of_turn,))
    agent.turns.append((agent.prompt_length, len(agent.ids)))
    return agent


def _last_words(agent: Trajectory, renderer: Renderer) -> str:
    start, end = agent.turns[-1]
    return renderer.decode(agent.ids[start : end - (agent.finish == "stop")]).strip() or NO_REPORT


# ------------------------------------------------------------------------------------------------ many episodes


def rollout(
    tasks: Sequence[Task],
    ks: Sequence[int],
    group_size: int,
    *,
    engine: Engine,
    renderer: Renderer,
    videos: Videos,
    cfg: RolloutConfig,
    seed: int = 0,
    step: int = 0,
    progress: bool = True,
    on_episode: Callable[[Episode], None] = lambda episode: None,
    stopped: threading.Event | None = None,
) -> list[Group]:
    """G episodes of every task, at most `cfg.concurrency` at a time. In this process, the same seed and step draw
    the same tokens (SGLang's batching is not repeatable).

    `on_episode` gets each episode as it ends, in this thread: what it saves survives Ctrl-C. Once `stopped` is set, no
    agent starts another turn."""
    stage = Stage(engine, renderer, videos, cfg, stopped=stopped or threading.Event())
    groups = [Group(task, k, [None] * group_size) for task, k in zip(tasks, ks, strict=True)]
    preparing, prompts = ThreadPoolExecutor(8, "prompt"), []
    bar = tqdm(total=len(tasks) * group_size, desc="rollout", unit="episode", disable=not progress, leave=False)

    def attempt(i: int, g: int) -> Episode:
        task, k, own = tasks[i], ks[i], derive(seed, step, tasks[i].id, g)
        try:
            return run_episode(stage, task, k, prompts[i].result(), own)
        except VideoError as error:  # of the overview: shared by the group, and paid by each of its episodes
            return Episode(task, k, Trajectory([], [], [], [], [], 0), seed=own, error=f"VideoError: {error}")

    def done(n: int, episode: Episode) -> None:
        groups[n // group_size].episodes[n % group_size] = episode
        on_episode(episode)
        bar.update()

    try:
        prompts += [preparing.submit(opening, task, k, stage) for task, k in zip(tasks, ks)]
        jobs = [lambda i=i, g=g: attempt(i, g) for i in range(len(tasks)) for g in range(group_size)]
        run_all(engine, jobs, cfg.concurrency, done)
    except BaseException:
        stage.stopped.set()  # nobody starts another turn
        raise
    finally:
        bar.close()
        preparing.shutdown(wait=False, cancel_futures=True)
    return groups


# ------------------------------------------------------------------------------------------------ engine and threads


def open_engine(
    checkpoint: str | Path, renderer: Renderer, *, gpus: Sequence[int] = (), urls: Sequence[str] = (),
    server_args: Sequence[str] = (), max_batch_tokens: int = 131_072,
) -> Engine:  # fmt: skip
    """The engine that a config describes: neither GPUs nor URLs mean this process, and its GPU if it has one."""
    if gpus or urls:
        return SGLang(checkpoint, renderer, gpus=gpus, urls=urls, server_args=server_args)
    import torch  # which a client of servers does not need

    from runtime.inprocess import InProcess

    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    return InProcess(checkpoint, renderer, device=device, dtype=dtype, max_batch_tokens=max_batch_tokens)


def together(engine: Engine, jobs: Sequence[Callable[[], Any]], timeout: float) -> list[Any]:
    """Run jobs at the same time -> their results in order, None for one that is given up.

    The engine is told who is about to ask it for something: while this thread waits, the jobs in its place."""
    if not jobs:
        return []
    lock, waiting, left = threading.Lock(), True, len(jobs)

    def run(job):
        nonlocal left
        try:
            return job()
        finally:
            with lock:
                left -= 1
                if waiting and left:  # the last one hands its place back to us
                    engine.expect(-1)

    engine.expect(len(jobs) - 1)
    pool = ThreadPoolExecutor(len(jobs), "call")  # of our own: in a shared pool, calls would wait for strangers' calls
    futures = [pool.submit(run, job) for job in jobs]
    wait(futures, timeout)
    with lock:
        waiting = False
        if left:
            engine.expect(1 - left)
        finished = [future.done() for future in futures]
    pool.shutdown(wait=False)
    return [future.result() if done else None for future, done in zip(futures, finished)]


def run_all(
    engine: Engine, jobs: Sequence[Callable[[], Any]], at_once: int, on_done: Callable[[int, Any], None]
) -> None:
    """Run jobs, `at_once` at a time -> on_done(index, result) as each ends, in this thread.

    The engine is told how many threads may ask it for something: a job that ends leaves its place to the next."""
    workers = min(at_once, len(jobs))
    lock, unstarted = threading.Lock(), len(jobs) - workers

    def run(job):
        nonlocal unstarted
        try:
            return job()
        finally:
            with lock:
                if unstarted:
                    unstarted -= 1
                else:
                    engine.expect(-1)

    engine.expect(workers)
    pool = ThreadPoolExecutor(max(1, workers), "episode")
    try:
        running = {pool.submit(run, job): i for i, job in enumerate(jobs)}
        for future in as_completed(running):
            on_done(running[future], future.result())
    except BaseException:  # Ctrl-C, or a bug: no further job begins
        with lock:
            unstarted = 0
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# ------------------------------------------------------------------------------------------------ on disk


def dump(episode: Episode, file: TextIO, renderer: Renderer) -> None:
    """One line of JSON: exact ids, the text for people, and frames by their times (their pixels stay in the video)."""

    def plain(agent: Trajectory) -> dict:
        text = renderer.decode(renderer.compact(agent.ids))
        return vars(agent) | {"frames": [list(clip.times) for clip in agent.frames], "text": text}

    record = vars(episode) | {
        "task": vars(episode.task),
        "main": plain(episode.main),
        "calls": [vars(call) | {"agent": call.agent and plain(call.agent)} for call in episode.calls],
    }
    file.write(json.dumps(record) + "\n")
    file.flush()


def keep_episodes(groups: Sequence[Group], renderer: Renderer, path: Path) -> None:
    """Every episode of the groups, in a file of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for group in groups:
            for episode in group.episodes:
                dump(episode, file, renderer)


def load(path: str | Path, videos: Videos | None = None, contract: VisualContract | None = None) -> list[Episode]:
    """The episodes of a file. With videos, their frames are decoded again; without, there are none."""
    return [episode_of(json.loads(line), videos, contract) for line in Path(path).read_text("utf-8").splitlines()]


def episode_of(record: dict, videos: Videos | None, contract: VisualContract | None) -> Episode:
    def agent(fields: dict, clips: list) -> Trajectory:
        times = fields.pop("frames")
        del fields["text"]
        if videos and [list(clip.times) for clip in clips] != times:
            raise ContractError(f"the video's frames now have other times than the {times} that were recorded")
        return Trajectory(**fields | {"frames": clips, "turns": [tuple(turn) for turn in fields["turns"]]})

    def again(call: Call, task: Task) -> list:
        look = use(call, task, tuple(TOOLS), videos, contract)
        return [look.frames] if isinstance(look, Look) else []

    task = record["task"]
    task = Task(**task | {"videos": tuple(task["videos"]), "options": tuple(task["options"])})
    clips = data.overview(task, record["k"], videos, contract) if videos and record["main"]["frames"] else []
    calls = []
    for fields in record["calls"]:
        seen = fields.pop("agent")
        call = Call(**fields | {"window": fields["window"] and tuple(fields["window"])})
        shown = again(call, task) if videos and not call.error else []
        if seen is None:  # the main agent saw them itself
            clips += shown
        else:
            call.agent = agent(seen, shown)
        calls.append(call)
    return Episode(**record | {"task": task, "main": agent(record["main"], clips), "calls": calls})
