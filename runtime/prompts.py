"""prompts.py: the prompts of all agents, the same in training, sampling and evaluation. A config can replace our texts.

    prompts = Prompts(system="...")     # in a config: `prompts: FILE.yaml`, with the fields below as its keys
    prompts.main_messages(question, paths, clips, contract, with_tools=True) -> messages for renderer.render
    prompts.refuse_unlike(checkpoint_dir)   # refuses a checkpoint that was trained with other words
    Prompts.load(checkpoint_dir)        # the words that the checkpoint was trained with

SFT, RL, evaluation and `ask` all build their prompts here. The prompt of an SFT row always promises reports: only a rollout has
the switch `tool_return: frames`.

Deliberately missing: prompts per dataset.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.config import differences
from runtime.video import Clip
from runtime.visual import ContractError, VisualContract, read_json

FILE = "prompts.json"

# Our text after a sub-agent's frames. A run's `prompts` can replace it and our system prompts.
SUBAGENT_REQUEST = "What happens here?"


class Live(str):
    """Text of our own. Control tokens in it are live."""


def system_prompt(with_tools: bool, stamped: bool = True, tool_return: str = "subagent") -> str:
    """Return the main agent's system prompt. It mentions times only if frames are stamped, and reports only if calls return
    them."""
    frames = "You see frames of it, each after its time." if stamped else "You see frames of it."
    answer_format = (
        "Think between <think> and </think>, then give the final answer between <answer> and </answer>: "
        "an option's letter, a time span as start - end in seconds, or a few words."
    )
    lines = [f"You answer questions about a video. {frames}", answer_format]
    if with_tools:
        result = "frames of its window" if tool_return == "frames" else "a report"
        lines.append(
            "The frames are only a sample. If they do not show enough, call tools before you answer: "
            f"several calls in one turn run in parallel, and each returns {result}."
        )
    return "\n".join(lines)


def subagent_system_prompt(stamped: bool = True) -> str:
    """Return the system prompt of a sub-agent whose tool does not bring one."""
    if not stamped:
        return "You see frames of one part of a video. Report briefly what happens in it."
    return "You see frames of one part of a video, each after its time. Report briefly what happens in it, and when."


@dataclass(frozen=True)
class Prompts:
    """Texts that replace ours. null: our text. An empty system text: no system message."""

    system: str | None = None
    """The main agent's system prompt. If it has a <tools> block of its own, the chat template adds none."""
    system_without_tools: str | None = None
    """The same for an agent without tools."""
    subagent_system: str | None = None
    """A sub-agent's system prompt. Both texts of the sub-agent can use {start}, {end} and {duration} of its window, in seconds,
    and {start_minutes} and {end_minutes}, as MM:SS. A tool's own texts go first."""
    subagent_request: str | None = None
    """The text after a sub-agent's frames."""
    before_question: str | None = None
    """The text between the overview and the question. Ours is a line break."""

    @property
    def changed(self) -> list[str]:
        """The names of the texts that are not ours."""
        return [name for name, text in dataclasses.asdict(self).items() if text is not None]

    def main_messages(
        self,
        question: str,
        paths: Sequence[str],
        clips: Sequence[Clip],
        contract: VisualContract,
        with_tools: bool,
        tool_return: str = "subagent",
    ) -> list[dict]:
        """Return the main agent's first messages. `clips`: one overview per video."""
        # The user's message: the overview of each video, then the question.
        parts: list[str | Clip] = []
        for path, clip in zip(paths, clips, strict=True):
            if len(paths) > 1:  # tools pick a video by its name
                parts.append(f"\n{os.path.basename(path)}: ")
            parts.append(clip)
        before = self.before_question
        parts.append(("\n" if before is None else before) + question)

        # The system prompt: the run's own text, or else ours.
        own = self.system if with_tools else self.system_without_tools
        system = system_prompt(with_tools, bool(contract.stamp), tool_return) if own is None else own
        return _opening(Live(system), parts)  # Live: its tags become control tokens

    def subagent_messages(
        self, clip: Clip, window: tuple[float, float], contract: VisualContract, request="", system="", question=""
    ) -> list[dict]:
        """Return a sub-agent's first messages. `window`: that of the clip, in seconds. `request` and `system` are the tool's
        own texts, if it has any; they are used verbatim. Only an SFT row can add a question; a rollout never does."""
        system = system or fill(self.subagent_system, window)
        if system is None:
            system = subagent_system_prompt(bool(contract.stamp))
        request = request or fill(self.subagent_request, window) or SUBAGENT_REQUEST
        if question:
            request += f"\nQuestion: {question}"
        return _opening(system, [clip, "\n" + request])

    @classmethod
    def load(cls, checkpoint: str | Path) -> "Prompts":
        """Read the texts of a checkpoint. A stock checkpoint gets ours."""
        path = Path(checkpoint) / FILE
        try:
            return cls(**(read_json(path) or {}))
        except TypeError as error:
            raise ContractError(f"{path}: {error}") from None

    def save(self, checkpoint: str | Path) -> None:
        (Path(checkpoint) / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1))

    def refuse_unlike(self, checkpoint: str | Path) -> None:
        """Raise ContractError if the checkpoint was trained with other texts. One that was not trained here has none."""
        if not (Path(checkpoint) / FILE).exists():
            return
        trained, ours = dataclasses.asdict(self.load(checkpoint)), dataclasses.asdict(self)
        if unlike := differences({"prompts": trained}, {"prompts": ours}):
            raise ContractError(
                f"{checkpoint} was trained with other prompts ({'; '.join(unlike.values())}). "
                "Set the run's `prompts` as in that training, or start from another checkpoint."
            )


def _opening(system: str, user: list[str | Clip]) -> list[dict]:
    messages = [{"role": "user", "content": user}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def fill(text: str | None, window: tuple[float, float]) -> str | None:
    """Put a sub-agent's window into a text of its own. All other braces stay."""
    start, end = window
    values = {"start": f"{start:.1f}", "end": f"{end:.1f}", "duration": f"{end - start:.1f}"}
    values |= {"start_minutes": minutes(start), "end_minutes": minutes(end)}
    for name, value in values.items():
        text = text and text.replace(f"{{{name}}}", value)
    return text


def minutes(seconds: float) -> str:
    """Write seconds as MM:SS."""
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


OURS = Prompts()
