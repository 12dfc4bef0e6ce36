"""rewards.py: every reward term and the structural tokens, as pure functions of an episode.

    R = R_acc + w_fmt * R_fmt + w_tool * R_tool                       score(episode, renderer, cfg) -> {part: value}
    struct(o) = the sampled tokens that carry the tags                structural_mask(trajectory, renderer) -> [bool]

Only the assistant's turns are read, the forced `<think>\\n` included; of a tool call only the fact counts (which call ran,
with what outcome), never the text that came back. The *last* complete `<answer>` is the answer.

    python rewards.py "<think>\\nI look.\\n</think>\\n<answer>B</answer>" --answer B --kind mcq     the reward lab

Deliberately missing: advantages and losses (grpo.py), a learned reward model. The only I/O is the optional judge.
"""

import argparse
import collections
import hashlib
import json
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data import Episode, Group, Task, Trajectory
from runtime.answers import normalise, parse_letter, parse_span
from runtime.contract import END_OF_TURN, Renderer

TAG = re.compile(r"</?(?:think|tool_call|answer)>")
THINK = re.compile(r"<think>(.*?)</think>", re.S)
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.S)
STAMP = r"<[\d.]+ seconds>"  # of frames (VisualContract.stamp), which may be quoted; any other `<` is a broken tag
PLAIN = rf"(?:[^<]|{STAMP})*"
NON_EMPTY = rf"<answer>(?!\s*</answer>){PLAIN}</answer>"
PARTS = ("reward", "acc", "fmt", "tool", "anchor", "strict")
SPAM = {"think": 3, "answer": 3, "tool_call": 32}  # more of one tag in a turn is spam, and the episode earns nothing


@dataclass(frozen=True)
class Anchor:
    """Selective Anchoring: R_anchor = alpha * closed + beta * flow - gamma * unclosed."""

    credit: Literal["struct", "sequence", "logp", "off"] = "struct"
    """Who is credited: only structural tokens (the paper's idea), all tokens (the released code: R_anchor is part of
    R_fmt), the log-prob of structural tokens as an objective of its own (the project page), or nobody."""
    alpha: float = 0.4
    beta: float = 0.3
    gamma: float = 0.3
    scale: float = 0.5
    """The paper's lambda."""


@dataclass(frozen=True)
class Judge:
    """An OpenAI-compatible chat endpoint that grades open answers."""

    url: str = ""
    model: str = ""
    timeout: float = 30.0
    retries: int = 3
    cache: str = ""
    """JSONL of verdicts by content; empty: none is kept."""


@dataclass(frozen=True)
class RewardConfig:
    """What an episode earns."""

    w_fmt: float = 1.0
    w_tool: float = 1.0
    """Both 0: accuracy-only GRPO."""
    answer_suffix: bool = True
    """Exploration Anchoring's weights for the answer's tags; false: the plain ones."""
    anchor: Anchor = Anchor()
    open_answer: Literal["f1", "exact", "judge"] = "f1"
    untagged_answer: bool = False
    """Without an <answer>, accept what follows "the answer is". Off in training, but for runs that say so."""
    judge: Judge = field(default_factory=Judge)

    def __post_init__(self):
        if self.open_answer == "judge" and not (self.judge.url and self.judge.model):
            raise ValueError("open_answer = 'judge': needs judge.url and judge.model")
        if self.anchor.credit == "sequence" and not self.w_fmt:
            raise ValueError(
                "anchor.credit = 'sequence' is paid through R_fmt, and w_fmt = 0 pays nothing: raise w_fmt"
            )


class JudgeError(RuntimeError):
    """The judge gave no verdict. The episode is dropped from the loss and counted: it is never a zero."""


# ------------------------------------------------------------------------------------------------ the whole


def score(episode: Episode, renderer: Renderer, cfg: RewardConfig) -> dict[str, float]:
    """All parts by name; `reward` is their sum. Raises JudgeError if a judge was asked for and failed."""
    turns = turn_texts(episode.main, renderer)
    if spam := tag_spam(turns):
        return dict.fromkeys(PARTS, 0.0) | {f"spam_{spam}": 1.0}
    acc = accuracy(final_answer(turns, cfg.untagged_answer), episode.task, cfg)
    anchor = anchor_reward(turns, cfg.anchor)
    parsed = {call.turn for call in episode.calls if call.error != "unparseable"}
    fmt = format_reward(turns, parsed, cfg.answer_suffix)
    # f is logged with the anchor in every credit mode; only `sequence` pays it through R_fmt.
    f = min(1.0, fmt + cfg.anchor.scale * anchor)
    paid = f if cfg.anchor.credit == "sequence" else fmt
    tool = tool_reward(episode, acc)
    return {
        "reward": acc + cfg.w_fmt * paid + cfg.w_tool * tool,
        "acc": acc,
        "fmt": f,
        "tool": tool,
        "anchor": anchor,
        "strict": float(strict(turns)),
        **closure(turns),
    }


