"""rollout.py: the agent. One question in, one Episode out; hundreds of them at once, each in a thread of its own.

    groups = rollout(tasks, ks, 8, engine=engine, renderer=renderer, videos=videos, cfg=cfg, seed=0, step=12)
    dump(episode, file, renderer); episodes = load_episodes("episodes.jsonl", videos, contract)

An episode, and which of its tokens are learned (mask 1):

    prompt     system, tools, K stamped frames, question           0
    turn       forced "<think>\\n"                                  0
               sampled: thoughts, then calls or the answer         1
    reports    one <tool_response> per call, in order, one turn    0
    turn       ...

Tokens are only ever appended: the sampled ids exactly as the engine returned them, then the tokenised delta. The calls of
a turn run in parallel threads. Each decodes its window and asks a sub-agent: the same engine and weights, a fresh
context. Whatever goes wrong in a call becomes a text that the model reads and an error that we count (Call.error).

Deliberately missing: rewards, and what to do with an episode. If its row, its video or the engine fails, Episode.error is set.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm import tqdm

import data
from data import Call, Episode, Group, Task, Trajectory
from runtime.config import refuse_below_1
from runtime.dataset import DataError, RowError, row_errors
from runtime.engine import Engine, EngineError, run_all, run_parallel
from runtime.render import NO_REPORT, THINK_PREFIX, Rendered, Renderer
from runtime.servers import SGLang, server_flags
from runtime.video import Frames, VideoError, Videos
from runtime.visual import ContractError, VisualContract
from tools import TOOLS, ClipForSubagent, ToolError, parse_calls, run_tool

# What the main agent reads of calls that did not run to their end.
GIVEN_UP = "This call took too long and was given up."
OVER_LIMIT = "This call was not run: at most {} calls may run in one turn."
NO_CALLS_LEFT = "No calls are left. Give the final answer now."
MIN_TURN_TOKENS = 16  # tokens that the context must still have for a turn
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SubagentConfig:
    """The agents that look at crops."""

    max_new_tokens: int = 512
    """Longest report."""
    temperature: float = 0.0
    """0: greedy."""
    train: bool = False
    """Their trajectories join the loss with their episode's advantage (the paper: no)."""

    def __post_init__(self):
        refuse_below_1(self, "max_new_tokens")


@dataclass(frozen=True)
class RolloutConfig:
    """How an agent works, and who samples its tokens."""

    tools: tuple[str, ...] = ("crop_video",)
    """Names from tools.py that the main agent is offered."""
    dispatch: Literal["parallel", "sequential", "none"] = "parallel"
    """parallel: all calls of a turn at once; sequential: one call per turn, the same number in all; none: no tools."""
    tool_return: Literal["subagent", "frames"] = "subagent"
    """What a call on the video returns: a sub-agent's report, or its frames."""
    think_prefix: bool = True
    """Open every turn of the main agent with `<think>`."""
    max_turns: int = 3
    """Turns that may call tools. One more follows, in which the agent must answer."""
    max_calls: int = 5
    """Calls that run in one turn; the rest get an error text."""
    max_new_tokens: int = 2048
    """Per turn. A turn that is cut off ends the episode."""
    max_context: int = 32_768
    """Tokens of the longest trajectory."""
    temperature: float = 0.7
    """Of the main agent; 0: greedy."""
    call_timeout: float = 600.0
    """Seconds after which a call is given up; long enough for a server's restart, but not for its first start."""
    concurrency: int = 256
    """Episodes that run at the same time, on each rank."""
    subagents: SubagentConfig = field(default_factory=SubagentConfig)
    server_gpus: tuple[int, ...] = ()
    """SGLang servers are started and supervised on them: one on each, or on every `tensor_parallel` of them."""
    tensor_parallel: int = 1
    """GPUs of one server. `server_gpus` are cut in order: [4, 5, 6, 7] and 2 are a server on 4 and 5, and one on 6 and 7."""
    urls: tuple[str, ...] = ()
    """SGLang servers that already run (with SGLANG_VLM_CACHE_SIZE_MB=0 if the vision tower trains: their cache of image
    embeddings outlives a weight update). Neither server_gpus nor urls: the model runs in this process."""
    server_args: tuple[str, ...] = ()
    """More flags for `sglang.launch_server`; all servers get those of `runtime.servers.server_flags`."""
    max_batch_tokens: int = 131_072
    """In this process: rows times length of the largest batch, which bounds the memory of its keys."""

    def __post_init__(self):
        unknown = [name for name in self.tools if name not in TOOLS]
        if unknown:
            raise ValueError(f"tools = {unknown}: there is only {', '.join(TOOLS)}")
        if self.dispatch != "none" and not self.tools:
            raise ValueError("tools = []: use `dispatch: none` for an agent without tools")
        for name in ("max_turns", "max_calls", "max_new_tokens", "max_context", "call_timeout", "concurrency"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive")
        gpus, size = list(self.server_gpus), self.tensor_parallel
        if size < 1 or len(gpus) % size:
            told = f"server_gpus = {gpus} cannot be cut into servers of tensor_parallel = {size}"
            raise ValueError(f"{told}: give a multiple")
        for flag in self.server_args:
            if flag.startswith(("--tp", "--tensor-parallel")):
                raise ValueError(f"server_args: {flag}: a server sees only its own GPUs; set `tensor_parallel` instead")

    @property
    def rounds(self) -> tuple[int, int]:
        """(rounds of calls, calls per round)."""
        if self.dispatch == "none":
            return 0, 0
        if self.dispatch == "sequential":
            return self.max_turns * self.max_calls, 1
        return self.max_turns, self.max_calls

    @property
    def schemas(self) -> list[dict] | None:
        return [TOOLS[name].schema for name in self.tools] if self.dispatch != "none" else None


@dataclass(frozen=True)
class AgentContext:
    """The surroundings that all agents of a run share."""

    engine: Engine
    renderer: Renderer
    videos: Videos
    cfg: RolloutConfig
    observe: Callable[[str, Any], None] = lambda event, what: None
    """Called with ("turn", its text), ("clip", the Call) and ("report", the Call) as they happen; `ask` prints them."""
    stopped: threading.Event = field(default_factory=threading.Event)
    callers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1_000_000, "call"))
    """Threads of calls. One that is idle takes the next call; if none is, a new one starts, so no call waits for another."""


