"""rollout.py: run the agent. One question in, one Episode out. Hundreds run at once, each in its own thread.

    context = AgentContext(engine, renderer, videos, cfg)
    groups = rollout(context, tasks, ks, group_size=8, seed=0, step=12)

The tokens of an episode and their mask (1: trained on):

    prompt     system, tools, K stamped frames, question           0
    turn       forced "<think>\\n"                                  0
               sampled: thoughts, then calls or the answer         1
    reports    one <tool_response> per call, in order, one turn    0
    turn       ...

Tokens are only appended: sampled ids exactly as the engine returned them, and the new ids of each tool turn. The calls of
a turn run in parallel threads. A call of crop_video decodes its window and asks a sub-agent, which has the same weights
and a fresh context. A failed call gives the model a text to read, and metrics count its Call.error. If the row, the video or the
engine fails, Episode.error_kind is set. Deliberately missing: rewards, and training.
"""

import functools
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakValueDictionary

from episode import NO_PROMPT, Call, Episode, Group, Prompt, Task, Trajectory
from runtime.config import refuse_below_1
from runtime.dataset import RowError, row_errors
from runtime.engine import Engine, EngineConfig, EngineError, Sample, run_all
from runtime.render import NO_REPORT, Rendered, Renderer
from runtime.video import Clip, VideoError, Videos
from runtime.visual import ContractError, VisualContract
from tools import ClipForSubagent, ToolError, parse_calls, refuse_unknown_tools, run_tool, schemas_of

# Texts that the main agent reads when a call did not run to its end, or when no more calls are allowed.
GIVEN_UP = "This call took too long and was given up."
OVER_LIMIT = "This call was not run: at most {} calls may run in one turn."
NO_CALLS_LEFT = "No calls are left. Give the final answer now."
MIN_TURN_TOKENS = 16  # room that the context must have left for another turn
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SubagentConfig:
    """The sub-agents, which look at crops."""

    max_new_tokens: int = 512
    """Longest report, in tokens."""
    temperature: float = 0.0
    """0: greedy."""
    train: bool = False
    """Train on their reports with the episode's advantage. The paper does not."""

    def __post_init__(self):
        refuse_below_1(self, "max_new_tokens")


@dataclass(frozen=True)
class RolloutConfig(EngineConfig):
    """How an agent runs, and which engine samples its tokens."""

    tools: tuple[str, ...] = ("crop_video",)
    """Tools that the main agent is offered, by their names in tools.py."""
    dispatch: Literal["parallel", "sequential", "none"] = "parallel"
    """parallel: all calls of a turn run at once. sequential: one call per turn, with the same total. none: no tools."""
    tool_return: Literal["subagent", "frames"] = "subagent"
    """What the main agent gets from a video tool: a sub-agent's report, or the frames themselves."""
    think_prefix: bool | None = True
    """Force `<think>` at the start of each turn of the main agent. null: in an evaluation, as in the checkpoint's training."""
    max_turns: int = 3
    """Rounds of calls. After the last one comes one more turn, the answer: 3 rounds make at most 4 turns. Under sequential, each
    call of a round takes a turn."""
    max_calls: int = 5
    """Calls that run in one turn. Further calls get an error text."""
    max_new_tokens: int = 2048
    """Longest turn, in tokens. A turn that is cut off ends the episode."""
    temperature: float = 0.7
    """Sampling temperature of the main agent. 0: greedy."""
    call_timeout: float = 600.0
    """Seconds until a call is given up: enough for its requests to try a second server."""
    subagents: SubagentConfig = SubagentConfig()

    def __post_init__(self):
        super().__post_init__()
        refuse_unknown_tools(self.tools)
        if self.dispatch != "none" and not self.tools:
            raise ValueError("tools = []: use `dispatch: none` for an agent without tools")
        for name in ("max_turns", "max_calls", "max_new_tokens", "max_context", "call_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive")

    @property
    def call_limits(self) -> tuple[int, int]:
        """The number of turns that may call tools, and of calls per turn."""
        if self.dispatch == "none":
            return 0, 0
        if self.dispatch == "sequential":
            return self.max_turns * self.max_calls, 1
        return self.max_turns, self.max_calls


