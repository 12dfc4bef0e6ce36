"""lab.py: the reward lab. Score any assistant text and print every term of the reward.

    python -m study.lab "<think>\\nI look closer.\\n</think>\\n<answer>B</answer>" --answer B [--config CONFIG]

Each argument is one turn. The gold answer tells the kind of question: a letter (mcq), a span of seconds (tvg), or text (oe).
The text is printed with its structural characters in brackets: [c].
"""

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from episode import NO_PROMPT, Call, Episode, Task, Trajectory
from metrics import format_metrics
from rewards import RewardConfig, score, structural_mask
from rl import RLConfig
from runtime import config
from runtime.answers import LETTERS, JudgeError, parse_span
from runtime.api import ApiJudge
from runtime.config import ConfigError
from runtime.render import END_OF_TURN, Renderer
from tools import parse_calls


class Characters(Renderer):
    """A renderer with one token per character and one for the end of turn, so that the lab needs no checkpoint."""

    ends_of_turn = (0x10FFFF,)

    def __init__(self):
        pass  # no tokenizer

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text.replace(END_OF_TURN, "\U0010ffff")]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids).replace("\U0010ffff", END_OF_TURN)

    def offsets(self, ids: list[int]) -> list[tuple[int, int]]:
        ends = [len(self.decode(ids[: i + 1])) for i in range(len(ids))]
        return list(zip([0, *ends], ends))


def episode_of_turns(turns: list[str], task: Task, renderer: Renderer, executed: int = 0, forced: str = "") -> Episode:
    """Return the episode that a rollout with these turns would record. The first `executed` calls count as run."""
    main = Trajectory(NO_PROMPT)
    calls: list[Call] = []
    for i, turn in enumerate(turns):
        prefix = forced if turn.startswith(forced) else ""
        given = renderer.encode(prefix)
        sampled = renderer.encode(turn[len(prefix) :])
        start = len(main.ids)
        main.ids += given + sampled
        main.mask += [0] * len(given) + [1] * len(sampled)
        main.turns.append((start, len(main.ids)))
        for call in parse_calls(turn, i):
            ran = len(calls) < executed
            calls.append(call if ran or call.error else replace(call, error="failed"))
    return Episode(task, 64, main, calls)


def task_of(answer: str) -> Task:
    """Return a task with this gold answer, which tells the kind of its question."""
    kind = "oe"
    words = re.findall(r"[^\W\d_]+", answer)
    letter = answer.strip("() .").upper()
    if letter in tuple(LETTERS):
        kind = "mcq"
        answer = letter
    elif parse_span(answer) and set(words) <= {"to", "s"}:  # "12.5 s to 20.1 s", but not "2 cats and 3 dogs"
        kind = "tvg"
    return Task("lab", "", (), kind, answer)


def main() -> None:
    parser = argparse.ArgumentParser("python -m study.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("turns", nargs="+", metavar="TEXT", help="the assistant's text, one argument per turn")
    parser.add_argument("--answer", required=True, help="the gold answer")
    parser.add_argument("--executed", type=int, default=0, help="number of calls that count as run")
    parser.add_argument("--config", help="an RL config, to score by its reward (default: our defaults)")
    args = parser.parse_args()
    renderer = Characters()
    turns = [turn.replace("\\n", "\n") + END_OF_TURN for turn in args.turns]
    task = task_of(args.answer)
    episode = episode_of_turns(turns, task, renderer, args.executed)
    try:
        cfg = config.load(RLConfig, args.config).reward if args.config else RewardConfig()
        parts = score(episode, renderer, cfg, ApiJudge(cfg.judge)) | format_metrics(episode, renderer, cfg)
    except (ConfigError, JudgeError) as error:
        sys.exit(f"error: {error}")

    print(f"{'kind':>17} {task.kind:>6}")
    for name, value in parts.items():
        print(f"{name:>17} {value:6.2f}")
    for token, structural in zip(episode.main.ids, structural_mask(episode.main, renderer), strict=True):
        text = renderer.decode([token])
        print(f"[{text}]" if structural else text, end="")
    print()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this process quietly
    main()
