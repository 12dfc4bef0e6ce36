"""A request ends at its deadline and at its size limit, whatever the other side does. Real sockets."""

import contextlib
import itertools
import socket
import threading
import time

import pytest

from runtime import web
from runtime.web import NoReply, Reply, request

HEAD = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def one_that_says(parts, pause: float = 0.0):
    """Yield the URL of a server that reads a request and then sends these bytes, with pauses, until the other side is gone."""

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=say, args=(connection,), daemon=True).start()

    def say(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        with contextlib.suppress(OSError), connection:
            for part in parts():
                connection.sendall(part)
                threading.Event().wait(pause)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def silent():
    threading.Event().wait()
    yield b""


def drip_header():
    yield HEAD
    yield from itertools.repeat(b"x")


def drip_body():
    yield HEAD + b"\r\n"
    yield from itertools.repeat(b" ")


def drip_chunks():
    yield HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    yield from itertools.repeat(b"1\r\n \r\n")


def endless():
    yield HEAD + b"\r\n"
    yield from itertools.repeat(bytes(1 << 20))


@pytest.mark.parametrize("payload", [None, {"a": 1}], ids=["GET", "POST"])
@pytest.mark.parametrize("parts", [silent, drip_header, drip_body, drip_chunks])
def test_one_deadline_covers_the_whole_of_a_request(parts, payload):
    """Past bug: a socket's timeout starts again with each byte, so an API that drips white space held a run for ever."""
    started = time.monotonic()
    with one_that_says(parts, pause=0.05) as url, pytest.raises(NoReply, match="timed out after 1 s"):
        request(url, 1.0, payload)
    assert time.monotonic() - started < 3


def test_an_endless_reply_is_cut_off(monkeypatch):
    """Past bug: it reached 908 MB in 6 s."""
    with one_that_says(endless) as url, pytest.raises(NoReply, match=f"more than {web.MAX_BYTES} bytes"):
        request(url, 60.0)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "<html>", ""])
def test_a_reply_that_is_no_json_is_told(text):
    """Past bug: a number of 5,000 digits was a traceback."""
    with pytest.raises(NoReply, match="the reply is not JSON: (Recursion|Value|JSONDecode)Error"):
        Reply(200, text).json()


def test_a_server_that_is_gone_or_talks_nonsense_is_told():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(NoReply, match="refused"):
        request(f"http://127.0.0.1:{port}", 5.0)
    for said in (b"", b"nonsense\r\n\r\n"):
        with one_that_says(lambda said=said: [said]) as url, pytest.raises(NoReply, match="closed|nonsense"):
            request(url, 5.0)
    with pytest.raises(NoReply, match="url"):
        request("localhost", 5.0)
