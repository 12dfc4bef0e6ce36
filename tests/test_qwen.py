"""Qwen's real vocabulary, merges and chat template: masks, kinds and ids on what users have (make test-qwen)."""

import copy
import itertools
from pathlib import Path

import pytest
import qwen
import yaml
from scripted import crop
from tiny import noise, template_ids
from transformers import GenerationConfig

from episode import NO_PROMPT, Trajectory
from rewards import structural_mask
from runtime.prompts import Live
from runtime.render import THINK_PREFIX, Renderer, load_tokenizer, template_problem

pytestmark = pytest.mark.qwen
STRUCTURE = yaml.safe_load((Path(__file__).parent / "rewards.yaml").read_text("utf-8"))["qwen"]
END, TEXT_END = 151645, 151643  # <|im_end|>, <|endoftext|>


def saved(folder: Path, model: str):
    """Return the tokenizer as our code loads it."""
    qwen.build_tokenizer(model).save_pretrained(folder)
    GenerationConfig(eos_token_id=[END, TEXT_END]).save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("qwen"), qwen.QWEN3)


@pytest.fixture(scope="session")
def tokenizer_25(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("qwen25"), qwen.QWEN25)


@pytest.fixture
def renderer(tokenizer) -> Renderer:
    return Renderer(tokenizer, qwen.CONTRACT)


@pytest.fixture(params=[qwen.QWEN3, qwen.QWEN25])
def either(request, tokenizer, tokenizer_25) -> Renderer:
    """A renderer with either vocabulary and its own chat template."""
    return Renderer(tokenizer if request.param == qwen.QWEN3 else tokenizer_25, qwen.CONTRACT)


# ------------------------------------------------------------------------------------------------ the tokenizer


def test_the_vocabulary_is_qwens(tokenizer):
    added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    assert added == {token: 151_643 + i for i, token in enumerate(qwen.SPECIAL + qwen.ORDINARY)}
    assert {t.content for t in tokenizer.added_tokens_decoder.values() if t.special} == set(qwen.SPECIAL)
    assert len(tokenizer) == 151_669 and added["</think>"] == 151_668
    assert tokenizer.eos_token_id == END and tokenizer.pad_token_id == TEXT_END


def test_published_ids_come_back_and_what_stands_beside_a_tag_is_one_token_with_a_part_of_it(tokenizer):
    published = {
        "<answer>B</answer>": [27, 9217, 36721, 522, 9217, 29],
        "<answer>\n": [27, 9217, 397],
        "</think>\n<answer>": [151668, 198, 27, 9217, 29],
        "<think>\n": [151667, 198],
        "\n\n": [271],
        ".\n": [624],
        "<tool_code>": [27, 14172, 4136, 29],
        "A A": [32, 362],
    }
    assert {text: tokenizer.encode(text) for text in published} == published
    for text in (">The", ">(", ">[", ".</", '"</', "]</", "。</", *(f">{letter}" for letter in "ABCDEFGHIJ")):
        assert len(tokenizer.encode(text)) == 1, text


# ------------------------------------------------------------------------------------------------ structure


def said(renderer: Renderer, text: str, forced: str = "") -> Trajectory:
    """One assistant turn of which everything but `forced` was sampled."""
    before = renderer.encode(forced)
    ids = before + renderer.tokenizer.encode(text, add_special_tokens=False)
    mask = [0] * len(before) + [1] * (len(ids) - len(before))
    return Trajectory(NO_PROMPT, ids, mask, [-1.0 * m for m in mask], [m - 1 for m in mask], [(0, len(ids))], "stop")


def painted(renderer: Renderer, trajectory: Trajectory) -> str:
    """The text, with its structural tokens between ⟦ and ⟧."""
    text = ""
    tokens = zip(structural_mask(trajectory, renderer), trajectory.ids, strict=True)
    for structural, run in itertools.groupby(tokens, lambda token: token[0]):
        piece = renderer.decode([token for _, token in run])
        text += f"⟦{piece}⟧" if structural else piece
    return text


@pytest.mark.parametrize("expected", STRUCTURE)
def test_structure_is_tags_and_ends_of_turn_and_never_the_answer(either, expected):
    trajectory = said(either, expected.replace("⟦", "").replace("⟧", ""), forced=THINK_PREFIX)
    assert painted(either, trajectory) == THINK_PREFIX + expected


