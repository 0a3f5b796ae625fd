#!/bin/bash
# bash recipes/gpu_check.sh OUT [--minutes 30] [--only NAME ...]
#
# Proves the project on the GPU of this machine, as `python -m eval.gpu` says, with what Python packages are there; no
# index is asked. Packages that are missing are taken from a folder of wheels, $WHEELS or .wheels of this clone:
#
#     pip download --python-version 3.12 --only-binary=:all: --no-deps -d .wheels \
#         datasets dill multiprocess cut-cross-entropy liger-kernel torchao
#
# A second call with the same OUT goes on with what is missing. PYTHON chooses the interpreter.
set -euo pipefail

if [ $# -lt 1 ] || [ "$1" = --help ] || [ "$1" = -h ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
wheels=$(realpath -m "${WHEELS:-$root/.wheels}")
cd "$root"

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
if compgen -G "$wheels/*.whl" >/dev/null; then
    # into a folder of their own, which leaves the interpreter as it is
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$out/packages" "$wheels"/*.whl
fi
# training and evaluation under the names that they are installed by
mkdir -p "$out/names"
ln -sfn "$root/recipes" "$out/names/looped_recipes"
ln -sfn "$root/eval" "$out/names/looped_eval"
export PYTHONPATH="$root:$out/names${PYTHONPATH:+:$PYTHONPATH}:$out/packages"
# what compilers keep, also where the home folder is not there or cannot be written
export TRITON_CACHE_DIR="$out/caches/triton" TORCHINDUCTOR_CACHE_DIR="$out/caches/inductor" HF_HOME="$out/caches/hub"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
exec "$PYTHON" -m eval.gpu "$out" "$@"
