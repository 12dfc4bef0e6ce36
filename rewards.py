"""rewards.py: the reward of an episode, and the tokens that Selective Anchoring credits.

    R        = R_acc + w_fmt * R_fmt + w_tool * R_tool
    R_acc    = the answer's score against the gold (runtime/answers.py)
    R_fmt    = min(0.9, s) + 0.1 * [flawless],   s = weights of a thought, a tagged answer, a thought before calls
    R_tool   = 0.1 for a parsed or 0.3 for an executed call, + 0.5 if the answer is then correct
    R_anchor = alpha * closed + beta * flow - gamma * unpaired,   for the tokens in struct(o) only

    score(episode, renderer, cfg, judge) -> {part: value}    all of these by name
    structural_mask(trajectory, renderer) -> [0 or 1]        struct(o): tags, ends of turns, white space after a tag
    assign_rewards(groups, renderer, cfg, judge)             writes both into the episodes

`score` is a pure function of an episode, apart from a judge. It reads only the assistant's turns, including the forced
`<think>\\n`. For a tool call it checks whether the call ran, and never reads the text it returned.

    python -m study.lab TEXT --answer B                      score any text, term by term

Deliberately missing: a learned reward model, and any I/O. If a judge scores open answers, the caller passes it in.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from episode import Episode, Group, Trajectory
from runtime.answers import Judge, JudgeError, final_answer, score_answer
from runtime.engine import Api, map_in_threads
from runtime.render import END_OF_TURN, TAG, TAG_PIECE, TAGS_AND_CODE, Renderer

# The keys of what `score` returns. Add a new part in two places: here, and in the dict that `score` returns.
PARTS = ("R", "R_acc", "R_fmt", "R_tool", "f", "R_anchor", "well_formed")
# A turn with more opening or closing tags of one kind is spam: its episode gets R = 0 and R_anchor = -gamma.
TAG_LIMITS = {"think": 3, "answer": 3, "tool_call": 32}
MIN_THOUGHT = 10  # letters or digits, of any script; a shorter thought earns nothing
# Weights of the terms of R_fmt, without and with the paper's Answer Suffix. "answer" is opening tag + closing tag.
FORMAT_WEIGHTS = {
    False: {"think": 0.3, "answer": 0.2 + 0.1, "think_before_call": 0.3},
    True: {"think": 0.2, "answer": 0.3 + 0.2, "think_before_call": 0.3},
}
CALL_JSON = re.compile(r"\s*\{.*\}\s*", re.S)
Elements = list[str]  # the tags and texts of one turn, as split_turn returns them


@dataclass(frozen=True)
class Anchor:
    """Selective Anchoring: which tokens get R_anchor's advantage, and its weights."""

    credit: Literal["struct", "off"] = "struct"
    """struct: structural tokens get the advantage of R_anchor. off: R_anchor is only logged, and the last 0.1 of R_fmt is also paid
    for balanced tags, as in the release."""
    alpha: float = 0.4
    beta: float = 0.3
    gamma: float = 0.3
    lam: float = 0.5
    """lambda: scales the advantage of R_anchor. (The metric f always has the default weights.)"""


@dataclass(frozen=True)
class RewardConfig:
    """Weights and options of the reward."""

    w_fmt: float = 1.0
    w_tool: float = 1.0
    """With both at 0, R is accuracy alone."""
    answer_suffix: bool = True
    """true: Exploration Anchoring's higher weights for the answer's tags. false: the plain weights."""
    anchor: Anchor = Anchor()
    open_answer: Literal["f1", "exact", "judge"] = "f1"
    """R_acc of an open question: the F1 of the answer's words, an exact match, or a judge's verdict."""
    untagged_answer: Literal["off", "stated", "fallback", "prose"] = "off"
    """The answer of a last turn without a complete <answer>.
    off: none.
    stated: the text after "answer is" or "answer:". The toy's accuracy-only runs need it.
    fallback: the text after </think>; if it contains "answer is", only what follows. Without </think>: the last line.
    prose, in evaluation only: all text after </think>; of a thought that is never closed, only what follows "answer is".
    Under stated and prose, an answer inside a thought that is never closed counts as well, with or without tags."""
    judge: Api = Api(key="", timeout=30.0)
    """The chat endpoint that grades open answers, for open_answer = judge."""

    def __post_init__(self):
        if self.open_answer == "judge" and not (self.judge.url and self.judge.model):
            raise ValueError("open_answer = 'judge' needs judge.url and judge.model: set both")


DEFAULT = RewardConfig()  # the weights of the metric f

