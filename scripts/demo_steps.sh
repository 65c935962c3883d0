# What the demos share; sourced in the root of the repository.
readonly RUNS=${RUNS:-runs} LAUNCH=${LAUNCH:-accelerate_configs/fsdp.yaml}
readonly BASE=$RUNS/sample TUNED=$RUNS/demo_qlora
readonly MERGED=$TUNED/exports/merged

title() { printf '\n=== %s\n' "$*"; }

run() {
  printf '$'
  printf ' %q' "$@"
  printf '\n'
  "$@"
}

train() { run accelerate launch --config_file "$LAUNCH" scripts/train.py "$@"; }
