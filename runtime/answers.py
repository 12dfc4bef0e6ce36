"""answers.py: what an answer's words say: an option's letter, a span of seconds, plain words.

    parse_letter("B) Vitamin C", options) -> "B"
    parse_span("from 12.5 to 20.1") -> (12.5, 20.1)
    normalise("The red door.") -> "red door"

Deliberately missing: what an answer earns (rewards.py).
"""

import re


def parse_letter(text: str, options: tuple[str, ...] = ()) -> str | None:
    """The one option that the text names, A to J; None if it names none or several."""
    allowed = "ABCDEFGHIJ"[: len(options) or 10]
    text = re.sub(r"\\(?:boxed|text)\{([^{}]*)\}", r"\1", text)
    named_by = {x: normalise(option) for x, option in zip(allowed, options)}
    # "B) Vitamin C": a letter and the text that it stands for, which may hold letters of its own.
    label = re.fullmatch(r"\W*([A-Ja-j])\W{0,3}(?:[.:)]\W{0,3}\s|\n)(.*)", text, re.S)
    if label and named_by.get(label[1].upper()) == normalise(label[2]):
        return label[1].upper()
    exact = [x for x in named_by if named_by[x] == normalise(text)]
    if len(exact) == 1 and not (label and label[1] in "Aa"):  # `normalise` took that label for an article
        return exact[0]
    if alone := re.fullmatch(r"\W*([A-Ja-j])\W*", text):
        letter = alone[1].upper()
        return letter if letter in allowed else None
    # The article "A" and the pronoun "I" are words where a lower-case word (but no "or", "is", ...) follows.
    word = r"(?!(?:A|I) (?!(?:or|and|is|as|because|since)\b)[a-z])"
    named = set(re.findall(rf"(?<![A-Za-z0-9']){word}([A-J])(?![A-Za-z0-9'])", text))
    return named.pop() if len(named) == 1 and named <= set(allowed) else None


_TIME = r"(?:\d+:)?\d+:\d+(?:\.\d+)?|\d+(?:\.\d+)?"
_SPAN = re.compile(
    rf"(?<!\d)({_TIME})[\s\])>\"']*(?:(?:s|secs?|seconds?)\b[\s\])>\"']*)?"  # 12.5 | 12.5s | <12.5 seconds>
    rf"(?:-|–|—|~|,|to|and|until|till)\W*(?:(?:it )?end(?:s|ing|_time)?\b\W*(?:(?:at|time|is)\b\W*)*)?({_TIME})",
    re.I,
)


def parse_span(text: str) -> tuple[float, float] | None:
    """The first "12.5 - 20.1", "[12.5, 20.1]" or "00:12 to 00:20" of the last sentence that has one; seconds, in order."""
    match = None
    for found in _SPAN.finditer(text):
        if match is None or re.search(r"[.!?]\s|\n", text[match.end() : found.start()]):
            match = found
    if not match:
        return None
    start, end = sorted(map(seconds_of, match.groups()))
    return start, end


def seconds_of(time: str) -> float:
    """12.5, 00:12.5 or 00:00:12.5."""
    return sum(float(part) * 60**i for i, part in enumerate(reversed(time.split(":"))))


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles; a text that is nothing but an article stays."""
    words = re.sub(r"(?<!\d)\.|\.(?!\d)|[^\w\s.]", " ", text.lower()).split()
    return " ".join([w for w in words if w not in ("a", "an", "the")] or words)
