"""rows.py: what the study trains and evaluates: cold starts, the contrast of plain GRPO and PARA-GRPO, ablations.

paradox.py makes jobs of the rows, and claims.py compares their figures. A *run* is one seed on one numeric path. A seed
sets everything: clips, initial weights, order of the data, samples. All rows of a seed have the same budget, and the same
cold start unless their name says otherwise.

Deliberately missing: tuning. A row's settings differ from the others' only in what its name says.
"""

from typing import NamedTuple

# CPUs round differently and small differences grow, so a result on one path can be luck. Path -> environment.
PATHS = {"": {}, "-old": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}}
KS = (4, 16, 64)  # values of K in evaluations, which sample as training does
# The weak prior of Qwen2.5-VL's class: its cold start can do everything, its format is tidy, and it rarely calls.
WEAK_TOY = ("--p-loose", "0.1", "--p-tool", "0.1", "--model-type", "qwen2_5_vl")
WEAK_VISUAL = ("visual.patch=14", "visual.frame_pixels=784")


class Row(NamedTuple):
    """A row of the tables: a policy, which is evaluated. An RL training has a config. Without one, a row trains a cold start, or it
    evaluates the model of `policy`."""

    name: str
    title: str
    config: str = ""
    changes: tuple[str, ...] = ()  # overrides of the config; for a cold start, flags of `toy.py build`
    start: str = "sft"
    prefix: bool = True  # whether training used the think prefix
    paper: str = ""  # its row in the paper's tables
    seeds: int = 2
    settings: tuple[str, ...] = ()  # overrides of the config of sft.py or rl.py that a row's start shares
    policy: str = ""  # the row or toy whose model is evaluated; empty: its own
    arm: str = "parallel"  # how the evaluation dispatches calls


TABLE = (
    Row("base", "untrained", prefix=False, paper="Qwen3-VL-8B", seeds=1, policy="sft-toy"),
    Row("sft", "cold start", prefix=False, paper="+SFT", seeds=5),
    Row("sft_tidy", "cold start without loose formats", changes=("--p-loose", "0"), prefix=False),
    Row("grpo", "GRPO, accuracy only", "toy_grpo", prefix=False, paper="SFT+GRPO", seeds=5),
    Row("paragrpo", "PARA-GRPO", "toy_paragrpo", paper="Full PARA-GRPO", seeds=5),
    Row("sequential", "PARA-GRPO, one call per turn", seeds=5, policy="paragrpo", arm="sequential"),
    Row("anchoring", "+ Exploration Anchoring", "toy_anchoring", paper="+Exploration Anchoring", seeds=5),
    Row("gating", "+ nFrames Gating", "toy_gating", prefix=False, paper="+nFrames Gating", seeds=5),
    Row("grpo_full", "GRPO, full reward", "toy_grpo_full", prefix=False, paper="SFT+GRPO"),
    Row("paragrpo_full", "PARA-GRPO, full reward", "toy_paragrpo_full", paper="Full PARA-GRPO"),
    Row("no_tool_reward", "PARA-GRPO, full reward, - R_tool", "toy_no_tool_reward", paper="-R_tool"),
    Row("no_gamma", "PARA-GRPO, - gamma", "toy_no_gamma", paper="-gamma penalty"),
    Row("prefix_only", "prefix and gating, no anchor", "toy_paragrpo", ("reward.anchor.credit=off",)),
    Row("anchor_only", "anchor and gating, no prefix", "toy_paragrpo", ("rollout.think_prefix=false",), prefix=False),
    Row("grpo_tidy_start", "GRPO, from the tidy start", "toy_grpo", start="sft_tidy", prefix=False),
    Row("paragrpo_tidy_start", "PARA-GRPO, from there", "toy_paragrpo", start="sft_tidy"),
    Row("sft_weak", "weak cold start", changes=WEAK_TOY, prefix=False, seeds=3, settings=(*WEAK_VISUAL, "steps=700")),
    Row("grpo_weak", "GRPO, from the weak start", "toy_grpo", start="sft_weak", prefix=False, seeds=3, settings=WEAK_VISUAL),
    Row("paragrpo_weak", "PARA-GRPO, from there", "toy_paragrpo", start="sft_weak", seeds=3, settings=WEAK_VISUAL),
)  # fmt: skip
ROWS = {row.name: row for row in TABLE}
CONTRAST = ("sft", "grpo", "paragrpo")
GATE_JOBS = {"sft": "gate", "sft_weak": "weak_gate"}  # a cold start -> the job that runs gate.py on it
