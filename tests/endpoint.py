"""A chat endpoint in a thread: real HTTP, and replies that a test has written."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Endpoint(ThreadingHTTPServer):
    """Says its replies one after another, the last one for ever: texts, or (status, headers, body)."""

    def __init__(self, *replies):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies, self.bodies, self.keys, self.lock = list(replies), [], set(), threading.Lock()
        self.under_way, self.most = 0, 0  # requests
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        there, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with there.lock:
            there.under_way += 1
            there.most = max(there.most, there.under_way)
            there.bodies.append(body)
            there.keys.add(self.headers["Authorization"])
            reply = there.replies.pop(0) if len(there.replies) > 1 else there.replies[0]
        time.sleep(0.05)
        if isinstance(reply, str):
            choice = {"message": {"content": reply}, "finish_reason": "stop"}
            reply = 200, {}, {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
        with there.lock:
            there.under_way -= 1
        status, headers, body = reply
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass
