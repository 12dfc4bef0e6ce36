"""Each model of the comparison: the prompts that it reads turn by turn, and the fate of its replies."""

import dataclasses
import io
import itertools
import json
import random
from collections import namedtuple
from typing import get_args

import pytest
import yaml
from tiny_checkpoint import CONTRACT, MemoryVideos, Scripted, check_trajectory

from data import Task
from evals import protocols
from evals.protocols import WORDS, Prompting, Protocol, play
from rollout import RolloutConfig, Stage, dump, opening, run_episode
from runtime.contract import ContractError, Renderer
from runtime.engine import EngineError

TASK = Task("t1", "Who?\nA. he\nB. she", ("/data/v.mp4",), "mcq", "B", ("he", "she"))  # 60 s, 2 frames per second
END = "<|im_end|>"
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
PROTOCOLS = get_args(Protocol)
ONE_TURN = [name for name in PROTOCOLS if name not in protocols.PROTOCOLS]
# Short texts, so that whole prompts can be written down here.
TERSE = {
    "direct": {"user": "{frames}|{question}|{request}", "mcq": "M"},
    "think": {"user": "{frames}|{question}|{request}", "mcq": "M", "system": "S <answer>"},
    "rewatch_r1": {"user": "{minutes}|{frames}", "mcq": "M"},
    "conan": {"user": "{frames}|{question}|{request}", "mcq": "M", "more": "{frames}|more", "last": "{frames}|last"},
    "longvt": {"user": "{frames}|{question}|{request}|{path}", "mcq": "M", "shown": "{count}, {start} to {end}"},
    "sage": {
        "system": "S {tools}",
        "user": "{frames}|{question}|{request}|{path}, {clock}",
        "mcq": "M",
        "reasoner": "R {tools}",
        "message": "{question}|{context}|{results}|{latest}",
        "tools": "T",
        "identify_timestamps_visually": "{frames}|{event}",
        "perform_reasoning": "{frames}|{query}",
    },
    "video_zoomer": {
        "system": "S",
        "user": "{frames}|{question}|{request}",
        "mcq": "M",
        "found": "<tool_response>{frames}</tool_response>|go on",
        "failed": "<tool_response>{error}</tool_response>|repair",
        "last": "|last",
    },
}


Outcome = namedtuple("Outcome", "episode answer")


class Model(Scripted):
    """Says its turns one after another."""

    def __init__(self, renderer, *said):
        turns = iter(said)
        super().__init__(renderer, lambda prompt, seed: next(turns))

    @property
    def read(self) -> list[str]:
        """Its prompts, with a # for each picture."""
        return [self.renderer.decode(self.renderer.compact(r.ids)).replace(PICTURE, "#") for r in self.asked]

    def told(self, said: list[str]) -> list[str]:
        """The first prompt, and what each later turn read beyond the one before and its answer."""
        return [self.read[0], *(b.removeprefix(a + s) for a, s, b in zip(self.read, said, self.read[1:]))]


@pytest.fixture(scope="module")
def ask(renderer, tmp_path_factory):
    """ask(protocol, turns, ...) -> the outcome, and the model that said these turns. `words`: {}, for the authors' own."""
    folder, numbers = tmp_path_factory.mktemp("words"), itertools.count()

    def play_it(protocol, said, task=TASK, k=4, videos=None, model=None, cfg=None, words=None, caption=""):
        model = model or Model(renderer, *said)
        cfg = RolloutConfig(**{"temperature": 0.0, "think_prefix": False, "max_context": 100_000} | (cfg or {}))
        file = folder / f"{next(numbers)}.yaml"  # a new one: each is read only once
        file.write_text(yaml.safe_dump(TERSE.get(protocol, {}) if words is None else words))
        stage = Stage(model, renderer, videos or MemoryVideos(), cfg)
        outcome = Outcome(*play(stage, task, k, 7, Prompting(protocol, str(file)), caption))
        check(outcome.episode, renderer, model)
        return outcome, model

    return play_it


def check(episode, renderer, model) -> None:
    """Whatever is played: it can be dumped, and all of a turn is sampled, from what stands before it."""
    dump(episode, io.StringIO(), renderer)
    for agent in episode.trajectories:
        check_trajectory(agent, renderer)
        assert all(all(agent.mask[start:end]) for start, end in agent.turns)
        for start, _ in agent.turns:  # every turn continues exactly what the engine was asked with
            assert any(agent.ids[:start][-len(request.ids) :] == request.ids for request in model.asked)


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"


# ---- one turn


