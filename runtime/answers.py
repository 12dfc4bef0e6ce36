"""answers.py: find a model's answer, read it, and score it against the gold, for rewards and evaluations.

    text = final_answer(turns)                      # the last complete <answer> of the last turn, after its last </think>
    said, score = score_answer(text, task)          # said: a letter (mcq), a span of seconds (tvg), or the text (oe)

A wrong reading is worse than none. A letter is read by these rules, and the first one that names a letter decides:
1. The text is one option's text. "The answer is" may stand before it.
2. Letters that the text denies, quotes ("B says") or gives as a reason ("since B fits") count in no rule below; nor do the
   lines of a list of options, if several are left.
3. The last label after a word that chooses, on its line and with only marks between: "answer is B", "so option B".
4. The last label before "is correct", "is right" or "is best".
5. A label at the beginning, before a mark or the line's end. Not if the text goes on with "wait", "maybe", "perhaps", "could" or
   "might".
6. The only capital letter that stands alone.
A label is a letter that stands alone. A small letter and I are labels only before a mark or the line's end, or after "option".
In "A or B", neither letter is a label. A is an article before a word in lower case, where no word stands before it or only
"is" or "be"; but not before a word that follows labels, as in "A fits" and "A since".

A span is read by these:
1. The only two times of a text are a span.
2. Of more times, the last two that are written as a range are: "12.5 - 20.1", "from 3 to 5".
3. There is no span if the text says that it cannot tell, denies this range ("not 3 - 5") or offers several ("3 - 5 or 12 - 20").
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

from episode import Task
from runtime.render import END_OF_TURN, TAG_PIECE

LETTERS = "ABCDEFGHIJ"  # of options


def letters_of(options: Sequence[str]) -> tuple[str, ...]:
    """Return the letters that can be the answer: one per option, or all ten if the options are unknown."""
    return tuple(LETTERS[: len(options) or None])


# ------------------------------------------------------------------------------------------------ the text of the answer

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.S)
STATED = re.compile(r".*answer\s*(?:is|:)[ \t]*([^\n]+)", re.I | re.S)  # the last "answer is", to the end of its line
CALL_BLOCK = re.compile(r"<(tool_call|tool_code)>.*?(?:</\1>|\Z)", re.S)


def final_answer(texts: list[str], untagged: str = "off") -> str | None:
    """Return the content of the last complete <answer> in the last turn, after its last </think>. If there is none, return
    what `untagged` accepts. Under `off` and `fallback`, a turn whose thought is never closed has no answer."""
    if not texts:
        return None
    turn = texts[-1].replace(END_OF_TURN, "")
    after_thought = turn.rpartition("</think>")[2]
    if "<think>" in after_thought and untagged in ("off", "fallback"):
        return None
    answer = last_answer(after_thought)
    if answer is None:
        answer = untagged_answer(turn, after_thought, untagged)
    return answer


def last_answer(text: str) -> str | None:
    """Return the content of the last complete <answer> in the text."""
    answers = ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def untagged_answer(turn: str, after_thought: str, untagged: str) -> str | None:
    """Return the answer of a turn without a complete <answer>. RewardConfig.untagged_answer explains the four modes."""
    if untagged == "off":
        return None
    if untagged == "stated":
        stated = STATED.match(after_thought)
        return stated[1] if stated else None

    # The other two read the text beside calls and tags.
    prose = TAG_PIECE.sub(" ", CALL_BLOCK.sub(" ", after_thought)).strip()
    if untagged == "fallback":
        if "</think>" not in turn:  # without a thought, only the last line can answer, as in the release
            prose = prose.rpartition("\n")[2]
        return statement(prose) or prose or None
    if "<think>" in after_thought:  # an open thought: its prose is no answer
        return statement(prose)
    return prose or None


def statement(text: str) -> str | None:
    """Return what follows the last "answer is" or "answer:" on its line, if it has a word."""
    stated = STATED.match(text)
    return stated[1] if stated and re.search(r"\w", stated[1]) else None


def unboxed(text: str) -> str:
    """Return the content of the text's last \\boxed{}, or the whole text, without \\text{} and dollar signs."""
    text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}|\$", r"\1", text)  # "$0.5 \text{m}$" -> "0.5 m"
    text = unicodedata.normalize("NFKC", text)  # "１２．５" -> "12.5"
    boxes = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)  # "\boxed{B}", with braces in it one level deep
    return (boxes[-1] if boxes else text).strip()