# ------------------------------------------------------------------------------------------------ R


def score(episode: Episode, renderer: Renderer, cfg: RewardConfig, judge: Judge | None = None) -> dict[str, float]:
    """Return all parts by name, or raise JudgeError. f is only a metric: R does not contain it."""
    # Split the turns into tags and text. Tag spam scores 0.
    texts = turn_texts(episode.main, renderer)
    turns = [split_turn(text) for text in texts]
    if any(is_spam(turns, name) for name in TAG_LIMITS):
        return score_of_spam(cfg)

    # Score the answer and the calls.
    tagged_answer = final_answer(texts)
    answer = tagged_answer
    if tagged_answer is None:
        answer = final_answer(texts, cfg.untagged_answer)
    _, acc = score_answer(answer, episode.task, cfg.open_answer, judge)
    tool = tool_reward(episode, acc)

    # Score the format. Without a call, R_fmt is at most 0.8, or 0.7 with the plain weights.
    # R_fmt = min(0.9, s) + 0.1 * [flawless]
    turns_that_called = {call.turn for call in episode.calls if not call.error}
    s = format_terms(turns, bool(tagged_answer), turns_that_called, cfg.answer_suffix)
    fmt = min(0.9, s) + 0.1 * is_flawless(turns, s, cfg.anchor)

    # f = min(0.9, s + lambda * R_anchor) + 0.1 * [well formed], with the default weights, whatever the run's are. So f has
    # the same scale in all runs.
    s_default = format_terms(turns, bool(tagged_answer), turns_that_called, DEFAULT.answer_suffix)
    f = min(0.9, s_default + DEFAULT.anchor.lam * anchor_reward(turns, DEFAULT.anchor)) + 0.1 * well_formed(turns)
    return {
        # R = R_acc + w_fmt * R_fmt + w_tool * R_tool
        "R": acc + cfg.w_fmt * fmt + cfg.w_tool * tool,
        "R_acc": acc,
        "R_fmt": fmt,
        "R_tool": tool,
        "f": f,
        "R_anchor": anchor_reward(turns, cfg.anchor),
        "well_formed": float(well_formed(turns)),
    }


def score_of_spam(cfg: RewardConfig) -> dict[str, float]:
    """Return the parts of a spam episode. They are 0, but R_anchor is the penalty for unpaired think tags. Otherwise spamming
    would beat leaving a thought open."""
    parts = dict.fromkeys(PARTS, 0.0)
    parts["R_anchor"] = -cfg.anchor.gamma
    parts["f"] = -DEFAULT.anchor.lam * DEFAULT.anchor.gamma
    return parts


def assign_rewards(groups: Sequence[Group], renderer: Renderer, cfg: RewardConfig, judge: Judge | None = None) -> None:
    """Write the rewards and struct(o) of every episode that ran. If the judge fails, the episode gets an error instead."""

    def give(episode: Episode) -> None:
        episode.main.structural = structural_mask(episode.main, renderer)
        try:
            parts = score(episode, renderer, cfg, judge)
            # Records are JSON, which cannot hold numbers of numpy or torch.
            episode.rewards = {name: float(value) for name, value in parts.items()}
        except JudgeError as error:
            episode.fail(error)

    # In threads, because a judge takes seconds per answer. list() raises what a thread raised.
    list(map_in_threads(give, [episode for group in groups for episode in group.ran], at_once=16))


def turn_texts(trajectory: Trajectory, renderer: Renderer) -> list[str]:
    """Return the assistant's turns as text, including a forced <think>. (The release omits it, so it earns nothing there.)
    A sampled end of turn becomes `<|im_end|>`, whichever end token of the checkpoint it was."""
    texts = []
    for start, end in trajectory.turns:
        ids = trajectory.ids[start:end]
        if ids and ids[-1] in renderer.ends_of_turn and trajectory.mask[end - 1] == 1:
            texts.append(renderer.decode(ids[:-1]) + END_OF_TURN)
        else:
            texts.append(renderer.decode(ids))
    return texts


# ------------------------------------------------------------------------------------------------ R_fmt, R_anchor, R_tool


