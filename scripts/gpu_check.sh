#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one go and under ten minutes on one card: the GPU tests, then the figures,
# which are added to benchmarks/RESULTS.md. With --dry-run the same programs run on the CPU in a small size.
#
# Uses the interpreter named in $PYTHON, else that of .venv. It needs a CUDA build of torch 2.13, and kvcache-core,
# kvcache-cuda and pytest; FlashInfer is measured where it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=${OUT:-benchmarks/out}
mkdir -p "$out"

if [[ ${1:-} == --dry-run ]]; then
    export GPU_CHECK_DRY_RUN=1
    device=cpu
else
    device=cuda
    nvidia-smi --query-gpu=name,driver_version,memory.total,memory.free --format=csv | tee "$out/gpu.txt"
fi

"$python" -c "from kvcache_core.cli import main; main()" show cuda | tee "$out/show.txt"
status=0
timeout 360 "$python" -m pytest plugins/cuda/tests/test_gpu.py -q -rs 2>&1 | tee "$out/tests.txt" || status=$?
timeout 180 "$python" benchmarks/gpu.py --device "$device" --record 2>&1 | tee "$out/figures.txt" || status=$?
if [[ $device == cuda ]]; then
    cp benchmarks/RESULTS.md "$out/RESULTS.md"
fi
exit "$status"
