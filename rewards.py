"""rewards.py: every term of the reward and the structural tokens, as pure functions of an episode.

    score(episode, renderer, cfg) -> {part: value}           R = R_acc + w_fmt * R_fmt + w_tool * R_tool
    structural_mask(trajectory, renderer) -> [bool]          struct(o), the tokens that Selective Anchoring credits

Only the assistant's turns are read, the forced `<think>\\n` included; of a tool call only whether it ran, never the
text that came back. The answer is the last complete `<answer>` of the last turn, after its last `</think>`.

    python -m study.lab TEXT --answer B                      what any text earns, term by term

Deliberately missing: a learned reward model, and any I/O. Open answers are judged by a judge that is handed in.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from data import Episode, Group, Task, Trajectory
from runtime.answers import LETTERS, listed_options, normalise, parse_letter, parse_span, words_of
from runtime.judge import Judge, JudgeConfig, JudgeError
from runtime.render import END_OF_TURN, Renderer

TAG = re.compile(r"</?(?:think|tool_call|answer)>")
THINK = re.compile(r"<think>(.*?)</think>", re.S)
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.S)
PLAIN = r"(?:[^<]|<(?=[ =\d]))*"  # `<12.5 seconds>` and `x < 5` may be said; any other `<` is a broken tag
NON_EMPTY = rf"<answer>(?!\s*</answer>){PLAIN}</answer>"
PARTS = ("R", "R_acc", "f", "R_fmt", "R_tool", "R_anchor", "well_formed")
MIN_THOUGHT = 10  # letters or digits, of any script; a shorter thought earns nothing
# More of one tag in a turn is spam, and the episode earns nothing.
TAG_LIMITS = {"think": 3, "answer": 3, "tool_call": 32}


@dataclass(frozen=True)
class Anchor:
    """Selective Anchoring: R_anchor = alpha * closed + beta * flow - gamma * unpaired."""

    credit: Literal["struct", "sequence", "off"] = "struct"
    """struct: the advantage of R_anchor, at structural tokens only (the paper's idea). sequence: lambda * R_anchor inside
    R_fmt, so all tokens (the released code). off: no credit."""
    alpha: float = 0.4
    beta: float = 0.3
    gamma: float = 0.3
    lam: float = 0.5
    """lambda, a word that Python keeps to itself."""


@dataclass(frozen=True)
class RewardConfig:
    """What an episode earns."""

    w_fmt: float = 1.0
    w_tool: float = 1.0
    """Both 0: accuracy-only GRPO."""
    answer_suffix: bool = True
    """Exploration Anchoring's weights of the answer's tags; false: the plain weights."""
    anchor: Anchor = Anchor()
    open_answer: Literal["f1", "exact", "judge"] = "f1"
    untagged_answer: bool = False
    """Without an <answer>, accept what follows "the answer is". The toy's accuracy-only runs need it."""
    judge: JudgeConfig = JudgeConfig()

    def __post_init__(self):
        if self.open_answer == "judge" and not (self.judge.url and self.judge.model):
            raise ValueError("open_answer = 'judge': needs judge.url and judge.model")
        if self.anchor.credit == "sequence" and not self.w_fmt:
            raise ValueError("anchor.credit = 'sequence' is paid inside R_fmt, and w_fmt = 0 pays nothing: raise w_fmt")


# ------------------------------------------------------------------------------------------------ R


def score(episode: Episode, renderer: Renderer, cfg: RewardConfig, judge: Judge | None = None) -> dict[str, float]:
    """Return all parts by name, or raise JudgeError. `f` is the paper's f = R_fmt + lambda * R_anchor (1 at most), logged in
    every credit mode; `R_fmt` is what R pays for format: f under credit `sequence`, else the paper's R_fmt alone."""
    turns = turn_texts(episode.main, renderer)
    spam = tag_spam(turns)
    if any(spam.values()):
        # Spam scores 0 and gets the penalty of an open think. Otherwise spamming would beat leaving a think open.
        lost = {"R_anchor": -cfg.anchor.gamma, "f": -cfg.anchor.lam * cfg.anchor.gamma}
        if cfg.anchor.credit == "sequence":  # which pays R_anchor within R
            lost |= {"R_fmt": lost["f"], "R": cfg.w_fmt * lost["f"]}
        return dict.fromkeys(PARTS, 0.0) | lost | spam | closure(turns)

    acc = accuracy(final_answer(turns, cfg.untagged_answer), episode.task, cfg, judge)
    anchor = anchor_reward(turns, cfg.anchor)
    turns_that_called = {call.turn for call in episode.calls if not call.error}
    r_fmt, f = format_rewards(turns, turns_that_called, cfg.answer_suffix, cfg.anchor.lam * anchor)
    if cfg.anchor.credit == "sequence":
        r_fmt = f  # R pays R_anchor as well
    tool = tool_reward(episode, acc)
    parts = {
        # R = R_acc + w_fmt * R_fmt + w_tool * R_tool
        "R": acc + cfg.w_fmt * r_fmt + cfg.w_tool * tool,
        "R_acc": acc,
        "f": f,
        "R_fmt": r_fmt,
        "R_tool": tool,
        "R_anchor": anchor,
        "well_formed": float(well_formed(turns)),
    }
    return parts | spam | closure(turns)


def give_rewards(groups: Sequence[Group], renderer: Renderer, cfg: RewardConfig, judge: Judge | None = None) -> None:
    """Score every episode that ran. One on which the judge failed gets an error, not a reward."""

    def give(episode: Episode) -> None:
        try:
            episode.rewards = score(episode, renderer, cfg, judge)
        except JudgeError as error:
            episode.error = f"JudgeError: {error}"

    ran = [episode for group in groups for episode in group.episodes if not episode.error]
    with ThreadPoolExecutor(16) as pool:  # a judge takes seconds
        list(pool.map(give, ran))


def turn_texts(trajectory: Trajectory, renderer: Renderer) -> list[str]:
    """Return the assistant's turns as text, a forced <think> included. (The release leaves it out, so it earns nothing.)
    A sampled end of turn is written `<|im_end|>`, whichever token of the checkpoint's list it was."""
    texts = []
    for start, end in trajectory.turns:
        ids, ending = trajectory.ids[start:end], ""
        if ids and ids[-1] in renderer.ends_of_turn and trajectory.mask[end - 1] == 1:
            ids, ending = ids[:-1], END_OF_TURN
        texts.append(renderer.decode(ids) + ending)
    return texts


def final_answer(turns: list[str], untagged: bool = False) -> str | None:
    """Return what is answered in the last turn, after its last </think>: the content of the last complete <answer>.
    Without one, if `untagged`: what follows the last "answer is" or "answer:", to the end of its line."""
    if not turns:
        return None
    said = turns[-1].rpartition("</think>")[2]
    answer = last_answer(said)
    if answer is not None or not untagged:
        return answer
    found = re.match(r".*answer\s*(?:is|:)[ \t]*([^\n]+)", said.replace(END_OF_TURN, ""), re.I | re.S)
    return found[1] if found else None


def last_answer(text: str) -> str | None:
    """Return the content of the last complete <answer>, wherever it stands."""
    answers = ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def tag_spam(turns: list[str]) -> dict[str, float]:
    """Return for each tag 1 if some turn repeats it too often, else 0."""
    spam = {f"spam_{name}": 0.0 for name in TAG_LIMITS}
    for turn in turns:
        for name, limit in TAG_LIMITS.items():
            if max(turn.count(f"<{name}>"), turn.count(f"</{name}>")) > limit:
                spam[f"spam_{name}"] = 1.0
    return spam


def closure(turns: list[str]) -> dict[str, float]:
    """Return, for each tag that was opened, the share that was closed in its turn: Format Fragility shows here first.
    `surplus/TAG` counts the closing tags that exceed the opened ones of their turn."""
    rates = {}
    for name in TAG_LIMITS:
        opened, closed, surplus = 0, 0, 0
        for turn in turns:
            opening, closing = turn.count(f"<{name}>"), turn.count(f"</{name}>")
            opened += opening
            closed += min(opening, closing)
            surplus += max(0, closing - opening)
        if opened:
            rates[f"closure/{name}"] = closed / opened
        rates[f"surplus/{name}"] = float(surplus)
    return rates


# ------------------------------------------------------------------------------------------------ R_acc


def accuracy(answer: str | None, task: Task, cfg: RewardConfig, judge: Judge | None = None) -> float:
    """Return R_acc. mcq: letters equal; tvg: temporal IoU; oe: token F1, exact match or the judge. No answer: 0."""
    if not answer:
        return 0.0
    if task.kind == "mcq":
        gold = task.answer.strip("() .").upper()
        options = task.options or listed_options(task.question)  # published RL rows list them in the question alone
        if gold not in LETTERS[: len(options)]:  # not the list that was meant
            options = ()
        return float(parse_letter(answer, options) == gold)
    if task.kind == "tvg":
        span, gold = parse_span(answer), parse_span(task.answer)
        return iou(span, gold) if span and gold else 0.0
    if cfg.open_answer == "judge":
        return judge(task.question, task.answer, answer)
    if cfg.open_answer == "exact":
        return float(normalise(answer) == normalise(task.answer))
    return token_f1(answer, task.answer)


def iou(a: tuple[float, float], b: tuple[float, float]) -> float:
    # IoU = |a n b| / |a u b|, of two intervals of seconds
    overlap = max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
    union = (a[1] - a[0]) + (b[1] - b[0]) - overlap
    return overlap / union if union > 0 else 0.0


def token_f1(answer: str, gold: str) -> float:
    # F1 = 2PR / (P + R) = 2 * common / (words of a + words of b), over normalised words
    a, b = words_of(answer), words_of(gold)
    common = (Counter(a) & Counter(b)).total()
    return 2 * common / (len(a) + len(b)) if common else 0.0


# ------------------------------------------------------------------------------------------------ R_fmt


def format_rewards(
    turns: list[str], turns_that_called: set[int], answer_suffix: bool, anchor_term: float
) -> tuple[float, float]:
    """Return R_fmt and f. `anchor_term` is lambda * R_anchor."""
    # s     = w_think * [every turn thinks] + w_answer * [the final answer is tagged and not empty]
    #       + 0.3 * [a thought before the calls, in every turn whose calls ran]
    # R_fmt = min(0.9, s)                     + 0.1 * [s > 0 and all tags balanced]
    # f     = min(0.9, s + lambda * R_anchor) + 0.1 * [s > 0 and all tags balanced]
    # Balanced text scores as under the release's cap at 1, which hides every broken tag of an episode that calls.
    # w_answer: the release's weights of the opening and of the closing tag. Without a call, R_fmt is 0.8 at most.
    w_think, w_answer = 0.3, 0.2 + 0.1
    if answer_suffix:  # the paper's Answer Suffix
        w_think, w_answer = 0.2, 0.3 + 0.2

    thinks = bool(turns) and all(thought_ends(turn) for turn in turns)
    thinks_before_calls = bool(turns_that_called) and all(thinks_before_call(turns[i]) for i in turns_that_called)
    balanced = all(tags_pair(turn, name) for turn in turns for name in TAG_LIMITS)

    s = w_think * thinks
    s += w_answer * bool(final_answer(turns))
    s += 0.3 * thinks_before_calls
    bonus = 0.1 * (balanced and s > 0)
    return min(0.9, s) + bonus, min(0.9, s + anchor_term) + bonus


def tags_pair(turn: str, name: str) -> bool:
    """Return whether the tags of one kind open and close in turn: each one is closed before the next one opens."""
    tags = re.findall(f"</?{name}>", turn)
    return tags == [f"<{name}>", f"</{name}>"] * (len(tags) // 2)


def thought_ends(turn: str) -> list[int]:
    """Return where the turn's thoughts end: those that are closed and say something. An empty one is none."""
    ends = []
    for thought in THINK.finditer(turn):
        said = TAG.sub("", thought[1])
        if sum(char.isalnum() for char in said) >= MIN_THOUGHT:  # dots and zero-width spaces say nothing
            ends.append(thought.end())
    return ends


def thinks_before_call(turn: str) -> bool:
    ends, call = thought_ends(turn), re.search("<tool_c(?:all|ode)>", turn)
    return bool(ends) and call is not None and ends[0] <= call.start()


def well_formed(turns: list[str]) -> bool:
    """Return whether every turn is exactly think + calls, and the last exactly think + answer, with only white space
    between. The end of a turn may lack after a call: sequential dispatch stops there."""
    think, end = rf"\s*<think>{PLAIN}</think>\s*", re.escape(END_OF_TURN)
    calls = re.compile(rf"{think}(?:<tool_call>\s*\{{[^<]*\}}\s*</tool_call>\s*)+(?:{end})?")
    answer = re.compile(rf"{think}{NON_EMPTY}\s*{end}")
    return bool(turns) and all(map(calls.fullmatch, turns[:-1])) and bool(answer.fullmatch(turns[-1]))


# ------------------------------------------------------------------------------------------------ R_anchor, R_tool


def anchor_reward(turns: list[str], anchor: Anchor) -> float:
    # R_anchor = alpha * [every turn thinks and closes it] + beta * [flow] - gamma * [in some turn the think tags do not pair]
    # flow: closed, and the last turn ends with `</think> ... <answer>non-empty</answer>`, and with nothing after it.
    # The paper's gamma is for a think that is never closed. Closing one twice would then cost less, and training finds that.
    states = [think_state(turn) for turn in turns]
    closed = bool(turns) and all(state == "closed" for state in states)
    ending = rf"</think>(?:(?!{TAG.pattern}).)*{NON_EMPTY}\s*{re.escape(END_OF_TURN)}\Z"
    flow = closed and re.search(ending, turns[-1], re.S) is not None
    return anchor.alpha * closed + anchor.beta * flow - anchor.gamma * ("unpaired" in states)


def think_state(turn: str) -> str:
    """Return unpaired (one is left open, or one is closed that is not open), closed or absent. An empty thought is absent."""
    if not tags_pair(turn, "think"):
        return "unpaired"
    return "closed" if thought_ends(turn) else "absent"


def tool_reward(episode: Episode, acc: float) -> float:
    """Return R_tool. F1 and IoU must reach 0.5 to count as scored: answering "the whole video" would score otherwise."""
    # R_tool = 0.1 for a call that parses, or 0.3 for one that ran
    #        + 0.5 if its report was read before the last turn, and the answer there scored
    parsed = any(call.error != "unparseable" for call in episode.calls)
    if not episode.executed:
        return 0.1 * parsed
    answering = len(episode.main.turns) - 1
    informed = any(call.turn < answering for call in episode.calls if not call.error)
    scored = acc > 0 if episode.task.kind == "mcq" else acc >= 0.5
    return 0.3 + 0.5 * (informed and scored)


# ------------------------------------------------------------------------------------------------ struct(o)


def structural_mask(trajectory: Trajectory, renderer: Renderer) -> list[bool]:
    """Return, for each token of the trajectory, whether it was sampled and is structure.

    Three kinds of tokens are structure. The first overlaps a tag and carries no content. The second is white space right
    after a closing tag: it is the decision not to close again. The third is every end of a turn: an early end breaks the
    structure, and an end in time completes it, or nothing would teach the model to stop after </answer>."""
    chosen = [False] * len(trajectory.ids)
    for start, end in trajectory.turns:
        ids = trajectory.ids[start:end]
        text, spans = renderer.decode(ids), renderer.offsets(ids)
        kinds = kinds_of_characters(text)
        for i, (first, last) in enumerate(spans):
            structural = is_structural(kinds, first, last) or ids[i] in renderer.ends_of_turn
            chosen[start + i] = structural and trajectory.mask[start + i] == 1
    return chosen


def kinds_of_characters(text: str) -> list[str]:
    """Return what each character is: part of an opening or a closing tag, blank, punctuation or (all else) content."""
    kinds = ["content"] * len(text)
    for i, char in enumerate(text):
        if char.isspace():
            kinds[i] = "blank"
        elif unicodedata.category(char)[0] in "PS":  # punctuation marks and symbols
            kinds[i] = "punctuation"
    for tag in TAG.finditer(text):
        kind = "closing" if tag.group().startswith("</") else "opening"
        kinds[tag.start() : tag.end()] = [kind] * len(tag.group())
    return kinds


def is_structural(kinds: list[str], first: int, last: int) -> bool:
    """Return whether the token of characters [first, last) carries a tag and no content, or is white space that follows a
    closing tag.

        yes:  </think>   >\\n   .</   ]</           no:  >B   >(   >The   and .</ where `.` is all that the tag closes

    White space may share its token, and so may punctuation before a closing tag: Qwen has single tokens for `.</` and
    `。</`, and to sample one is to decide to close. A letter, a digit and the answer's first character may not."""
    if set(kinds[first:last]) == {"blank"}:
        return first > 0 and kinds[first - 1] == "closing"
    tag = ""  # the first one that the token touches
    for kind in kinds[first:last]:
        if kind in ("opening", "closing"):
            tag = tag or kind
        elif kind == "content" or (kind == "punctuation" and tag):
            return False
    if "punctuation" not in kinds[first:last]:
        return tag != ""

    # Punctuation before a closing tag, unless it is the first character of what the tag closes.
    before = first - 1
    while before >= 0 and kinds[before] == "blank":
        before -= 1
    return tag == "closing" and (before < 0 or kinds[before] != "opening")
