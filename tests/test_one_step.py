"""docs/one_step.md: its figures are those of the record and of this code, and they are right by other means."""

import json
import math
import re

import pytest
import record_one_step
import torch
from scripts import REPO

import grpo
import rewards
import rl
from records import episode_of

PAGE = (REPO / "docs" / "one_step.md").read_text("utf-8")
RECORD, *EPISODES = [json.loads(line) for line in (REPO / "docs" / "one_step.jsonl").read_text("utf-8").splitlines()]
# name(index) = what is to be computed = the result
SUM = re.compile(r"^(\w+)(?:\((\w+)\))? += (.+) = (-?[\d.]+)$", re.M)


def table(name: str) -> list[list[str]]:
    """The cells of a table between marks, its header first."""
    text = re.search(rf"<!-- {name}: .*?<!-- end of {name} -->", PAGE, re.S)[0]
    rows = [re.split(r" *(?<!\\)\| *", line.strip("|")) for line in re.findall(r"^\|.*\|$", text, re.M)]
    rows = [[cell.strip() for cell in row] for row in rows]
    return [rows[0], *rows[2:]]


def by_name(name: str) -> dict[str, dict[str, str]]:
    header, *rows = table(name)
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def sampled(key: str) -> list:
    return [x for e in EPISODES for x, m in zip(e["main"][key], e["main"]["mask"]) if m]


def test_the_page_is_what_the_record_and_the_code_make_of_it(tmp_path, monkeypatch):
    """The code computes rewards, struct(o) and advantages, so the record lacks them here."""
    (tmp_path / "docs").mkdir()
    computed = {"rewards": {}, "advantage": 0.0, "anchor_advantage": 0.0}
    record = [RECORD, *(e | computed | {"main": e["main"] | {"structural": []}} for e in EPISODES)]
    (tmp_path / "docs" / "one_step.jsonl").write_text("".join(json.dumps(line) + "\n" for line in record), "utf-8")
    page = tmp_path / "docs" / "one_step.md"
    emptied, count = re.subn(r"(<!-- (\w+): written by .*? -->).*?(?=<!-- end of \2 -->)", r"\1\n", PAGE, flags=re.S)
    assert count == 7 and len(emptied) < len(PAGE) / 1.3
    page.write_text(emptied, "utf-8")
    monkeypatch.setattr(record_one_step, "PAGE", page)
    monkeypatch.setattr(record_one_step, "RECORD", tmp_path / "docs" / "one_step.jsonl")
    record_one_step.write()
    assert page.read_text("utf-8") == PAGE


def test_the_sums_worked_by_hand_are_right_and_are_those_of_the_tables():
    advantages, losses = by_name("advantages"), by_name("losses")
    lengths = [len(e["main"]["ids"]) - e["main"]["prompt_length"] for e in EPISODES]
    found = SUM.findall(PAGE)
    assert len(found) == 34
    for name, index, expression, result in found:
        value = eval(expression, {"min": min, "exp": math.exp})
        assert value == pytest.approx(float(result), abs=6e-4), (name, index)
        if name in advantages["mean"] and index:
            assert advantages[f"episode {index}"][name] == result, (name, index)
        elif name in losses and name != "A_t":  # of the index-th token
            row = [float(cell) for cell in list(losses[name].values())[1:]]
            assert row[int(index) - 1] == pytest.approx(float(result), abs=6e-4), (name, index)
        elif name == "KL":
            w, r, kl = (float(list(losses[row].values())[int(index)]) for row in ("w", "r", "w · r · KL"))
            assert kl == pytest.approx(w * r * float(result), rel=2e-3)
        elif name == "A_t":
            row = next(row for row in table("tokens") if row[1] == "1" and row[2] == str(int(index == "struct")))
            assert row[3] == result
        else:
            assert name in ("packed", "unpacked")
            prompt = EPISODES[0]["main"]["prompt_length"]
            assert int(result) == sum(lengths) + prompt * {"packed": 1, "unpacked": len(EPISODES)}[name]


def test_the_rewards_and_advantages_are_those_that_the_run_trained_on():
    """rl.py wrote them into the record; the page computes them anew."""
    rows = by_name("advantages")
    for i, e in enumerate(EPISODES, 1):
        recorded = e["rewards"] | {"A": e["advantage"], "A_anchor": e["anchor_advantage"]}
        for name in ("R", "R_anchor", "A", "A_anchor"):
            assert rows[f"episode {i}"][name] == f"{recorded[name]:.3f}"


