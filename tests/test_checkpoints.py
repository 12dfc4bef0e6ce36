"""A resumed run equals the uninterrupted run. A kill loses only the steps since the last save. An export is an ordinary
Hugging Face checkpoint."""

import datetime
import json
import math
import os
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from scripts import Forked, finish
from torch import nn

from runtime import distributed, weights
from runtime.checkpoints import (
    export,
    load_policy,
    load_state,
    save_state,
    saved_step,
    weight_files,
    weights_digest,
)
from runtime.config import ConfigError
from runtime.distributed import gather, mean_over_ranks, rank, sum_over_ranks
from runtime.inprocess import InProcess
from runtime.policy import PolicyConfig
from runtime.render import CHAT_TEMPLATE, load_tokenizer
from runtime.run import OptimConfig, make_optimizer
from runtime.visual import VisualContract
from runtime.weights import run_memory, snapshot_folders

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONTRACT = VisualContract(frame_pixels=64 * 64)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tiny.write(tmp_path_factory.mktemp("tiny") / "model", vision={"depth": 2})
    CONTRACT.save(path)
    (path / "tokenizer.json").write_text('{"any": "bytes"}')
    (path / "chat_template.jinja").write_text("{{ tools }}{{ messages }}")
    (path / "merges.txt").write_text("a b")
    return path


def fresh(path):
    policy = load_policy(PolicyConfig(str(path), freeze=()), tiny.NEVER_SAMPLED)
    return policy, make_optimizer(policy, OptimConfig(lr=1e-2))


# ------------------------------------------------------------------------------------------------ training state


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_the_newest_complete_states_stay_and_left_overs_go(tmp_path):
    model, optimizer = small()
    for step in (1, 2, 9):
        save_state(tmp_path, model, optimizer, step, keep=2)
    (tmp_path / "step-00000010.tmp").mkdir()  # a save that was killed
    (tmp_path / "step-00000001.old").mkdir()  # a removal that was killed
    assert load_state(tmp_path, model, optimizer) == saved_step(tmp_path) == 9
    save_state(tmp_path, model, optimizer, 10, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000009", "step-00000010"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    """Empty a file, as a power cut does to a file that was not synced to the disk."""
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("harm", [cut, empty, Path.unlink], ids=["cut", "empty", "gone"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_damaged_newest_state_is_told_beside_the_one_before(tmp_path, name, harm):
    """Past bug: a traceback of two pages, although `keep: 2` had kept a good state."""
    model, optimizer = small()
    for step in (2, 4):
        save_state(tmp_path, model, optimizer, step)
    harm(tmp_path / "step-00000004" / name)
    with pytest.raises(ConfigError, match="step-00000004 .* resume from step-00000002$"):
        load_state(tmp_path, model, optimizer)


def test_weights_that_are_not_finite_are_neither_saved_nor_exported_nor_loaded(path, tmp_path):
    """Past bug: they were saved, replaced the good states, and became the run's result."""
    policy, optimizer = fresh(path)
    save_state(tmp_path / "state", policy, optimizer, 1, keep=1)
    export(policy, tmp_path / "out", CONTRACT)
    name = "model.model.language_model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        policy.get_parameter(name)[1, 2] = math.nan
    with pytest.raises(ConfigError, match=f"no state of step 2 is saved: weights are not finite, such as {name}"):
        save_state(tmp_path / "state", policy, optimizer, 2, keep=1)
    with pytest.raises(ConfigError, match=f"/out.tmp is not written: weights are not finite, such as {name[6:]}"):
        export(policy, tmp_path / "out", CONTRACT)
    assert saved_step(tmp_path / "state") == 1 and load_policy(PolicyConfig(str(tmp_path / "out")))

    weights = load_file(tmp_path / "out" / "model.safetensors")
    weights[name[6:]][1, 2] = math.nan
    save_file(weights, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"/out: weights are not finite, such as {name[6:]}"):
        load_policy(PolicyConfig(str(tmp_path / "out")))


# ------------------------------------------------------------------------------------------------ exports


def test_others_may_read_exported_weights_as_they_may_read_the_rest(path, tmp_path):
    """Past bug: a server or a colleague with another uid could not read them."""
    policy, _ = fresh(path)
    for umask in (0o022, 0o027):
        before = os.umask(umask)
        try:
            export(policy, tmp_path / "out", CONTRACT)
        finally:
            os.umask(before)
        assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {0o666 & ~umask}


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_an_ordinary_checkpoint_with_the_trained_weights(tmp_path, tied):
    source = tiny.write(tmp_path / "source", tied)
    policy, optimizer = fresh(source)
    bundles, _ = tiny.random_bundles(4)
    policy(bundles).logprobs.sum().backward()
    optimizer.step()
    export(policy, tmp_path / "out", CONTRACT)
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) is not tied
    model = tiny.plain(tmp_path / "out")
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) is tied
    assert all(torch.equal(p, dict(model.named_parameters())[n]) for n, p in policy.model.named_parameters())
    with torch.no_grad():
        again = load_policy(PolicyConfig(str(tmp_path / "out")), tiny.NEVER_SAMPLED)
        assert torch.equal(again(bundles).logprobs, policy(bundles).logprobs)