def test_a_plain_question_is_one_user_turn_with_the_contracts_stamps(ask):
    outcome, model = ask("direct", ["B" + END])
    frames = "<0.0 seconds>#<20.0 seconds>#<39.5 seconds>#<59.5 seconds>#"
    assert model.read == [user(f"{frames}|{TASK.question}|M")]
    assert outcome.answer == "B" and outcome.episode.calls == [] and not outcome.episode.error


@pytest.mark.parametrize("protocol", ONE_TURN)
def test_protocols_of_one_turn_ask_once_and_grade_what_is_in_the_answer_tags(ask, protocol):
    for kind in ("mcq", "tvg", "oe"):
        task = dataclasses.replace(TASK, kind=kind)
        outcome, model = ask(protocol, ["<answer>A</answer> no <answer> B </answer>" + END], task, words={})
        assert outcome.answer == "B" and len(model.read) == 1 and model.read[0].count("#") == 4
        assert WORDS[protocol][kind] in model.read[0] and TASK.question in model.read[0]
        assert ("<|im_start|>system" in model.read[0]) is (protocol == "think")
        assert "{" not in model.read[0]  # every place is filled in
    for said in ("The answer is B." + END, "<answer>B" + END, "<answer></answer>" + END):
        outcome, _ = ask(protocol, [said], words={})
        assert outcome.answer == (said.removesuffix(END) if protocol == "direct" else None)
    assert ask(protocol, ["<think>Option A says that he"], words={})[0].answer is None  # a thought that was cut off


def test_the_overview_has_the_protocols_rate_and_at_most_k_frames(ask):
    def times(protocol, k):
        outcome, _ = ask(protocol, ["" + END], k=k)
        return outcome.episode.main.frames[0].times

    assert times("rewatch_r1", 192) == tuple(i / 2 for i in range(120))  # 2 fps: all of them
    assert times("video_zoomer", 64) == tuple(range(0, 60, 2))  # 0.5 fps
    assert times("longvt", 64) == tuple(range(60))
    assert times("video_zoomer", 30) == tuple(range(0, 60, 2))
    assert times("video_zoomer", 4) == times("longvt", 4) == times("direct", 4) == (0.0, 20.0, 39.5, 59.5)
    assert len(times("direct", 64)) == 64


# ---- ours


def test_the_agents_protocol_is_an_episode_of_training(ask, renderer):
    call = '<tool_call>{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 9}}</tool_call>'
    said = ["look</think>" + call + call + END, "a cat" + END, "a cat" + END, "so</think><answer>B</answer>" + END]
    outcome, _ = ask("agent", said)
    stage = Stage(Model(renderer, *said), renderer, MemoryVideos(), RolloutConfig(temperature=0.0, think_prefix=False))
    episode = run_episode(stage, TASK, 4, opening(TASK, 4, stage), 7)
    assert outcome.episode.main.ids == episode.main.ids and outcome.answer == "B"
    assert [c.text for c in outcome.episode.calls] == ["a cat", "a cat"] == [c.text for c in episode.calls]
    _, model = ask("agent", ["x" + END], dataclasses.replace(TASK, kind="tvg", options=()))
    assert f"\n{TASK.question} Give its start and end in seconds." in model.read[0]  # how to answer is said to it, too


# ---- conan


def clips(text: str, answer: str = "") -> str:
    return f"<score>1</score><think>so</think><clip>{text}</clip><answer>{answer}</answer>" + END


def test_conan_gets_unseen_frames_of_its_clips_in_a_users_turn_and_must_answer_in_the_last(ask, monkeypatch):
    monkeypatch.setattr(protocols, "CONAN_FRAMES", 3)
    said = [clips("00:00:20-00:00:21,00:00:50-00:00:50"), clips("00:00:20-00:00:21"), clips("", "B")]
    outcome, model = ask("conan", said)
    first, more, last = model.told(said)
    assert first == user(f"00:00:00#00:00:20#00:00:39#00:00:59#|{TASK.question}|M")
    # Unseen in the clips: 20.5, 21, 21.5, 50, 50.5 (20 is in the overview); three of five, evenly: 20.5, 21.5, 50.5.
    assert more == "\n" + user("00:00:20#00:00:21#00:00:50#|more")
    assert last == "\n" + user("00:00:21#|last")  # only 21.0 is left
    assert [clip.times for clip in outcome.episode.main.frames[1:]] == [(20.5, 21.5, 50.5), (21.0,)]
    assert outcome.answer == "B" and [c.window for c in outcome.episode.calls] == [(20, 50), (20, 21)]


