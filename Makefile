# make demo    real text -> streams -> packs -> a small model, killed half-way and resumed
# make test    the tests                     make check   format, lint, types and the tests
# make quick   the rooms' own tests          make slow    tests that take minutes each
# make docs    the site, in build/site            make wheel    both archives, installed and tried
# make bench   speed, in 6 to 18 minutes     make bench-peers   the same beside its peers
# make forkserver   worker processes, started as Python 3.14 does      make coverage   of the tests
# make mutants   do the tests notice changes of single lines?
#
# Each target makes .venv first if it is not there, or older than what it is made from. All it needs
# is a Python from 3.11 on; another one than the first found: make PYTHON=/path/to/python

# pip leaves out the byte code (it is quicker so); then Python must be free to write it at first use.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && echo "$$python" && break; done)
VENV := .venv
BIN := $(VENV)/bin
SMALL := $(VENV)/small
INSTALLED := $(VENV)/installed
# Named again beside the constraints: pip must settle on this build of torch before anything that
# depends on it, and the pin has one home.
TORCH := $(shell grep '^torch==' constraints.txt)
# What streampack is measured against. Its own pins (numpy<2.2, transformers<5) fit no environment of
# today, so that it comes without its dependencies, after the libraries that it imports.
MOSAICML := $(shell grep '^mosaicml-streaming==' constraints.txt)
PIP_INSTALL := python -m pip install --quiet --disable-pip-version-check --no-compile
RESULTS := build/bench
PEERS := .venv-peers
DOCS := .venv-docs
# The README's first lines, in an environment that has only the archive and what it depends on.
EMPTY := build/empty
FIRST_LINES := bin/python -I -c 'import re; \
	exec(re.findall("```python\n(.*?)```", open("../../README.md").read(), re.DOTALL)[0])'

.PHONY: help install architectures demo quick test slow forkserver coverage mutants lint ruff types format check docs \
	wheel clean bench bench-peers

help:
	@sed -n 's/^# //p' Makefile | head -n 7

install: $(INSTALLED)

# The demo needs a fifth of the packages, and is the first thing that a newcomer waits for.
$(SMALL): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python from 3.11 on found; name one: make PYTHON=/path/to/python"; exit 1; }
	@echo "installing into $(VENV): half a minute or a minute"
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/$(PIP_INSTALL) -c constraints.txt "$(TORCH)" -e '.[plots]'
	@touch $(SMALL)

# A torchvision that does not fit would keep transformers from importing its models. Only MosaicML
# Streaming and litData require it; their tests bring a stand-in (tests/helpers/site).
# The stamp is written last: an install that broke off is done again.
$(INSTALLED): $(SMALL) requirements-mosaicml.txt
	@echo "installing what tests need: a minute or two"
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -r requirements-mosaicml.txt "$(TORCH)" -e '.[dev]'
	$(BIN)/$(PIP_INSTALL) --no-deps "$(MOSAICML)"
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || { \
		echo "torchvision does not fit this build of torch and is removed: see docs/install.md"; \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision; }
	@touch $(INSTALLED)

# Again with transformers 4.57, in an environment that has it: python -m tests.helpers.architectures
architectures: $(INSTALLED)
	$(BIN)/python -m tests.helpers.architectures

demo: $(SMALL)
	$(BIN)/python examples/demo/kill_and_resume.py

# Three at a time on two cores: much of it waits for servers and processes. A file's tests stay
# together, and files begin in the order of tests/conftest.py, the longest first; xdist's own would be
# by numbers of tests.
test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# While editing: what runs inside one process, with few generated examples for each law. Wanted below
# 60 seconds on two idle cores once the kernels are compiled.
QUICK := $(addprefix tests/,mds stores storage texts streams mix order pack plan gather batch runtime planned online \
	loader behaviour/test_architecture.py) $(wildcard tests/test_*.py)

quick: $(INSTALLED)
	STREAMPACK_TEST_EXAMPLES=5 $(BIN)/python -m pytest -q -n 2 --dist loadfile \
		--no-loadscope-reorder -m "not slow and not processes and not thorough" $(QUICK)

# Where the start method matters: worker processes, what they share and how they end. Ranks of a
# test are forks always, and what has no worker would only be repeated.
FORKSERVER := $(addprefix tests/runtime/test_,batch_reader.py reading_workers.py whole_batch.py \
	worker_pool.py worker_processes.py)