@dataclass(frozen=True)
class AgentContext:
    """The objects that all agents of a rollout share."""

    engine: Engine
    renderer: Renderer
    videos: Videos
    cfg: RolloutConfig
    observe: Callable[[str, Any], None] = lambda event, what: None
    """Receives each event as it happens: ("turn", its text), ("clip", the Call), ("report", the Call). `ask` prints them."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Once it is set, no agent starts another turn."""
    subagent_prompts: WeakValueDictionary = field(default_factory=WeakValueDictionary)
    """What a sub-agent is shown -> its prompt, while an agent holds it. A prompt holds its frames, so their id is not reused."""
    prompt_lock: threading.Lock = field(default_factory=threading.Lock)


class Stopped(Exception):
    """The run is ending, so this episode was not finished."""


def derive_seed(*parts: Any) -> int:
    """Hash the parts to a seed, the same in every process."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


# ------------------------------------------------------------------------------------------------ one episode


def render_prompt(task: Task, k: int, context: AgentContext) -> Prompt:
    """Render a task's prompt, which all episodes of its group share."""
    cfg, renderer = context.cfg, context.renderer
    clips = overview(task, k, context.videos, renderer.contract)
    with_tools = cfg.dispatch != "none"
    messages = renderer.prompts.main_messages(
        task.question, task.videos, clips, renderer.contract, with_tools, cfg.tool_return
    )
    schemas = list(schemas_of(cfg.tools).values()) if with_tools else None
    return renderer.prompt(messages, schemas)


def overview(task: Task, k: int, videos: Videos, contract: VisualContract) -> list[Clip]:
    """Return K uniformly spaced frames, divided among the task's videos. Each video shows at least one."""
    lengths = [videos.info(path).n_frames for path in task.videos]
    shares = [0] * len(lengths)
    left = min(max(k, len(lengths)), sum(lengths))
    # Give one more frame to each video in turn. Longer videos get the share that a short one cannot fill.
    while left:
        for i, length in enumerate(lengths):
            if left and shares[i] < length:
                shares[i] += 1
                left -= 1
    return [videos.overview(path, share, contract.frame_size) for path, share in zip(task.videos, shares)]


def run_episode(context: AgentContext, task: Task, k: int, prompt: Prompt, seed: int) -> Episode:
    """Run one episode: the main agent calls tools and reads their results until it answers."""
    started = time.perf_counter()
    main = Trajectory(prompt)
    episode = Episode(task, k, main, seed=seed)
    turns_with_calls, calls_per_turn = context.cfg.call_limits
    try:
        for turn in range(turns_with_calls + 1):
            # The agent thinks, and then calls tools or answers.
            text = sample_main_turn(context, main, derive_seed(seed, turn))
            context.observe("turn", text)
            calls = parse_calls(text, turn)
            # A turn without calls is the answer. Calls in the last turn, or in a turn that was cut off, do not run.
            if not calls or turn == turns_with_calls or main.finish == "length":
                break
            # All calls of the turn run at the same time.
            calls, contents = run_calls(context, task, calls, calls_per_turn, derive_seed(seed, turn, "calls"))
            # The agent reads all results in one turn, in call order.
            if turn == turns_with_calls - 1:
                contents[-1].append(f"\n{NO_CALLS_LEFT}")
            if not append_rendered(context, main, context.renderer.continuation(contents)):
                break  # it never reads these results, so the calls do not count
            episode.calls += calls
    except (EngineError, VideoError, Stopped) as error:
        episode.fail(error)
    episode.seconds = time.perf_counter() - started
    return episode


def append_given(trajectory: Trajectory, ids: list[int]) -> None:
    """Append tokens that the model reads."""
    trajectory.ids += ids
    trajectory.mask += [0] * len(ids)
    trajectory.logprobs += [0.0] * len(ids)
    trajectory.versions += [-1] * len(ids)


def append_sampled(trajectory: Trajectory, sample: Sample) -> None:
    """Append tokens that the model wrote."""
    trajectory.ids += sample.ids
    trajectory.mask += [1] * len(sample.ids)
    trajectory.logprobs += sample.logprobs
    trajectory.versions += [sample.version] * len(sample.ids)
    trajectory.finish = sample.finish


def end_turn_at(trajectory: Trajectory, end: int) -> None:
    """Drop the sampled tokens from index `end` on, as if the model had stopped there. Nothing follows them yet."""
    for column in (trajectory.ids, trajectory.mask, trajectory.logprobs, trajectory.versions):
        del column[end:]
    trajectory.finish = "stop"