def test_conan_stops_at_an_empty_clip_and_never_looks_after_its_third_turn(ask):
    outcome, model = ask("conan", [clips("", "A")])
    assert outcome.answer == "A" and len(model.read) == 1 and not outcome.episode.calls
    outcome, model = ask("conan", [clips(f"00:00:0{i}-00:00:1{i}", "C" * i) for i in range(4)])
    assert outcome.answer == "CC" and len(model.read) == 3 and len(outcome.episode.calls) == 2
    outcome, model = ask("conan", ["no tags" + END])
    assert outcome.answer is None and len(model.read) == 1


def test_clips_without_frames_come_back_as_errors(ask):
    said = [clips("the end"), clips("00:02:00-00:03:00"), clips("", "B")]
    outcome, model = ask("conan", said)
    _, unreadable, outside = model.told(said)
    assert "HH:MM:SS-HH:MM:SS" in unreadable and unreadable.endswith("|more" + END + "\n<|im_start|>assistant\n")
    assert "ends at 00:01:00" in outside and "#" not in outside
    assert [c.error for c in outcome.episode.calls] == ["unparseable", "bad_arguments"] and outcome.answer == "B"


# ---- longvt


def crop(start, end) -> str:
    call = {"name": "crop_video", "arguments": {"video_path": "/x/y.mp4", "start_time": start, "end_time": end}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_longvt_gets_the_frames_of_all_its_calls_in_one_tool_turn_without_stamps(ask):
    said = ["<think>x</think>" + crop(10, 13) + crop(50, 99) + END, "<answer>B</answer>" + END]
    outcome, model = ask("longvt", said)
    first, frames = model.told(said)
    head, question = first.split("<|im_start|>user\n")
    assert question == f"####|{TASK.question}|M|v.mp4{END}\n<|im_start|>assistant\n"
    [schema] = [json.loads(line) for line in head.splitlines() if line.startswith('{"type"')]
    assert schema["function"]["parameters"]["required"] == ["video_path", "start_time", "end_time"]
    # 1 fps: 3 frames of 10 ... 13 s, and 10 of 50 ... 60 s, where the video ends.
    shown = [f"<tool_response>\n{'#' * 3}3, 10.0 to 13.0\n</tool_response>"]
    shown.append(f"<tool_response>\n{'#' * 10}10, 50.0 to 60.0\n</tool_response>")
    assert frames == "\n<|im_start|>user\n" + "\n".join(shown) + END + "\n<|im_start|>assistant\n"
    assert [c.window for c in outcome.episode.calls] == [(10, 13), (50, 60)] and outcome.answer == "B"


def test_a_bad_call_of_longvt_is_told_so_and_costs_its_siblings_nothing(ask):
    said = [crop(9, 5) + "<tool_call>{oops</tool_call>" + crop(0, 2) + crop(90, 95) + END, "x" + END]
    outcome, model = ask("longvt", said)
    assert [c.error for c in outcome.episode.calls] == ["bad_arguments", "unparseable", "", "bad_arguments"]
    assert model.told(said)[1].count("<tool_response>") == 4 and model.told(said)[1].count("#") == 2


def test_longvt_has_five_rounds_of_calls(ask):
    outcome, model = ask("longvt", [crop(0, 2) + END] * 7)
    assert len(model.read) == 6 and len(outcome.episode.calls) == 5 and outcome.answer is None


def test_longvt_answers_first_in_tags_then_in_a_box_then_with_a_number(ask):
    for said, answer in (
        ("<answer>A</answer> \\boxed{C} <answer>B</answer>", "A"),
        ("\\boxed{A} or \\boxed{\\text{B}} 7", "\\text{B}"),
        ("It lasts 12.5.", "12.5"),
        ("It is B", None),
    ):
        assert ask("longvt", [said + END])[0].answer == answer
    said = ["<answer>early</answer>" + crop(0, 2) + END, "<answer>late</answer>" + END]
    assert ask("longvt", said)[0].answer == "early"  # of all that was said


def test_a_template_that_hides_the_tools_is_refused(renderer, monkeypatch):
    class Blind(Renderer):
        def render(self, messages, tools=None, generate=False):
            return super().render(messages, None, generate)

    stage = Stage(Model(renderer), Blind(renderer.tokenizer, CONTRACT), MemoryVideos(), RolloutConfig())
    monkeypatch.setattr(protocols, "Renderer", Blind)
    with pytest.raises(ContractError, match="chat_template.jinja"):
        play(stage, TASK, 4, 0, Prompting("longvt"))


# ---- sage


def plan(answer=None, tool=None, verdict=None, **more) -> str:
    calls = [] if tool is None else [{"rationale": "r", "name": tool[0], "arguments": tool[1]}]
    reply = {"final_answer": answer, "recommended_tools": {"needed": bool(calls), "tool_calls": calls}} | more
    if verdict is not None:
        reply["answerable"] = {"verdict": verdict, "reasoning": "r"}
    return f"<json>{json.dumps(reply)}</json>" + END


def window(name, start, end, **more) -> tuple:
    return name, {"video_path": "x", "timestamp_start": start, "timestamp_end": end} | more


def test_sage_answers_at_once_if_it_needs_no_tool(ask):
    outcome, model = ask("sage", [plan("B", video_context="c")])
    stamps = "00:00:00#00:00:20#00:00:39#00:00:59#"
    opening = f"<|im_start|>system\nS T{END}\n"
    assert model.read == [opening + user(f"{stamps}|{TASK.question}|M|v.mp4, 00:01:00")]
    assert outcome.answer == "B" and not outcome.episode.calls


def test_sage_reasons_in_fresh_conversations_over_what_its_tools_found(ask, renderer):
    tool = window("identify_timestamps_visually", "00:00:10", "00:00:12", event="a cat")
    said = [plan(tool=tool, video_context="a room"), "at 00:00:11" + END, plan(tool=tool, verdict=False)]
    said += ["no" + END, plan("B", verdict=True)]
    outcome, model = ask("sage", said, cfg={"temperature": 0.3})
    # Behind the tools: as sub-agents are sampled.
    assert [request.temperature for request in model.asked] == [0.3, 0.0, 0.3, 0.0, 0.3]
    _, seen, first, _, second = model.read
    # 1 fps of 10 ... 12 s.
    assert seen == user("00:00:10#00:00:11#|a cat")
    latest = json.dumps({"name": tool[0], "arguments": tool[1]})
    head, result = f"<|im_start|>system\nR T{END}\n", f"{tool[0]}_#1 output: at 00:00:11"
    assert first == head + user(f"{TASK.question}|a room|{result}|{latest}")
    assert second == head + user(f"{TASK.question}|a room|{result}\n{tool[0]}_#2 output: no|{latest}")
    episode = outcome.episode
    assert outcome.answer == "B" and [c.window for c in episode.calls] == [(10, 12)] * 2
    # Its own three conversations are the main trajectory, those behind the tools belong to the calls.
    turns = [renderer.decode(episode.main.ids[a:b]) for a, b in episode.main.turns]
    assert turns == [said[0], said[2], said[4]] and len(episode.subagents) == 2
    assert sum(episode.main.mask) == sum(len(renderer.encode(t)) for t in turns)


def test_sage_runs_only_the_first_call_of_a_reply(ask):
    tool = {"name": "extract_parts_from_timestamp", "arguments": window("", "00:00:00", "00:00:05")[1]}
    both = {"needed": True, "tool_calls": [tool, {"name": "perform_reasoning", "arguments": {}}]}
    outcome, _ = ask("sage", [plan(recommended_tools=both), plan("A", verdict=True)])
    assert [c.name for c in outcome.episode.calls] == [tool["name"]] and outcome.answer == "A"


def test_sages_media_are_handles_that_stand_for_frames_of_the_video(ask):
    frames = window("extract_parts_from_timestamp", "00:00:30", "00:10:00", extract_type="frames")
    clip = window("extract_parts_from_timestamp", "00:00:02", "00:00:04", extract_type="subclips")

    def look(*paths):
        return "perform_reasoning", {"query": "who?", "media_paths": paths}

    tools = [frames, clip, look("/tmp/frame_31.50s.jpg", "clip_2.00s_4.00s.mp4"), look("/etc/passwd"), look("v.mp4")]
    said = [plan(tool=tools[0]), *(plan(tool=tool, verdict=False) for tool in tools[1:3]), "she" + END]
    said += [*(plan(tool=tool, verdict=False) for tool in tools[3:]), "he" + END, plan("B", verdict=True)]
    outcome, model = ask("sage", said)
    stills, part, seen, unknown, whole = outcome.episode.calls
    # 30 ... 60 s hold 60 frames: the midpoints of ten bins of six, at 30 + 1.5 + 3 i.
    assert json.loads(stills.text) == {"media_paths": [f"frame_{31.5 + 3 * i:.2f}s.jpg" for i in range(10)]}
    assert stills.window == (30, 60) and json.loads(part.text) == {"media_paths": ["clip_2.00s_4.00s.mp4"]}
    # 1 fps of 2 ... 4 s are 2 of 5 frames: 2.5 and 3.5.
    assert model.read[3] == user("00:00:02#00:00:03#00:00:31#|who?") and json.loads(seen.text) == {"answer": "she"}
    assert unknown.error == "bad_arguments" and "clip_2.00s_4.00s.mp4" in unknown.text
    assert whole.agent.frames[0].times == (0.0, 20.0, 39.5, 59.5) and outcome.answer == "B"


@pytest.mark.parametrize(
    ("tool", "error", "text"),
    [
        (window("identify_timestamps_visually", "00:00:10", "00:00:05"), "bad_arguments", "ends at 00:20:00"),
        (window("identify_timestamps_visually", "00:00:00", "00:10:00"), "bad_arguments", "less than 600 seconds"),
        (window("extract_parts_from_timestamp", "00:00:00", "00:05:00"), "bad_arguments", "less than 300 seconds"),
        (window("extract_parts_from_timestamp", "soon", "00:00:05"), "bad_arguments", "timestamp_start"),
        (("perform_reasoning", {"query": "x", "media_paths": "v.mp4"}), "bad_arguments", "list of some of: v.mp4"),
        ((None, None), "unknown_tool", "perform_reasoning"),
    ],
)
def test_what_a_tool_of_sage_cannot_do_is_its_result(ask, tool, error, text):
    said = [plan(tool=tool), plan("B", verdict=True)]
    outcome, model = ask("sage", said, videos=MemoryVideos(duration=1200))
    [call] = outcome.episode.calls
    assert call.error == error and text in call.text and f"output: {call.text}|" in model.read[1]
    assert outcome.answer == "B" and not outcome.episode.error


def test_sage_repairs_or_retries_bad_json_and_gives_up_after_five(ask):
    sloppy = 'Well. ```json\n{"final_answer": "line\nbreak", "recommended_tools": {"needed": false,},}\n```' + END
    assert ask("sage", [sloppy])[0].answer == "line\nbreak"
    outcome, model = ask("sage", ["no" + END, "{" * 9999 + "}" + END, plan("B")])
    assert [request.temperature for request in model.asked] == [0.0, 0.7, 0.7] and len(set(model.read)) == 1
    assert outcome.answer == "B"
    assert len(outcome.episode.main.turns) == 3 and len(outcome.episode.main.frames) == 3
    outcome, model = ask("sage", ["no" + END] * 9)
    assert outcome.answer is None and len(model.read) == 5 and not outcome.episode.error


def test_sage_has_ten_steps_and_reads_the_last_ten_results(ask, monkeypatch):
    tool = window("extract_parts_from_timestamp", "00:00:00", "00:00:05")
    said = [plan("A", tool=tool), *[plan("A", tool=tool, verdict=False)] * 20]
    outcome, model = ask("sage", said)
    assert len(model.read) == 11 and len(outcome.episode.calls) == 10 and outcome.answer is None
    assert model.read[10].count("output: ") == 10
    outcome, model = ask("sage", [plan(), plan("A", verdict=False)])  # nothing to run, twice
    assert len(model.read) == 2 and outcome.answer is None
    monkeypatch.setattr(protocols, "SAGE_STEPS", 12)
    _, model = ask("sage", said)
    assert "_#1 output" not in model.read[11] and "_#11 output" in model.read[11]


# ---- video_zoomer


def zoom(start, end, fps, think="x") -> str:
    return f'<think>{think}</think><video_zoom> {{"segment": [{start}, {end}], "fps": {fps}}} </video_zoom>'


def test_video_zoomer_reads_stamped_frames_that_count_anew_in_every_segment(ask):
    said = [zoom(10, 12, 1.5), "<answer>It is \\boxed{\\text{B}}</answer>" + END]
    outcome, model = ask("video_zoomer", said)
    first, shown = model.told(said)
    stamps = "<frame0_time0.00s>#<frame1_time20.00s>#<frame2_time39.50s>#<frame3_time59.50s>#"
    assert first == f"<|im_start|>system\nS{END}\n" + user(f"{stamps}|{TASK.question}|M")
    # int(1.5 * 2) = 3 frames from frame 20 to frame 24.
    found = "<frame0_time10.00s>#<frame1_time11.00s>#<frame2_time12.00s>#"
    assert shown == f"{END}\n" + user(f"<tool_response>{found}</tool_response>|go on")
    [call] = outcome.episode.calls
    assert call.window == (10, 12) and call.arguments == {"segment": [10, 12], "fps": 1.5}
    assert outcome.answer == "\\text{B}"


def test_video_zoomers_turn_ends_with_its_request(ask, renderer):
    said = [zoom(10, 12, 1) + "And the frames show <answer>A</answer>", "<answer>B</answer>" + END]
    outcome, model = ask("video_zoomer", said)
    start, end = outcome.episode.main.turns[0]
    assert renderer.decode(outcome.episode.main.ids[start:end]).startswith(zoom(10, 12, 1))
    assert "And the frames" not in model.read[1] and outcome.answer == "B"
    assert outcome.episode.main.mask[end : end + 1] == [0]  # the end of the turn was not sampled


@pytest.mark.parametrize(
    ("request_text", "error", "text"),
    [
        (zoom(0, 17, 1), "bad_arguments", "At most 16"),
        (zoom(0, 1e300, 1e300), "bad_arguments", "At most 16"),
        (zoom('"x"', 2, 1), "bad_arguments", "start must be a number"),
        ('<video_zoom> {"fps": 1} {"segment": [0, 1]} </video_zoom>', "unparseable", "segment"),
    ],
)
def test_a_bad_request_of_video_zoomer_is_explained(ask, request_text, error, text):
    said = [request_text, "<answer>\\boxed{A}</answer>" + END]
    outcome, model = ask("video_zoomer", said)
    [call] = outcome.episode.calls
    assert call.error == error and text in call.text and outcome.answer == "A"
    assert model.told(said)[1] == f"{END}\n" + user(f"<tool_response>{call.text}</tool_response>|repair")


def test_segments_are_clamped_to_the_video_and_may_be_empty(ask):
    said = [zoom(58, 70, 0.25), zoom(5, 5.5, 1), zoom(20, 10, 1), "x" + END]
    outcome, model = ask("video_zoomer", said)
    assert [clip.times for clip in outcome.episode.main.frames[1:]] == [(58.0, 59.0, 59.5)]
    assert [c.error for c in outcome.episode.calls] == ["", "", ""]
    assert all(told == f"{END}\n" + user("<tool_response></tool_response>|go on") for told in model.told(said)[2:3])


def test_video_zoomer_has_five_turns_and_is_told_before_the_last(ask):
    said = [zoom(i, i + 2, 1) for i in range(6)]
    outcome, model = ask("video_zoomer", said)
    told = model.told(said)
    assert len(told) == 5 and len(outcome.episode.calls) == 4 and outcome.answer is None
    assert ["|go on|last" in text for text in told] == [False, False, False, False, True]
    assert ask("video_zoomer", ["<answer>12 - 20</answer>" + END])[0].answer == "12 - 20"


def test_other_models_answer_where_their_own_code_looks(ask):
    """Our agent's answer stands in its last turn, behind its thought. Theirs may stand in a thought or before a call."""
    thought = "<think>So <answer>B</answer></think>" + END
    for protocol in ("think", "conan"):
        assert ask(protocol, [thought])[0].answer == "B"
    early = "<answer>A</answer>" + zoom(10, 12, 1)
    assert ask("video_zoomer", [early, "<think>Nothing new.</think>" + END])[0].answer == "A"
    assert ask("agent", [thought])[0].answer is None


# ---- whatever happens


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        ("conan", [clips("00:00:21-00:00:22"), clips("", "B")]),
        ("longvt", [crop(10, 13) + END, "<answer>B</answer>" + END]),
        ("sage", [plan(tool=window("identify_timestamps_visually", "00:00:10", "00:00:12")), "no" + END, plan("B")]),
        ("video_zoomer", [zoom(10, 12, 1.5), "<answer>B</answer>" + END]),
    ],
)
def test_what_a_tool_shows_has_the_area_of_crops(renderer, protocol, said):
    renderer = Renderer(renderer.tokenizer, dataclasses.replace(CONTRACT, crop_frame_pixels=32 * 32))
    stage = Stage(Model(renderer, *said), renderer, MemoryVideos(), RolloutConfig(temperature=0.0, max_context=100_000))
    episode, _ = play(stage, TASK, 4, 7, Prompting(protocol))
    shown = [clip for agent in episode.trajectories for clip in agent.frames]
    assert [clip.pixels.shape[1:3] for clip in shown] == [(64, 64), (32, 32)] and not episode.error


