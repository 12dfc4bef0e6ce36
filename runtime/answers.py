"""answers.py: find a model's answer, read it, and score it against the gold, for rewards and evaluations.

    text = final_answer(turns)                      # the last complete <answer> of the last turn, after its last </think>
    said, score = score_answer(text, task)          # said: a letter (mcq), a span of seconds (tvg), or the text (oe)

A wrong reading is worse than none. A letter is read by these rules, and the first one that names a letter decides:
1. The text is one option's text.
2. A letter that the text denies, as in "not A" or "A is wrong", counts in no rule below.
3. The text is a label or begins with one: "(b)", "B. Vitamin C", "Option B". Another label may not follow at once ("A or B"),
   nor begin another line (a list).
4. The label after the last "answer is" or "answer:".
5. The label after the last "option", "choose", "go with", "so" or "hence".
6. The only letter that stands alone in the text.

A span is read by these:
1. The only two times of a text are a span.
2. Of more times, the last two that are written as a range are: "12.5 - 20.1", "from 3 to 5".
3. A text that cannot tell, denies its range, or offers another one has none.

Qwen's models sometimes answer an English question in Chinese, so the patterns also match the Chinese words for "answer",
"choose" and "not".
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
    """Return what follows the last "answer is" or "answer:", if it has a word: "The answer is:" at a line's end states nothing."""
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
    """Read the text, and compare what it says with the task's answer. Return both: a letter, a span or the text (None: it cannot
    be read), and a score from 0 to 1. `open_answer`: f1 of the words, exact match, or the judge's verdict."""
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

# A letter that stands alone. "A" before a lower-case word is an article. "A/B", "B's" and "D.C." are no labels.
_WORD = r"[^\W\u4e00-\u9fff]"  # "选B" needs no space
_END = rf"(?!{_WORD}|[/'-]\w|\.\w\.)"
_LETTER = rf"(?<!{_WORD})(?<!\w[/.'-])(?:[B-HJ]|A(?! (?!or|and|nor|is|was)[a-z])|I(?=[).:])){_END}"
# Several of them: "A, B and C".
_AND = r"\)?(?:,? (?:and|or|nor|then) |, ?|[、和或 ])"
_LETTERS = rf"{_LETTER}(?:{_AND}{_LETTER}){{0,9}}"
# A label: "B", "b)"; not the A of "A or B".
_LABEL = rf"([A-J]|[a-j](?=[).:,\n]|\Z)){_END}(?!{_AND}{_LETTER})"

# Rule 1. What may stand before an option's text: "The answer is", "**Final answer:**".
LEAD = r"(?i:\A[\W_]{0,5}(?:the )?(?:(?:final|correct|best|right) )?(?:answer|option|choice)(?: is\b|\W?:)[\s:*_]{0,5})"
# Rule 2. The letters that a text denies.
_DENIED = (
    rf"(?i:(?:not|n't)(?: be)?|neither|rather than) (?i:option )?{_LETTERS}"  # "not A", "neither A nor B"
    rf"|不[是选]?{_LETTERS}"  # "不选A"
    rf"|{_LETTERS}[^A-J，。,.\n而]{{0,8}}不"  # "A不对"
    rf"|{_LETTERS}[):]?(?: is| are| was)?"  # "A is wrong", "A: no", "B ✗"
    r"(?:n't| (?:not|no|never|wrong|incorrect|false|out|ruled out)\b| [✗❌])"
)
# Rule 3. A label at the beginning: "(b)", "B. Vitamin C", "Option B".
_LISTED = rf"\n\W{{0,6}}{_LETTER}(?:[).:]|\s*$)"
_BEGINS = (
    rf"(?im)\A(?!(?s:.*){_LISTED})\W{{0,5}}"  # no other line begins with a label, as in "A. red\nB. blue"
    rf"(?:option |(?=\w(?:[).:,]|\s*$))){_LABEL}"  # without "option", a mark or the line's end follows
)
# Rule 4. A label after "answer is".
_ANSWER_IS = (
    r"(?:(?i:answer(?: is| \w{1,6} be|\W{0,3}:))"  # "the answer is B", "the answer must be B", "**Answer**: B"
    r"|答案[是为]?)"  # "答案是B"
    rf"\W{{0,6}}(?i:option )?{_LABEL}"
)
# Rule 5. A label after another word that chooses.
_CHOOSE = (
    r"(?:(?i:\b(?:option(?: is)?|choose|go(?:ing)? with|so|hence)\b)"  # "choose B", "go with (B)", "So B"
    r"|选项?)"  # "选B"
    rf"\W{{0,6}}{_LABEL}"
)