def append_rendered(context: AgentContext, trajectory: Trajectory, delta: Rendered) -> bool:
    """Append what the agent reads next. If the context has no room, append nothing, mark the previous turn as cut off and
    return False."""
    ids = delta.ids
    # A turn that stopped at another token, such as <|endoftext|> or </tool_call>, still needs the template's end of turn.
    if trajectory.ids[-1] != context.renderer.end_of_turn:
        ids = [context.renderer.end_of_turn, *ids]
    if trajectory.length + len(ids) + MIN_TURN_TOKENS > context.cfg.max_context:
        trajectory.finish = "length"
        return False
    append_given(trajectory, ids)
    trajectory.call_clips += delta.clips
    return True


def sample_main_turn(context: AgentContext, main: Trajectory, seed: int) -> str:
    """Append one sampled turn to the main agent's trajectory. Return its text, including a forced <think>."""
    cfg, renderer = context.cfg, context.renderer
    start = len(main.ids)
    if cfg.think_prefix:
        append_given(main, renderer.think_prefix)
    stop = renderer.ends_of_turn
    if cfg.dispatch == "sequential":
        stop += (renderer.end_of_call,)
    sample_turn(context, main, cfg.max_new_tokens, cfg.temperature, seed, stop)
    main.turns.append((start, len(main.ids)))
    return renderer.decode(main.ids[start:])


def sample_turn(
    context: AgentContext,
    trajectory: Trajectory,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stop: tuple[int, ...],
) -> None:
    """Sample at most `max_new_tokens` tokens, and append exactly the ids that the engine returned."""
    if context.stopped.is_set():
        raise Stopped("the run was ended")
    n, max_context = trajectory.length, context.cfg.max_context
    if n >= max_context:
        raise EngineError(f"a prompt of {n} tokens fills max_context = {max_context}; raise it")
    sample = context.engine.generate(
        trajectory.prompt,
        trajectory.ids,
        trajectory.call_clips,
        max_new_tokens=min(max_new_tokens, max_context - n),
        temperature=temperature,
        seed=seed,
        stop=stop,
    )
    forbidden = set(sample.ids) & set(context.renderer.never_sampled)
    if forbidden:
        raise ContractError(f"the engine sampled tokens {sorted(forbidden)}, which stand for pixels and are banned")
    append_sampled(trajectory, sample)


# ------------------------------------------------------------------------------------------------ its calls in parallel


def run_calls(
    context: AgentContext, task: Task, calls: list[Call], allowed: int, seed: int
) -> tuple[list[Call], list[list]]:
    """Run the calls of one turn in parallel. Return them with their outcomes, and the content that the main agent reads for
    each, both in call order."""
    # Calls that could not be parsed already have their error. Of the others, run the first `allowed`.
    jobs = {}
    for i, call in enumerate(calls):
        if not call.error and len(jobs) < allowed:
            jobs[i] = functools.partial(run_call, context, task, call, derive_seed(seed, i))
    # This thread is itself an episode's. A call may hang: it is given up after `call_timeout` seconds.
    results = run_all(context.engine, jobs, at_once=len(jobs), timeout=context.cfg.call_timeout, nested=True)

    # Give each call its outcome. `run_call` has reported those that ran.
    outcomes, contents = [], []
    for i, call in enumerate(calls):
        clips = []
        if i in results:
            call, clips = results[i]
        elif i in jobs:
            call = replace(call, error="timeout", text=GIVEN_UP, seconds=context.cfg.call_timeout)
        elif not call.error:
            call = replace(call, error="over_limit", text=OVER_LIMIT.format(allowed))
        if i not in results:
            context.observe("report", call)
        outcomes.append(call)
        contents.append([*clips, call.text])  # the main agent reads frames, if it gets any, and then the text
    return outcomes, contents


