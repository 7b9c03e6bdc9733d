# One entry for people and CI. Every target sets up what it needs by itself; `make help` lists them.

VENV := .venv
PY := $(VENV)/bin/python
TLT := $(VENV)/bin/tlt
MODEL := smollm2-135m
LOCK := requirements/cpu.txt
# Installs the pinned list in seconds where pip takes minutes; without it pip does the job.
UV := uv==0.13.9
TORCH_INDEX := https://download.pytorch.org/whl/cpu
TORCH := $(shell grep '^torch==' $(LOCK))
# Ends the set-up: its name holds what the environment was made from, and where, since scripts carry that path.
STAMP := $(VENV)/.setup-$(shell { cat $(LOCK) pyproject.toml; pwd; } | sha256sum | cut -c1-16)

.DEFAULT_GOAL := help
.PHONY: help setup model quickstart test lint lock clean

help: ## List the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14
	@echo
	@echo "Variables: PYTHON=python3.12 (setup), QUICKSTART_ARGS='learner.max_steps=5', PYTEST_ARGS='-m \"not slow\"',"
	@echo "           LOCK_ARGS=--upgrade, TLT_CACHE=/path (models; default ~/.cache/tlt)"

setup: $(STAMP) ## Create .venv with the pinned CPU set and this checkout (about two minutes, then instant)

$(STAMP):
	@set -e; \
	if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  for candidate in $(or $(PYTHON),python3.11 python3 python3.12 python3.13); do \
	    if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	    then python=$$candidate; break; fi; \
	  done; \
	  test -n "$$python" || { echo "setup: found no Python 3.11, 3.12 or 3.13 as" \
	    "$(or $(PYTHON),python3.11 python3 python3.12 python3.13). Install one, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	  $$python -c 'import venv, ensurepip' 2>/dev/null || { echo "setup: $$python lacks the venv module." \
	    "Install it (Debian, Ubuntu: apt install $$($$python -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'))," \
	    "or name another Python: make setup PYTHON=/path/to/python" >&2; exit 1; }; \
	  echo "setup: creating $(VENV) with $$($$python --version)"; \
	  $$python -m venv --clear $(VENV); \
	fi
	@headers=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
	if ! $(PY) -c 'import pycosat' 2>/dev/null && ! { command -v cc >/dev/null && test -e "$$headers/Python.h"; }; then \
	  echo "setup: a C compiler and $$headers/Python.h are needed, since pycosat (for reasoning-gym) comes as source." \
	    "Debian, Ubuntu: apt install build-essential python3-dev" >&2; exit 1; \
	fi
	@echo "setup: installing $(TORCH)"
	@# The plain try comes first: asking PyTorch's index is slow where it cannot be reached, and pip may know a mirror.
	@$(PY) -m pip install -q --no-deps '$(TORCH)' 2>/dev/null \
	  || $(PY) -m pip install -q --no-deps --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	@echo "setup: installing $(LOCK)"
	@# --no-deps throughout: the list is complete, and resolving again would bring CUDA builds in (cpu-overrides.txt).
	@{ $(PY) -m pip install -q '$(UV)' && $(VENV)/bin/uv pip install -q --python $(PY) --no-deps -r $(LOCK); } \
	  || { echo "setup: uv failed, trying pip"; $(PY) -m pip install -q --no-deps -r $(LOCK); }
	@$(PY) -m pip install -q --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.setup-* && touch $@
	@echo "setup: done"

model: setup ## Fetch and convert the built-in model once (about 30 s)
	@$(TLT) model fetch $(MODEL)

quickstart: model ## Train SmolLM2-135M with GRPO on this machine's CPU
	$(TLT) train configs/quickstart.yaml $(QUICKSTART_ARGS)

lint: setup ## Lint, format check, types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

test: lint model ## Everything that CI runs: lint, types, all tests with real vLLM and Ray; skips are listed at the end
	$(PY) -m pytest $(PYTEST_ARGS)

lock: setup ## Resolve requirements/cpu.txt again from pyproject.toml (keeps pins that still fit; LOCK_ARGS=--upgrade)
	@wheels=$$(mktemp -d) && trap 'rm -rf "$$wheels"' EXIT && \
	{ $(PY) -m pip download -q --no-deps -d "$$wheels" '$(TORCH)' 2>/dev/null \
	  || $(PY) -m pip download -q --no-deps -d "$$wheels" --extra-index-url $(TORCH_INDEX) '$(TORCH)'; } && \
	$(VENV)/bin/uv pip compile -q pyproject.toml --extra cpu --extra dev --extra tensorboard --extra plot \
	  --override requirements/cpu-overrides.txt --find-links "$$wheels" --python-version 3.11 \
	  --no-annotate --custom-compile-command "make lock" $(LOCK_ARGS) -o $(LOCK)

clean: ## Remove .venv and caches; keeps runs/ and the model cache
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find tlt rollout trainer tests -name __pycache__ -type d -prune -exec rm -rf {} +
