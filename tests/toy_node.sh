# node.sh on the toy: one step, two items.
CONFIG=configs/toy_NAME.yaml
RUN=runs/toy/NAME
EVALUATION=runs/toy/eval/NAME
BASE=toy_data/model
items=(limit=2 'frames=[4]')
EVALUATE=(configs/eval/toy.yaml "${items[@]}")
EVALUATE_BASE=(configs/eval/toy.yaml checkpoint=$BASE 'name=Qwen3-VL-8B (own)' "${items[@]}")
SFT_GPUS=1
RL_GPUS=1
MORE=(steps=1)