# ------------------------------------------------------------------------------------------------ its score


class JudgeError(RuntimeError):
    """The judge gave no verdict. The episode is counted and left out of the loss. It does not score 0."""


Judge = Callable[[str, str, str], float]  # (question, gold, answer) -> 1.0 or 0.0; may raise JudgeError


def score_answer(
    text: str | None, task: Task, open_answer: str = "f1", judge: Judge | None = None
) -> tuple[str | tuple[float, float] | None, float]:
    """Read the text, and compare what it says with the task's answer. Return both: a letter, a span or the text (None: it
    cannot be read), and a score from 0 to 1. `open_answer`: f1 of the words, exact match, or the judge's verdict."""
    gold = task.answer
    if not text:
        return None, 0.0
    if task.kind == "mcq":
        letter = parse_letter(text, task.options)
        return letter, float(letter == gold)
    if task.kind == "tvg":
        span = parse_span(text)
        gold_span = parse_span(gold)
        return span, iou(span, gold_span) if span and gold_span else 0.0
    if open_answer == "judge":
        assert judge is not None, "open_answer = judge, without a judge"
        return text, judge(task.question, gold, text)
    if open_answer == "exact":
        return text, float(normalise(text) == normalise(gold))
    return text, token_f1(text, gold)


def iou(a: tuple[float, float], b: tuple[float, float]) -> float:
    # IoU = |a n b| / |a u b|, of two intervals in seconds
    overlap = max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
    union = (a[1] - a[0]) + (b[1] - b[0]) - overlap
    return overlap / union if union > 0 else 0.0


def token_f1(answer: str, gold: str) -> float:
    # F1 = 2PR / (P + R) = 2 * common / (words of a + words of b), over normalised words
    a, b = words_of(answer), words_of(gold)
    common = (Counter(a) & Counter(b)).total()
    return 2 * common / (len(a) + len(b)) if common else 0.0


# ------------------------------------------------------------------------------------------------ letters

# A letter that stands alone: "Bob", "B's", "A/B" and "D.C." have none. A Chinese character may touch it: "选B".
_WORD = r"[^\W\u4e00-\u9fff]"
_START = rf"(?<!{_WORD})(?<!\w[/.'-])"
_END = rf"(?!{_WORD}|[/'-]\w|\.\w\.)"
_MARK = r"(?=[).:]|\s*(?m:$))"  # a mark or the line's end follows
# "A man", "The answer is A man"; but not "A fits", "The answer is A since he runs", "Option A shows a man".
_NOUN = (
    r"(?= (?!(?:is|was|fits|matches|shows|describes|seems"
    r"|and|or|because|since|as|for|from|in|with|at|by|here|which|based|given|due|according)\b)[a-z])"
)
_ARTICLE = rf"(?:(?<!\w )|(?<=is )|(?<=be )|(?<='s ))A{_NOUN}"
_LETTER = rf"{_START}(?:[A-HJ]|I{_MARK}){_END}"
_AND = r"\)?(?:,? (?:and|or|nor) |, ?|[、和或\s])"
_LETTERS = rf"{_LETTER}(?:{_AND}{_LETTER}){{0,9}}"  # "A, B and C"
# A label: "B", "b)"; not the letters of "A or B".
_LABEL = rf"(?<!\band )(?<!\bor ){_START}([A-HJ]|[Ia-j]{_MARK}){_END}(?!{_AND}{_LETTER})"

