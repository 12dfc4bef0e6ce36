"""answers.py: find a model's answer, read it, and compare it with the gold, for rewards and evaluations.

    text = final_answer(turns)                  # the last complete <answer> of the last turn, after its last </think>
    said = read_answer(text, kind, options)     # a letter (mcq), a span of seconds (tvg), or plain words (oe)
    accuracy(said, kind, gold)                  # from 0 to 1

A wrong reading is worse than none. The first of these rules that applies reads a letter. A letter that the text denies ("not
A", "A is wrong") counts in none of them.
1. The text is one option's text.
2. The text is a label or begins with one: "(b)", "B. Vitamin C", "Option B". Another label may not follow at once ("A or B"),
   nor begin another line (a list).
3. The last "answer is" or "answer:" with a label behind it; else the last such "option", "choose", "go with", "so" or "hence".
4. Only one letter stands alone in the text.
A span is the only two times of a text, or its last range ("12.5 - 20.1"). All patterns run in linear time.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable

from runtime.render import END_OF_TURN, TAG_PIECE

# ------------------------------------------------------------------------------------------------ the answer

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.S)
STATED = re.compile(r".*answer\s*(?:is|:)[ \t]*([^\n]+)", re.I | re.S)
CALL_BLOCK = re.compile(r"<(tool_call|tool_code)>.*?(?:</\1>|\Z)", re.S)


def final_answer(texts: list[str], untagged: str = "off") -> str | None:
    """Return the content of the last complete <answer> in the last turn, after its last </think>. If there is none, return
    what `untagged` accepts. Under `off` and `fallback`, a turn whose thought is never closed has no answer."""
    if not texts:
        return None
    turn = texts[-1].replace(END_OF_TURN, "")
    after_thought = turn.rpartition("</think>")[2]
    in_open_thought = "<think>" in after_thought
    if in_open_thought and untagged in ("off", "fallback"):
        return None
    answer = last_answer(after_thought)
    if answer is not None or untagged == "off":
        return answer

    # stated: what follows the last "answer is", to the end of its line
    stated = STATED.match(after_thought)
    if untagged == "stated":
        return stated[1] if stated else None

    # fallback and prose: the text beside calls and tags. fallback reads a turn without a thought by its last line.
    prose = TAG_PIECE.sub(" ", CALL_BLOCK.sub(" ", after_thought)).strip()
    if untagged == "fallback" and "</think>" not in turn:
        prose = prose.rpartition("\n")[2]
    stated = STATED.match(prose)
    states = stated and re.search(r"\w", stated[1])  # not the colon of "The answer is:", which ends its line
    if states and (untagged == "fallback" or in_open_thought):
        return stated[1]
    return None if in_open_thought else prose or None


def last_answer(text: str) -> str | None:
    """Return the content of the last complete <answer> in the text."""
    answers = ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def unboxed(text: str) -> str:
    """Return the content of the text's last \\boxed{}, or the whole text, without \\text{} and dollar signs."""
    text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}|\$", r"\1", text)  # "$0.5 \text{m}$" -> "0.5 m"
    text = unicodedata.normalize("NFKC", text)  # "１２．５" -> "12.5"
    boxes = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)  # "\boxed{B}", with braces in it one level deep
    return (boxes[-1] if boxes else text).strip()


def read_answer(text: str | None, kind: str, options: tuple[str, ...] = ()) -> str | tuple[float, float] | None:
    """Return a letter (mcq), a span (tvg), or the text itself (oe). None: the text has no such answer."""
    if not text or kind == "oe":
        return text or None
    return parse_letter(text, options) if kind == "mcq" else parse_span(text)


# ------------------------------------------------------------------------------------------------ letters

LETTERS = "ABCDEFGHIJ"
# "The answer is", "**Final answer:**"
LEAD = r"(?i:\A[\W_]{0,5}(?:the )?(?:(?:final|correct|best|right) )?(?:answer|option|choice)(?: is\b|\W?:)[\s:*_]{0,5})"
_WORD = r"[^\W\u4e00-\u9fff]"  # a letter stands beside no other one, but "选B" needs no space
_END = rf"(?!{_WORD}|[/'-]\w|\.\w\.)"  # "A/B", "B's" and "D.C." are no labels
# A letter that stands alone. "A" before a lower-case word is an article.
_LETTER = rf"(?<!{_WORD})(?<!\w[/.'-])(?:[B-HJ]|A(?! (?!or|and|nor|is|was)[a-z])|I(?=[).:])){_END}"
_AND = r"\)?(?:,? (?:and|or|nor|then) |, ?|[、和或 ])"
_LETTERS = rf"{_LETTER}(?:{_AND}{_LETTER}){{0,9}}"  # "A, B and C"
_DENIED = (  # "not A", "neither A nor B", "不选A"; "A is wrong", "A: no", "A不对"
    rf"(?i:(?:not|n't)(?: be)?|neither|rather than) (?i:option )?{_LETTERS}|不[是选]?{_LETTERS}"
    rf"|{_LETTERS}[^A-J，。,.\n而]{{0,8}}不"
    rf"|{_LETTERS}[):]?(?: is| are| was)?(?:n't| (?:not|no|never|wrong|incorrect|false|out|ruled out)\b| [✗❌])"
)
_LABEL = rf"([A-J]|[a-j](?=[).:,\n]|\Z)){_END}(?!{_AND}{_LETTER})"  # "B", "b)"; not the A of "A or B"
_LISTED = rf"\n\W{{0,6}}{_LETTER}(?:[).:]|\s*$)"  # a line that begins with a label
# Rule 2: "(b)", "B. Vitamin C", "Option B"; not "A. red\nB. blue".
_BEGINS = rf"(?im)\A(?!(?s:.*){_LISTED})\W{{0,5}}(?:option |(?=\w(?:[).:,]|\s*$))){_LABEL}"
# Rule 3: "the answer is B", "Answer: **B**", "答案是B"; then "choose B", "go with (B)", "So B", "选B".
_ANSWER_IS = rf"(?:(?i:answer(?: is| \w{{1,6}} be|\W{{0,3}}:))|答案[是为]?)\W{{0,6}}(?i:option )?{_LABEL}"
_CHOOSE = rf"(?:(?i:\b(?:option(?: is)?|choose|go(?:ing)? with|so|hence)\b)|选项?)\W{{0,6}}{_LABEL}"


