# The entry points. `make` alone lists them.
# Everything that is built or fetched lives in .venv/, build/ and models/*/; all three can be deleted.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m-instruct

.DEFAULT_GOAL := help
.PHONY: help setup chat test test-extended lint bench install clean

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

# What tests need from Debian: installed where we may, else named.
.PHONY: debian-test
debian-test:
	@missing=""; for pair in mosquitto:mosquitto openssl:openssl systemd-analyze:systemd; do \
		PATH="$$PATH:/usr/sbin" command -v $${pair%%:*} >/dev/null || missing="$$missing $${pair##*:}"; done; \
	test -z "$$missing" || { \
		if [ "$$(id -u)" = 0 ]; then \
			echo "installing$$missing by apt-get"; apt-get -qq update && apt-get -qq install --no-install-recommends $$missing >/dev/null; \
		else echo "tests need:$$missing; run: sudo apt-get install$$missing" >&2; exit 1; fi; }

test: debian-test $(VENV)/.installed-dev setup lint ## lint, types and all tests but the extended ones and the board's
	$(BIN)/pytest

test-extended: $(VENV)/.installed-reference setup ## tests against torch and a second model: more to download
	$(BIN)/pytest -m extended

bench: setup ## measure beside llama.cpp: build/bench/report.json and .png
	@$(BIN)/python -m tools.fetch --gguf $(MODEL)
	$(BIN)/python -m tools.bench

# ---- installing on a board: the image's recipe, the emulated board and a developer's machine all run this -----------

DESTDIR ?=
BOARD ?=
LIB := /usr/lib/skerry
INSTALL := install -D -m 644

install: ## install agent and configuration below DESTDIR, for BOARD (a name in conf/boards)
	@test -z "$(BOARD)" || test -f "conf/boards/$(BOARD).yaml" || \
		{ echo "no board $(BOARD); known: $(basename $(notdir $(wildcard conf/boards/*.yaml)))" >&2; exit 2; }
	cd agent && find skerry -name '*.py' -exec $(INSTALL) '{}' "$(DESTDIR)$(LIB)/agent/{}" ';'
	install -d "$(DESTDIR)/usr/bin" "$(DESTDIR)/etc/skerry/conf.d"
	sed 's|@AGENT@|$(LIB)/agent|' conf/skerry.in > "$(DESTDIR)/usr/bin/skerry"
	chmod 755 "$(DESTDIR)/usr/bin/skerry"
	for board in conf/boards/*.yaml; do $(INSTALL) "$$board" "$(DESTDIR)$(LIB)/boards/$${board##*/}" || exit 1; done
	test -e "$(DESTDIR)/etc/skerry/skerry.yaml" || { \
		$(INSTALL) conf/skerry.yaml "$(DESTDIR)/etc/skerry/skerry.yaml" && \
		{ test -z "$(BOARD)" || sed -i 's|^# *board:.*|board: $(BOARD)|' "$(DESTDIR)/etc/skerry/skerry.yaml"; }; }
	$(INSTALL) conf/skerry.schema.json "$(DESTDIR)/usr/share/skerry/skerry.schema.json"
	$(INSTALL) conf/systemd/skerry.service "$(DESTDIR)/usr/lib/systemd/system/skerry.service"
	$(INSTALL) conf/systemd/sysusers.conf "$(DESTDIR)/usr/lib/sysusers.d/skerry.conf"
	$(INSTALL) conf/systemd/tmpfiles.conf "$(DESTDIR)/usr/lib/tmpfiles.d/skerry.conf"
	$(INSTALL) conf/70-skerry.rules "$(DESTDIR)/usr/lib/udev/rules.d/70-skerry.rules"

clean: ## delete what can be made again
	rm -rf $(VENV) build models/*/
