"""judge.py: a model behind a chat endpoint that grades open answers: does this say the same as the reference?

    ask_judge(question, gold, answer, cfg) -> 1.0 or 0.0, or JudgeError

Deliberately missing: shades of right. The judge says yes or no.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from runtime.api import Api, Chat
from runtime.engine import EngineError

TRIES, SECONDS = 3, 30.0
PROMPT = (
    "Question: {question}\nReference answer: {gold}\nGiven answer: {answer}\n\n"
    "Does the given answer say the same as the reference? Reply with one word: yes or no."
)


@dataclass(frozen=True)
class Judge(Api):
    """An OpenAI-compatible chat endpoint that grades open answers."""

    key: str = ""
    cache: str = ""
    """JSONL file of verdicts; empty: nothing is cached."""


class JudgeError(RuntimeError):
    """The judge gave no verdict. The episode is counted and left out of the loss: this is not a zero."""


def ask_judge(question: str, gold: str, answer: str, cfg: Judge) -> float:
    """Return 1 or 0 from the judge, or raise JudgeError. Verdicts are cached by everything that shapes them."""
    prompt = PROMPT.format(question=question, gold=gold, answer=answer)
    key = hashlib.sha256(f"{cfg.url}\0{cfg.model}\0{prompt}".encode()).hexdigest()
    lines = {verdict: json.dumps({"key": key, "verdict": verdict}) for verdict in (0.0, 1.0)}  # as the cache has them
    if cfg.cache and Path(cfg.cache).exists():
        known = Path(cfg.cache).read_text()
        for verdict, line in lines.items():
            if line in known:
                return verdict

    chat, said = Chat(cfg, attempts=TRIES, timeout=SECONDS), ""
    for _ in range(TRIES):
        try:
            said, _ = chat.ask([{"role": "user", "content": prompt}], temperature=0, max_tokens=8)
        except EngineError as error:
            raise JudgeError(str(error)) from None
        word = re.match(r"\W*(yes|no)\b", said, re.I)
        if word:
            verdict = float(word[1].lower() == "yes")
            if cfg.cache:
                Path(cfg.cache).parent.mkdir(parents=True, exist_ok=True)
                with open(cfg.cache, "a") as file:
                    file.write(lines[verdict] + "\n")
            return verdict
    raise JudgeError(f"{cfg.url}: no yes or no after {TRIES} tries; the last reply: {said[:200]}")