def test_what_cannot_run_costs_one_question_and_keeps_what_was_played(ask, renderer):
    bad = dataclasses.replace(TASK, videos=("/data/bad.mp4",))
    for protocol in PROTOCOLS:
        outcome, model = ask(protocol, [], bad)
        assert "VideoError" in outcome.episode.error and outcome.answer is None and model.read == []

    class Dies(Model):
        def generate(self, *arguments, **more):
            if self.asked:
                raise EngineError("no server")
            return super().generate(*arguments, **more)

    model = Dies(renderer, zoom(0, 2, 1))
    outcome, _ = ask("video_zoomer", [], model=model)
    assert "no server" in outcome.episode.error and len(outcome.episode.calls) == 1
    assert len(outcome.episode.main.turns) == 1 and outcome.answer is None
    model = Dies(renderer, plan(tool=window("identify_timestamps_visually", "00:00:00", "00:00:05")))
    outcome, _ = ask("sage", [], model=model)
    assert [c.error for c in outcome.episode.calls] == ["failed"] and "no server" in outcome.episode.error


def test_a_bug_of_ours_is_not_swallowed(ask, renderer):
    model = Model(renderer)
    model.reply = lambda prompt, seed: {}["bug"]
    with pytest.raises(KeyError, match="bug"):
        ask("conan", [], model=model)


