"""prompts.py: words of one's own in place of the prompts in data.py, the same in training, sampling and evaluation.

prompts = Prompts(system="...")     # in a config: `prompts: FILE.yaml`, with the fields below as its keys
prompts.check(checkpoint_dir)       # refuses a checkpoint that was trained with other words
Prompts.load(checkpoint_dir)        # the words that the checkpoint was trained with
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from runtime.config import differences
from runtime.visual import ContractError, read_json

FILE = "prompts.json"


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

    @classmethod
    def load(cls, checkpoint: str | Path) -> "Prompts":
        """Read the texts of a checkpoint. A stock checkpoint gets ours."""
        path = Path(checkpoint) / FILE
        try:
            return cls(**(read_json(path) or {}))
        except TypeError as error:
            raise ContractError(f"{path}: {error}") from None

    def fill(self, window: tuple[float, float]) -> "Prompts":
        """Put a sub-agent's window into its texts. All other braces stay."""
        start, end = window
        values = {"start": f"{start:.1f}", "end": f"{end:.1f}", "duration": f"{end - start:.1f}"}
        values |= {"start_minutes": minutes(start), "end_minutes": minutes(end)}
        filled = {}
        for field in ("subagent_system", "subagent_request"):
            text = getattr(self, field)
            for name, value in values.items():
                text = text and text.replace(f"{{{name}}}", value)
            filled[field] = text
        return dataclasses.replace(self, **filled)

    def save(self, checkpoint: str | Path) -> None:
        (Path(checkpoint) / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1))

    def check(self, checkpoint: str | Path) -> None:
        """Raise ContractError if the checkpoint was trained with other texts. One that was not trained here has none."""
        if not (Path(checkpoint) / FILE).exists():
            return
        trained, ours = dataclasses.asdict(self.load(checkpoint)), dataclasses.asdict(self)
        if unlike := differences({"prompts": trained}, {"prompts": ours}):
            raise ContractError(
                f"{checkpoint} was trained with other prompts ({'; '.join(unlike.values())}). "
                "Set the run's `prompts` as in that training, or start from another checkpoint."
            )


def minutes(seconds: float) -> str:
    """Write seconds as MM:SS."""
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


OURS = Prompts()
