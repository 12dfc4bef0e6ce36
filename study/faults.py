"""faults.py: what the released code does otherwise in episodes with calls, put into ours one fault at a time.

    python -m study.faults splice,unseen configs/toy_grpo_full.yaml [key=value ...]     # rl.py with two of these

    splice       each response renders the whole chat again and keeps what is longer than before: of several responses,
                 all but the first lose their opening and stand in an open assistant turn; the forced <think> costs two
                 tokens more, since the rendered turn lacks it
    unseen       rewards read sampled tokens only, so the forced <think> is not there for them
    siblings     one call that cannot be read discards all calls of its turn; the error is learned from, yet not read
    unanswered   the calls of the last turn run, and nobody answers them

The paper's plain GRPO stops calling although its reward pays for calls. Do these faults explain it? The method's files stay
as they are: this one replaces some of their functions while a training runs.
"""

import argparse
import functools
import sys
import weakref

import rewards
import rl
import rollout
from runtime import config
from runtime.contract import END_OF_TURN, Renderer
from tools import UNPARSEABLE


def splice() -> None:
    whole_turn = Renderer.continuation

    def continuation(self, contents, role="tool"):
        given = whole_turn(self, contents[:1], role)
        for i in range(2, len(contents) + 1):
            rendered = whole_turn(self, contents[:i], role)
            # The chat up to this response, from where the ids so far end.
            new = rendered.ids[len(given.ids) :]
            given = type(given)(given.ids + new, given.mask + [0] * len(new), rendered.frames)
        return given

    Renderer.continuation = continuation

    append = rollout.append

    def append_late(stage, agent, delta):
        if stage.cfg.think_prefix:  # the rendered assistant turn is shorter than the sampled one
            lost = len(stage.renderer.encode(rollout.THINK_PREFIX))
            delta = type(delta)(delta.ids[lost:], delta.mask[lost:], delta.frames)
        return append(stage, agent, delta)

    rollout.append = append_late


def unseen() -> None:
    def turn_texts(trajectory, renderer):
        texts = []
        for start, end in trajectory.turns:
            sampled = [i for i, mask in zip(trajectory.ids[start:end], trajectory.mask[start:end]) if mask]
            ended = bool(sampled) and sampled[-1] in renderer.ends_of_turn
            texts.append(renderer.decode(sampled[: len(sampled) - ended]) + END_OF_TURN * ended)
        return texts

    rewards.turn_texts = turn_texts


def siblings() -> None:
    parse_calls = rollout.parse_calls

    def all_or_none(text, turn=0):
        calls = parse_calls(text, turn)
        if any(call.error for call in calls):
            for call in calls:
                call.error, call.text = "unparseable", UNPARSEABLE
        return calls

    rollout.parse_calls = all_or_none

    append, sample_turn = rollout.append, rollout.sample_turn
    unread: dict[int, list[tuple[int, int]]] = {}  # of the agents: where errors stand, up to the next turn's opening

    def append_noting(stage, agent, delta):
        start = len(agent.ids)
        appended = append(stage, agent, delta)
        if appended and UNPARSEABLE in stage.renderer.decode(delta.ids):
            opening = len(stage.renderer.encode("\n<|im_start|>assistant\n"))
            unread.setdefault(id(agent), []).append((start, len(agent.ids) - opening))
            weakref.finalize(agent, unread.pop, id(agent), None)
        return appended

    def sample_without_errors(stage, agent, *how):
        """Let the engine continue ids that lack the errors, and append what it says to those that have them."""
        ids = agent.ids[:]
        for start, end in reversed(unread.get(id(agent), [])):
            del ids[start:end]
        seen = rollout.Trajectory(ids, [], [], [], agent.frames, agent.prompt_length)
        sample_turn(stage, seen, *how)
        rollout._extend(agent, seen.ids[-len(seen.mask) :], 1, seen.logprobs, seen.versions[-1])
        agent.finish = seen.finish

    rollout.append, rollout.sample_turn = append_noting, sample_without_errors


def unanswered() -> None:
    run_episode = rollout.run_episode

    @functools.wraps(run_episode)
    def run_last_calls(stage, task, k, prompt, seed):
        episode = run_episode(stage, task, k, prompt, seed)
        rounds, calls_per_round = stage.cfg.rounds
        last = len(episode.main.turns) - 1
        if last == rounds and not episode.error and episode.main.finish != "length":
            start, end = episode.main.turns[last]
            calls = rollout.parse_calls(stage.renderer.decode(episode.main.ids[start:end]), last)
            replies = rollout._run_calls(stage, task, calls, calls_per_round, rollout.derive(seed, last, "calls"))
            episode.calls += [reply.call for reply in replies]
        return episode

    rollout.run_episode = run_last_calls


FAULTS = {fault.__name__: fault for fault in (splice, unseen, siblings, unanswered)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", help=f"some of {', '.join(FAULTS)}, with commas between")
    parser.add_argument("config", help="of rl.py")
    parser.add_argument("changes", nargs="*", metavar="key=value")
    args = parser.parse_args()
    for name in args.faults.split(","):
        FAULTS[name]()
    rl.main(config.load(rl.RLConfig, args.config, args.changes))


if __name__ == "__main__":
    sys.exit(main())
