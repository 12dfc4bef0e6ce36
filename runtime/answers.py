"""answers.py: parse a model's answer: an option's letter, a span of seconds, or plain words.

    parse_letter("B) Vitamin C", options) -> "B"          listed_options("Which?\\nA. red\\nB. blue") -> ("red", "blue")
    parse_span("from 12.5 to 20.1") -> (12.5, 20.1)       words_of("The red door.") -> ["red", "door"]
    spoken("<think>A or B?</think> B") -> "B"

The forms are in tables: each row has an example of a form and its pattern. All patterns run in linear time.
"""

import re
import unicodedata

# Scripts without spaces between words: Thai to Khmer, kana, Han. In Hangul, a particle can also touch a letter.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_TOUCHING = _UNSPACED + "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af"


def spoken(turn: str) -> str:
    """Return the text of a turn after its thoughts, without calls. An unclosed thought is not an answer."""
    said = turn.rpartition("</think>")[2]
    return re.sub(r"<(think|tool_call)>.*?(?:</\1>|\Z)", " ", said, flags=re.S).strip()


def unboxed(text: str) -> str:
    """Return the content of the text's last \\boxed{}, or the whole text, without \\text{} and dollar signs."""
    text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}|\$", r"\1", text)  # "$0.5 \text{m}$" -> "0.5 m"
    text = unicodedata.normalize("NFKC", text)  # "１２．５" -> "12.5"
    boxes = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)  # "\boxed{B}", with braces in it one level deep
    return (boxes[-1] if boxes else text).strip()


# ------------------------------------------------------------------------------------------------ letters

LETTERS = "ABCDEFGHIJ"
# A text is a sequence of statements about letters. Each statement affirms its letter, leaves it open or denies it. The
# letter with the highest weight is the answer, so a decision overrides an earlier hedge. A tie is no answer.
AFFIRMED, LABELLED, MENTIONED, OPEN, DENIED = 5, 4, 3, 2, 1
# An example, the weight of D in it, and the words beside D that give this weight. The first matching row counts.
STATEMENTS = (
    ("Nothing fits except D", AFFIRMED, r"(?:none|nothing|wrong|incorrect|false)\b.*\b(?:except|other than)"),
    ("D cannot be excluded", OPEN, r"(?:can)?not be (?:\w+ )?(?:excluded|ruled out|eliminated)"),
    ("It is not D. D is wrong", DENIED, r"not|never|neither|nor|cannot|no(?=\W*$)|wrong|incorrect|false|impossible|unlikely|contradict\w*|without|except|exclud\w+|eliminat\w+|discard\w*|reject\w*|rul\w+ out|(?:is|are) out|rather than|instead of|nicht|pas|不|而非|并非|排除|错|誤|没|間違|틀|✗|✘|❌"),
    ("It may be D. D is possible", OPEN, r"may|might|could|maybe|perhaps|possibl[ey]|plausible|seems?|tempt\w+|going to|initial\w*|first|original\w*|consider\w*|thought|(?:al)?though|while|because|since|可能|虽然|因为|起初|最初|有道理"),
    ("So it is D. D is right", AFFIRMED, r"answer|so|thus|therefore|hence|must be|choose|choice|chose|pick|select\w*|go\w* with|correct|right|true|yes|best|better|fits?|match\w*|the only|closest|remains?|lean\w*|prefer|support\w*|confirm\w*|答案|[选選](?!项|項)|正确|正解|对(?!于)|符合|支持|정답|✓|✔|✅"),
)  # fmt: skip
# "The answer is", "**Final answer:**": the lead of an answer.
LEAD = r"(?i)\A[\W_]{0,5}(?:the )?(?:(?:final|correct|best|right) )?(?:answer|option|choice)(?: is\b|\W?:)[\s:*_]{0,5}"
# ". ", ", ", "but": begins another statement.
_NEXT = r"[!?;,\n。]|\.(?!\w)|\bbut\b"
# "because", "rather", "而非": begins a statement about another letter.
_OTHER = rf"{_NEXT}|\b(?:(?:al)?though|because|since|while|so|rather|instead)\b|(?:\bnot|不?[是选]|而非)\W*\Z"
# Excludes "A man", "I am": a word or a number follows, unless the text goes on about the letter ("A is").
_NO_WORD = r"(?![AIai] (?!(?i:or|and|is|as|because|since|but|not|seems|might|may|could|it)\b)(?:[a-z\d]|[A-Z][A-Za-z]))"
# "B", "(B)", "option A", but not "B's", "D.C.", "AB".
_LETTER = rf"(?<![\w'’.])(?:(?<=[Oo]ption )|{_NO_WORD})(?:[A-HJ]|I(?=[).:\]]))(?!\.?[\w'’])[)\]*\"]{{0,4}}"
# "option c", "answer is (b": a small letter.
_SMALL = rf"\b(?i:option|choice|answer(?: is| \w+ be|:)+)[\s:*(\"'\[]{{1,5}}{_NO_WORD}[a-j](?![\w'’])"
# ", B", "、B": continues a list of letters.
_COMMA = rf"\s?[,、/&][\s(\[*\"]{{0,5}}{_LETTER}"
# " or B", ", and perhaps option B", "和B": ends a list of letters.
_OR = rf"[.?]?,?\s?(?i:and/or|and|or|nor|和|与|或|还是)(?: maybe| perhaps)?[\s(\[*\"]{{1,5}}(?:option )?{_LETTER}"
# "A", "A, B or C", "A、B": letters that are named together.
_GROUP = re.compile(rf"({_LETTER}(?:(?:{_COMMA})*(?:{_OR})+|(?:{_COMMA}){{2,}}|{_COMMA}\s?(?=\Z|[\u3400-\u9fff])|))")
# ". ", ")", ":", " - ", "、", "**.**", a line break, but not "D.C.": turns the letter before it into a label ("B. Vitamin C").
_MARK = r"(?:[*_]{0,3}(?:[)\]:]|、(?!\s?[A-J](?![A-Za-z]))|\.(?!\.|[A-Za-z]\b))[*_)\].:]{0,3}|\s[-–—]\s|[ \t]*\n)"
# "(A) false", "B: no", "C red - it is wrong": where the verdict on a label begins.
_VERDICT = r"(?:^|[-–—:(])[\W_]*(?:(?:this|it) )?(?:is |was )?"


