# `make train` and `make test` set up everything they need in .venv; `make doctor` says what was found.
.DEFAULT_GOAL := help
CONFIG ?= configs/synthetic-hstu.yaml
ARGS ?=

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
DEVICE := $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
# The set-up is redone when pyproject.toml changes or a GPU driver appears.
STAMP := $(VENV)/.ready-$(DEVICE)-$(shell cksum < pyproject.toml | cut -d' ' -f1)

help:
	@echo "make train    train and evaluate CONFIG=$(CONFIG); overrides: ARGS='train.epochs=5'"
	@echo "make test     run the test suite"
	@echo "make test-slow  run its long forms, which make test leaves out"
	@echo "make doctor   print the versions found and what to install where they do not match"
	@echo "make lint     ruff"
	@echo "make types    mypy on all packages, the programs and the public functions of the operators"
	@echo "make docs     build the site into build/site"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python from 3.11 to 3.13 found: install one, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@# The CPU and the CUDA builds of fbgemm share their files: for the other device everything is installed anew.
	@if ls $(VENV)/.ready-* 2>/dev/null | grep -qv -- '-$(DEVICE)-'; then rm -rf $(VENV); fi
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment (on Debian: apt-get install python3-venv)"; rm -rf $(VENV); exit 1; }
	@echo "Installing the tested $(DEVICE) set into $(VENV) (once; some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(DEVICE),dev]'
	@# torchrec asks for the CUDA fbgemm by name; --no-deps lets the CPU build stand in for it.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps torchrec==1.8.0
	@# `from serving import Recommender` works in any folder: the checkout comes last in the environment's import path.
	@echo "$(CURDIR)" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hstu_sparse_checkout.pth"
	@rm -f $(VENV)/.ready-* && touch $(STAMP)

train: $(STAMP)
	@$(BIN)/python train.py $(CONFIG) $(ARGS)

# Bytecode is written, or each process would compile all files and rewrite the tests' asserts again.
test: $(STAMP)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m slow $(ARGS)

doctor:
	@if test -x $(BIN)/python; then $(BIN)/python hstu_sparse/doctor.py; \
	elif test -n "$(PYTHON)"; then $(PYTHON) hstu_sparse/doctor.py; else echo "No Python from 3.11 to 3.13 found."; exit 1; fi

lint: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/python -m mypy

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict && echo build/site/index.html

.PHONY: help setup train test test-slow doctor lint types docs
