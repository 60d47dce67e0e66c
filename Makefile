# `make train` and `make test` set up everything they need in .venv; `make doctor` says what was found.
.DEFAULT_GOAL := help
CONFIG ?= configs/synthetic-hstu.yaml
ARGS ?=

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
DEVICE := $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
# The tested set by its release of torch, 2.13 or 2.14: by default the installed one.
SET ?= $(or $(word 3,$(subst -, ,$(notdir $(wildcard $(VENV)/.ready-$(DEVICE)-2.*)))),2.13)
EXTRA_2.13 := $(DEVICE)
EXTRA_2.14 := $(DEVICE)-2-14
TORCHREC_2.13 := 1.8.0
TORCHREC_2.14 := 1.9.2
# The public index has torch only with CUDA, whose packages (4 GB) a CPU does not need. Where pip's configuration names no other
# index, the set-up for a CPU asks for TORCH_INDEX: the index of CPU builds, or nothing to take the packages for CUDA, too.
NEEDS_INDEX := $(and $(filter cpu,$(DEVICE)),$(filter undefined,$(origin TORCH_INDEX)))
# The set-up is redone when pyproject.toml changes, a GPU driver appears or another set is asked for.
STAMP := $(VENV)/.ready-$(DEVICE)-$(SET)-$(shell cksum < pyproject.toml | cut -d' ' -f1)

help:
	@echo "make setup    install the tested set of torch 2.13 into .venv; SET=2.14 takes that of torch 2.14"
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
	@test -n "$(EXTRA_$(SET))" || { echo "SET=$(SET): the tested sets are 2.13 and 2.14"; exit 1; }
	@# The CPU and the CUDA builds of fbgemm share their files: for another device or set everything is installed anew.
	@if ls $(VENV)/.ready-* 2>/dev/null | grep -qv -- '-$(DEVICE)-$(SET)-'; then rm -rf $(VENV); fi
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment (on Debian: apt-get install python3-venv)"; rm -rf $(VENV); exit 1; }
	@if test -n "$(NEEDS_INDEX)" && ! $(BIN)/python -m pip config list | grep -qE 'index-url|find-links'; then \
	  echo "pip would install 4 GB of CUDA packages. Select pip, Linux and CPU on PyTorch's page Start Locally, and give the"; \
	  echo "address that its command ends with: make setup TORCH_INDEX=ADDRESS (TORCH_INDEX= takes the CUDA packages)"; \
	  exit 1; fi
	@echo "Installing the tested $(DEVICE) set of torch $(SET) into $(VENV) (once; some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --extra-index-url ,$(TORCH_INDEX)) \
	  --editable '.[$(EXTRA_$(SET)),dev]'
	@# torchrec asks for the CUDA fbgemm by name; --no-deps lets the CPU build stand in for it.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps torchrec==$(TORCHREC_$(SET))
	@# `from serving import Recommender` works in any folder: the checkout comes last in the environment's import path.
	@echo "$(CURDIR)" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hstu_sparse_checkout.pth"
	@rm -f $(VENV)/.ready-* && touch $(STAMP)
	@echo "Installed. Next: source $(VENV)/bin/activate"

train: $(STAMP)
	@$(BIN)/python train.py $(CONFIG) $(ARGS)

# Bytecode is written, or each process would compile all files and rewrite the tests' asserts again.
test: $(STAMP)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m slow $(ARGS)

doctor:
	@if test -x $(BIN)/python; then $(BIN)/python tools/doctor.py; \
	elif test -n "$(PYTHON)"; then $(PYTHON) tools/doctor.py; else \
	  echo "No Python from 3.11 to 3.13 found: install one, then make setup"; exit 1; fi

lint: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/python -m mypy

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict && echo build/site/index.html

.PHONY: help setup train test test-slow doctor lint types docs
