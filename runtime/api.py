"""api.py: a model behind an OpenAI-compatible chat endpoint: asked as it is, or as an engine. For evaluation only.

    check_api(Api(url="https://HOST/v1", model="gpt-4o"))    # refuses a missing key, and an address without an answer
    Chat(api).ask(messages, max_tokens=8)                    # -> (text, "stop" or "length")
    engine = OpenAI(api, renderer)                           # engine.generate(ids, frames, ...), as engine.py says

To the engine, a prompt goes out as the messages that its ids spell, frames as images in their places. The reply comes
back as text, which the renderer's tokenizer cuts into ids and thus counts; what the API itself counted is printed at the
end. Log-probs are unknown (0), so nothing that is sampled here can be trained on.

Deliberately missing: forced openings of a turn, seeds, stop tokens, streaming.
"""

import base64
import io
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.config import ConfigError
from runtime.engine import EngineError, Sample
from runtime.render import END_OF_TURN, IMAGE_PAD, VISION_END, VISION_START, Renderer
from runtime.video import Frames

CONTROL = ("<|im_start|>", END_OF_TURN, IMAGE_PAD, VISION_START, VISION_END)  # what divides a prompt


@dataclass(frozen=True)
class Api:
    """An OpenAI-compatible chat endpoint."""

    url: str = ""
    """Such as https://api.openai.com/v1; empty: none."""
    model: str = ""
    key: str = "OPENAI_API_KEY"
    """The environment variable that holds the key, which is written nowhere; empty: no key is sent."""

    def __post_init__(self):
        if self.url and not self.model:
            raise ValueError(f"url = {self.url!r}: needs the name of a model, too")


def check_api(api: Api) -> None:
    """Refuse an API without its key, or that does not answer at all."""
    import requests

    if not api.url:
        return
    if api.key and not os.environ.get(api.key):
        raise ConfigError(f"api.key = {api.key!r}: there is no such environment variable; export it, or name another")
    try:
        requests.get(f"{api.url.rstrip('/')}/models", timeout=10)  # whatever it says, it is there
    except requests.RequestException as error:
        raise ConfigError(f"api.url = {api.url!r} does not answer: {error}") from None


class Chat:
    """Client of one endpoint, for many threads at once. It asks again, ever more slowly, where that can help."""

    def __init__(self, api: Api, attempts: int = 6, timeout: float = 600.0, patience: float = 1.0):
        self.api, self.attempts = api, attempts
        self.timeout = timeout  # seconds of one attempt
        self.patience = patience  # seconds before the second attempt; doubles
        self.counted = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}
        self._key = os.environ.get(api.key, "") if api.key else ""
        self._lock = threading.Lock()

    def ask(self, messages: list[dict], **settings) -> tuple[str, str]:
        """Return (text, stop or length), or raise EngineError."""
        import requests

        body = {"model": self.api.model, "messages": messages, **settings}
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        problem, pause = "", self.patience
        for attempt in range(self.attempts):
            if attempt:  # jitter: requests that were refused together must not return together
                time.sleep(pause * random.uniform(1.0, 1.5))
                pause *= 2
            try:
                reply = requests.post(
                    f"{self.api.url.rstrip('/')}/chat/completions", json=body, headers=headers, timeout=self.timeout
                )
            except requests.RequestException as error:
                problem = str(error)
                continue
            told = reply.text.replace(self._key, "[the key]") if self._key else reply.text
            problem = f"status {reply.status_code}: {told[:300]}"
            if reply.status_code in (408, 409, 429) or reply.status_code >= 500:
                if reply.headers.get("Retry-After", "").isdecimal():
                    pause = max(pause, float(reply.headers["Retry-After"]))
                continue
            if reply.status_code >= 400:
                raise EngineError(f"{self.api.url}: {problem}")
            try:
                answer = reply.json()
                choice = answer["choices"][0]
                said = str(choice["message"]["content"] or "")
            except (ValueError, KeyError, IndexError, TypeError):
                continue
            usage = answer.get("usage") or {}
            with self._lock:
                self.counted["requests"] += 1
                for name in ("prompt_tokens", "completion_tokens"):
                    self.counted[name] += usage.get(name) or 0
            return said, "length" if choice.get("finish_reason") == "length" else "stop"
        raise EngineError(f"{self.api.url}: no answer after {self.attempts} tries, last: {problem}")


class OpenAI:
    """The engine."""

    version = 0

    def __init__(self, api: Api, renderer: Renderer):
        self.chat, self.renderer = Chat(api), renderer

    def generate(self, ids, frames, *, max_new_tokens, temperature, seed, stop=(), shared=0) -> Sample:
        said, finish = self.chat.ask(self.messages(ids, frames), max_tokens=max_new_tokens, temperature=temperature)
        # It may spell control tokens, as text from outside; they stay text.
        sampled = self.renderer.encode(self.renderer.inert(said, "assistant"))
        if finish == "stop":
            sampled.append(self.renderer.end_of_turn)
        return Sample(sampled, [0.0] * len(sampled), finish, self.version)

    def messages(self, ids: list[int], frames: Sequence[Frames]) -> list[dict]:
        """Return the chat that the ids spell. The last turn, which is only opened, is the one that is asked for."""
        control = self.renderer.tokenizer.convert_tokens_to_ids(list(CONTROL))
        begin, end, image, *_ = control
        pictures = [pixels for clip in frames for pixels in clip.pixels]
        messages, content, text, shown = [], [], [], 0
        for token in self.renderer.compact(ids):
            if token not in control:
                text.append(token)
                continue
            if text:
                content.append({"type": "text", "text": self.renderer.decode(text)})
                text = []
            if token == begin:
                content = []
            elif token == image:
                content.append({"type": "image_url", "image_url": {"url": data_url(pictures[shown])}})
                shown += 1
            elif token == end:
                # The first line of a turn is its role.
                role, _, content[0]["text"] = content[0]["text"].partition("\n")
                messages.append({"role": role, "content": [part for part in content if part.get("text") != ""]})
        return messages

    def expect(self, change: int) -> None:
        """An API batches on its own."""

    def close(self) -> None:
        counts = ", ".join(f"{n} {name}" for name, n in self.chat.counted.items())
        print(f"{self.chat.api.model}: {counts}", file=sys.stderr)


def data_url(pixels: np.ndarray) -> str:
    """Write a frame ([H, W, 3] uint8) as a JPEG: a request has a limit of its size, and 64 PNGs come near it."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "jpeg", quality=95, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