forkserver: $(INSTALLED)
	STREAMPACK_TEST_START=forkserver $(BIN)/python -m pytest -q -n 2 --dist loadfile \
		--no-loadscope-reorder -m "processes and not slow and not own_start" $(FORKSERVER)

# Compiled kernels are invisible to it, so no floor is set. With all examples of each law.
coverage: $(INSTALLED)
	STREAMPACK_TEST_EXAMPLES=1000 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --cov=streampack \
		--cov-report=term:skip-covered

# Changes lines of the last commit, in a clone of it: make mutants OPTIONS="--seed 7 --number 30"
mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants $(OPTIONS)

slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m slow -n 2 --dist loadfile --no-loadscope-reorder

lint: ruff types

ruff: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Types take a minute of one core, so they are checked while the tests begin.
check: ruff
	@$(MAKE) --no-print-directory -j 2 types test

# Lines go to files, and the tables of docs/benchmarks.md are made of them. Let nothing else run.
bench: $(INSTALLED)
	@mkdir -p $(RESULTS) && rm -f $(RESULTS)/ours.jsonl
	@for bench in limits pack plan steps batch loader start; do echo "bench_$$bench.py"; \
		$(BIN)/python benchmarks/bench_$$bench.py --out $(RESULTS)/ours.jsonl > /dev/null || exit 1; done
	$(BIN)/python benchmarks/report.py $(RESULTS)/*.jsonl

bench-peers: $(PEERS)/peers.json
	@mkdir -p $(RESULTS) && rm -f $(RESULTS)/peers.jsonl
	@echo "bench_peers.py, bench_compat.py, bench_start.py --peers"
	@$(PEERS)/bin/python benchmarks/bench_peers.py --out $(RESULTS)/peers.jsonl > /dev/null
	@$(PEERS)/bin/python benchmarks/bench_peers.py --workload jsonl parquet lists --runs 5 \
		--peer tokenizer_alone streampack_texts zephon_pipeline \
		--out $(RESULTS)/peers.jsonl > /dev/null
	@$(PEERS)/bin/python benchmarks/bench_compat.py --runs 3 --out $(RESULTS)/peers.jsonl > /dev/null
	@$(PEERS)/bin/python benchmarks/bench_start.py --peers --samples 100000000 --runs 1 \
		--out $(RESULTS)/peers.jsonl > /dev/null
	$(PEERS)/bin/python benchmarks/report.py $(RESULTS)/*.jsonl

# peers.json is written last, with what could not be installed and why. The venv hides itself from git.
$(PEERS)/peers.json: pyproject.toml constraints.txt requirements-mosaicml.txt \
		benchmarks/requirements-peers.txt benchmarks/peers/install.py
	@test -n "$(PYTHON)" || { echo "no Python from 3.11 on found; name one: make PYTHON=/path/to/python"; exit 1; }
	@echo "installing into $(PEERS): two or three minutes"
	"$(PYTHON)" -m venv $(PEERS)
	@echo '*' > $(PEERS)/.gitignore
	$(PEERS)/bin/$(PIP_INSTALL) -c constraints.txt -r requirements-mosaicml.txt "$(TORCH)" \
		-e '.[hf,plots]'
	$(PEERS)/bin/$(PIP_INSTALL) --no-deps "$(MOSAICML)"
	$(PEERS)/bin/python benchmarks/peers/install.py $@

# A venv of its own, with nothing but the extra `docs`: the reference is read from the source, so the
# site needs neither torch nor this package.
$(DOCS)/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python from 3.11 on found; name one: make PYTHON=/path/to/python"; exit 1; }
	"$(PYTHON)" -m venv $(DOCS)
	$(DOCS)/bin/python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
		print(*project['optional-dependencies']['docs'], sep='\n')" > $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r $(DOCS)/requirements.txt
	@touch $@

docs: $(DOCS)/installed
	$(DOCS)/bin/zensical build --strict --clean

wheel: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	rm -rf $(EMPTY) && $(BIN)/python -m venv $(EMPTY)
	$(EMPTY)/bin/$(PIP_INSTALL) -c constraints.txt "$(TORCH)" dist/*.whl
	cd $(EMPTY) && $(FIRST_LINES)
	$(EMPTY)/bin/$(PIP_INSTALL) --no-deps --force-reinstall dist/*.tar.gz
	cd $(EMPTY) && $(FIRST_LINES)
	$(EMPTY)/bin/streampack --version

clean:
	rm -rf $(VENV) $(PEERS) $(DOCS) demo-output build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
