"""picture.py: draw the method, results/method.png: calls one by one beside calls in parallel, and which tokens the anchor credits.

    python -m study.picture

The colors of the tokens are what rewards.structural_mask returns for them.
"""

from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from episode import Task
from rewards import structural_mask
from runtime.render import END_OF_TURN, THINK_PREFIX
from study import toy
from study.lab import Characters, episode_of_turns

MAIN, SUBAGENT = "#9ecae1", "#fdae6b"
FORCED, CONTENT, STRUCTURAL, GIVEN = "#fde9b8", "#dbe9f6", "#6baed6", "#e3f0e3"
SAID = [
    THINK_PREFIX + "Let me look closer.\n</think>\n" + toy.call(24, 48) + "\n" + toy.call(0, 24) + END_OF_TURN,
    THINK_PREFIX + "A clip shows it.\n</think>\n<answer>black</answer>" + END_OF_TURN,
]
REPORTS = "(tool: No flash. A black flash.)"
# (row from the top, start, seconds, text, color)
TIMELINES = {
    "one call per turn": [
        (0, 0, 3, "call 1", MAIN),
        (1, 3, 3, "crop 1", SUBAGENT),
        (0, 6, 3, "call 2", MAIN),
        (1, 9, 3, "crop 2", SUBAGENT),
        (0, 12, 3, "answer", MAIN),
    ],
    "in parallel: all calls in one turn": [
        (0, 0, 4, "calls 1, 2", MAIN),
        (1, 4, 3, "crop 1", SUBAGENT),
        (2, 4, 3, "crop 2", SUBAGENT),
        (0, 7, 3, "answer", MAIN),
    ],
}


def draw_timelines(axis: Axes) -> None:
    """Draw the main agent's turns and its sub-agents over time."""
    top = 0
    for title, bars in TIMELINES.items():
        axis.text(0, top - 0.35, title, fontsize=10, fontweight="bold")
        for row, start, seconds, text, color in bars:
            axis.barh(top + row + 0.2, seconds, left=start, height=0.8, color=color, edgecolor="white")
            axis.text(start + seconds / 2, top + row + 0.2, text, ha="center", va="center", fontsize=9)
        top += 3
    axis.set(xlim=(-0.1, 15.1), ylim=(6, -0.9))
    axis.axis("off")
    axis.text(0, 5.8, "blue: main agent   orange: sub-agents, same weights      time →", fontsize=9)


def draw_tokens(axis: Axes) -> None:
    """Draw an episode's text. Each piece has the color of its credit."""
    renderer = Characters()
    episode = episode_of_turns(SAID, Task("", "", (), "oe", "black"), renderer, executed=2, forced=THINK_PREFIX)
    main = episode.main
    credit = [
        (STRUCTURAL if s else CONTENT) if m else FORCED for s, m in zip(structural_mask(main, renderer), main.mask)
    ]
    line = column = 0
    for number, (start, end) in enumerate(main.turns):
        if number:
            axis.text(0, line, REPORTS, family="monospace", fontsize=9, va="center", backgroundcolor=GIVEN)
            line += 1
        tokens = list(zip(main.ids[start:end], credit[start:end]))
        for color, piece in groupby(tokens, key=lambda token: token[1]):
            parts = renderer.decode([token for token, _ in piece]).split("\n")
            for i, part in enumerate(parts):
                if i:
                    line, column = line + 1, 0
                if part:
                    axis.barh(line, len(part), left=column, height=0.9, color=color)
                    axis.text(column, line, part, family="monospace", fontsize=9, va="center")
                column += len(part)
        line, column = line + 1, 0
    for text, color in (
        ("forced: no credit", FORCED),
        ("A_i", CONTENT),
        ("A_i + λ A_anchor,i", STRUCTURAL),
        ("read, not sampled", GIVEN),
    ):
        axis.barh(line + 0.7, 2, left=column, height=0.8, color=color)
        axis.text(column + 2.5, line + 0.7, text, fontsize=9, va="center")
        column += 4 + len(text)
    axis.set(xlim=(0, 95), ylim=(line + 1.3, -0.7))
    axis.axis("off")


def main() -> None:
    figure = Figure(figsize=(12.5, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.45))
    draw_timelines(left)
    draw_tokens(right)
    figure.savefig("results/method.png", dpi=120)


if __name__ == "__main__":
    main()
