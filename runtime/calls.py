"""calls.py: find the calls in an assistant's turn.

    parse_calls(text, turn) -> [Call]      # a bad call becomes a Call with an error; no text of the model raises

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Pretrained models also write
`<tool_code>print(crop_video(start_time=1, end_time=2))`, often without `</tool_code>`. We parse its literals, and never
evaluate it. An unclosed `<tool_call>` does not run: it is the format that we teach.
"""

import ast
import json
import re
import threading
from typing import Any

from episode import Call

MAX_CALL_CHARS = 4096  # a typical call has 100; a longer one is unparseable
MAX_DEPTH = 16  # levels of {} and []; a typical call has 2. Where Python itself gives up depends on the thread's stack
_TAG = re.compile(r"<(/?)(tool_call|tool_code)>")
_END_OF_TURN = re.compile(r"<\|\w+\|>\Z")
POSITIONAL = ("video_path", "start_time", "end_time")  # the arguments of a call in <tool_code> that writes no names
UNPARSEABLE = 'This call could not be read. Write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'


def parse_calls(text: str, turn: int = 0) -> list[Call]:
    """Read the calls of one assistant turn, in order. A bad one becomes a Call with an error, and the others still parse.

    One pass over the tags takes linear time: an opening tag inside an open call ends that call as unparseable. A <tool_code>
    that is still open at the end of the turn is read like a closed one."""
    calls = []
    opened = None  # the opening tag of the current call
    for tag in _TAG.finditer(text):
        closing, name = tag[1], tag[2]
        if not closing:
            if opened:
                calls.append(_unparseable(turn))
            opened = tag
        elif opened and name == opened[2]:
            body = text[opened.end() : tag.start()]
            calls += [_read_json(body, turn)] if name == "tool_call" else _read_code(body, turn)
            opened = None
    if opened and opened[2] == "tool_code":
        calls += _read_code(_END_OF_TURN.sub("", text[opened.end() :]), turn)
    elif opened:
        calls.append(_unparseable(turn))
    return calls


def _unparseable(turn: int) -> Call:
    return Call(turn, "", {}, text=UNPARSEABLE, error="unparseable")


def _read_json(body: str, turn: int) -> Call:
    try:
        call = json.loads(body) if len(body) <= MAX_CALL_CHARS else None
        if not isinstance(call, dict):
            return _unparseable(turn)
        arguments = call.get("arguments")
        if isinstance(arguments, str):  # some models write a JSON string
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return _unparseable(turn)
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        return _unparseable(turn)
    return _make_call(turn, call["name"], arguments)


def _make_call(turn: int, name: str, arguments: dict[str, Any]) -> Call:
    """Return the call, which is unparseable if it is nested too deep."""
    if is_deeper(arguments, MAX_DEPTH - 1):  # the call itself is a level
        return _unparseable(turn)
    return Call(turn, name, arguments)


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and dicts are nested more than so many levels deep."""
    if not isinstance(value, list | dict):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_deeper(part, levels - 1) for part in parts)


# CPython's parser counts its depth per interpreter, not per thread, so two at once can raise a SystemError.
_PARSING = threading.Lock()
NO_LITERALS = (SyntaxError, TypeError, ValueError, RecursionError, MemoryError)  # of code that is none, or too deep


def _read_code(body: str, turn: int) -> list[Call]:
    """Read a <tool_code> block. If the whole is Python, each statement is a call. Otherwise each line that is a call counts, and
    the others are ignored. A block without any is one unparseable call."""
    calls = _read_python(body, turn)
    if not calls:
        for line in body.splitlines():
            calls += [call for call in _read_python(line, turn) if not call.error]
    return calls or [_unparseable(turn)]


def _read_python(code: str, turn: int) -> list[Call]:
    """Return a call per statement, or none if the code is not Python."""
    try:
        with _PARSING:
            statements = ast.parse(code.strip()).body if len(code) <= MAX_CALL_CHARS else []
    except NO_LITERALS:
        statements = []
    return [_read_statement(statement, turn) for statement in statements]


def _read_statement(statement: ast.stmt, turn: int) -> Call:
    """Read `crop_video(start_time=1, end_time=2)`, `tools.crop_video("a.mp4", 1, 2)`, or either one inside `print(...)`."""
    expression = statement.value if isinstance(statement, ast.Expr) else None
    match expression:
        case ast.Call(ast.Name("print"), [printed], []):
            expression = printed
    match expression:
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name), [], keywords) if all(k.arg for k in keywords):
            written = {k.arg: k.value for k in keywords}
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name), values, []) if len(values) <= len(POSITIONAL):
            written = dict(zip(POSITIONAL, values))
        case _:
            return _unparseable(turn)
    try:
        arguments = {key: ast.literal_eval(value) for key, value in written.items()}
        arguments = json.loads(json.dumps(arguments))  # the same types as from JSON
    except NO_LITERALS:
        return _unparseable(turn)
    return _make_call(turn, name, arguments)
