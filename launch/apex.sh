#!/usr/bin/env bash
# Build NVIDIA apex into the GPU environment (fused Adam and norms where TransformerEngine is absent).
# Needs: nvcc of the CUDA release that torch was built with, and a checkout of NVIDIA/apex.
#   usage: launch/apex.sh /path/to/apex
set -euo pipefail
source_dir=${1:?usage: launch/apex.sh /path/to/a/checkout/of/NVIDIA/apex}
python=$(make -s -C "$(dirname "$0")/.." python KIND=gpu)
APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "$python" -m pip install -v --no-build-isolation --no-deps "$source_dir"
"$python" -c "from apex.optimizers import FusedAdam; print('apex:', FusedAdam)"