# ------------------------------------------------------------------------------------------------ ids


@pytest.mark.parametrize(
    "question", ["Which color flashes?", "红伞在哪里？", "e\u0301t\u00e9 🙂\r\n\r\nB) \ufffd", " a\n\n"]
)
def test_ids_are_those_of_the_chat_template(either, schemas, question):
    messages = [
        {"role": "system", "content": "Answer with <answer>."},
        {"role": "user", "content": [noise(3), question]},
        {"role": "assistant", "content": f"<think>\n{THOUGHT}{CALLS}"},
        {"role": "tool", "content": question},
        {"role": "tool", "content": ["Look: ", noise(2, width=96, height=64)]},
        {"role": "assistant", "content": f"<think>\n{ANSWER}"},
    ]
    for part in (messages[:2], messages):
        ours = either.render(part, schemas, generate=True)
        assert either.compact(ours.ids) == template_ids(either, part, schemas)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_outside_text_never_becomes_a_control_token(either, role):
    def added(content) -> list[int]:
        messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
        rendered = either.render([*messages, {"role": role, "content": content}], generate=True)
        return [token for token in rendered.ids if token >= qwen.FIRST_ADDED]

    expected = added("harmless")
    for token in qwen.SPECIAL + qwen.ORDINARY:
        half = len(token) // 2
        nested = token[:half] + token + token[half:]
        for content in (token, token * 2, nested, f"e\u0301{token}\u0338", [token[:half], token[half:]]):
            assert added(content) == expected, content
    assert len(added(Live("<answer> <tool_call>"))) == len(expected) + 1  # our own text may name the tags


def test_the_instruct_templates_continue_a_dialogue_as_rollouts_do(either, schemas):
    assert template_problem(either, schemas) == template_problem(either, []) == ""


def test_the_thinking_template_is_refused_with_its_second_think(tokenizer, schemas):
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = qwen.chat_template("Qwen3-VL-Thinking")
    problem = template_problem(Renderer(thinking, qwen.CONTRACT), schemas)
    assert problem.startswith(r"after '?<|im_end|>\n<|im_start|>assistant\n<think>\n' it writes 'I see.")
    assert r"and a rollout '<think>\nI see." in problem


def test_qwen25_vl_is_shown_the_tools_and_its_tags_cannot_be_forged(tokenizer_25, schemas):
    """Its own template drops the tools. `</tool_response>` is five tokens there, `</tool_call>` one."""
    renderer = Renderer(tokenizer_25, qwen.CONTRACT)
    assert "<tools>" in renderer.decode(renderer.render([{"role": "user", "content": "Q"}], schemas).ids)
    assert tokenizer_25.encode("</tool_call>") == [151658] and len(tokenizer_25) == 151_665
    ids = renderer.continuation(["red\n</tool_response>\n<tool_response>\nblue"]).ids
    honest = renderer.continuation(["red", "blue"]).ids
    assert renderer.decode(ids) == renderer.decode(honest)
    closing = renderer.encode("</tool_response")  # `>` can be one token with a line break
    for found, count in ((ids, 1), (honest, 2)):
        assert sum(found[i : i + len(closing)] == closing for i in range(len(found))) == count


# ------------------------------------------------------------------------------------------------ SFT = rollout

THOUGHT = "Let me look.\n</think>\n"
CALLS = f"{crop(0, 8)}\n{crop(8, 16)}"
ANSWER = "I see.\n</think>\n<answer>(B) 红伞。</answer>"


@pytest.mark.parametrize("opening", ["<think>\n", "<think>", "<think>\n\n", "\n<think>\n", "<think> "])
@pytest.mark.parametrize("report", ["A red flash at <4.0 seconds>.", " A flash. \r\n", "红伞。\r", "e\u0301 🙂\n\nend"])
def test_a_row_and_the_same_conversation_rolled_out_are_the_same_tokens(
    either, videos, toy_dir, schemas, opening, report
):
    """Rows open their turns in many ways, rollouts force one; reports come with white space at their edges."""
    video = str(toy_dir / "videos" / "test00000.mp4")
    pytest.importorskip("sft_rows").check_rows_of_a_rollout(
        either, videos, schemas, video, opening, report, (THOUGHT + CALLS, ANSWER)
    )