def closure(turns: list[str]) -> dict[str, float]:
    """Per tag that was opened, the share that was closed: what Format Fragility loses first."""
    counts = collections.Counter(TAG.findall("".join(turns)))
    return {f"closure/{tag}": min(1.0, counts[f"</{tag}>"] / n) for tag in SPAM if (n := counts[f"<{tag}>"])}


def give_rewards(groups: Sequence[Group], renderer: Renderer, cfg: RewardConfig) -> int:
    """Score every episode that ran; returns how many the judge failed on. Those earn nothing, not zero."""

    def give(group: Group) -> int:
        lost = 0
        for episode in [episode for episode in group.episodes if not episode.error]:
            try:
                episode.reward = score(episode, renderer, cfg)
            except JudgeError as error:
                lost += 1
                episode.error = f"JudgeError: {error}"
        return lost

    with ThreadPoolExecutor(16) as pool:  # judges take seconds
        return sum(pool.map(give, groups))


def turn_texts(trajectory: Trajectory, renderer: Renderer) -> list[str]:
    """The assistant's turns as text: a forced <think>, and `<|im_end|>` where it was sampled, included. (The release
    reads sampled tokens alone, so that a forced <think> earns nothing.)"""
    return [renderer.decode(trajectory.ids[a:b]) for a, b in trajectory.turns]


def tag_spam(turns: list[str]) -> str:
    """The name of a tag that some turn repeats beyond reason, or ""."""
    for turn in turns:
        counts = collections.Counter(TAG.findall(turn))
        for name, most in SPAM.items():
            if max(counts[f"<{name}>"], counts[f"</{name}>"]) > most:
                return name
    return ""


def final_answer(turns: list[str], untagged: bool = False) -> str | None:
    """The content of the last complete <answer>; without one, if `untagged`, what follows the last turn's last "answer
    is" or "answer:" on its line."""
    for turn in reversed(turns):
        if found := ANSWER.findall(turn):
            return found[-1].strip()
    last = turns[-1].replace(END_OF_TURN, "") if untagged and turns else ""
    found = re.match(r".*answer\s*(?:is|:)[ \t]*([^\n]+)", last, re.I | re.S)
    return found[1] if found else None


# ------------------------------------------------------------------------------------------------ R_acc


def accuracy(answer: str | None, task: Task, cfg: RewardConfig) -> float:
    """mcq: letters equal; tvg: temporal IoU; oe: token F1, exact match or the judge. No answer: 0."""
    if not answer:
        return 0.0
    if task.kind == "mcq":
        return float(parse_letter(answer, task.options) == task.answer.strip("() .").upper())
    if task.kind == "tvg":
        span, gold = parse_span(answer), parse_span(task.answer)
        return iou(span, gold) if span and gold else 0.0
    if cfg.open_answer == "judge":
        return ask_judge(task.question, task.answer, answer, cfg.judge)
    if cfg.open_answer == "exact":
        return float(normalise(answer) == normalise(task.answer))
    return token_f1(answer, task.answer)


def iou(a: tuple[float, float], b: tuple[float, float]) -> float:
    """|a n b| / |a u b| of two intervals of seconds."""
    overlap = max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
    union = (a[1] - a[0]) + (b[1] - b[0]) - overlap
    return overlap / union if union > 0 else 0.0


def token_f1(answer: str, gold: str) -> float:
    """F1 = 2PR / (P + R) over normalised words."""
    a, b = normalise(answer).split(), normalise(gold).split()
    common = (collections.Counter(a) & collections.Counter(b)).total()
    return 2 * common / (len(a) + len(b)) if common else 0.0


# ------------------------------------------------------------------------------------------------ R_fmt and R_anchor


def format_reward(turns: list[str], turns_with_calls: set[int], answer_suffix: bool) -> float:
    """R_fmt without its anchor: think + answer tags + think before a call + balance, at most 1."""
    think, opened, closed = (0.2, 0.3, 0.2) if answer_suffix else (0.3, 0.2, 0.1)
    value = think * any(len(t.strip()) >= 10 for turn in turns for t in THINK.findall(turn))
    answer_open = any(re.search(rf"<answer>\s*(?:[^<\s]|{STAMP})", turn) for turn in turns)
    value += opened * answer_open + closed * bool(final_answer(turns))
    value += 0.3 * any(re.search(r"<think>.*?</think>.*?<tool_c(?:all|ode)>", turns[i], re.S) for i in turns_with_calls)
    balanced = all(turn.count(f"<{tag}>") == turn.count(f"</{tag}>") for turn in turns for tag in SPAM)
    value += 0.1 * (balanced and value > 0)
    return min(1.0, value)


