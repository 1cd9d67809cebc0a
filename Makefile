# make test and make demo need Python and git, and nothing else: scripts/bootstrap.py makes .venv first.

PYTHON ?= python3
TORCH ?=
export TORCH

.DEFAULT_GOAL := help
.PHONY: help venv demo test check clean

help:  ## say what can be made
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)
	@echo "  PYTHON=python3.12   the Python that .venv is made with (3.11 or newer)"
	@echo "  TORCH='torch==...'  what pip installs as torch, with options of pip if need be"

venv:  ## make .venv, or bring it up to date
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "agentkv: there is no $(PYTHON) here. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@"$(PYTHON)" scripts/bootstrap.py $(if $(filter file,$(origin PYTHON)),,--python-chosen) --goal "$(MAKECMDGOALS)"

demo: venv  ## run the demo on a real model
	@.venv/bin/agentkv demo

test: venv  ## run every check and every test
	@scripts/check

check: venv  ## run every check but the tests
	@scripts/check --fast

clean:  ## remove .venv and everything else that was made here; the models in your cache folder stay
	@rm -rf .venv build dist kernels/agentkv_kernels/cpu/built .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