def parse_letter(text: str, options: tuple[str, ...] = ()) -> str | None:
    """Return the letter of the option that the text names, or None."""
    text = re.sub(r"[*`#]|__", "", unboxed(text)).replace("’", "'").strip()

    # Rule 1: the text is one option's text.
    said = re.sub(LEAD, "", text).strip(" .").lower()
    same = [letter for letter, option in zip(LETTERS, options) if option.strip(" .").lower() == said]
    if len(same) == 1 and not re.fullmatch("[a-j]", said):
        return same[0]

    # Rules 2 and 3, without the letters that the text denies. "(B)" is read as "B)".
    text = re.sub(_DENIED, " ", re.sub(r"[(\[]([A-J])[)\]]", r"\1)", text))
    named = []
    for rule in (_BEGINS, _ANSWER_IS, _CHOOSE):
        named = named or re.findall(rule, text)

    # Rule 4: only one letter stands alone.
    alone = set(re.findall(_LETTER, text))
    if not named and len(alone) == 1:
        named = list(alone)
    letter = named[-1].upper() if named else None
    return letter if letter in tuple(LETTERS[: len(options) or None]) else None


# ------------------------------------------------------------------------------------------------ spans

_NUMBER = r"(\d{1,7}(?:\.\d{1,9})?)"
_MINUTES = r" ?(?:m(?:in(?:ute)?s?)?(?![a-z])|(?=(?:-|to) ?[\d.]{1,9} ?min))"  # "2 min", and the 2 of "2 to 3 min"
_SECONDS = r"(?: ?s(?:ec(?:ond)?s?)?)?(?![a-z\d%]|\.\d)"  # "5 s", "5", but not "5th"
_TIME = (  # "1:05" and "00:01:05.5", "2 min 5 s", "65.5 s"
    rf"(?i)(?<![a-z\d_.])(?:(?:{_NUMBER}:)?{_NUMBER}:{_NUMBER}{_SECONDS}"
    rf"|{_NUMBER}{_MINUTES}(?:(?:,? | and |){_NUMBER}{_SECONDS})?|{_NUMBER}{_SECONDS})"
)
_NO_TIMES = r"(?i)\b(?:frames?|lasts?|lasting|for)(?: about)?(?:(?:,| to| and|-)? ?\d[\d.]{0,9}){1,9}"  # "frames 2-5", "for 3 s"
_MARK = "\ua4d4"  # stands for a time; a letter that no answer contains
_RANGE = (  # "12.5 - 20.1", "from 3 to 5", "between 3 and 5", "[3, 5]"
    rf"(?m){_MARK}\W{{0,4}}(?:[-–—~→]|\bto\b)\W{{0,4}}{_MARK}|between {_MARK} and {_MARK}"
    rf"|(?:^|[\[(:]) ?{_MARK}, ?{_MARK}(?:[\])]|$)"
)


def parse_span(text: str) -> tuple[float, float] | None:
    """Return a span in seconds. None: the text has no range, cannot tell, or leaves several open."""
    text = re.sub(_NO_TIMES, " ", unboxed(text).replace(_MARK, " "))
    times = []
    for time in re.finditer(_TIME, text):
        h, m, s, minutes, seconds_after, seconds = [float(number or 0) for number in time.groups()]
        times.append(3600 * h + 60 * (m + minutes) + s + seconds_after + seconds)
    masked = re.sub(_TIME, _MARK, text)
    ranges = list(re.finditer(_RANGE if len(times) > 2 else rf"{_MARK}[^{_MARK}]*{_MARK}", masked))
    if not ranges or re.search(r"(?i)cannot|can['’]t|unable|unclear", masked):
        return None

    # Refuse "not 3 - 5" and "3 - 5 or 12 - 20".
    before = masked[: ranges[-1].start()]
    if re.search(r"(?i)(?:\b(?:not|and|or)|[不或])\W*(?:from |between )?\Z", before) or " or " in ranges[-1][0]:
        return None
    start, end = times[before.count(_MARK) :][:2]
    return (start, end) if start <= end else None


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


# ------------------------------------------------------------------------------------------------ the comparison with the gold


def accuracy(
    said: str | tuple[float, float] | None,
    kind: str,
    gold: str,
    open_answer: str = "f1",
    judge: Callable[[str, str], float] | None = None,
) -> float:
    """Return the score of what `read_answer` returned: equal letters (mcq), temporal IoU (tvg), or `open_answer` (oe): f1 of
    the words, exact match, or judge(gold, said). No answer: 0."""
    if said is None:
        return 0.0
    if kind == "mcq":
        return float(said == gold.strip("() .").upper())
    if kind == "tvg":
        span = parse_span(gold)
        return iou(said, span) if span else 0.0
    if open_answer == "judge":
        return judge(gold, said)
    if open_answer == "exact":
        return float(normalise(said) == normalise(gold))
    return token_f1(said, gold)


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
