#!/usr/bin/env bash
# usage: install.sh VENV      A real SGLang 0.5.21 that serves on a CPU, in an environment of its own (2 minutes, 3 GB).
#
# SGLang's wheel asks for CUDA packages. It is installed without its dependencies, and the ones that a CPU server does
# import are named here; what is left over (sgl_kernel, one operator of torchvision) is stood in for by stand_ins/.
set -euo pipefail
venv=$1
python3 -m venv "$venv"
install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
install torch==2.13.0 transformers==5.12.1 numpy pillow
install --no-deps sglang==0.5.21 torchvision==0.28.0 triton==3.8.0 \
  compressed-tensors==0.18.0 xgrammar==0.2.7 apache-tvm-ffi==0.1.11
install aiohttp dill einops fastapi gguf interegular ipython jsonschema "llguidance>=1.7.6,<2" loguru msgspec \
  openai==2.6.1 orjson partial-json-parser prometheus-client psutil pybase64 pydantic python-multipart pyyaml pyzmq \
  requests sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tiktoken uvicorn uvloop xxhash
"$venv/bin/python" -c "import torch; assert torch.__version__.startswith('2.13.0'), torch.__version__"
