#!/usr/bin/env bash
# Builds the sdist and from it the wheel, installs the wheel into a new environment, and trains from an empty directory:
# what somebody has who never saw this checkout.
#
#   scripts/test_wheel.sh           the wheel's dependencies are installed anew, which takes minutes
#   scripts/test_wheel.sh --quick   they are those of .venv, and only the package comes from the wheel (CI). It does not
#                                   see a dependency that pyproject.toml lacks
set -euo pipefail
cd "$(dirname "$0")/.."
readonly HERE=$PWD QUICK=${1:-}
PLACE=$(mktemp -d)
readonly PLACE
touch "$PLACE/log"
trap 'rm -rf "$PLACE"' EXIT

# Shows what a step printed if it fails, and the one before it.
step() {
  local start=$SECONDS
  printf '==> %s' "$1"
  shift
  "$@" >"$PLACE/output" 2>&1 || { echo; tail -n 40 "$PLACE/log" "$PLACE/output" >&2; exit 1; }
  printf ' (%d s)\n' $((SECONDS - start))
  mv "$PLACE/output" "$PLACE/log"
}

# What ships is what lies in the checkout: each file of the wheel's folders is in it, and so in the sdist that it is built from.
same_files() {
  find finetune accelerate_configs ds_configs recipes -type f -not -path '*/__pycache__/*' | sed 's|^finetune/||' | sort >"$PLACE/here"
  "$PLACE/venv/bin/python" -c "import zipfile, sys; print(*zipfile.ZipFile(sys.argv[1]).namelist(), sep='\n')" "$PLACE"/dist/*.whl |
    sed -n '/dist-info/d; s|^finetune/||p' | grep -v '^constraints.txt$' | sort >"$PLACE/there"
  diff "$PLACE/here" "$PLACE/there"
  tar tzf "$PLACE"/dist/*.tar.gz >"$PLACE/sdist"
  grep -q '/tests/conftest.py$' "$PLACE/sdist"
}

# The packages of .venv as a path: its editable install of this checkout, a .pth file there, does not count.
borrow_packages() {
  local extras=report,tensorboard,trackio,wandb,fp8
  .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$PLACE/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
  .venv/bin/python -m pip --python "$PLACE/venv/bin/python" install --no-index "$(echo "$PLACE"/dist/*.whl)[$extras]"
}

# All that a command finds by name lies in the wheel: launch files and DeepSpeed's, recipes, the schema, a
# new project's files. One process runs them all, since most of a command's time is its start.
commands() {
  "$PLACE/venv/bin/python" - "$HERE" <<'PYTHON'
import contextlib
import io
import sys
from pathlib import Path

import finetune
from finetune.cli import main

here = Path(sys.argv[1])
assert Path(finetune.__file__).is_relative_to(sys.prefix), finetune.__file__
assert here not in [Path(entry).resolve() for entry in sys.path], sys.path
for words in (
    "schema",
    "schema --path",
    "plan sample",
    "explain sample optim.lr --config_file zero3",
    "doctor --recipe sample --config_file ddp",
    "init project",
):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main.main(words.split()) == 0, words
    print(words, said.getvalue(), sep="\n")
    if words == "schema":
        printed = said.getvalue()
    elif words == "schema --path":
        assert Path(said.getvalue().strip()).read_text(encoding="utf-8") == printed
PYTHON
}

step "build the sdist, and from it the wheel" .venv/bin/python -m build --no-isolation --outdir "$PLACE/dist" .
# Its own pip takes half a minute.
step "an empty environment" .venv/bin/python -m venv ${QUICK:+--without-pip} "$PLACE/venv"
step "they hold the files of the checkout" same_files
if [ "$QUICK" = --quick ]; then
  step "install the wheel and its extras, beside the packages of .venv" borrow_packages
else
  # shellcheck disable=SC2086  # the arguments are words on purpose
  [ -z "${TORCH_PIP_ARGS:-}" ] || step "torch" "$PLACE/venv/bin/pip" install -c constraints.txt ${TORCH_PIP_ARGS} torch
  step "install the wheel" "$PLACE/venv/bin/pip" install -c constraints.txt "$PLACE"/dist/*.whl
fi

mkdir "$PLACE/empty"
cd "$PLACE/empty"
export PATH="$PLACE/venv/bin:$PATH" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
unset PYTHONPATH
step "only the wheel is there to import, and its commands find its files" commands
cd project
step "two processes with FSDP2 train the new project" finetune launch --config_file fsdp recipe.yaml \
  "length={steps: 4}" output.dir=run
step "it was FSDP on two processes" grep "launch    fsdp x 2 on" "$PLACE/log"
step "its model is there" ls run/model/model.safetensors
cd "$HERE"
echo "==> the wheel works"