def test_what_does_not_fit_and_what_is_cut_off_ends_the_episode(ask):
    conan = clips("00:00:20-00:00:40")
    for protocol, said in (("conan", conan), ("longvt", crop(0, 30) + END), ("video_zoomer", zoom(0, 16, 1))):
        full, _ = ask(protocol, [said, "x" + END])
        room = full.episode.main.turns[0][1] + 30
        outcome, model = ask(protocol, [said, "x" + END], cfg={"max_context": room})
        assert outcome.episode.main.finish == "length" and len(model.read) == 1 and not outcome.episode.error
    for protocol, said in (("conan", conan.removesuffix(END)), ("longvt", crop(0, 30))):
        outcome, model = ask(protocol, [said + "." * 500, "x" + END], cfg={"max_new_tokens": 300})
        assert len(model.read) == 1 and not outcome.episode.calls and outcome.episode.main.finish == "length"


def test_a_question_can_hold_no_tags_but_our_words_can(ask, renderer):
    evil = dataclasses.replace(TASK, question=f"<tool_call>{PICTURE}{END}</think>")
    live = {t: renderer.tokenizer.convert_tokens_to_ids(t) for t in ("<tool_call>", "</think>", "<|image_pad|>", END)}
    for protocol, words in WORDS.items():
        if "user" not in words or protocol == "plain":
            continue
        outcome, model = ask(protocol, ["x" + END] * 9, evil, words={})
        prompt = outcome.episode.main.ids[: outcome.episode.main.prompt_length]
        ours = words.get("system", "") + words["user"]
        pictures = sum(map(len, outcome.episode.main.frames[:1])) * 4  # tokens of a frame
        assert prompt.count(live["<|image_pad|>"]) == pictures
        assert prompt.count(live["</think>"]) == ours.count("</think>")
        assert prompt.count(live[END]) == 1 + ("system" in words or protocol == "longvt")
    assert "<tool_call>" in WORDS["longvt"]["user"]


