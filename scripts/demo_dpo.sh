#!/usr/bin/env bash
# `make demo-dpo`: the model that `make demo-qlora` merged, or makes here, learns which of two right answers is preferred:
# one word, not a whole sentence. Each step is a command that is shown before it runs.
#
#   scripts/demo_dpo.sh [PROMPT…]     asks these instead
#   RUNS, LAUNCH, PRETRAIN, TUNE      as for scripts/demo_qlora.sh
#   PREFER="key=value …"              further overrides of recipes/demo_dpo.yaml
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/demo_steps.sh
. scripts/demo_steps.sh

readonly BEFORE=$RUNS/demo_dpo_before AFTER=$RUNS/demo_dpo
# Stories that are in no sample, and something to ask about them.
readonly FIRST='Finn was a young otter. His home was near the lake. He was brave, and he loved to play outside. One windy day, Finn found a cake on the table, and it was for him. What is Finn like?'
readonly SECOND='Once upon a time there was a tiny rabbit named Nora. She lived by the river. She had a blue ribbon and took it everywhere. One sunny morning, she came home and saw that the blue ribbon was not there. What color is the ribbon?'

# The share of held-out pairs whose preferred answer is the likelier one.
accuracy() { sed -n 's|.*"validation_logps/accuracies": *\([0-9.]*\).*|\1|p' "$1/metrics.jsonl" | tail -n 1; }

if [ -f "$MERGED/model.safetensors" ]; then
  title "1. A small Llama that answers: $MERGED is there already"
else
  title "1. A small Llama that answers, from nothing: scripts/demo_qlora.sh"
  scripts/demo_qlora.sh
fi

title "2. Before: what it thinks of held-out pairs"
rm -rf "$BEFORE" "$AFTER"
# shellcheck disable=SC2086  # several overrides
train recipes/demo_dpo.yaml model.name="$MERGED" output.dir="$BEFORE" ${PREFER:-} length.steps=0

title "3. DPO: it learns which answers are preferred"
# shellcheck disable=SC2086
train recipes/demo_dpo.yaml model.name="$MERGED" output.dir="$AFTER" ${PREFER:-}

[ $# -gt 0 ] || set -- "$FIRST" "$SECOND"
for prompt in "$@"; do
  title "4. The same prompt before and after: $prompt"
  printf -- '--- before: %s\n' "$MERGED"
  finetune generate "$MERGED" --chat --max-new-tokens 60 --prompt "$prompt"
  printf -- '--- after: %s\n' "$AFTER"
  finetune generate "$AFTER" --chat --max-new-tokens 60 --prompt "$prompt"
done

title "$SECONDS s. Held-out pairs whose preferred answer is the likelier one: $(accuracy "$BEFORE") before, $(accuracy "$AFTER") after"
printf '  finetune chat %q\n' "$AFTER"