def parse_letter(text: str, options: tuple[str, ...] = ()) -> str | None:
    """Return the letter of the option that the text names, or None."""
    text = re.sub(r"[*`#]|__", "", unboxed(text)).replace("’", "'").strip()

    # Rule 1: the text is one option's text. A single letter is a label, even if it is an option's text.
    said = re.sub(LEAD, "", text).strip(" .").lower()
    same = [letter for letter, option in zip(LETTERS, options) if option.strip(" .").lower() == said]
    if len(same) == 1 and not re.fullmatch("[a-j]", said):
        return same[0]

    # Rule 2: drop the letters that the text denies. "(B)" is read as "B)".
    text = re.sub(r"[(\[]([A-J])[)\]]", r"\1)", text)
    text = re.sub(_DENIED, " ", text)

    # Rules 3 to 5: the first that finds labels decides, by its last label.
    named = re.findall(_BEGINS, text)
    if not named:
        named = re.findall(_ANSWER_IS, text)
    if not named:
        named = re.findall(_CHOOSE, text)

    # Rule 6: only one letter stands alone.
    alone = set(re.findall(_LETTER, text))
    if not named and len(alone) == 1:
        named = list(alone)
    letter = named[-1].upper() if named else None
    return letter if letter in letters_of(options) else None


# ------------------------------------------------------------------------------------------------ spans

_NUMBER = r"\d{1,7}(?:\.\d{1,9})?"
_MINUTES = r" ?(?:m(?:in(?:ute)?s?)?(?![a-z])|(?=(?:-|to) ?[\d.]{1,9} ?min))"  # "2 min", and the 2 of "2 to 3 min"
_SECONDS = r"(?: ?s(?:ec(?:ond)?s?)?)?(?![a-z\d%]|\.\d)"  # "5 s", "5", but not "5th"
_TIME = (
    r"(?i)(?<![a-z\d_.])(?:"
    rf"(?:(?P<hours>{_NUMBER}):)?(?P<clock_minutes>{_NUMBER}):(?P<clock_seconds>{_NUMBER}){_SECONDS}"  # "00:01:05.5", "1:05"
    rf"|(?P<minutes>{_NUMBER}){_MINUTES}(?:(?:,? | and |)(?P<rest>{_NUMBER}){_SECONDS})?"  # "2 min 5 s"
    rf"|(?P<seconds>{_NUMBER}){_SECONDS})"  # "65.5 s"
)
_NO_TIMES = r"(?i)\b(?:frames?|lasts?|lasting|for)(?: about)?(?:(?:,| to| and|-)? ?\d[\d.]{0,9}){1,9}"  # "frames 2-5", "for 3 s"
_MARK = "\ua4d4"  # stands for a time; a letter that no answer contains
_TWO_TIMES = rf"{_MARK}[^{_MARK}]*{_MARK}"
_RANGE = (
    rf"(?m){_MARK}\W{{0,4}}(?:[-–—~→]|\bto\b)\W{{0,4}}{_MARK}"  # "12.5 - 20.1", "from 3 to 5"
    rf"|between {_MARK} and {_MARK}"
    rf"|(?:^|[\[(:]) ?{_MARK}, ?{_MARK}(?:[\])]|$)"  # "[3, 5]"
)


def parse_span(text: str) -> tuple[float, float] | None:
    """Return a span in seconds. None: the text names no range, says that it cannot tell, or offers several."""
    # Replace each time by a mark: "from 1:05 to 69 s" has the times 65 and 69.
    text = re.sub(_NO_TIMES, " ", unboxed(text).replace(_MARK, " "))
    times = [seconds_of_time(time) for time in re.finditer(_TIME, text)]
    masked = re.sub(_TIME, _MARK, text)

    # Rules 1 and 2: find the ranges.
    ranges = list(re.finditer(_TWO_TIMES if len(times) == 2 else _RANGE, masked))
    if not ranges or re.search(r"(?i)cannot|can['’]t|unable|unclear", masked):
        return None

    # Rule 3: refuse "not 3 - 5" and "3 - 5 or 12 - 20".
    before = masked[: ranges[-1].start()]
    if re.search(r"(?i)(?:\b(?:not|and|or)|[不或])\W*(?:from |between )?\Z", before) or " or " in ranges[-1][0]:
        return None
    first = before.count(_MARK)
    start, end = times[first], times[first + 1]
    return (start, end) if start <= end else None


def count_times(text: str) -> int:
    """Count the times that a text names, as parse_span reads them. A span has two."""
    return len(re.findall(_TIME, re.sub(_NO_TIMES, " ", unboxed(text))))


def seconds_of_time(time: re.Match) -> float:
    """Return the seconds of a match of _TIME. Parts that the time does not have count as 0."""
    part = {name: float(number or 0) for name, number in time.groupdict().items()}
    minutes = 60 * part["hours"] + part["clock_minutes"] + part["minutes"]
    return 60 * minutes + part["clock_seconds"] + part["rest"] + part["seconds"]


# ------------------------------------------------------------------------------------------------ words

# Scripts without spaces between words: Thai to Khmer, kana, Han.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_SPELLED = str.maketrans({"→": "->", "←": "<-", "⇒": "=>", "≤": "<=", "≥": ">=", "≠": "!=", "−": "-", "^": ""})
_OPERATOR = r"(?:<->|->|=>|<-|<=|>=|!=|[<>])"  # stands between two words that it compares or joins
# Signs that carry meaning, as in "12.5", "-5", "AB+" and "x>y". All others are dropped, except marks that belong to a letter.
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