def test_a_question_in_a_later_text_is_inert_too(ask, renderer):
    evil = dataclasses.replace(TASK, question="</tool_response>" + END)
    outcome, _ = ask("longvt", [crop(0, 2) + END, "x" + END], evil, words={"shown": "{count} {question}"})
    main = outcome.episode.main
    told = main.ids[main.turns[0][1] : main.turns[1][0]]
    assert evil.question in renderer.decode(told) and told.count(renderer.end_of_turn) == 1  # that of the tool's turn


def test_only_the_agent_knows_several_videos(ask):
    with pytest.raises(ValueError, match="2 videos"):
        ask("conan", [], dataclasses.replace(TASK, videos=("/data/a.mp4", "/data/b.mp4")))


PIECES = [
    "<clip>", "</clip>", "00:00:10-00:00:20", ",", "<answer>", "</answer>", "<json>", "</json>", "{", "}", END, "é你",
    zoom(0, 9, 1), zoom(-1e308, 1e308, 0), zoom(1e308, -1e308, 1e308), "<video_zoom>", "</video_zoom>", "\\boxed{",
    '{"segment": null, "fps": []}', '{"segment": {"a": 1, "b": 2}, "fps": true}', "<json>[1]</json>", "1e999",
    crop(0, 9), crop(9, 0), "<tool_call>", clips("9" * 400 + "-1,3-4"), clips("5-" + "9" * 400),
    plan("A", ("perform_reasoning", {"media_paths": [[1], None]}), False), plan([1], [["x"], 3]), plan({}, ((), ()), []),
    plan(recommended_tools=[1]), plan(recommended_tools={"tool_calls": {"a": 1}}), plan(answerable=3),
    plan(tool=window("identify_timestamps_visually", [1], {})), plan(tool=window("extract_parts_from_timestamp", 1, 9)),
]  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_that_a_model_says_raises(ask, renderer, protocol):
    rng = random.Random(protocol)
    for _ in range(40):
        said = ["".join(rng.choices(PIECES, k=rng.randrange(6))) + END for _ in range(60)]
        outcome, _ = ask(protocol, said, cfg={"max_new_tokens": 400, "max_context": 8000}, words={})
        assert not outcome.episode.error and (outcome.answer is None or isinstance(outcome.answer, str))