def parse_letter(text: str, options: tuple[str, ...] = (), lenient: bool = False) -> str | None:
    """Return the one option that the text names, or None. With `lenient`, take the first of several tied letters."""
    allowed = LETTERS[: len(options) or len(LETTERS)]
    text = re.sub(LEAD, "", unboxed(text.replace("，", ";")))  # Chinese lists have "、", so this separates statements
    text = re.sub(rf"\A[\W_]{{0,9}}([A-Ja-j])(?:[\W_]*\Z|{_MARK})\s*", lambda label: f"{label[1].upper()}. ", text)

    # "Vitamin C" is the text of one option. After a label "A." this is not tried: normalise() drops it as an article.
    same = [letter for letter, option in zip(allowed, options) if normalise(option) == normalise(text)]
    if len(same) == 1 and not text.startswith("A."):
        return same[0]

    text = _show_letters(text, options)
    weights, together = _weigh_letters(text)
    if list(weights.values()).count(LABELLED) == 1 and weights.get(text[0]) == LABELLED:
        weights[text[0]] = AFFIRMED  # a text that begins with its only label affirms it
    best = [letter for letter in weights if weights[letter] == max(weights.values()) > DENIED]
    if lenient and together.isdisjoint(best):
        best = best[:1]
    return best[0] if len(best) == 1 and best[0] in allowed else None


def _show_letters(text: str, options: tuple[str, ...]) -> str:
    """Rewrite the text so that `_LETTER` finds all letters and nothing that only looks like one."""
    # "选B" -> "选 B", "option c" -> "option C"
    text = re.sub(rf"(?<=[{_TOUCHING}])(?=[A-J])|(?<=[A-J])(?=[{_TOUCHING}])", " ", text)
    text = re.sub(_SMALL, lambda small: small[0][:-1] + small[0][-1].upper(), text)
    # "D. Vitamin C" -> "D. _": an option's own text after its letter carries no weight
    for letter, option in zip(LETTERS, options):
        text = re.sub(rf"(?i)(\b{letter}\W{{1,4}}){re.escape(option.strip(' .'))}(?!\w)", r"\1_", text)
    return text