def anchor_reward(turns: list[str], anchor: Anchor) -> float:
    """R_anchor = alpha * [every turn closes its think] + beta * [flow] - gamma * [some think is never closed]

    flow: all of that, and the last turn is `... </think> ... <answer>non-empty</answer>` *and then ends*: without the
    end, `<answer>x</answer>x</answer>...` would earn it."""
    closed = bool(turns) and all(_think_state(turn) == "closed" for turn in turns)
    ending = rf"</think>(?:(?!{TAG.pattern}).)*{NON_EMPTY}\s*{re.escape(END_OF_TURN)}\Z"
    flow = closed and re.search(ending, turns[-1], re.S) is not None
    unclosed = any(_think_state(turn) == "open" for turn in turns)
    return anchor.alpha * closed + anchor.beta * flow - anchor.gamma * unclosed


def _think_state(turn: str) -> str:
    """closed | open | absent; a turn that closes what it never opened counts as absent."""
    depth = 0
    for tag in re.findall(r"</?think>", turn):
        if tag == "</think>" and depth == 0:
            return "absent"
        depth += 1 if tag == "<think>" else -1
    return "open" if depth else "closed" if "<think>" in turn else "absent"


def strict(turns: list[str]) -> bool:
    """Every turn is exactly think + calls, the last exactly think + answer, nothing else but white space. Sequential
    dispatch ends a turn with its first call, before the model could."""
    think, end = rf"\s*<think>{PLAIN}</think>\s*", re.escape(END_OF_TURN)
    calls = re.compile(rf"{think}(?:<tool_call>\s*\{{[^<]*\}}\s*</tool_call>\s*)+(?:{end})?")
    answer = re.compile(rf"{think}{NON_EMPTY}\s*{end}")
    return bool(turns) and all(map(calls.fullmatch, turns[:-1])) and bool(answer.fullmatch(turns[-1]))


# ------------------------------------------------------------------------------------------------ R_tool


def tool_reward(episode: Episode, acc: float) -> float:
    """0.1 for a parseable call or 0.3 if one ran, + 0.5 if one ran and the answer scored.

    F1 and IoU must reach 0.5 to count as scored, or answering "the whole video" would."""
    if not any(call.error == "" for call in episode.calls):
        return 0.1 * any(call.error != "unparseable" for call in episode.calls)
    return 0.3 + 0.5 * (acc > 0 if episode.task.kind == "mcq" else acc >= 0.5)


# ------------------------------------------------------------------------------------------------ structural tokens


def structural_mask(trajectory: Trajectory, renderer: Renderer) -> list[bool]:
    """Per token of the trajectory: it was sampled, and it is structure.

    Structure is every token that overlaps a tag, found by character spans so that tags of several tokens count whole,
    and every end of a turn: one that comes too early breaks the structure, and one that comes in time completes it. (If
    only the early ones counted, nothing would teach the model to stop after </answer>.) A token that carries anything
    but white space besides the tag (`>B`) is left out: arguments, prose and answers are never touched."""
    chosen = [False] * len(trajectory.ids)
    for a, b in trajectory.turns:
        ids = trajectory.ids[a:b]
        text, spans = renderer.decode(ids), renderer.offsets(ids)
        tag_at = [False] * len(text)
        for tag in TAG.finditer(text):
            tag_at[tag.start() : tag.end()] = [True] * len(tag.group())
        for i, (start, end) in enumerate(spans):
            piece = range(start, min(end, len(text)))
            carries = any(tag_at[c] for c in piece) and all(tag_at[c] or text[c].isspace() for c in piece)
            chosen[a + i] = bool(trajectory.mask[a + i]) and (carries or ids[i] == renderer.end_of_turn)
    return chosen


# ------------------------------------------------------------------------------------------------ the judge

JUDGE_PROMPT = (
    "Question: {question}\nReference answer: {gold}\nGiven answer: {answer}\n\n"
    "Does the given answer say the same as the reference? Reply with one word: yes or no."
)


