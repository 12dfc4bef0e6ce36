"""The released code's faults, each alone: what an agent then reads, what its rewards see, and what stays as it was."""

import pytest
from test_rollout import END, call, play, text_of, turns, user_turns
from tiny_checkpoint import Scripted

import data
import rewards
import rollout
from rollout import NO_CALLS_LEFT
from runtime.contract import Renderer
from study import faults

ANSWER = "<think>\nIt is here.\n</think>\n<answer>cat</answer>" + END
TWO = f"<think>\nI look twice.\n</think>\n{call(0, 20)}\n{call(20, 40)}" + END


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Whatever a fault replaces is put back."""
    for where, name in (
        (Renderer, "continuation"),
        (rollout, "append"),
        (rollout, "parse_calls"),
        (rollout, "sample_turn"),
        (rollout, "run_episode"),
        (rewards, "turn_texts"),
    ):
        monkeypatch.setattr(where, name, getattr(where, name))


def test_spliced_responses_lose_their_opening_and_stand_in_an_open_assistant_turn(renderer):
    [healthy] = play(renderer, turns(TWO, ANSWER), think_prefix=False)
    faults.splice()
    [spliced] = play(renderer, turns(TWO, ANSWER), think_prefix=False)
    assert len(user_turns(healthy, renderer)[-1].split("<tool_response>")) == 3
    after = text_of(spliced, renderer).split(TWO)[1]
    first, rest = after.split("<|im_start|>assistant\n", 1)
    assert first == "\n<|im_start|>user\n<tool_response>\nI saw a cat.\n</tool_response><|im_end|>\n"
    # The second response: its last words, in the assistant's turn, and the opening of another one.
    assert "<tool_response>" not in rest and "</tool_response><|im_end|>\n<|im_start|>assistant\n" in rest
    # By length alone nothing is missing: this is why nobody noticed.
    assert len(spliced.main.ids) == len(healthy.main.ids)


def test_with_the_prefix_even_one_spliced_response_loses_its_first_tokens(renderer):
    one = f"I look.\n</think>\n{call(0, 20)}" + END
    faults.splice()
    [episode] = play(renderer, turns(one, "Here.\n</think>\n<answer>cat</answer>" + END))
    after = text_of(episode, renderer).split(one)[1]
    assert not after.startswith("\n<|im_start|>user") and "I saw a cat.\n</tool_response><|im_end|>" in after


def test_unseen_prefixes_leave_a_turn_without_its_think(renderer):
    [episode] = play(renderer, turns("It is here.\n</think>\n<answer>cat</answer>" + END))
    assert rewards.turn_texts(episode.main, renderer)[0].startswith("<think>\nIt")
    faults.unseen()
    assert rewards.turn_texts(episode.main, renderer) == ["It is here.\n</think>\n<answer>cat</answer>" + END]
    assert rewards.score(episode, renderer, rewards.RewardConfig())["strict"] == 0


@pytest.mark.parametrize("spliced", [False, True])
def test_a_bad_call_discards_its_siblings_and_its_error_is_learned_from_but_never_read(renderer, spliced):
    bad = f"<think>\nI look.\n</think>\n{call(0, 20)}\n<tool_call>\n{{oops\n</tool_call>" + END
    seen = []

    def reply(prompt: str, seed: int) -> str:
        seen.append(prompt)
        return bad if len(seen) == 1 else ANSWER

    if spliced:
        faults.splice()
    faults.siblings()
    [episode] = play(renderer, reply, think_prefix=False, max_turns=1, engine=Scripted(renderer, reply))
    assert [made.error for made in episode.calls] == ["unparseable", "unparseable"]
    assert "could not be read" in text_of(episode, renderer) and NO_CALLS_LEFT in text_of(episode, renderer)
    assert len(seen) == 2 and "could not be read" not in seen[1]
    assert seen[1].endswith(f"{bad}\n<|im_start|>assistant\n")
    main = episode.main
    assert len(main.ids) == len(main.mask) == len(main.logprobs) == len(main.versions)
    assert renderer.decode(main.ids[main.turns[-1][0] :]) == ANSWER and main.finish == "stop"


def test_the_last_calls_run_and_nobody_answers_them(renderer):
    [healthy] = play(renderer, turns(TWO), think_prefix=False, max_turns=1)
    faults.unanswered()
    [episode] = play(renderer, turns(TWO), think_prefix=False, max_turns=1)
    assert (healthy.executed, episode.executed) == (2, 4)
    assert episode.main.ids == healthy.main.ids
    [answered] = play(renderer, turns(TWO, ANSWER), think_prefix=False, max_turns=1)
    assert answered.executed == 2


def test_without_a_fault_nothing_is_replaced():
    assert rollout.THINK_PREFIX == data.THINK_PREFIX and set(faults.FAULTS) == {
        "splice",
        "unseen",
        "siblings",
        "unanswered",
    }
    assert rollout.run_episode.__module__ == "rollout" and rewards.turn_texts.__module__ == "rewards"