class Stopped(Exception):
    """The run is being ended; this episode is not finished."""


def derive_seed(*parts: Any) -> int:
    """Return a seed that is the same in every process."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


# ------------------------------------------------------------------------------------------------ one episode


def render_prompt(task: Task, k: int, context: AgentContext) -> Rendered:
    """Render the prompt of a task, which all rollouts of its group share."""
    cfg, contract = context.cfg, context.renderer.contract
    frames = data.overview(task, k, context.videos, contract)
    messages = data.main_messages(task, frames, cfg.dispatch != "none", contract.stamped, cfg.tool_return)
    return context.renderer.render(messages, cfg.schemas, generate=True)


def run_episode(context: AgentContext, task: Task, k: int, prompt: Rendered, seed: int) -> Episode:
    """Run one episode: turns of the main agent and reports of its calls, until it answers."""
    started = time.perf_counter()
    main = open_trajectory(prompt)
    episode = Episode(task, k, main, seed=seed)
    rounds, calls_per_round = context.cfg.rounds
    try:
        for turn in range(rounds + 1):
            # The agent thinks, and then calls tools or answers.
            text = sample_main_turn(context, main, derive_seed(seed, turn))
            context.observe("turn", text)
            calls = parse_calls(text, turn)
            # Without calls this is the answer. After the last round, and in a turn that was cut off, calls are not run.
            if not calls or turn == rounds or main.finish == "length":
                break
            # All calls of the turn run at the same time.
            calls, contents = run_calls(context, task, calls, calls_per_round, derive_seed(seed, turn, "calls"))
            # The agent reads their results in one turn, in call order.
            if turn == rounds - 1:
                contents[-1] = [*contents[-1], f"\n{NO_CALLS_LEFT}"]
            if not append_rendered(context, main, context.renderer.continuation(contents)):
                break  # it never read them, so they do not count
            episode.calls += calls
    except (EngineError, VideoError, Stopped) as error:
        episode.error = f"{type(error).__name__}: {error}"
    episode.seconds = time.perf_counter() - started
    return episode


def open_trajectory(prompt: Rendered) -> Trajectory:
    """Return a trajectory that holds the prompt alone."""
    trajectory = Trajectory(prompt_frames=list(prompt.frames), prompt_length=len(prompt.ids))
    _extend(trajectory, prompt.ids)
    return trajectory


def _extend(trajectory: Trajectory, ids: list[int], mask: int = 0, logprobs: Sequence[float] = (), version=-1) -> None:
    """Append tokens, sampled ones with their log-probs. A rollout lets a trajectory grow in no other way."""
    trajectory.ids += ids
    trajectory.mask += [mask] * len(ids)
    trajectory.logprobs += logprobs or [0.0] * len(ids)
    trajectory.versions += [version] * len(ids)


def append_rendered(context: AgentContext, trajectory: Trajectory, delta: Rendered) -> bool:
    """Append what the agent reads next. If its context has no room, append nothing and return False: the turn before
    counts as cut off."""
    ids = delta.ids
    # A turn that stopped at another token, such as <|endoftext|> or </tool_call>, still lacks the template's own end.
    if trajectory.ids[-1] != context.renderer.end_of_turn:
        ids = [context.renderer.end_of_turn, *ids]
    if len(trajectory.ids) + len(ids) + MIN_TURN_TOKENS > context.cfg.max_context:
        trajectory.finish = "length"
        return False
    _extend(trajectory, ids)
    trajectory.call_frames += delta.frames
    return True


def sample_main_turn(context: AgentContext, main: Trajectory, seed: int) -> str:
    """Append one sampled turn to the main agent's trajectory and return its text, forced opening included."""
    cfg, renderer = context.cfg, context.renderer
    start = len(main.ids)
    if cfg.think_prefix:
        _extend(main, renderer.encode(THINK_PREFIX))
    stop = renderer.ends_of_turn
    if cfg.dispatch == "sequential":
        stop += (renderer.tokenizer.convert_tokens_to_ids("</tool_call>"),)
    sample_turn(context, main, cfg.max_new_tokens, cfg.temperature, seed, stop)
    main.turns.append((start, len(main.ids)))
    return renderer.decode(main.ids[start:])