def ask_judge(question: str, gold: str, answer: str, cfg: Judge) -> float:
    """1 or 0 from the judge, or JudgeError; verdicts are cached by everything that shaped them."""
    import requests

    prompt = JUDGE_PROMPT.format(question=question, gold=gold, answer=answer)
    key = hashlib.sha256(f"{cfg.url}\0{cfg.model}\0{prompt}".encode()).hexdigest()
    cache = Path(cfg.cache) if cfg.cache else None
    if cache and cache.exists():
        for line in cache.read_text().splitlines():
            if key in line and line.endswith("}"):  # whole: others may be writing
                return json.loads(line[line.rindex("{") :])["verdict"]  # what stands before it, nobody ended
    body = {"model": cfg.model, "temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": prompt}]}
    said = ""
    for attempt in range(cfg.retries):
        try:
            reply = requests.post(f"{cfg.url.rstrip('/')}/chat/completions", json=body, timeout=cfg.timeout)
            reply.raise_for_status()
            said = str(reply.json()["choices"][0]["message"]["content"])
        except (requests.RequestException, ValueError, KeyError, IndexError) as error:
            said = repr(error)
        else:
            if verdict := re.match(r"\W*(yes|no)\b", said, re.I):
                value = float(verdict[1].lower() == "yes")
                if cache:
                    cache.parent.mkdir(parents=True, exist_ok=True)
                    with cache.open("a") as file:
                        file.write(json.dumps({"key": key, "verdict": value}) + "\n")
                return value
        time.sleep(min(2.0**attempt, cfg.timeout) if attempt + 1 < cfg.retries else 0)
    raise JudgeError(f"{cfg.url}: no yes or no after {cfg.retries} tries; the last reply: {said[:200]}")


# ------------------------------------------------------------------------------------------------ the reward lab


class Characters:
    """A renderer whose tokens are single characters (and the end of turn): the lab needs no checkpoint."""

    end_of_turn = 0x10FFFF

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text.replace(END_OF_TURN, chr(self.end_of_turn))]

    def decode(self, ids: list[int]) -> str:
        return "".join(END_OF_TURN if i == self.end_of_turn else chr(i) for i in ids)

    def offsets(self, ids: list[int]) -> list[tuple[int, int]]:
        spans, start = [], 0
        for i in ids:
            spans.append((start, start := start + len(self.decode([i]))))
        return spans


def stage(turns: list[str], task: Task, renderer, executed: int = 0, forced: str = "") -> Episode:
    """An episode whose main agent said `turns`, as rollout.py would have recorded it; the first `executed` calls ran."""
    from tools import parse_calls

    main = Trajectory([], [], [], [], [], 0)
    calls = []
    for i, turn in enumerate(turns):
        start = len(main.ids)
        prefix = renderer.encode(forced) if forced and turn.startswith(forced) else []
        ids = prefix + renderer.encode(turn[len(forced) :] if prefix else turn)
        main.ids += ids
        main.mask += [0] * len(prefix) + [1] * (len(ids) - len(prefix))
        main.turns.append((start, len(main.ids)))
        calls += parse_calls(turn, i)
    for i, call in enumerate(calls):
        call.error = call.error or ("" if i < executed else "failed")
    return Episode(task, 64, main, calls)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("turns", nargs="+", metavar="TEXT", help="what the assistant says, one argument per turn")
    parser.add_argument("--answer", required=True, help="the gold answer")
    parser.add_argument("--kind", choices=("mcq", "tvg", "oe"), default="mcq")
    parser.add_argument("--executed", type=int, default=0, help="how many of the calls ran")
    parser.add_argument("--truncated", action="store_true", help="the last turn was cut off before its end-of-turn")
    parser.add_argument("--model", default="", help="paint the tokens of this checkpoint's tokenizer, not characters")
    args = parser.parse_args()
    renderer = Characters()
    if args.model:
        from runtime.checks import find_tokenizer
        from runtime.contract import VisualContract, load_tokenizer

        try:
            renderer = Renderer(load_tokenizer(find_tokenizer(args.model)), VisualContract())
        except (ValueError, FileNotFoundError) as error:
            sys.exit(f"error: {error}")
    turns = [turn.replace("\\n", "\n") + END_OF_TURN for turn in args.turns]
    if args.truncated:
        turns[-1] = turns[-1].removesuffix(END_OF_TURN)
    episode = stage(turns, Task("lab", "", (), args.kind, args.answer), renderer, args.executed)
    for name, value in score(episode, renderer, RewardConfig()).items():
        note = "  with lambda x anchor, which only credit `sequence` pays here" if name == "fmt" else ""
        print(f"{name:>10} {value:6.2f}{note}")
    paint = sys.stdout.isatty()
    for token, structural in zip(episode.main.ids, structural_mask(episode.main, renderer), strict=True):
        mark = ("\033[7m{}\033[0m" if paint else "[{}]") if structural else "{}"
        print(mark.format(renderer.decode([token])), end="")
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
