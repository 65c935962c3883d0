#!/usr/bin/env bash
# `make demo-qlora`: from nothing to a model that answers. Each step is a command that is shown before it runs.
#
#   scripts/demo_qlora.sh [PROMPT…]   asks these instead
#   RUNS=DIR                          where runs are kept, instead of runs/
#   LAUNCH=FILE                       another launch file
#   PRETRAIN="key=value …"            further overrides of recipes/sample.yaml
#   TUNE="key=value …"                further overrides of recipes/demo_qlora.yaml
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/demo_steps.sh
. scripts/demo_steps.sh
# Beginnings of stories that are in no sample, and something to ask about them.
readonly FIRST='Once there lived a small rabbit by the river. Her name was Nora. One warm afternoon, Nora made a big cookie all by herself. It smelled so good that she wanted to eat it all. "I am so hungry," said Leo. But Nora turned her back and went on eating. What does this story teach?'
readonly SECOND='Finn was a young otter. His home was near the lake. He had a silver whistle and took it everywhere. One windy day, Finn wanted to play, but the silver whistle was gone. What is this story about?'

show() {
  local prompt=$1
  title "4. The same prompt before and after: $prompt"
  printf -- '--- before: %s, which knows no turns, goes on\n' "$BASE/model"
  # Without --chat the prompt is written first.
  finetune generate "$BASE/model" --prompt "$prompt" --max-new-tokens 60 | tail -c +$((${#prompt} + 1))
  printf -- '--- after: %s answers\n' "$MERGED"
  finetune generate "$MERGED" --chat --prompt "$prompt"
}

if [ -f "$BASE/model/model.safetensors" ]; then
  title "1. A small Llama that writes stories: $BASE/model is there already"
else
  title "1. A small Llama learns to write stories, from nothing"
  # shellcheck disable=SC2086  # several overrides
  train recipes/sample.yaml output.dir="$BASE" ${PRETRAIN:-}
fi

title "2. QLoRA: its weights in 4 bits, and adapters that learn to answer"
rm -rf "$TUNED"
# shellcheck disable=SC2086
train recipes/demo_qlora.yaml model.name="$BASE/model" output.dir="$TUNED" ${TUNE:-}

title "3. The adapters merged into the weights, and proved in a new process"
run finetune export "$TUNED" --as merged

[ $# -gt 0 ] || set -- "$FIRST" "$SECOND"
for prompt in "$@"; do
  show "$prompt"
done

title "$SECONDS s. The merged model lies in $MERGED: transformers opens it, and so does"
printf '  finetune chat %q\n' "$MERGED"