def sample_turn(
    context: AgentContext, trajectory: Trajectory, max_new_tokens: int, temperature: float, seed: int, stop: tuple
) -> None:
    """Let the engine continue the trajectory by at most `max_new_tokens`, and append the very ids that it sampled."""
    if context.stopped.is_set():
        raise Stopped("the run was ended")
    n, max_context = len(trajectory.ids), context.cfg.max_context
    if n >= max_context:
        raise EngineError(f"a prompt of {n} tokens fills max_context = {max_context}; raise it")
    sample = context.engine.generate(
        trajectory.ids, trajectory.frames, max_new_tokens=min(max_new_tokens, max_context - n), temperature=temperature,
        seed=seed, stop=stop, shared_prefix=trajectory.prompt_length,
    )  # fmt: skip
    forbidden = set(sample.ids) & set(context.renderer.never_sampled)
    if forbidden:
        raise ContractError(f"the engine sampled tokens {sorted(forbidden)}, which stand for pixels and are banned")
    _extend(trajectory, sample.ids, 1, sample.logprobs, sample.version)
    trajectory.finish = sample.finish


# ------------------------------------------------------------------------------------------------ its calls in parallel


def run_calls(
    context: AgentContext, task: Task, calls: list[Call], allowed: int, seed: int
) -> tuple[list[Call], list[list]]:
    """Run the calls of one turn at the same time. Return them with their outcomes, and what the main agent reads of each,
    both in call order."""
    # Calls that could not be read have their error already. Of the others, the first `allowed` run.
    jobs = {}
    for i, call in enumerate(calls):
        if not call.error and len(jobs) < allowed:
            jobs[i] = functools.partial(run_call, context, task, call, derive_seed(seed, i))
    results = run_parallel(context.engine, context.callers, jobs, context.cfg.call_timeout)

    # Give each call its outcome.
    outcomes = []
    for i, call in enumerate(calls):
        if i in results:
            outcomes.append(results[i])
            continue
        if i in jobs:
            call = dataclasses.replace(call, error="timeout", text=GIVEN_UP, seconds=context.cfg.call_timeout)
        elif not call.error:
            call = dataclasses.replace(call, error="over_limit", text=OVER_LIMIT.format(allowed))
        context.observe("report", call)
        outcomes.append((call, []))

    # The main agent reads the frames that it is shown, then the text.
    contents = []
    for call, frames in outcomes:
        contents.append([*frames, call.text])
    return [call for call, _ in outcomes], contents


