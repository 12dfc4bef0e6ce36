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
engine fails, Episode.error_kind is set.

Deliberately missing: rewards, and training.
"""

import functools
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal
from weakref import WeakValueDictionary

from episode import NO_PROMPT, Call, Episode, Group, Prompt, Task, Trajectory
from runtime.dataset import RowError, row_errors
from runtime.engine import Engine, EngineConfig, EngineError, Sample, run_all, thread_pool
from runtime.render import NO_REPORT, Rendered, Renderer
from runtime.video import Clip, VideoError, Videos
from runtime.visual import ContractError, VisualContract
from tools import TOOLS, ClipForSubagent, ToolError, parse_calls, run_tool, schemas_of

Dispatch = Literal["parallel", "sequential", "none"]
# Texts that the main agent reads when a call did not run to its end, or when no more calls are allowed.
GIVEN_UP = "This call took too long and was given up."
UNREADABLE = "This part of the video could not be read."
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


@dataclass(frozen=True)
class RolloutConfig(EngineConfig):
    """How an agent runs, and which engine samples its tokens."""

    tools: tuple[Literal[*TOOLS], ...] = ("crop_video",)  # type: ignore[valid-type]  # mypy wants the words written out
    """Tools that the main agent is offered, by their names in tools.py."""
    dispatch: Dispatch = "parallel"
    """parallel: all calls of a turn run at once. sequential: one call per turn, with the same total. none: no tools."""
    tool_return: Literal["subagent", "frames"] = "subagent"
    """What the main agent gets from a video tool: a sub-agent's report, or the frames themselves."""
    think_prefix: bool | None = True
    """Force `<think>` at the start of each turn of the main agent. null: in an evaluation, as in the checkpoint's training."""
    max_rounds: int = 3
    """Rounds of calls. One more turn is the answer, so 3 rounds make at most 4 turns. Under sequential, each call of a round
    takes a turn."""
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
        if self.dispatch != "none" and not self.tools:
            raise ValueError("tools = []: use `dispatch: none` for an agent without tools")
        for name in ("max_new_tokens", "call_timeout"):  # with 0, no turn has a token, and every call is given up
            if getattr(self, name) == 0:
                raise ValueError(f"{name} = 0: set a larger number")


@dataclass(frozen=True)
class AgentContext:
    """The objects that all agents of a rollout share."""

    engine: Engine
    renderer: Renderer
    videos: Videos
    cfg: RolloutConfig
    observe: Callable[[str, str | Call], None] = lambda event, what: None
    """Receives each event as it happens: ("turn", its text), ("clip", the Call), ("report", the Call). `ask` prints them."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Once it is set, no agent starts another turn."""
    subagent_prompts: WeakValueDictionary = field(default_factory=WeakValueDictionary)
    """What a sub-agent is shown -> its prompt, while an agent holds it. A prompt holds its frames, so their id is not reused."""
    prompt_lock: threading.Lock = field(default_factory=threading.Lock)


class Stopped(Exception):
    """The run is ending, so this episode was not finished."""


def derive_seed(*parts: object) -> int:
    """Hash the parts to a seed, the same in every process."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


# ------------------------------------------------------------------------------------------------ the flow of an episode


@dataclass(frozen=True)
class Flow:
    """How a model converses: its turns, its calls and the replies. agent_flow is our agent's; evals/protocols.py has others."""

    rounds: int  # turns that may call tools; one more turn answers
    calls_per_turn: int  # how many run; further calls get an error text
    find_calls: Callable[[str, int], list[Call]]  # (text of a turn, its number) -> its calls
    # Run a call, with a seed, and return it with its outcome. It may raise a ToolError or a VideoError.
    use_tool: Callable[[AgentContext, Episode, Call, int], Call]
    # (calls with their outcomes, was this the last round?) -> the contents of the messages that the model reads next
    reply: Callable[[list[Call], bool], list[list]]
    role: str = "tool"  # of these messages
    closing: str = ""  # a turn also ends with this text
    think_prefix: bool = False  # force `<think>` at the start of each turn


def agent_flow(cfg: RolloutConfig) -> Flow:
    """Return the flow of our agent."""
    rounds = cfg.max_rounds
    calls_per_turn = cfg.max_calls
    closing = ""
    if cfg.dispatch == "none":
        rounds = 0
    if cfg.dispatch == "sequential":  # one call per turn, and as many in all
        rounds = cfg.max_rounds * cfg.max_calls
        calls_per_turn = 1
        closing = "</tool_call>"
    return Flow(
        rounds,
        calls_per_turn,
        find_calls=parse_calls,
        use_tool=look_closely,
        reply=report_all,
        closing=closing,
        think_prefix=bool(cfg.think_prefix),
    )


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


def run_episode(
    context: AgentContext, task: Task, k: int, prompt: Prompt, seed: int, flow: Flow | None = None
) -> Episode:
    """Run one episode: the main agent calls tools and reads their results until it answers. `flow`: None is our agent's."""
    started = time.perf_counter()
    flow = flow or agent_flow(context.cfg)
    main = Trajectory(prompt)
    episode = Episode(task, k, main, seed=seed)
    try:
        for turn in range(flow.rounds + 1):
            # The agent thinks, and then calls tools or answers.
            text = sample_main_turn(context, main, flow, derive_seed(seed, turn))
            context.observe("turn", text)
            calls = flow.find_calls(text, turn)
            # A turn without calls is the answer. Calls in the last turn, or in a turn that was cut off, do not run.
            if not calls or turn == flow.rounds or main.finish == "length":
                break
            # All calls of the turn run at the same time.
            calls = run_calls(context, flow, episode, calls, derive_seed(seed, turn, "calls"))
            # The agent reads all results in one turn, in call order.
            contents = flow.reply(calls, turn == flow.rounds - 1)
            if not append_rendered(context, main, context.renderer.continuation(contents, flow.role)):
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