def format_terms(turns: list[Elements], tagged: bool, turns_that_called: set[int], answer_suffix: bool) -> float:
    """Return s, the weights that the turns earn. `tagged`: the final answer is in <answer> tags.

    The release computes min(1, s + 0.1 * [s > 0 and all tags balanced]). With calls, s alone can reach 1, and broken tags cost
    nothing. Capping s at 0.9 gives well-formed text the same score, and any flaw costs 0.1."""
    # s = w_think * [every turn thinks] + w_answer * [the final answer is tagged and not empty]
    #     + w_think_before_call * [calls ran, and every turn with such a call thinks before its first call]
    weights = FORMAT_WEIGHTS[answer_suffix]
    thinks = bool(turns) and all(thought_ends(turn) for turn in turns)
    thinks_before_calls = bool(turns_that_called) and all(thinks_before_call(turns[i]) for i in turns_that_called)
    s = weights["think"] * thinks
    s += weights["answer"] * tagged
    s += weights["think_before_call"] * thinks_before_calls
    return s


def is_flawless(turns: list[Elements], s: float, anchor: Anchor) -> bool:
    """Return whether R_fmt pays its last 0.1. Under `struct`, the text must be well formed. That needs a thought, which the
    release does not ask of plain GRPO. So under `off`, balanced tags suffice."""
    if anchor.credit == "struct":
        return well_formed(turns)
    return s > 0 and all(tags_pair(turn, name) for turn in turns for name in (*TAG_LIMITS, "tool_code"))


def thinks_before_call(turn: Elements) -> bool:
    """Return whether the first thought ends before the first call begins."""
    calls = [i for i, element in enumerate(turn) if element in ("<tool_call>", "<tool_code>")]
    ends = thought_ends(turn)
    return bool(calls and ends) and ends[0] < calls[0]


def well_formed(turns: list[Elements]) -> bool:
    """Return whether every turn is a thought and then calls, and the last one a thought, an answer and the end of the turn. Only
    white space may stand between these parts. The shapes are, for example,

        <think> text </think> <tool_call> json </tool_call> end
        <think> text </think> <answer> text </answer> end

    A thought and an answer may contain any text, and a call any {...}, without a tag or a piece of one. A thought may be
    empty, an answer may not. A call need not run. A turn with calls needs no end of turn, because sequential dispatch stops at
    </tool_call>."""
    think = "<think>( text)? </think>"
    calls = re.compile(f"{think}( <tool_call> json </tool_call>)+( end)?")
    answer = re.compile(f"{think} <answer> text </answer> end")
    shapes = [shape_of(turn) for turn in turns]
    return bool(shapes) and all(map(calls.fullmatch, shapes[:-1])) and bool(answer.fullmatch(shapes[-1]))


def anchor_reward(turns: list[Elements], anchor: Anchor) -> float:
    # R_anchor = alpha * [closed] + beta * [flow] - gamma * [in some turn the think tags do not pair]
    # closed: all think tags pair, and every turn has a thought.
    # flow: closed, and the last turn ends with </think>, no other tag, <answer>text</answer> and the end of the turn.
    # The paper subtracts gamma only for a <think> that is never closed. A surplus </think> would then be cheaper, and the policy
    # learns to write it. So any unpaired think tag costs gamma.
    paired = all(tags_pair(turn, "think") for turn in turns)
    closed = bool(turns) and paired and all(thought_ends(turn) for turn in turns)
    flow = closed and re.search(r"</think>( \w+)* <answer> text </answer> end$", shape_of(turns[-1])) is not None
    return anchor.alpha * closed + anchor.beta * flow - anchor.gamma * (not paired)


def tool_reward(episode: Episode, acc: float) -> float:
    """Return R_tool. An answer scored by F1 or IoU is correct from 0.5 on. Above 0 even the answer "the whole video" would
    be correct."""
    # R_tool = 0.1 if a call parsed, or 0.3 if one ran
    #        + 0.5 if one ran before the last turn, so its report could be read, and the answer is correct
    parsed = any(call.error != "unparseable" for call in episode.calls)
    if not episode.n_executed:
        return 0.1 * parsed
    answering = len(episode.main.turns) - 1
    informed = any(call.turn < answering for call in episode.calls if not call.error)
    correct = acc > 0 if episode.task.kind == "mcq" else acc >= 0.5
    return 0.3 + 0.5 * (informed and correct)


# ------------------------------------------------------------------------------------------------ the elements of a turn


def split_turn(text: str) -> Elements:
    """Split a turn into elements: tags, the texts between them, and the end of the turn. Drop texts of white space only.

    "<think>\\nI see it.\\n</think>\\n<answer>B</answer><|im_end|>"
    -> "<think>", "\\nI see it.\\n", "</think>", "<answer>", "B", "</answer>", "<|im_end|>" """
    elements = re.split(f"({'|'.join(TAGS_AND_CODE)})", text.removesuffix(END_OF_TURN))
    if text.endswith(END_OF_TURN):
        elements.append(END_OF_TURN)
    return [element for element in elements if element.strip()]