def test_the_loss_of_three_tokens_and_of_the_group_is_the_equation():
    """In plain Python, from the recorded log-probs and advantages."""
    columns = dict(zip(["pi", "prox", "reference"], RECORD["logprobs"], strict=True))
    vocabulary, old = RECORD["vocabulary"]["texts"], sampled("logprobs")
    structure = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</", "answer", ">", "<|im_end|>")
    tags, owners = [], []
    for e in EPISODES:
        text = ""
        for token, m in zip(e["main"]["ids"], e["main"]["mask"]):
            piece = vocabulary[str(token)]
            closed = piece == "\n" and text.endswith(("</think>", "</tool_call>", "</answer>"))
            if m:
                tags.append(closed or piece in structure)
                owners.append(e)
            text += piece
    assert sampled("structural") == tags
    losses = []
    for n, (e, tag) in enumerate(zip(owners, tags, strict=True)):
        a = e["advantage"] + 0.5 * e["anchor_advantage"] * tag
        pi, prox, reference = (columns[name][n] for name in ("pi", "prox", "reference"))
        w, r, d = math.exp(prox - old[n]), math.exp(pi - prox), reference - pi
        kl = w * r * (math.exp(d) - d - 1)
        losses.append(-w * min(r * a, max(0.8, min(1.2, r)) * a) + 0.01 * kl)
        if n in RECORD["three"]:
            row = 1 + RECORD["three"].index(n)
            cells = [float(line[row]) for line in table("losses")[1:]]
            assert cells == pytest.approx([old[n], prox, pi, reference, a, w, r, kl, losses[-1]], abs=6e-5)
    share = sum(losses) / RECORD["total_tokens"]
    assert f"= {share:.5f}, a sum over {len(losses)} tokens" in PAGE


def test_what_the_prose_says_of_the_policies_is_so():
    pi, prox, reference = (torch.tensor(column) for column in RECORD["logprobs"])
    ratio, w, d = (pi - prox).exp(), (prox - torch.tensor(sampled("logprobs"))).exp(), reference - pi
    assert set(sampled("versions")) == {3} and RECORD["commit"] in PAGE
    assert 0.8 < ratio.min() < 0.9 and 1.0 < ratio.max() < 1.2  # the clip is inert
    assert w.min() < 0.8 and w.max() < 5
    assert all(d[n] > 0.5 for n in RECORD["three"])  # the cold start gives the three tokens more
    words = [e["task"]["answer"] for e in EPISODES]
    assert words == ["white"] * 8 and {e["k"] for e in EPISODES} == {4}


def test_who_sees_whom_is_so_pair_by_pair():
    prompt = EPISODES[0]["main"]["prompt_length"]
    owners, positions = [0] * prompt, list(range(prompt))  # 0: the prompt, i: suffix i
    for i, e in enumerate(EPISODES, 1):
        n = len(e["main"]["ids"]) - prompt
        owners += [i] * n
        positions += range(prompt, prompt + n)
    q = 0
    for _, tokens, places, sees in table("layout")[1:]:
        start, last = map(int, tokens.split("–"))
        assert start == q and places == f"{positions[start]}–{positions[last]}"
        for q in range(start, last + 1):
            seen = set()
            for piece in sees.split(", "):
                first, end = (q if end == "t" else int(end) for end in piece.split("–"))
                seen |= set(range(first, end + 1))
            assert seen == {k for k in range(q + 1) if owners[k] in (0, owners[q])}, q
        q += 1
    assert q == len(owners)


def test_the_recorder_keeps_what_the_loss_was_given(toy_dir, tmp_path, monkeypatch):
    """On an untrained toy, whose babble earns rewards that vary, so that the policy moves."""
    small = ["steps=3", "batch_tasks=4", "grpo.group_size=3", "gating=[4]", "rollout.max_new_tokens=8"]
    monkeypatch.setattr(record_one_step, "SETTINGS", record_one_step.SETTINGS + small)
    earned, losses, given = rewards.score, grpo.token_losses, []

    def token_losses(*columns):
        given.append(torch.stack(columns[:4]).detach())
        return losses(*columns)

    monkeypatch.setattr(grpo, "token_losses", token_losses)
    monkeypatch.setattr(rewards, "score", lambda e, *more: earned(e, *more) | {"R": float(e.main.ids[-1] % 5)})
    # All groups differ alike, so the first one that may be taken is taken.
    monkeypatch.setattr(record_one_step, "kinds", lambda episodes: [(False, False, 0.0)] * len(episodes))
    for module, name in ((rl, "make_train_groups"), (grpo, "micro_batch_losses")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    out = tmp_path / "record.jsonl"
    monkeypatch.setattr(record_one_step, "RECORD", out)
    record_one_step.record(str(toy_dir / "model"), str(toy_dir))
    text = out.read_text("utf-8")
    assert str(toy_dir) not in text  # no folders of this machine
    record, *lines = [json.loads(line) for line in text.splitlines()]
    episodes = [episode_of(line, None, None) for line in lines]
    pi, prox, reference = (torch.tensor(column) for column in record["logprobs"])
    old = torch.tensor([p for e in episodes for p, m in zip(e.main.logprobs, e.main.mask) if m])
    columns = torch.stack([pi, prox, old, reference])
    n = columns.shape[1]
    assert any(call[:, i : i + n].equal(columns) for call in given for i in range(call.shape[1] - n + 1))
    for one, other in ((pi, prox), (prox, old), (old, reference)):  # more than rounding
        assert (one - other).abs().max() > 1e-4
    assert set(record_one_step.figures(record, episodes)) == set(re.findall(r"<!-- (\w+): written by", PAGE))