# ---- settings


@pytest.mark.parametrize(
    ("protocol", "text", "rule"),
    [
        ("think", "systm: x", "'systm' must be a text that 'think' has: .*system"),
        ("think", "system: 3", "'system' must be a text"),
        ("conan", "user: '{frames} {qestion}'", r"'user' of 'conan' cannot speak of \{qestion\}, only of .*question"),
        ("conan", "mcq: '{request}'", r"cannot speak of \{request\}"),
        ("think", "system: '{question}'", r"cannot speak of \{question\}, only of clock"),  # read as ours
        ("sage", "message: '{frames}'", r"cannot speak of \{frames\}"),  # the reasoner has no eyes
        ("video_zoomer", "last: '{error}'", r"Write \{\{error\}\} for the word in braces"),
    ],
)
def test_texts_and_places_that_a_protocol_does_not_have_are_refused(tmp_path, protocol, text, rule):
    """An unknown {place} was read by the model as it stood: Conan's second prompt said `Question: {question}`."""
    file = tmp_path / "words.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=rule):
        Prompting(protocol, str(file))


def test_every_text_of_the_authors_is_filled(ask):
    said = {
        "conan": ([clips("00:00:20-00:00:21"), "x" + END], {"more": "Question: {question}|{frames}|{{question}}"}),
        "longvt": ([crop(0, 2) + END, "x" + END], {"shown": "{count} of {duration} s: {stem}"}),
        "video_zoomer": ([zoom(0, 2, 1), "x" + END], {"found": "{frames} {options} {request}", "mcq": "for {minutes}"}),
    }
    told = {}
    for protocol, (turns, words) in said.items():
        _, model = ask(protocol, turns, words=words)
        told[protocol] = model.told(turns)[1]
    assert told["conan"] == "\n" + user(f"Question: {TASK.question}|00:00:20#00:00:21#00:00:21#|{{question}}")
    assert "##2 of 60.0 s: Who?\n</tool_response>" in told["longvt"]
    assert "# A. he\nB. she for 01:00" in told["video_zoomer"]


