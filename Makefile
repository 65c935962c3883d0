# Everything a developer runs. `make help` lists it; the set-up itself is scripts/setup.sh.

SHELL := /bin/bash
# Another environment, with other versions: make test-smoke VENV=build/x CONSTRAINTS=tests/versions/lowest.txt
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PY := $(VENV)/bin/python
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

# Most tests start two processes, so half the cores are workers; four at least, because starting up mostly waits, as do
# tests that need another one's run (two on two cores leave half of them idle).
TEST_WORKERS ?= $(shell n=$$(( $(CORES) / 2 )); echo $$(( n < 4 ? 4 : n > 16 ? 16 : n )))
PYTEST_ARGS ?=

# The demo's two processes share the cores; without this each would start one thread per core and be slower.
DEMO_THREADS := $(shell n=$$(( $(CORES) / 2 )); echo $$(( n < 1 ? 1 : n )))

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-qlora demo-dpo test durations test-quick test-search test-smoke test-extras test-wheel test-resume preference-table test-chaos check docs support-matrix ops format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## Create .venv and install the pinned packages; nothing to do when they are there
	@VENV=$(VENV) CONSTRAINTS=$(CONSTRAINTS) scripts/setup.sh

# TOKENIZERS_PARALLELISM: the tokenizers library warns at each fork otherwise.
demo: setup  ## Train a small Llama on the built-in stories with FSDP2 on two processes
	@OMP_NUM_THREADS=$(DEMO_THREADS) HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
	  $(VENV)/bin/accelerate launch --config_file accelerate_configs/fsdp.yaml \
	  scripts/train.py recipes/sample.yaml output.overwrite=true

demo-qlora: setup  ## Pre-train (or reuse) that Llama, teach it to answer with QLoRA, merge, and ask before and after
	@PATH="$(abspath $(VENV))/bin:$$PATH" OMP_NUM_THREADS=$(DEMO_THREADS) HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
	  scripts/demo_qlora.sh

demo-dpo: setup  ## Teach that model by DPO which of two right answers is preferred, and measure and ask before and after
	@PATH="$(abspath $(VENV))/bin:$$PATH" OMP_NUM_THREADS=$(DEMO_THREADS) HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
	  scripts/demo_dpo.sh

# One thread a process: the tests run many processes at once, and fp32 sums keep their order.
# The ops are compiled beside the first tests, which mostly wait; those that need the last one begin when it is done.
# Where one cannot be built it says why, and the tests that need it are skipped or fail.
test: setup  ## Run the whole test suite (PYTEST_ARGS="-k name -x" narrows it)
	@$(VENV)/bin/finetune ops & \
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false FINETUNE_OPS_PID=$$! \
	  $(PY) -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

durations: export FINETUNE_DURATIONS = 1
durations: test  ## Run it, and write what tests take into tests/durations.json, by which it is ordered

# What a contributor runs before each commit: the tests that are marked `quick`.
test-quick: setup  ## Run a test of each thing there is, at most 4 minutes on 2 cores
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
	  $(PY) -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder -m quick $(PYTEST_ARGS)

# The first of TIMES seeds, each for as many examples as `make test` has: make test-search SEED=7 TIMES=20
SEED ?= 1
TIMES ?= 5
test-search: setup  ## Search other examples for one that breaks a property, TIMES times as many, from SEED on
	@for seed in $$(seq $(SEED) $$(( $(SEED) + $(TIMES) - 1 ))); do \
	  OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
	    $(PY) -m pytest -q -n $(TEST_WORKERS) --dist loadgroup -m hypothesis \
	    --hypothesis-profile=search --hypothesis-seed=$$seed $(PYTEST_ARGS) || exit 1; done

# One after the other, since their runs are shared, and start as forks of one process.
test-smoke: setup  ## What CI runs with other versions of the libraries: each way to launch, in a minute
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(PY) -m pytest -n 0 $(PYTEST_ARGS) tests/versions/smoke.py

# Extras that development leaves out: large, and with what they bring (scikit-learn, SciPy) other libraries import more. What
# is installed stays in the environment.
EXTRAS := -e '.[gguf,harness,serve]' xllamacpp==2026.10.11549 sentence-transformers==6.2.0
EXTRAS += kubernetes-validate==1.37.0 kubernetes==35.0.0 kubeflow-trainer-api==2.3.0
test-extras: setup  ## Install GGUF, lm-eval, a server, sentence-transformers and schemas of clusters, and run the tests that need them
	@$(PY) -m pip install -q --disable-pip-version-check --no-compile --no-build-isolation -c $(CONSTRAINTS) $(EXTRAS)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
	  $(PY) -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS) \
	  tests/export/test_evaluate_harness.py tests/export/test_export_chat.py tests/export/test_gguf.py \
	  tests/cli/test_print_cluster_job.py tests/training/test_embedding.py \
	  -k "harness or serves or gguf or kubernetes_accepts or sentence_transformers"

test-resume: setup  ## Resume every backend's checkpoint on every backend; writes docs/resume-matrix.md (about 30 minutes)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(PY) tests/support/matrix.py docs/resume-matrix.md

preference-table: setup  ## Run each loss of preferences under each launch file; writes docs/preference-table.md (about 10 minutes)
	@PYTHONPATH=. OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(PY) tests/support/preference_table.py docs/preference-table.md

# KILLS, requests to stop and the seed of what is drawn: make test-chaos CHAOS="100 20 7"
CHAOS ?= 100 20
test-chaos: setup  ## Kill runs and ask them to stop at random moments, 120 times (about 20 minutes)
	@PYTHONPATH=. OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(PY) tests/support/chaos.py $(CHAOS)

test-wheel: setup  ## Build the package, install it into an empty environment, and train there (about 10 minutes)
	@scripts/test_wheel.sh

check: setup  ## Format, lint, types and import rules
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy --strict finetune/
	$(PY) -m pytest -q tests/utils/test_imports.py

docs: setup  ## Build the docs site into build/docs; a broken link fails
	$(PY) scripts/build_docs.py

support-matrix: setup  ## Ask what goes together, and write docs/support.md (a minute)
	@PYTHONPATH=. OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
	  $(PY) -W ignore tests/support/support_matrix.py docs/support.md

ops: setup  ## Build DeepSpeed's native ops ahead of the first run (4 to 20 minutes on 2 cores)
	@$(VENV)/bin/finetune ops

format: setup  ## Rewrite the code in the project's format and fix what ruff can
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:  ## Remove caches and build leftovers; .venv and runs/ stay
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
