"""A chat endpoint in a thread: real HTTP, requests held to the official types, and replies that a test has written."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

REQUEST = TypeAdapter(CompletionCreateParamsNonStreaming)


class Endpoint(ThreadingHTTPServer):
    """Says its replies one after another, the last one for ever: texts, or (status, headers, body); bytes are sent raw."""

    def __init__(self, *replies):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies, self.bodies, self.keys, self.lock = list(replies), [], set(), threading.Lock()
        self.under_way, self.most = 0, 0  # requests
        self.seconds, self.wrong = 0.05, []  # of a reply; requests that the official types refuse
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def shutdown(self) -> None:
        super().shutdown()
        assert not self.wrong  # whoever opens an endpoint holds its requests to the types


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        there, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with there.lock:
            there.under_way += 1
            there.most = max(there.most, there.under_way)
            there.bodies.append(body)
            there.keys.add(self.headers["Authorization"])
            reply = there.replies.pop(0) if len(there.replies) > 1 else there.replies[0]
        try:
            assert self.path.endswith("/v1/chat/completions")
            assert set(body) <= set(CompletionCreateParamsNonStreaming.__annotations__)
            for message in REQUEST.validate_python(body)["messages"]:
                list(message["content"])  # checked as it is read
        except (AssertionError, ValueError) as error:
            there.wrong.append(f"{body}: {error}")
        time.sleep(there.seconds)
        if isinstance(reply, str):
            choice = {"message": {"content": reply}, "finish_reason": "stop"}
            reply = 200, {}, {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
        with there.lock:
            there.under_way -= 1
        status, headers, body = reply
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *_):
        pass
