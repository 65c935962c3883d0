#!/usr/bin/env bash
# Creates .venv and installs the pinned packages into it. A second call does nothing, and needs no network.
#
#   PYTHON=python3.12 scripts/setup.sh    another interpreter (3.11 or newer)
#   VENV=DIR CONSTRAINTS=FILE             another environment, with other versions (scripts/test_versions.py)
#   PACKAGES="-e . pytest"                other packages than those that development needs
#   TORCH_PIP_ARGS="--index-url URL"      where torch comes from, for example a CPU-only build
#   SETUP_SYSTEM=0                        never call apt-get
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${VENV:-.venv} CONSTRAINTS=${CONSTRAINTS:-constraints.txt} PACKAGES=${PACKAGES:--e .[dev]}
readonly STAMP=$VENV/finetune-setup.sha256
readonly LOG=$VENV/setup.log

fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# What was installed is a function of these, so their digest says whether there is anything to do.
digest() {
  { cat pyproject.toml "$CONSTRAINTS" && printf '%s' "${PACKAGES#"-e .[dev]"}"; } | { sha256sum 2>/dev/null || shasum -a 256; } | cut -d ' ' -f 1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  fail "Python 3.11 or newer is needed and none of '${PYTHON:-python3.11 python3}' is one. On Debian 12:" \
    "apt-get install python3 python3-venv. To name another interpreter: PYTHON=/path/to/python3 make setup"
}

make_venv() {
  local python
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$("$python" --version) has no venv module. On Debian: apt-get install python3-venv"
  echo "==> $VENV with $("$python" --version)"
  "$python" -m venv "$VENV"
}

# Runs pip with its output in a log; a terminal shows its newest line, and a failure shows the last ones.
pip_step() {
  local title=$1 start=$SECONDS status=0 line
  shift
  printf '==> %s\n' "$title"
  printf '\n# %s: pip install %s\n' "$title" "$*" >>"$LOG"
  if [ -t 1 ]; then
    "$VENV/bin/python" -m pip install --progress-bar off --disable-pip-version-check -c "$CONSTRAINTS" "$@" 2>&1 |
      tee -a "$LOG" | while IFS= read -r line; do
        printf '\r\033[K    %.*s' $((${COLUMNS:-80} - 6)) "$line"
      done || status=$?
    printf '\r\033[K'
  else
    "$VENV/bin/python" -m pip install --progress-bar off --disable-pip-version-check -c "$CONSTRAINTS" "$@" \
      >>"$LOG" 2>&1 || status=$?
  fi
  if [ "$status" -ne 0 ]; then
    tail -n 25 "$LOG" >&2
    fail "pip failed at this step: $title. The whole output is in $LOG; once the cause is gone, run it again"
  fi
  printf '    done in %d s\n' $((SECONDS - start))
}

# DeepSpeed compiles its native ops on the machine: every ZeRO run on a CPU, and offload anywhere, needs a
# compiler with Python's headers, and ZeRO-3 on NVMe needs libaio's as well. Nothing else does, so what cannot be
# installed here is a line to read, not a failure.
system_packages() {
  local include missing=() sudo=()
  include=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')
  command -v "${CXX:-c++}" >/dev/null || missing+=(g++)
  # Debian packs the interpreter's headers apart; other builds of Python bring theirs.
  [ -f "$include/Python.h" ] || missing+=("python$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-dev")
  if ! command -v gcc >/dev/null || ! echo '#include <libaio.h>' | gcc -E - >/dev/null 2>&1; then
    missing+=(libaio-dev)
  fi
  [ ${#missing[@]} -gt 0 ] || return 0

  if [ "${SETUP_SYSTEM:-1}" != 0 ] && [ "$(uname -s)" = Linux ] && command -v apt-get >/dev/null; then
    if [ "$(id -u)" -ne 0 ]; then
      sudo=(sudo -n)
    fi
    if "${sudo[@]}" true 2>/dev/null; then
      echo "==> apt-get install ${missing[*]} (for DeepSpeed's native ops)"
      if { "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y "${missing[@]}" ||
        { "${sudo[@]}" apt-get update &&
          "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y "${missing[@]}"; }; } \
        >>"$LOG" 2>&1 </dev/null; then
        return 0
      fi
    fi
  fi
  local compiler=${missing[*]/libaio-dev/}
  [ -z "${compiler// /}" ] ||
    echo "note: DeepSpeed on a CPU, and optimizer offload, also need: apt-get install $compiler"
  [[ " ${missing[*]} " != *" libaio-dev "* ]] ||
    echo "note: the launch config zero3_nvme, and nothing else, also needs: apt-get install libaio-dev"
}

main() {
  local wanted
  wanted=$(digest)
  if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then
    return 0
  fi

  [ -x "$VENV/bin/python" ] || make_venv
  : >"$LOG"
  # torch first and by itself: what depends on torch would otherwise choose a build, and may choose gigabytes.
  # setuptools and wheel, because DeepSpeed's setup.py below imports them and torch from this environment; hatchling builds
  # this package.
  # shellcheck disable=SC2086  # the arguments are words on purpose
  pip_step "1/3 torch (the largest download)" ${TORCH_PIP_ARGS:-} torch setuptools wheel hatchling editables
  # No ops at install time: they are built for this machine when a launch config needs them, or by `make ops`.
  DS_BUILD_OPS=0 pip_step "2/3 deepspeed" --no-build-isolation deepspeed
  # shellcheck disable=SC2086  # the packages are words on purpose
  pip_step "3/3 finetune and its other packages" --no-build-isolation $PACKAGES
  system_packages
  printf '%s\n' "$wanted" >"$STAMP"
  echo "==> ready; the log is $LOG"
}

main "$@"
