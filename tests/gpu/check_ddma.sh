#!/usr/bin/env bash
# DDMA on the GPUs of this machine in under four minutes: CUDA IPC between two processes of one GPU
# beside a copy on the device, NCCL where there are two GPUs, FP8 kernels bit for bit as on a CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device: nothing to check"'
timeout 240 "$PYTHON" -m pytest -q -s -m gpu tests/gpu/test_ddma.py tests/gpu/test_fp8.py