# Rule 1. What may stand before an option's text: "The answer is", "**Final answer:**".
LEAD = r"(?i:\A[\W_]{0,5}(?:the )?(?:\w+ )?(?:answer|option|choice)(?: is\b|\W?:)[\s:*_]{0,5})"
# Rule 2. Letters that do not count, and a line of a list of options.
_DROPPED = (
    rf"(?:(?i:(?:\b(?:not|neither|rather than|because|since) |n't )(?:option )?)|不[是选]){_LETTERS}"  # "isn't A", "不是A"
    rf"|{_LETTERS}[):]?(?: is| are| can be)?"  # "A is wrong", "A and B are false", "A can be excluded", "A: no", "A ✗"
    r"(?: (?:not|never|no|wrong|incorrect|false|(?:ruled )?out|excluded|says|[✗❌])(?!\w)|n't)"  # "A isn't shown"
    rf"|{_LETTERS}(?:选?项)? ?[均都]?[不错]"  # "A错", "A和C都不对", "A项不正确"
)
_LISTED = rf"(?m)^[^\w\n]{{0,6}}({_LETTER})[).:].*$"  # "- A. red"
# Rule 3. A label after a word that chooses. Qwen's models sometimes answer an English question in Chinese.
_CHOSEN = (
    r"(?:(?i:(?:answer|choice|option)(?: is| \w{1,6} be|\W?:)"  # "answer is B", "choice must be B", "Answer: B"
    r"|\b(?:choose|go(?:ing)? with|so|thus|hence|therefore))"  # "choose B", "go with (B)", "So, B"
    rf"|答案[是为]?|选择?)[^\w\n]{{0,6}}(?i:option )?{_LABEL}"  # "答案是B", "选B"; "so option B"
)
# Rule 4. A label that is called right: "B is the correct answer".
_RIGHT = rf"{_LABEL}\)? is (?:the )?(?:correct|right|best)"
# Rule 5. A label at the beginning: "(b)", "B. Vitamin C"; but not "B... wait, no".
_BEGINS = rf"\A\W{{0,5}}(?=\w{_MARK}){_LABEL}(?!(?s:.*)(?i:\b(?:wait|maybe|perhaps|could|might)\b))"


def parse_letter(text: str, options: tuple[str, ...] = ()) -> str | None:
    """Return the letter of the option that the text names, or None."""
    text = unboxed(text).replace("*", "").strip()  # "**B**" -> "B"

    # Rule 1: the text is one option's text. A single letter is a label, even if it is an option's text.
    said = re.sub(LEAD, "", text).strip(" .").lower()
    same = [letter for letter, option in zip(LETTERS, options) if option.strip(" .").lower() == said]
    if len(same) == 1 and not re.fullmatch("[a-j]", said):
        return same[0]

    # Articles become small and labels become capital: "A man" -> "a man", "option b" -> "option B", "(B)" -> "B)".
    text = re.sub(_ARTICLE, "a", text)
    text = re.sub(rf"(?<=[Oo]ption )[a-j]\b(?!{_NOUN})", lambda letter: letter[0].upper(), text)
    text = re.sub(r"\(([A-J])\)", r"\1)", text)

    # Rule 2: drop the letters that do not count, and the lines of a list.
    text = re.sub(_DROPPED, " ", text)
    if len(set(re.findall(_LISTED, text))) > 1:
        text = re.sub(_LISTED, "", text)

    # Rules 3 to 5: the first that finds labels decides, by its last one.
    labels = re.findall(_CHOSEN, text) or re.findall(_RIGHT, text) or re.findall(_BEGINS, text)

    # Rule 6: only one letter stands alone.
    alone = set(re.findall(_LETTER, text))
    if not labels and len(alone) == 1:
        labels = list(alone)
    letter = labels[-1].upper() if labels else None
    return letter if letter in letters_of(options) else None


# ------------------------------------------------------------------------------------------------ spans

_NUMBER = r"\d{1,7}(?:\.\d{1,9})?"
_NOT_IN_WORD = r"(?i)(?<![a-z\d.])"  # no "B12"
_TIME = rf"{_NOT_IN_WORD}({_NUMBER}(?::{_NUMBER}){{0,2}})(?: ?s(?:ec(?:ond)?s?)?)?(?![a-z\d%]|\.\d)"  # "5 s", "1:05"
_MINUTES = (
    rf"{_NOT_IN_WORD}(?<!\d:)({_NUMBER})(?:"
    rf"(?: ?m(?:in(?:ute)?s?)?(?![a-z])|分钟?)(?:(?: and | )?({_NUMBER}))?"  # "2 min", "2分", "2 min 5 s"
    rf"|(?= ?(?:-|to|and) ?{_NUMBER} ?min))"  # the 2 of "2 to 3 min"
)
# No times: "lasts 3 s", "frames 2, 3"; but in "frames 2-5, 10 - 12 s" two are.
_NO_TIMES = rf"(?i)\blasts {_NUMBER}|\bframes? \d+(?:(?:,|-| to) ?\d+(?! ?-| ?s(?:ec|\b)|[.:]?\d)){{0,9}}"
_HERE = "\ua4d4"  # stands for a time; a letter that no answer contains
_TWO_TIMES = rf"{_HERE}[^{_HERE}]*{_HERE}"
_RANGE = (
    rf"(?m){_HERE}\W{{0,4}}(?:[-–]|to)\W{{0,4}}{_HERE}|between {_HERE} and {_HERE}"  # "12.5 - 20.1", "from 3 to 5"
    rf"|[\[(:] ?{_HERE}, ?{_HERE}(?:[\])]|$)"  # "[3, 5]", "(3, 5)", "Answer: 3, 5"
)


