#!/usr/bin/env bash
# usage: serve.sh VENV MODEL PORT [flags of sglang.launch_server]
here=$(cd "$(dirname "$0")" && pwd)
# Child processes find the stand-ins through PYTHONPATH. Compilation would delay the first image by 15 s, and OpenMP
# threads that spin while they wait starve the others of a small machine.
export PYTHONPATH=$here/stand_ins SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false
exec "$1/bin/python" -m sglang.launch_server --device cpu --attention-backend torch_native --dtype float32 \
  --model-path "$2" --host 127.0.0.1 --port "$3" --max-total-tokens 20000 "${@:4}"