def run_call(context: AgentContext, task: Task, call: Call, seed: int) -> tuple[Call, list[Clip]]:
    """Run one call in its thread. Failures of the model, the video or the tool become the call's text. Return the call with
    its outcome, and the frames that the main agent gets (`tool_return: frames`)."""
    started = time.perf_counter()
    error = ""
    window = None
    subagent = None
    frames_for_main = []
    try:
        result = run_tool(call, task, context.cfg.tools, context.videos, context.renderer.contract)
        if isinstance(result, str):
            text = result
        else:
            window = result.window
            context.observe("clip", replace(call, window=window))
            if context.cfg.tool_return == "frames":
                frames_for_main = [result.frames]
                text = f"{len(result.frames)} frames from {window[0]:.1f} s to {window[1]:.1f} s"
            else:
                subagent, text = ask_subagent(context, result, seed)
    except ToolError as problem:
        error, text = problem.kind, str(problem)
    except EngineError as problem:
        # Rare, because a lost request goes to another server. The main agent goes on without this report.
        log.warning("a sub-agent could not answer: %s", problem)
        error, text = "engine", "The sub-agent could not answer."
    seconds = time.perf_counter() - started
    call = replace(call, text=text, error=error, window=window, seconds=seconds, subagent=subagent)
    context.observe("report", call)
    return call, frames_for_main


def ask_subagent(context: AgentContext, clip: ClipForSubagent, seed: int) -> tuple[Trajectory, str]:
    """Ask a sub-agent for a report: same weights, fresh context. It reads only these frames and the tool's request, not the
    question (as in the paper)."""
    cfg, renderer = context.cfg.subagents, context.renderer
    trajectory = Trajectory(subagent_prompt(context, clip))
    sample_turn(context, trajectory, cfg.max_new_tokens, cfg.temperature, seed, renderer.ends_of_turn)
    said = trajectory.ids
    trajectory.turns.append((0, len(said)))
    if trajectory.finish == "stop":
        said = said[:-1]  # without the end of turn
    return trajectory, renderer.decode(said).strip() or NO_REPORT


def subagent_prompt(context: AgentContext, clip: ClipForSubagent) -> Prompt:
    """Render a sub-agent's prompt, once for all sub-agents that see the same frames of a window and read the same words."""
    renderer = context.renderer
    shown = (id(clip.frames.pixels), clip.frames.times, clip.window, clip.request, clip.system)
    prompt = context.subagent_prompts.get(shown)
    if prompt is None:
        messages = renderer.prompts.subagent_messages(
            clip.frames, clip.window, renderer.contract, clip.request, clip.system
        )
        rendered = renderer.prompt(messages)
        with context.prompt_lock:  # the first of those that render it at the same time makes it
            prompt = context.subagent_prompts.setdefault(shown, rendered)
    return prompt


# ------------------------------------------------------------------------------------------------ many episodes


def rollout(
    context: AgentContext,
    tasks: Sequence[Task],
    ks: Sequence[int],
    group_size: int,
    seed: int = 0,
    step: int = 0,
    copies: Sequence[int] = (),
) -> list[Group]:
    """Run G episodes per task, at most `concurrency` at once. With the model in this process, the same seed and step give the
    same tokens. (SGLang ignores seeds without --enable-deterministic-inference.) `copies`: how many times each task has come
    before in this step. Its episodes then get other seeds."""
    groups = [Group(task, k, []) for task, k in zip(tasks, ks, strict=True)]
    copies = copies or [0] * len(groups)
    preparing = ThreadPoolExecutor(8, "prompt")
    jobs = {}
    try:
        for i, group in enumerate(groups):
            # Render the group's prompt once, ahead of its episodes.
            prompt = preparing.submit(prepare_prompt, context, group)
            for g in range(group_size):
                episode_seed = derive_seed(seed, step, group.task.id, copies[i] * group_size + g)
                jobs[i, g] = functools.partial(run_one, context, group, prompt, episode_seed)
        episodes = run_all(context.engine, jobs, context.cfg.concurrency)
    except BaseException:
        context.stopped.set()
        raise
    finally:
        preparing.shutdown(wait=False, cancel_futures=True)
    for (i, _), episode in episodes.items():
        groups[i].episodes.append(episode)
    return groups


def prepare_prompt(context: AgentContext, group: Group) -> Prompt:
    with row_errors():  # any exception becomes a RowError
        return render_prompt(group.task, group.k, context)


def run_one(context: AgentContext, group: Group, prompt: Future[Prompt], seed: int) -> Episode:
    """Run one episode of a group. Without a prompt, every episode of the group fails."""
    try:
        ready = prompt.result()
    except RowError as error:
        kind = "VideoError" if isinstance(error.__cause__, VideoError) else "RowError"
        return Episode(group.task, group.k, Trajectory(NO_PROMPT), seed=seed, error_kind=kind, error_text=str(error))
    return run_episode(context, group.task, group.k, ready, seed)
