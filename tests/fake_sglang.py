"""A stand-in for an SGLang server: the parts of its HTTP interface that servers.py uses, no model, and faults on demand.

    python fake_sglang.py PORT IMAGE_PAD CELL STOP [FAULT]

Its tokens depend on the prompt, the seed and the weights' version. FAULT: busy (503 at times), abort (every
second request), drift (one image token too few), swap (refuses the first weights), slow_start=SECONDS, warms_up=SECONDS (samples,
but is not healthy, and dies if it gets weights), slow=SECONDS for every request, crash=N (at once, after N lines of log), reply=JSON
(a list of changes: each answer has one of them). GET /model_info reports what the server has seen.
"""

import hashlib
import json
import os
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image

port, image_pad, cell, stop = map(int, sys.argv[1:5])
fault, _, amount = (sys.argv[5] if len(sys.argv) > 5 else "").partition("=")
healthy_at = time.monotonic() + (float(amount) if fault == "warms_up" else 0)
state = {"version": "default", "model_path": "the/checkpoint", "pid": os.getpid()}
state |= {"prompts": {}, "read": {}, "served": 0, "loads": 0}
lock = threading.Lock()


def generate(request: dict) -> tuple[int, dict]:
    if "image_data" not in request:  # the first request, which asks whether the server is ready
        return 200, {}
    with lock:
        state["served"] += 1
        number = state["served"]
        state["shown"] = request["image_data"]
        shown = str(request["image_data"][:1])
        state["prompts"][shown] = state["prompts"].get(shown, 0) + 1
    if fault == "busy" and number % 3 == 1:
        return 503, {"error": "busy"}
    time.sleep(float(amount) if fault == "slow" else 0.02)
    images, prompt = iter(request.get("image_data") or []), []
    for token in request["input_ids"]:
        if token == image_pad:
            width, height = Image.open(next(images).removeprefix("file://")).size
            prompt += [token] * (width // cell * (height // cell) - (fault == "drift"))
        else:
            prompt.append(token)
    params = request["sampling_params"]
    assert params["top_p"] == 1 and params["top_k"] == -1 and str(image_pad) in params["logit_bias"]
    rng = random.Random(f"{prompt}/{params['sampling_seed']}/{state['version']}")
    ids = [rng.randrange(20, 200) for _ in range(min(6, params["max_new_tokens"] - 1))] + [stop]
    finish = {"type": "stop", "matched": stop}
    if fault == "abort" and number % 2:
        finish = {"type": "abort", "message": "no"}
    meta = {"finish_reason": finish, "weight_version": state["version"]}
    if request.get("return_logprob"):
        meta["output_token_logprobs"] = [[-1.0, token, None] for token in ids]
    reply = {"output_ids": ids, "meta_info": meta}
    if request.get("return_prompt_token_ids"):
        reply["prompt_token_ids"] = prompt
    if fault == "reply":
        changes = json.loads(amount)
        reply |= changes[number % len(changes)]
    return 200, reply


def load(request: dict) -> tuple[int, dict]:
    if time.monotonic() < healthy_at:  # a real server fails an assertion: it has a request in flight
        os._exit(1)
    state["loads"] += 1
    if not os.path.isdir(request["model_path"]) or (fault == "swap" and state["loads"] == 1):
        return 400, {"success": False, "message": "no such folder"}
    if not request["flush_cache"]:  # a real server would go on using the old weights' keys
        return 400, {"success": False, "message": "the cache holds keys of the old weights"}
    state["version"] = request["weight_version"]
    state["model_path"] = request["model_path"]
    files = sorted(path for path in Path(request["model_path"]).iterdir() if path.is_file())
    state["read"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return 200, {"success": True, "message": ""}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, code: int, body: dict | None) -> None:
        text = json.dumps(body).encode() if body is not None else b""
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        if self.path == "/health":
            self.answer(200 if time.monotonic() >= healthy_at else 503, None)
        else:
            self.answer(200, {"weight_version": state["version"], **state, "environment": dict(os.environ)})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(*{"/generate": generate, "/update_weights_from_disk": load}[self.path](request))

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True


if fault == "crash":
    print(*[f"line {i}" for i in range(int(amount))], sep="\n")
    sys.exit(3)
if fault == "slow_start":
    time.sleep(float(amount))
Server(("", port), Handler).serve_forever()