def _weigh_letters(text: str) -> tuple[dict[str, int], set[str]]:
    """Return the weight of each letter, and the letters that are labels or are named together with others."""
    weights = {}
    together = set()
    parts = _GROUP.split(text)  # words, letters, words, letters, ..., words
    for i in range(1, len(parts), 2):
        words, group, rest = parts[i - 1 : i + 2]
        letters = re.findall(r"(?<!\w)[A-J](?!\w)", group)
        several = len(letters) > 1

        # Check whether the letters begin their statement, and whether they are a label ("B. Vitamin C").
        before = re.split(_NEXT, words)[-1]
        begins = not re.search(r"\w", before)
        label = None if several or not begins else re.match("[A-J]" + _MARK, group + rest)

        # Weigh the words after them. "D?" is answered in the next statement. After a label, only a verdict has weight.
        # Words that were weighed are cut from the rest, so that they do not also count for the next letter.
        after = (group + rest)[label.end() if label else len(group) :]
        following = re.split(_OTHER, after.replace("?", " "))[0]
        verdict = weigh_words(following, _VERDICT if label else "")
        if verdict:
            parts[i + 1] = after[len(following) :]

        # Take the lower weight of the words before and after. If neither has one, the form of the letters decides.
        beside = [known for known in (weigh_words(before), verdict) if known]
        if beside:
            weight = min(beside)
        elif begins and (label or not re.search(r"\w", following)):
            weight = LABELLED
        else:
            weight = MENTIONED

        # Letters named together are open ("A or B"), unless all are affirmed.
        if several and (weight != AFFIRMED or re.search(r"(?i)\bor\b|或|还", group)):
            weight = min(weight, OPEN)
        if several or label:
            together.update(letters)

        # "A... no wait, B": earlier letters become open again. A denied letter comes back only if it is affirmed.
        if re.search(r"(?i)\bwait\b|correction", words):
            weights = {letter: min(earlier, OPEN) for letter, earlier in weights.items()}
        for letter in letters:
            earlier = weights.get(letter, OPEN)
            if weight == DENIED:
                weights[letter] = DENIED
            elif earlier != DENIED or weight == AFFIRMED:
                weights[letter] = max(weight, earlier)
    return weights, together


def weigh_words(words: str, start: str = "") -> int:
    """Return the weight that the words of its statement give to a letter, or 0 if they give none. `start`: a pattern that
    must come before these words."""
    statement = re.sub(r"n['’]t\b", " not", re.split(_NEXT, words)[-1])
    for _, weight, form in STATEMENTS:
        if re.search(rf"(?i){start}(?<![a-z])(?:{form})(?![a-z])", statement):
            return weight
    return 0


# How a question lists its options: one per line, or all in one line.
OPTION_FORMS = (
    ("A. red\nB. blue", re.compile(r"(?m)^[ \t]*[(\[]?([A-J])[)\].:]+[ \t]*(?=\S)")),
    ("(A) red (B) blue", re.compile(r"(?<![\w.])[(\[]?([A-J])(?:[)\]][ \t]*|[.:][ \t]+)(?=\S)")),
)


def listed_options(question: str) -> tuple[str, ...]:
    """Return the options that the question itself lists, without their letters. Return () if it lists none."""
    for _, form in OPTION_FORMS:
        labels = list(form.finditer(question))
        letters = "".join(label[1] for label in labels)
        # Find the longest sequence A, B, C, ... without a gap, and take its last occurrence.
        for count in range(len(LETTERS), 1, -1):
            first = letters.rfind(LETTERS[:count])
            if first >= 0:
                return _option_texts(labels[first : first + count], question)
    return ()


def _option_texts(labels: list[re.Match], question: str) -> tuple[str, ...]:
    """Return the first line after each label, up to the next label."""
    texts = []
    ends = [label.start() for label in labels[1:]] + [len(question)]
    for label, end in zip(labels, ends):
        line = question[label.end() : end].strip().split("\n")[0]
        texts.append(line.strip(" \t;,"))
    return tuple(texts)


# ------------------------------------------------------------------------------------------------ spans