def parse_span(text: str) -> tuple[float, float] | None:
    """Return a span in seconds. None: the text names no range, says that it cannot tell, or offers several."""
    masked, times = mark_times(text)

    # Rules 1 and 2: find the ranges.
    ranges = list(re.finditer(_TWO_TIMES if len(times) == 2 else _RANGE, masked))
    if not ranges or re.search(r"(?i)cannot|can't|unable|unclear", masked):
        return None

    # Rule 3: refuse "not 3 - 5", "3 - 5 or 12 - 20" and "3 s or 5 s".
    before = masked[: ranges[-1].start()]
    if re.search(r"(?i)(?:\b(?:not|nothing|and|or)|或)\W*(?:from |between )?\Z", before) or " or " in ranges[-1][0]:
        return None
    first = before.count(_HERE)
    start, end = times[first], times[first + 1]
    return (start, end) if start <= end else None


def mark_times(text: str) -> tuple[str, list[float]]:
    """Return the text with a mark in place of each time, and the times in seconds: "1:05 to 69 s" has 65 and 69."""
    text = re.sub(_NO_TIMES, " ", unboxed(text).replace(_HERE, " "))
    text = re.sub(_MINUTES, lambda time: f"{time[1]}:{time[2] or 0}", text)  # "2 min 5 s" -> "2:5 s"
    times = []
    for clock in re.findall(_TIME, text):
        seconds = 0.0
        for part in clock.split(":"):
            seconds = 60 * seconds + float(part)
        times.append(seconds)
    return re.sub(_TIME, _HERE, text), times


# ------------------------------------------------------------------------------------------------ words

# Scripts without spaces between words: Thai to Khmer, kana, Han.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_SPELLED = str.maketrans({"→": "->", "←": "<-", "⇒": "=>", "≤": "<=", "≥": ">=", "≠": "!=", "−": "-", "^": ""})
_OPERATOR = r"(?:<->|->|=>|<-|<=|>=|!=|[<>])"  # stands between two words that it compares or joins
# Signs that carry meaning, as in "12.5", "-5", "AB+" and "x>y". All others are dropped, except marks of a letter.
_SIGNS = (
    rf"((?<=\d)\.(?=\d)|(?<![\w.)])-(?=\.?\d)|(?<=\w)\+{{1,2}}(?!\w)|(?<=\w){_OPERATOR}(?=[\w-]))"
    r"|[^\w\s\u0300-\u036f\u064b-\u065f\u0900-\u109f\u1780-\u17ff]"
)


def normalise(text: str) -> str:
    """Return the text in lower case without punctuation and articles. A text of articles alone is kept."""
    text = unboxed(text).lower().translate(_SPELLED)
    text = re.sub(r"<([\d.]+ seconds)>", r"\1", " ".join(text.split()))  # a frame's stamp
    text = re.sub(rf"(?<=\w) ?({_OPERATOR}) ?(?=[\w-])", r"\1", text)  # "x > y" is one word and differs from "y > x"
    words = re.sub(_SIGNS, lambda sign: sign[1] or " ", text).split()
    text = " ".join([word for word in words if word not in ("a", "an", "the")] or words)
    return re.sub(r"\b(\d+)(?=[^\W\d_])", r"\1 ", text)  # "0.5m" equals "0.5 m"


def words_of(text: str) -> list[str]:
    """Return the words of the normalised text, or the single characters of a script without spaces."""
    return re.sub(rf"([{_UNSPACED}])", r" \1 ", normalise(text)).split()