def shape_of(turn: Elements) -> str:
    """Return the turn with each text as one word: `<think> text </think> <answer> text </answer> end`. A text that contains
    a piece of one of our tags, such as `</think`, becomes `broken`. The {...} of a call becomes `json`."""
    words = []
    for i, element in enumerate(turn):
        if element in TAGS_AND_CODE:
            words.append(element)
        elif element == END_OF_TURN:
            words.append("end")
        elif TAG_PIECE.search(element):
            words.append("broken")
        elif i > 0 and turn[i - 1] == "<tool_call>" and CALL_JSON.fullmatch(element):
            words.append("json")
        else:
            words.append("text")
    return " ".join(words)


def tags_pair(turn: Elements, name: str) -> bool:
    """Return whether every tag of this name is closed before the next one opens, and none closes unopened."""
    tags = [element for element in turn if element in (f"<{name}>", f"</{name}>")]
    return tags == [f"<{name}>", f"</{name}>"] * (len(tags) // 2)


def thought_ends(turn: Elements) -> list[int]:
    """Return the index of each </think> that closes a thought of at least MIN_THOUGHT letters or digits."""
    ends = []
    thinking = False
    letters = 0
    for i, element in enumerate(turn):
        if element == "<think>":
            thinking = True
        elif element == "</think>":
            if letters >= MIN_THOUGHT:
                ends.append(i)
            thinking = False
            letters = 0
        elif thinking and element not in TAGS_AND_CODE:
            letters += sum(char.isalnum() for char in element)  # dots and zero-width spaces do not count
    return ends


def is_spam(turns: list[Elements], name: str) -> bool:
    """Return whether a turn has more opening or more closing tags of this name than its limit."""
    return any(max(turn.count(f"<{name}>"), turn.count(f"</{name}>")) > TAG_LIMITS[name] for turn in turns)


# ------------------------------------------------------------------------------------------------ struct(o)

# A structural token in the marks of `mark_characters`. It holds no content, and punctuation only before a closing tag: Qwen has
# single tokens `.</` and `。</`, and sampling one decides to close.
STRUCTURAL_TOKEN = re.compile(
    "_*<[</_]*"  # part of an opening tag: `<think>`, `>\n`; but not `.<`, `>(`, `>B`
    "|[_.]*/[</_]*"  # part of a closing tag: `</think>`, `.</`; but not `>,`
    "|(?<=/)_+"  # white space, and the mark before it ends a closing tag: `\n`
)


def structural_mask(trajectory: Trajectory, renderer: Renderer) -> list[int]:
    """Return for each token of the trajectory 1 if it was sampled and is structural, else 0.

    Three kinds of tokens are structural. The first overlaps a tag and carries no content. The second is white space right
    after a closing tag: the model decides there not to close again. The third is every end of a turn: ending too early breaks
    the structure. If the right end got no credit, the model would not learn to stop after </answer>."""
    mask = [0] * len(trajectory.ids)
    for start, end in trajectory.turns:
        ids = trajectory.ids[start:end]
        marks = mark_characters(renderer.decode(ids))
        for i, (first, last) in enumerate(renderer.offsets(ids)):
            structural = ids[i] in renderer.ends_of_turn or STRUCTURAL_TOKEN.fullmatch(marks, first, last)
            mask[start + i] = 1 if structural and trajectory.mask[start + i] == 1 else 0
    return mask


def mark_characters(text: str) -> str:
    """Return one mark for each character of a turn:

        I see.</think> <answer>(B) red</answer>
        x_xxx.////////_<<<<<<<<xx._xxx/////////

    `<` is part of an opening tag, `/` of a closing tag, `_` white space, `.` punctuation or a symbol, and `x` content. The first
    character after an opening tag and white space is content, even if it is a bracket or a dot."""
    marks = ["x"] * len(text)
    for i, char in enumerate(text):
        if char.isspace():
            marks[i] = "_"
        elif unicodedata.category(char)[0] in "PS":  # punctuation marks and symbols
            marks[i] = "."
    for tag in TAG.finditer(text):
        is_closing = tag[0].startswith("</")
        marks[tag.start() : tag.end()] = ["/" if is_closing else "<"] * len(tag[0])
        first = len(text) - len(text[tag.end() :].lstrip())  # after the tag and white space
        if first < len(text) and not is_closing:
            marks[first] = "x"
    return "".join(marks)