def run_call(context: AgentContext, task: Task, call: Call, seed: int) -> tuple[Call, list[Frames]]:
    """Run one call in its thread. Whatever the model, the video or the tool can cause becomes a text. Return the call with
    its outcome, and the frames that the main agent is shown (`tool_return: frames`)."""
    started = time.perf_counter()
    call = dataclasses.replace(call)  # a thread that is given up must not write into what the model has read
    shown = []
    try:
        result = run_tool(call, task, context.cfg.tools, context.videos, context.renderer.contract)
        if isinstance(result, str):
            call.text = result
        else:
            call.window = result.window
            context.observe("clip", call)
            if context.cfg.tool_return == "frames":
                shown = [result.frames]
                start, end = result.window
                call.text = f"{len(result.frames)} frames from {start:.1f} s to {end:.1f} s"
            else:
                call.subagent, call.text = ask_subagent(context, result, seed)
    except ToolError as error:
        call.error, call.text = error.kind, str(error)
    except EngineError as error:  # the servers are tried for minutes, so this is rare; the main agent goes on without
        log.warning("a sub-agent could not answer: %s", error)
        call.error, call.text = "engine", "The sub-agent could not answer."
    call.seconds = time.perf_counter() - started
    context.observe("report", call)
    return call, shown


def ask_subagent(context: AgentContext, clip: ClipForSubagent, seed: int) -> tuple[Trajectory, str]:
    """Ask a sub-agent: the same weights, a fresh context, and only these frames and the tool's request (the paper: not even
    the question)."""
    cfg = context.cfg.subagents
    messages = data.subagent_messages(clip.frames, context.renderer.contract.stamped, clip.request, clip.system)
    trajectory = open_trajectory(context.renderer.render(messages, generate=True))
    sample_turn(context, trajectory, cfg.max_new_tokens, cfg.temperature, seed, context.renderer.ends_of_turn)
    start, end = trajectory.prompt_length, len(trajectory.ids)
    trajectory.turns.append((start, end))
    if trajectory.finish == "stop":
        end -= 1  # without the end of the turn
    return trajectory, context.renderer.decode(trajectory.ids[start:end]).strip() or NO_REPORT


# ------------------------------------------------------------------------------------------------ many episodes