def test_an_export_carries_the_sources_files_its_contract_and_its_dtype_but_no_other_weights(path, tmp_path):
    """Past mutants: without visual.json, any contract fits; and the old weights' index was copied."""
    source = shutil.copytree(path, tmp_path / "source")
    kept = {file.name for file in source.iterdir()}
    (source / "visual.json").unlink()  # as in a stock checkpoint
    for name in (
        "pytorch_model.bin",
        "consolidated.00.pth",
        "training.pt",
        "model.gguf",
        "model.safetensors.index.json",
    ):
        (source / name).write_text('{"weight_map": {"stale": "model.safetensors"}}')
    for computed, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):  # the second replaces the first
        policy = load_policy(PolicyConfig(str(source), dtype=computed), train=False)
        export(policy, tmp_path / "out", CONTRACT)
        assert {p.name for p in (tmp_path / "out").iterdir()} == kept
        for name in ("tokenizer.json", "chat_template.jinja", "merges.txt", "generation_config.json"):
            assert (tmp_path / "out" / name).read_bytes() == (path / name).read_bytes()
        assert VisualContract.load(tmp_path / "out") == CONTRACT != VisualContract()
        stored = load_file(tmp_path / "out" / "model.safetensors")
        assert {t.dtype for t in stored.values()} == {dtype}
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        said = {part["dtype"] for part in (config, config["text_config"], config["vision_config"])}
        assert said == {str(dtype).removeprefix("torch.")}
    assert not list(tmp_path.glob("out.*"))


def test_a_published_qwen25_vl_is_exported_under_its_published_names_and_says_the_same(tmp_path):
    """SGLang skips a weight whose name it does not know, without a word. Both names are read."""
    stock = tiny.build(tmp_path / "stock", 0, "qwen2_5_vl", tie_word_embeddings=False)
    published, renderer, model = (
        tiny.as_published(stock, tmp_path / "published"),
        tiny.renderer(stock),
        tiny.plain(stock),
    )
    stored = load_file(published / "model.safetensors")  # transformers itself writes published names
    assert {name.split(".")[0] for name in stored} == {"model", "visual", "lm_head"}
    policy = load_policy(PolicyConfig(str(published)), renderer.never_sampled)
    export(policy, tmp_path / "out", tiny.CONTRACT_14)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)
    assert tiny.renderer(tmp_path / "out").contract == tiny.CONTRACT_14
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHAT_TEMPLATE  # its own renders no tools
    exported, prompt = tiny.plain(tmp_path / "out"), tiny.prompts_of(renderer)[3]
    ours, theirs = (tiny.plain_logprobs(m, renderer.never_sampled, prompt.ids, prompt.clips) for m in (exported, model))
    assert torch.equal(ours, theirs)
    state = {name: weight.detach().contiguous() for name, weight in policy.model.named_parameters()}
    save_file(state, published / "model.safetensors", {"format": "pt"})  # under the names of transformers' model
    again = load_policy(PolicyConfig(str(published)), train=False).model
    assert all(torch.equal(weight, state[name]) for name, weight in again.named_parameters())


SURPLUS = ("consolidated.safetensors", "model-00001-of-00099.safetensors", "adapter_model.safetensors")


@pytest.mark.parametrize("sharded", [False, True])
def test_only_model_safetensors_or_what_its_index_names_is_read(path, tmp_path, sharded):
    """Past bug: the shards of an earlier export and Mistral's consolidated.safetensors replaced weights."""
    folder = shutil.copytree(path, tmp_path / "own")
    if sharded:
        (folder / "model.safetensors").unlink()
        tiny.plain(path).save_pretrained(folder, max_shard_size="100KB")
    files, digest = sorted(folder.glob("*.safetensors")), weights_digest(folder)
    assert (len(files) > 1) is sharded
    wrong = {name: weight + 1 for name, weight in load_file(path / "model.safetensors").items()}
    for name in SURPLUS:
        save_file(wrong, folder / name, {"format": "pt"})
    assert weights_digest(folder) == digest
    assert weight_files(folder) == files
    expected = load_policy(PolicyConfig(str(path)), train=False).state_dict()
    read = load_policy(PolicyConfig(str(folder)), train=False).state_dict()
    assert all(torch.equal(read[name], weight) for name, weight in expected.items())


def test_weights_in_8_bits_are_refused(path, tmp_path):
    """Past bug: they were read without their scales. (mistakes.yaml: int8, in the scripts.)"""
    folder = shutil.copytree(path, tmp_path / "own")
    weights = load_file(folder / "model.safetensors")
    norm = "model.language_model.norm.weight"
    weights[norm] = weights[norm].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"{norm} is stored as F8_E4M3"):
        InProcess(folder, None)


