#!/usr/bin/env bash
# From a blank node with eight GPUs of 80 GB to the paper's tables: environment, data, cold start, the six trainings of the
# ablation, evaluations. docs/node.md explains what the commands print. No node has run this file yet. A test runs it on the toy.
#
#   bash node.sh --print           # prints the commands (`unpack` is below; all but the first run in .venv-node)
#   bash node.sh                   # runs them. A second call goes on where the first one stopped
#   bash node.sh SETTINGS          # with other values of what stands in capitals below (tests/toy_node.sh)
set -euo pipefail
cd "$(dirname "$0")"

# Where the config, the run and the evaluation of a training are. NAME is sft, or a row of the ablation.
CONFIG=configs/NAME_8b.yaml
RUN=runs/NAME_8b
EVALUATION=runs/eval/own/NAME_8b
ABLATION=(grpo anchoring gating paragrpo no_tool_reward no_gamma)
BASE=Qwen/Qwen3-VL-8B-Instruct
EVALUATE=(configs/eval/trained.yaml)
EVALUATE_BASE=(configs/eval/rows.yaml row=qwen3vl_8b way=own)
SFT_GPUS=8 RL_GPUS=4 # SGLang has the others
MORE=()              # words for each training

print=
for word in "$@"; do
    if [ "$word" = --print ]; then print=yes; else source "$word"; fi
done

run() { # COMMAND...: print a command, and run it
    for word in "$@"; do
        if [[ $word == *[\ \[\(]* ]]; then printf "'%s' " "$word"; else printf '%s ' "$word"; fi
    done
    printf '\n'
    if [ ! "$print" ]; then "$@"; fi
}

once() { # RESULT COMMAND...: run a command, unless its result is there
    if [ "$print" ] || [ ! -e "$1" ]; then run "${@:2}"; fi
    if [ ! "$print" ]; then touch "$1"; fi
}

unpack() { # ARCHIVES FOLDER: unpack all archives of a folder; some are split into parts
    find "$1" -name '*.zip' -print0 | xargs -0 -r -I{} unzip -q -n {} -d "$2" # find -exec would hide a failure
    find "$1" -name '*.tar' -print0 | xargs -0 -r -I{} tar -x -C "$2" -f {}
    if compgen -G "$1/*.tar.part.*" > /dev/null; then cat "$1"/*.tar.part.* | tar -x -C "$2"; fi
}

train() { # RUN COMMAND...
    once "$1/model" "${@:2}" "${MORE[@]}"
    run rm -rf "$1/state" # two states of 92 GiB, which only an unfinished training needs
}

evaluate() { # NAME WORDS...
    local trained=${RUN/NAME/$1}
    run python eval.py "${EVALUATE[@]}" checkpoint="$trained/model" name="${trained##*/}" run="${EVALUATION/NAME/$1}" "${@:2}"
}

# ---- environment
if [ "$print" ] || [ ! -e .venv-node/.installed ]; then run python3 -m venv .venv-node; fi
export PATH=$PWD/.venv-node/bin:$PATH
once .venv-node/.installed pip install -r requirements.lock

# ---- data
once data/train/.fetched hf download ParaVT/ParaVT-Parquet --repo-type dataset --local-dir data/train
once data/media/.fetched hf download ParaVT/ParaVT-Source --repo-type dataset --local-dir data/media
once data/media/.unpacked unpack data/media data/media
# LongVideoBench is gated: accept its terms on the hub, and run `hf auth login`.
for name in lmms-lab/Video-MME longvideobench/LongVideoBench lmms-lab/LVBench sy1998/MLVU_dev yale-nlp/MMVU; do
    folder=data/eval/${name#*/}
    once "$folder/.fetched" hf download "$name" --repo-type dataset --local-dir "$folder"
    once "$folder/.unpacked" unpack "$folder" "$folder"
done
once data/train/.checked python sft.py "${CONFIG/NAME/sft}" --check-data decoders=48

# ---- training, from the cold start
train "${RUN/NAME/sft}" torchrun --standalone --nproc_per_node=$SFT_GPUS sft.py "${CONFIG/NAME/sft}"
rl=(torchrun --standalone --nproc_per_node=$RL_GPUS rl.py)
for name in "${ABLATION[@]}"; do
    train "${RUN/NAME/$name}" "${rl[@]}" "${CONFIG/NAME/$name}"
done
# The base model's format and calls are those of the first step of a training from it.
base=${RUN/NAME/qwen3vl}
train "$base" "${rl[@]}" "${CONFIG/NAME/grpo}" policy.checkpoint=$BASE run="$base" steps=1

# ---- evaluation, which resumes by itself
run python eval.py "${EVALUATE_BASE[@]}" run="${EVALUATION/NAME/qwen3vl}"
for name in sft "${ABLATION[@]}"; do
    evaluate "$name"
done
evaluate paragrpo 'arms=[parallel, sequential]' # adds the second arm: calls one by one
run python eval.py table ${EVALUATION/NAME/*} --baseline "Qwen3-VL-8B (own)"
run python eval.py ablation "$RUN" "$EVALUATION"