def sample_main_turn(context: AgentContext, main: Trajectory, flow: Flow, seed: int) -> str:
    """Append one sampled turn to the main agent's trajectory. Return its text, including a forced <think>."""
    cfg, renderer = context.cfg, context.renderer
    start = len(main.ids)
    if flow.think_prefix:
        append_given(main, renderer.think_prefix)

    # If the closing tag is one token, the engine stops there.
    closing = tuple(renderer.encode(flow.closing))
    stop = renderer.ends_of_turn
    if len(closing) == 1:
        stop += closing
    sample_turn(context, main, cfg.max_new_tokens, cfg.temperature, seed, stop)

    # Otherwise the model runs on, and the turn is cut after the tag.
    text = renderer.decode(main.ids[start:])
    if len(closing) > 1 and flow.closing in text:
        text = text[: text.index(flow.closing) + len(flow.closing)]
        spans = renderer.offsets(main.ids[start:])
        kept = sum(first < len(text) for first, _ in spans)  # tokens that begin in the text
        end_turn_at(main, start + kept)
    main.turns.append((start, len(main.ids)))
    return text


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


def run_calls(context: AgentContext, flow: Flow, episode: Episode, calls: list[Call], seed: int) -> list[Call]:
    """Run the calls of one turn in parallel. Return them with their outcomes, in call order."""
    # Calls that could not be parsed already have their error. Of the others, run the first `calls_per_turn`.
    jobs: dict[int, Callable[[], Call]] = {}
    for i, call in enumerate(calls):
        if not call.error and len(jobs) < flow.calls_per_turn:
            jobs[i] = functools.partial(run_call, context, flow, episode, call, derive_seed(seed, i))
    # This thread is itself an episode's. A call may hang: it is given up after `call_timeout` seconds.
    finished = run_all(context.engine, jobs, at_once=len(jobs), timeout=context.cfg.call_timeout, nested=True)

    # Give the other calls their outcome.
    outcomes = []
    for i, call in enumerate(calls):
        if i in finished:
            outcomes.append(finished[i])
            continue
        if i in jobs:
            call = replace(call, error="timeout", text=GIVEN_UP, seconds=context.cfg.call_timeout)
        elif not call.error:
            call = replace(call, error="over_limit", text=OVER_LIMIT.format(flow.calls_per_turn))
        context.observe("report", call)
        outcomes.append(call)
    return outcomes


def run_call(context: AgentContext, flow: Flow, episode: Episode, call: Call, seed: int) -> Call:
    """Run one call in its thread, and return it with its outcome. Failures of the tool or the video become its text."""
    started = time.perf_counter()
    try:
        call = flow.use_tool(context, episode, call, seed)
    except ToolError as problem:
        call = replace(call, error=problem.kind, text=str(problem))
    except VideoError:
        call = replace(call, error="failed", text=UNREADABLE)
    call = replace(call, seconds=time.perf_counter() - started)
    context.observe("report", call)
    return call


def look_closely(context: AgentContext, episode: Episode, call: Call, seed: int) -> Call:
    """Run the tool, and let a sub-agent look at its frames. With `tool_return: frames`, the main agent sees them itself."""
    result = run_tool(call, episode.task, context.cfg.tools, context.videos, context.renderer.contract)
    if isinstance(result, str):
        return replace(call, text=result)
    call = replace(call, window=result.window)
    context.observe("clip", call)
    if context.cfg.tool_return == "frames":
        start, end = result.window
        text = f"{len(result.frames)} frames from {start:.1f} s to {end:.1f} s"
        return replace(call, text=text, clips=[result.frames])
    try:
        subagent, report = ask_subagent(context, result, seed)
    except EngineError as problem:
        # Rare, because a lost request goes to another server. The main agent goes on without this report.
        log.warning("a sub-agent could not answer: %s", problem)
        return replace(call, text="The sub-agent could not answer.", error="engine")
    return replace(call, text=report, subagent=subagent)


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


def report_all(calls: list[Call], last: bool) -> list[list]:
    """Answer each call by its frames, if it has any, and its text."""
    contents = [[*call.clips, call.text] for call in calls]
    if last:
        contents[-1].append(f"\n{NO_CALLS_LEFT}")
    return contents


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
    jobs = {}
    try:
        with thread_pool(8) as preparing:
            for i, group in enumerate(groups):
                # Render the group's prompt once, ahead of its episodes.
                prompt = preparing.submit(prepare_prompt, context, group)
                for g in range(group_size):
                    episode_seed = derive_seed(seed, step, group.task.id, copies[i] * group_size + g)
                    jobs[i, g] = functools.partial(run_one, context, group, prompt, episode_seed)
            episodes = run_all(context.engine, jobs, context.cfg.at_once)
    except BaseException:
        context.stopped.set()
        raise
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