# "12.5": a number.
_N = r"\d{1,7}(?:\.\d{1,9})?"
# "frame", "steps": a number after one of these is not a time. "clip 3 - 5" can be a span, so only plural clips count.
_THINGS = "(?:frame|image|picture|figure|option|step|question)s?|(?:clip|segment|scene|shot|part|call|turn)s"
# Numbers that are not times, and commas: an example, its pattern, and the text that replaces it before times are read.
REWRITTEN = (
    ("2024-05-06", r"(?<![\d.])\d{1,4}([-/.])\d{1,2}\1\d{1,4}(?!\.?\d)", " "),
    ("frames 2, 3 and 4", rf"\b(?:{_THINGS})[ #]{{1,2}}\d{{1,7}}(?!\.?\d)(?:,? ?(?:and|to|[-–,]) ?\d{{1,7}}(?!\.?\d))*", " "),
    ("1. **Start**", r"(?m)^[ \t]*\d{1,2}[.)][ \t]+(?=\W{0,3}[^\W\d])(?!to |and )", " "),
    ("the 83rd and the 97th second", r"(\d)(?:st|nd|rd|th)(?=(?: (?:and|to|until) the \d+(?:st|nd|rd|th))? seconds?\b)", r"\1"),
    ("-3", rf"(?<![\w)\]>\"'″”–-])(?<!\d )(?<![\ddc ]s )[-−]{_N}", " "),  # unless it follows a time: "12.5s -20.1s"
    ("00:00:02,500", r"(:\d\d),(?=\d{3})", r"\1."),
    ("[1,240]", r"([\[(]\s?\d{1,7}),(?=\d{1,7}\s?[\])])", r"\1, "),
    ("1,234.5", r"(?<![\d.])(\d{1,3}),(?=\d{3}(?!\d))", r"\1"),
)  # fmt: skip

# The forms of a time, and the seconds per unit of each number in it. 0: a bare number ("2" in "2 to 3 minutes").
_UNITS = ("hours?|hrs?|h|小时|小時|時間|时", "minutes?|mins?|m|分钟|分鐘|分", "seconds?|secs?|s|秒钟|秒", "ms|毫秒")
# "1 hour", ", 2 minutes", " and 5 s": up to one number per unit.
_PARTS = "".join(rf"(?:[ ,]{{0,2}}(?:and )?({_N}) {{0,2}}(?:{unit})(?![a-z]))?" for unit in _UNITS)
TIME_FORMS = (
    ("01:02:05.5", r"(?:(\d{1,3}):)?(\d{1,4})[:'′’](\d{1,2}(?:\.\d{1,9})?)(?!\.?\d|:)['’′\"″”]{0,2}", (3600, 60, 1)),
    ("1 hour 2 minutes 5 s 500 ms", rf"(?={_N} {{0,2}}(?:{'|'.join(_UNITS)})(?![a-z])){_PARTS}", (3600, 60, 1, 0.001)),
    ("12.5", rf"({_N})(?!\.?\d| ?%|(?!to\d)[a-z])", (0,)),
)
_BEGIN = r"(?:(?<![a-z\d_])(?<!\d\.)|(?<=\dto))"  # where a number can begin: not in "x264", but in "12.5to20.1"
_TIME = re.compile(_BEGIN + "(?:" + "|".join(pattern for _, pattern, _ in TIME_FORMS) + ")", re.I)
_FACTORS = sum((factors for *_, factors in TIME_FORMS), ())
# Explicit ranges. T stands for a time, and _FILL for words like " about the ".
_T = "\ua4d4"  # a caseless letter that no answer contains and that \W does not match
_FILL = r"(?:\W|about|around|approximately|roughly|the|at|time|t|第){0,9}"
RANGE_FORMS = (
    ("12.5 - 20.1", rf"T\W{{0,4}}(?:[-‐–—−~→⇒]|=>|(?:and |up )?(?:to|until|till|through|thru)|到|至|から){_FILL}T"),
    ("between 12.5 and 20.1", rf"between{_FILL}T\W{{0,4}}and{_FILL}T"),
    ("[12.5, 20.1]", rf"(?m)(?:[\[(:=]|^)[^\w\n]{{0,5}}T\W{{0,3}}[,;]{_FILL}T[^\w\n]{{0,5}}(?:[\])]|$)"),
    ("starts at 12.5 and ends at 20.1", r"(?<![a-z])(?:start|beg[aiu]n|from)[^T]{0,30}T[^T]{0,80}(?<![a-z])(?:end|finish|stop|until|to)[^T]{0,30}T"),
)  # fmt: skip


