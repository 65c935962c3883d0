#!/usr/bin/env bash
# Builds the wheel and the sdist, installs the wheel into a new environment, and trains from an empty directory: what
# somebody has who never saw this checkout. Takes a few minutes, most of which is the installation.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly HERE=$PWD
PLACE=$(mktemp -d)
readonly PLACE
trap 'rm -rf "$PLACE"' EXIT

# Shows what a step printed if it fails.
step() {
  printf '==> %s\n' "$1"
  shift
  "$@" >"$PLACE/output" 2>&1 || { tail -n 40 "$PLACE/output" >&2; exit 1; }
  mv "$PLACE/output" "$PLACE/log"
}

step "build the wheel and the sdist" .venv/bin/python -m build --no-isolation --outdir "$PLACE/dist" .
tar tzf "$PLACE"/dist/*.tar.gz >"$PLACE/sdist"
grep -q '/tests/conftest.py$' "$PLACE/sdist"
step "an empty environment" .venv/bin/python -m venv "$PLACE/venv"
# shellcheck disable=SC2086  # the arguments are words on purpose
[ -z "${TORCH_PIP_ARGS:-}" ] || step "torch" "$PLACE/venv/bin/pip" install -c constraints.txt ${TORCH_PIP_ARGS} torch
step "install the wheel" "$PLACE/venv/bin/pip" install -c constraints.txt "$PLACE"/dist/*.whl

mkdir "$PLACE/empty"
cd "$PLACE/empty"
export PATH="$PLACE/venv/bin:$PATH" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
unset PYTHONPATH
step "two processes with FSDP2" finetune launch --config_file fsdp sample length.steps=4 output.dir=runs/fsdp
step "it was FSDP on two processes" grep "fsdp x2" "$PLACE/log"
step "its model is there" ls runs/fsdp/model/model.safetensors
step "finetune plan" finetune plan sample
step "finetune explain" finetune explain sample optim.lr --config_file zero3
step "finetune doctor" finetune doctor --recipe sample --config_file ddp
step "finetune init" finetune init project
cd project
step "its recipe" finetune launch --config_file single recipe.yaml "length={steps: 2}"
cd "$HERE"
echo "==> the wheel works"
