# make demo    real text -> streams -> packs -> a small model, killed half-way and resumed
# make test    the tests                     make check   format, lint, types and the tests
#
# Each target makes .venv first if it is not there, or older than what it is made from. All it needs
# is a Python from 3.11 to 3.13; another one than the first found: make PYTHON=/path/to/python

# pip leaves out the byte code (it is quicker so); then Python must be free to write it at first use.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3 python; do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	2>/dev/null && echo "$$python" && break; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
# Named again beside the constraints: pip must settle on this build of torch before anything that
# depends on it, and the pin has one home.
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help install demo test slow lint format check clean

help:
	@sed -n 's/^# //p' Makefile | head -n 2

install: $(INSTALLED)

# The stamp is written last: an install that broke off is done again.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python from 3.11 to 3.13 found; name one: make PYTHON=/path/to/python"; exit 1; }
	@echo "installing into $(VENV): a minute or two"
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-c constraints.txt "$(TORCH)" -e '.[dev]'
	@touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/streampack demo

# Two at a time: much of it waits for servers and processes. A file's tests stay together.
test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m slow

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint test

clean:
	rm -rf $(VENV) demo-output build .mypy_cache .pytest_cache .ruff_cache .hypothesis