def rollout(
    tasks: Sequence[Task], ks: Sequence[int], group_size: int, *, engine: Engine, renderer: Renderer, videos: Videos,
    cfg: RolloutConfig, seed: int = 0, step: int = 0, progress: bool = True, stopped: threading.Event | None = None,
) -> list[Group]:  # fmt: skip
    """Run G episodes of every task, at most `cfg.concurrency` at a time. In this process, the same seed and step draw the
    same tokens (SGLang without --enable-deterministic-inference heeds no seeds). Once `stopped` is set, no agent starts
    another turn."""
    context = AgentContext(engine, renderer, videos, cfg, stopped=stopped or threading.Event())
    groups = [Group(task, k, [None] * group_size) for task, k in zip(tasks, ks, strict=True)]
    bar = tqdm(total=len(tasks) * group_size, desc="rollout", unit="episode", disable=not progress, leave=False)
    preparing = ThreadPoolExecutor(8, "prompt")
    prompt_futures = []  # by task

    def prepare(group: Group) -> Rendered:
        with row_errors():  # whatever a row makes of it
            return render_prompt(group.task, group.k, context)

    def run_one(i: int, g: int) -> Episode:
        """Run rollout g of task i."""
        task, k = tasks[i], ks[i]
        episode_seed = derive_seed(seed, step, task.id, g)
        try:
            prompt = prompt_futures[i].result()
        except RowError as error:  # no prompt: each episode of the group pays for it
            kind = "VideoError" if isinstance(error.__cause__, VideoError) else "RowError"
            return Episode(task, k, Trajectory(), seed=episode_seed, error=f"{kind}: {error}")
        return run_episode(context, task, k, prompt, episode_seed)

    def on_done(n: int, episode: Episode) -> None:
        groups[n // group_size].episodes[n % group_size] = episode
        bar.update()

    jobs = [functools.partial(run_one, i, g) for i in range(len(tasks)) for g in range(group_size)]
    try:
        for group in groups:  # prompts are prepared ahead, each once for its group
            prompt_futures.append(preparing.submit(prepare, group))
        run_all(engine, jobs, cfg.concurrency, on_done)
    except BaseException:
        context.stopped.set()  # nobody starts another turn
        raise
    finally:
        bar.close()
        preparing.shutdown(wait=False, cancel_futures=True)
        context.callers.shutdown(wait=False)
    return groups


# ------------------------------------------------------------------------------------------------ the engine


def open_engine(
    checkpoint: str | Path, renderer: Renderer, cfg: RolloutConfig, logs: Path | None = None, wait: bool = True
) -> Engine:
    """Open the engine that the config describes: SGLang at `server_gpus` or `urls`, else this process, with its GPU if it has
    one. With `wait=False` servers may still be starting: call `wait_until_ready`."""
    if cfg.server_gpus or cfg.urls:
        flags = cfg.server_args
        if cfg.server_gpus:
            flags = (*server_flags(checkpoint, cfg.max_context, cfg.server_gpus, cfg.tensor_parallel), *flags)
        engine = SGLang(
            checkpoint, renderer, gpus=cfg.server_gpus, urls=cfg.urls, server_args=flags,
            tensor_parallel=cfg.tensor_parallel, logs=logs,
        )  # fmt: skip
        if wait:
            engine.wait_until_ready()
        return engine
    import torch  # which a client of servers does not need

    from runtime.inprocess import InProcess

    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    return InProcess(checkpoint, renderer, device=device, dtype=dtype, max_batch_tokens=cfg.max_batch_tokens)


# ------------------------------------------------------------------------------------------------ on disk


def dump(episode: Episode, file: TextIO, renderer: Renderer) -> None:
    """Write one line of JSON: exact ids, the text for people, and the frames' times (their pixels stay in the video)."""

    def record_of(trajectory: Trajectory) -> dict:
        times = {name: times_of(getattr(trajectory, name)) for name in ("prompt_frames", "call_frames")}
        return vars(trajectory) | times | {"text": renderer.decode(renderer.compact(trajectory.ids))}

    calls = []
    for call in episode.calls:
        calls.append(vars(call) | {"subagent": call.subagent and record_of(call.subagent)})
    record = vars(episode) | {"task": vars(episode.task), "main": record_of(episode.main), "calls": calls}
    file.write(json.dumps(record) + "\n")
    file.flush()


def times_of(clips: Sequence[Frames]) -> list[list[float]]:
    return [list(clip.times) for clip in clips]


def keep_episodes(groups: Sequence[Group], renderer: Renderer, path: Path) -> None:
    """Write all episodes of the groups into a file of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for group in groups:
            for episode in group.episodes:
                dump(episode, file, renderer)


def load_episodes(path: str | Path, videos: Videos | None = None, contract=None) -> list[Episode]:
    """Read the episodes of a file. With videos, their frames are decoded again; without, there are none."""
    return [episode_of(json.loads(line), videos, contract) for line in Path(path).read_text("utf-8").splitlines()]


def episode_of(record: dict, videos: Videos | None, contract: VisualContract | None) -> Episode:
    """Rebuild the episode of a record that `dump` wrote."""
    _check_fields(record, Episode)
    _check_fields(record["main"].keys() - {"text"}, Trajectory)
    fields = record["task"]
    task = Task(**fields | {"videos": tuple(fields["videos"]), "options": tuple(fields["options"])})
    prompt_frames = []
    if videos and record["main"]["prompt_frames"]:  # it has none if its own video could not be read
        prompt_frames = data.overview(task, record["k"], videos, contract)
    calls, call_frames = [], []
    for fields in record["calls"]:
        _check_fields(fields, Call)
        call = Call(**fields | {"window": fields["window"] and tuple(fields["window"]), "subagent": None})
        # The recorded call runs again, for its frames.
        clips = []
        if videos and not call.error:
            result = run_tool(call, task, tuple(TOOLS), videos, contract)
            if isinstance(result, ClipForSubagent):
                clips = [result.frames]
        # They were shown to a sub-agent, or else to the main agent itself.
        if fields["subagent"]:
            call.subagent = _trajectory_of(fields["subagent"], clips, [], videos)
        else:
            call_frames += clips
        calls.append(call)
    main = _trajectory_of(record["main"], prompt_frames, call_frames, videos)
    return Episode(**record | {"task": task, "main": main, "calls": calls})


def _trajectory_of(record: dict, prompt_frames: list, call_frames: list, videos: Videos | None) -> Trajectory:
    recorded = record["prompt_frames"] + record["call_frames"]
    if videos and times_of(prompt_frames + call_frames) != recorded:
        raise ContractError(f"the video's frames now have other times than the {recorded} that were recorded")
    turns = [tuple(turn) for turn in record["turns"]]
    fields = record | {"prompt_frames": prompt_frames, "call_frames": call_frames, "turns": turns}
    del fields["text"]
    return Trajectory(**fields)


def _check_fields(names: Iterable[str], kind: type) -> None:
    """Refuse the record of a version in which the type had other fields."""
    differ = set(names) ^ kind.__dataclass_fields__.keys()
    if differ:
        told = f"whose {kind.__name__} has other fields ({', '.join(sorted(differ))})"
        raise DataError(f"an episode of another version of this code, {told}: read it with that version, or run again")