def parse_span(text: str) -> tuple[float, float] | None:
    """Return a span in seconds, start first: the two times of a text that has exactly two, or its last explicit range."""
    text = unboxed(text).replace(_T, " ")
    for _, pattern, new in REWRITTEN:
        text = re.sub(pattern, new, text, flags=re.I)

    # Replace each time with a mark. A range is a pattern of words around marks.
    times = [_seconds(time) for time in _TIME.finditer(text)]
    masked = _TIME.sub(_T, text)
    place = _last_range(masked)
    if place is None:
        return None

    first = masked.count(_T, 0, place)
    (start, start_unit), (end, end_unit) = times[first : first + 2]
    if start_unit == 0 and end_unit:
        start *= end_unit  # "2 to 3 minutes"
    return min(start, end), max(start, end)


def _seconds(time: re.Match) -> tuple[float, float]:
    """Return a time in seconds, and the seconds of its unit if it is a single number (0: no unit), else 1."""
    numbers = [(float(number), factor) for number, factor in zip(time.groups(), _FACTORS) if number]
    seconds = sum(number * (factor or 1) for number, factor in numbers)
    return seconds, numbers[0][1] if len(numbers) == 1 else 1


def _last_range(masked: str) -> int | None:
    """Return where the last range begins in a text with marks for times. None: there is no range, or it is one of a choice."""
    starts = []
    if masked.count(_T) == 2 and not re.search(rf"{_T} or {_T}", masked):
        starts.append(masked.index(_T))
    else:
        for _, pattern in RANGE_FORMS:
            for match in re.finditer(pattern.replace("T", _T), masked, re.I):
                starts.append(masked.index(_T, match.start()))
    starts = [start for start in starts if weigh_words(masked[:start][-80:]) != DENIED]  # "not 3 - 5"
    last = max(starts, default=None)
    if last is None or re.search(rf"{_T}\W*(?:\bor\b|或)[^{_T}.;,\n]*\Z", masked[:last]):  # "3 - 5 or 7 - 9"
        return None
    return last


# ------------------------------------------------------------------------------------------------ words

# "->", "≤": stands between two words that it compares or joins.
_OPERATOR = r"(?:<->|->|=>|<-|<=|>=|!=|[<>→←⇒≤≥≠])"
_SPELLED = {"→": "->", "←": "<-", "⇒": "=>", "≤": "<=", "≥": ">=", "≠": "!=", "−": "-", "^": ""}
# Signs that carry meaning. All others are dropped.
KEPT_FORMS = (
    ("12.5", r"(?<=\d)\.(?=\d)"),
    ("-5", r"(?<![\w.)])-(?=\.?\d)"),
    ("AB+", r"(?<=\w)\+{1,2}(?!\w)"),
    ("x>y", rf"(?<=\w){_OPERATOR}(?=[\w-])"),
)
_KEPT = re.compile("(" + "|".join(pattern for _, pattern in KEPT_FORMS) + r")|[^\w\s]")


def normalise(text: str) -> str:
    """Return the text in lower case without punctuation and articles. A text of articles alone is kept."""
    text = unboxed(text).lower()
    for sign, spelled in _SPELLED.items():
        text = text.replace(sign, spelled)
    text = re.sub(r"<([\d.]+ seconds)>", r"\1", " ".join(text.split()))  # a frame's stamp
    text = re.sub(rf"(?<=\w) ?({_OPERATOR}) ?(?=[\w-])", r"\1", text)  # "x > y" is one word and differs from "y > x"
    words = _KEPT.sub(_keep_sign, text).split()
    text = " ".join([word for word in words if word not in ("a", "an", "the")] or words)
    return re.sub(r"\b(\d+)(?=[^\W\d_])", r"\1 ", text)  # "0.5m" equals "0.5 m"


def _keep_sign(sign: re.Match) -> str:
    """Return the replacement of a sign. A combining mark stays: it belongs to its letter, like the vowels of Devanagari."""
    is_mark = unicodedata.category(sign[0][0])[0] == "M"
    return sign[0] if sign[1] or is_mark else " "


def words_of(text: str) -> list[str]:
    """Return the words of the normalised text, or the single characters of a script without spaces."""
    return re.sub(rf"([{_UNSPACED}])", r" \1 ", normalise(text)).split()
