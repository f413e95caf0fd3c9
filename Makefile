# The entry points. `make` alone lists them.
# Everything that is built or fetched lives in .venv/, build/ and models/*/; all three can be deleted.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m-instruct

.DEFAULT_GOAL := help
.PHONY: help setup chat test test-extended lint bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# The stamp is younger than pyproject.toml when the venv holds what it names.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[tools]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[tools,dev]'
	@touch $@

$(VENV)/.installed-reference: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[tools,dev,reference]'
	@touch $@

setup: $(VENV)/.installed ## make the venv, fetch and convert the default model
	@$(BIN)/python -m tools.fetch $(MODEL)

chat: setup ## talk to the model in this terminal
	@$(BIN)/skerry chat

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.installed-dev setup lint ## lint, types and all tests but the extended ones and the board's
	$(BIN)/pytest

test-extended: $(VENV)/.installed-reference setup ## tests against torch and a second model: more to download
	$(BIN)/pytest -m extended

bench: setup ## measure beside llama.cpp: build/bench/report.json and .png
	@$(BIN)/python -m tools.fetch --gguf $(MODEL)
	$(BIN)/python -m tools.bench

clean: ## delete what can be made again
	rm -rf $(VENV) build models/*/