def test_weights_without_a_place_in_the_model_are_told(tmp_path, capsys):
    """The config has a tied head, and one block less than the file."""
    folder = tiny.write(tmp_path / "own", tied=False)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 2, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    load_policy(PolicyConfig(str(folder)), train=False)
    assert f"{folder} has 12 weights that " in capsys.readouterr().out


def test_no_checkpoint_asks_to_run_its_own_code(checkpoint, tmp_path, monkeypatch):
    """Past bug: an evaluation of another family waited for an answer to "run the custom code? [y/N]"."""
    folder = shutil.copytree(checkpoint, tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "foo_vl", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    assert load_tokenizer(folder).get_vocab()


@pytest.mark.parametrize(
    "free, images, in_memory", [(1.5, 0, False), (2.5, 0, True), (2.5, 1, False), (None, 0, False)]
)
def test_snapshots_lie_in_memory_where_two_have_room(path, tmp_path, monkeypatch, capsys, free, images, in_memory):
    """The room beside images is in multiples of the weights. Two must fit: the old one and the one being written. Files that are
    not read need no room. None: memory cannot be written, which once ended the run with a traceback."""
    path = shutil.copytree(path, tmp_path / "own")
    shutil.copy(path / "model.safetensors", path / "consolidated.safetensors")
    size = (path / "model.safetensors").stat().st_size
    if free is None:
        monkeypatch.setattr(weights, "MEMORY", tmp_path / "not there")
    else:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free * size))
    with snapshot_folders(tmp_path, path, images=images * size) as folders:
        assert set(folders) == {run_memory(tmp_path) if in_memory else tmp_path / "snapshot"}
        assert folders[0].is_dir()
    assert (f"{weights.MEMORY}/minparavt-*" in capsys.readouterr().out) is not in_memory
    assert not run_memory(tmp_path).exists()
    assert not (tmp_path / "snapshot").exists()


# ------------------------------------------------------------------------------------------------ ranks


def both_ranks(path, folder):
    policy, optimizer = fresh(path)
    policy(tiny.random_bundles(0)[0] if rank() == 0 else []).logprobs.sum().backward()
    optimizer.step()
    save_state(folder / "state", policy, optimizer, 2)
    export(policy, folder / "out", CONTRACT)

    resumed, its_optimizer = fresh(path)
    assert load_state(folder / "state", resumed, its_optimizer) == 2
    for (name, p), q in zip(policy.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local()), name
        mine, its = optimizer.state[p], its_optimizer.state[q]
        assert all(torch.equal(mine[k].to_local(), its[k].to_local()) for k in ("exp_avg", "exp_avg_sq"))

    mine = [{"turns": [6.0], "only_0": [5.0], "empty": []}, {"turns": [1.0, 2.0]}][rank()]
    assert mean_over_ranks(mine) == {"turns": 3.0, "only_0": 5.0}  # over values, not over ranks
    mine = [{"loss": 0.0, "only_0": 5.0}, {"loss": 1.0, "only_1": 7.0}][rank()]
    assert sum_over_ranks(mine) == {"loss": 1.0, "only_0": 5.0, "only_1": 7.0}
    assert gather(rank()) == [0, 1]


def save_and_load_on_a_slow_disk(folder: Path) -> None:
    """Make rank 1 write and read for longer than the training group's timeout."""
    distributed.NCCL_TIMEOUT = datetime.timedelta(seconds=1.5)
    distributed.init_distributed()
    (model, optimizer), sync = small(), os.fsync
    if rank() == 1:
        os.fsync = lambda file: time.sleep(2) or sync(file)
    save_state(folder, model, optimizer, 1)
    time.sleep(2 * rank())
    assert load_state(folder, model, optimizer) == 1


@pytest.mark.slow
def test_ranks_wait_for_a_slow_disk_longer_than_for_a_lost_rank(tmp_path):
    """Past bug: a state was saved and loaded in the default group, with NCCL's timeout."""
    finish(Forked(partial(save_and_load_on_a_slow_disk, tmp_path), ranks=2))


def test_two_ranks_save_resume_export_and_agree(path, tmp_path):
    """Each rank writes a file. Their sizes are alike, so that no rank waits long for another."""
    tiny.on_ranks(both_ranks, 2, path, tmp_path)
    exported = tiny.plain(tmp_path / "out")
    first, second = (tmp_path / "out" / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == dict.fromkeys(load_file(first), first.name) | dict.fromkeys(load_file(second), second.name)
    assert 1 / 2 < first.stat().st_size / second.stat().st_size < 2
    policy, optimizer = fresh(path)  # one process resumes from the state of two
    assert load_state(tmp_path / "state", policy, optimizer) == 2
    weights = dict(exported.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in policy.model.named_parameters())
    assert len(optimizer.state) == len(weights) and all(s["exp_avg"].any() for s in optimizer.state.values())