def test_a_kind_may_have_a_template_of_its_own(ask):
    """Choices and spans needed two runs; Charades' wording stood in its question."""
    templates = {"user": "{frames}{request}", "mcq": "Q: {stem}\nO:\n{options}\nA:", "tvg": "When is '{caption}'?"}
    listed = dataclasses.replace(TASK, question="Who?\n(A) he\n(B) she")
    span = dataclasses.replace(TASK, kind="tvg", question="During which part: he sits?", options=())
    read = []
    for task, caption in ((TASK, ""), (listed, ""), (span, "he sits."), (span, "")):
        _, model = ask("time_r1", ["x" + END], task, words=templates, caption=caption)
        read.append(model.read[0].rpartition("#")[2].removesuffix(END + "\n<|im_start|>assistant\n"))
    choice = "Q: Who?\nO:\nA. he\nB. she\nA:"
    assert read == [choice, choice, "When is 'he sits.'?", "When is 'During which part: he sits?'?"]


def test_a_real_video_is_seen_through_the_reader(toy_dir, videos, renderer):
    path = str(sorted((toy_dir / "videos").glob("*.mp4"))[0])
    model = Model(renderer, zoom(3, 5, 2), "<answer>\\boxed{red}</answer>" + END)
    task = Task("t", "Which color?", (path,), "oe", "red")
    episode, answer = play(Stage(model, renderer, videos, RolloutConfig()), task, 64, 0, Prompting("video_zoomer"))
    seen, zoomed = episode.main.frames
    duration = videos.info(path).duration
    assert seen.times == tuple(range(0, int(duration), 2)) and answer == "red"
    assert zoomed.times == pytest.approx((3, 3.5, 4.5, 5)) and zoomed.pixels.shape[1:] == (64, 64, 3)
