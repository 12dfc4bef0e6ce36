"""web.py: an HTTP request with one deadline and one size limit for the whole of it, for servers, APIs and judges.

    reply = request("http://HOST:PORT/generate", 60, {"input_ids": [1, 2]})     # POST of JSON; without it, GET
    reply.status, reply.text, reply.json()                                      # or NoReply

Deliberately missing: streaming, kept connections.
"""

import json
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

MAX_BYTES = 64 << 20  # of a reply; one of 262,144 tokens with their log-probs has about 12 MB


class NoReply(Exception):
    """A request without a reply that can be used. The text is the reason."""


@dataclass(frozen=True)
class Reply:
    status: int
    text: str

    def json(self) -> Any:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:  # ValueError: also for a number of 5,000 digits
            raise NoReply(f"the reply is not JSON: {error!r:.200}") from None


def request(url: str, seconds: float, payload: dict | None = None, key: str = "", proxies: bool = False) -> Reply:
    """Send a request and return the reply, whatever its status. Raise NoReply after so many seconds. `proxies`: ask by way of
    the proxies that the environment names."""
    headers = {"Content-Type": "application/json", "User-Agent": "minparavt"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    body = None if payload is None else json.dumps(payload).encode()
    opener = build_opener(ProxyHandler(None if proxies else {}))
    deadline = time.monotonic() + seconds
    result = Future()

    def exchange() -> None:
        try:
            try:
                reply = opener.open(Request(url, body, headers), timeout=seconds)
            except HTTPError as error:  # a reply with another status than 200
                reply = error
            with reply:
                content = bytearray()
                while part := reply.read1(1 << 16):
                    content += part
                    if len(content) > MAX_BYTES:
                        raise NoReply(f"the reply has more than {MAX_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise TimeoutError
            result.set_result(Reply(reply.status, content.decode("utf-8", "replace")))
        except Exception as error:  # the caller raises it
            result.set_exception(error)

    # A socket's own timeout starts again with each byte. So wait for a thread, and leave it alone at the deadline.
    threading.Thread(target=exchange, name="request", daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError:  # of the wait or of the socket
        raise NoReply(f"timed out after {seconds:.3g} s") from None
    except (OSError, HTTPException, ValueError) as error:  # ValueError: not a URL
        raise NoReply(str(error) or repr(error)) from None
