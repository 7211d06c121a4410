# Three commands do everything on a machine with Python 3.11 or newer: `make run`, `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
WORKERS ?= auto
PROMPT ?= Explain in two sentences why the sky is blue.

# Tests start hundreds of processes: each would compile what it imports anew where nothing may be kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run serve readme test test-slow test-fleet test-browser screenshots fuzz stress test-clients clients-page check lint wheel clean help bench-cpu bench-gpu

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/'

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Twostroke needs Python 3.11 to 3.13, and this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 run") if not (3, 11) <= sys.version_info[:2] <= (3, 13) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.server: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server]'
	@touch $@ $(VENV)/.core

# Twenty thousand modules, of which the tests import a few thousand: each is compiled when it is first imported.
$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.core $(VENV)/.server

run: $(VENV)/.core   ## install the core, fetch the default model, answer a prompt, show the two phases
	$(BIN)/twostroke run smollm2 "$(PROMPT)"
	@printf '\nThe command is %s. Try: %s chat %s\nOr put it on your path: source %s\n' \
	  $(BIN)/twostroke $(BIN)/twostroke smollm2 $(BIN)/activate

serve: $(VENV)/.server   ## install the server, fetch the default model, serve it with OpenAI's, Anthropic's and Ollama's APIs (SERVE_OPTIONS="--port 8001")
	$(BIN)/twostroke serve smollm2 $(SERVE_OPTIONS)

test: $(VENV)/.dev   ## install the development extras and run the tests
	$(BIN)/python -m pytest -m "not slow and not gpu and not clients and not browser and not fleet" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/.dev   ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu and not clients and not browser and not fleet"

test-fleet: $(VENV)/.dev   ## several servers behind a router, as processes: what happens when one dies
	$(BIN)/python -m pytest tests/cluster -m fleet

# Some of them: make fuzz FUZZED=tests/scheduling
fuzz: $(VENV)/.dev   ## try every property on twenty times as many cases, others each time
	$(BIN)/python -m pytest $(FUZZED) -m "hypothesis and not slow and not gpu and not clients and not browser and not fleet" --hypothesis-profile=search \
	  -n $(WORKERS) --dist worksteal -o timeout=3600

# An hour, from a seed: make stress SECONDS=3600 SEED=7
stress: $(VENV)/.dev   ## random trouble for an engine on a virtual clock and for a real server (SECONDS, SEED)
	$(BIN)/python -m tests.stress --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED))

# All of them, or some: make test-clients CLIENTS=instructor,dspy
test-clients: $(VENV)/.dev   ## install the clients that people bring, each in an environment of its own, and try them
	$(BIN)/python -m tests.clients test "$(CLIENTS)"

clients-page: $(VENV)/.dev   ## write docs/clients.md from what test-clients found
	$(BIN)/python -m tests.clients page "$(CLIENTS)"

$(VENV)/.browser: pyproject.toml constraints.txt $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	@touch $@ $(VENV)/.dev

# Its path, where it is not found by itself: make test-browser CHROMIUM=/opt/chrome/chrome
test-browser: $(VENV)/.browser   ## try the live page in Chromium, against a real server
	$(if $(CHROMIUM),CHROMIUM=$(CHROMIUM)) $(BIN)/python -m pytest tests/web -m browser

screenshots: $(VENV)/.browser   ## make the pictures of docs/page anew
	$(if $(CHROMIUM),CHROMIUM=$(CHROMIUM)) $(BIN)/python -m tests.web.screenshots

lint: $(VENV)/.dev   ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test   ## what CI runs

wheel: $(VENV)/.dev   ## build the wheel into dist/, install it in an empty environment with its dependencies, and run it
	$(BIN)/python -m build
	$(BIN)/python -m pytest tests/test_wheel.py

# Options by variables, e.g. make bench-cpu ENGINES=twostroke,llama-cpp-q4_0 WORKLOADS=w1 REPETITIONS=3
# (PARTS, THREADS, MODEL and QUICK=1 too; BENCH_HOME=folder keeps the peers' venvs and models elsewhere).
BENCH_OPTIONS = $(if $(ENGINES),--engines $(ENGINES)) $(if $(WORKLOADS),--workloads $(WORKLOADS)) \
  $(if $(REPETITIONS),--repetitions $(REPETITIONS)) $(if $(PARTS),--parts $(PARTS)) \
  $(if $(THREADS),--threads $(THREADS)) $(if $(MODEL),--model $(MODEL)) $(if $(QUICK),--quick)

bench-cpu: $(VENV)/.core   ## install the CPU peers in venvs of their own and measure all engines in turns
	BENCH_COMMAND="make bench-cpu $(filter-out BENCH_HOME=%,$(MAKEOVERRIDES))" $(BIN)/python -m bench.peers $(BENCH_OPTIONS)

# Needs a card and a PYTHON with the [cuda] extra; MODEL as under bench/shapes, VLLM a folder of packages that holds vLLM.
# QUANTISE=fp8 and KV=fp8: both engines bring the same checkpoint to that.
bench-gpu:   ## measure Twostroke beside vLLM on this machine's GPU: same weights, same workloads, in turns
	$(PYTHON) -m bench.peers.gpu $(or $(MODEL),llama-3.1-8b) $(if $(VLLM),--vllm-path $(VLLM),--engines twostroke,twostroke-16bit) \
	  $(if $(ENGINES),--engines $(ENGINES)) $(if $(WORKLOADS),--workloads $(WORKLOADS)) $(if $(TURNS),--turns $(TURNS)) $(if $(QUANTISE),--quantise $(QUANTISE)) $(if $(KV),--kv $(KV))

readme: $(VENV)/.core   ## run the README's commands and put what they print into it; best on a quiet machine
	$(BIN)/python -m bench.readme

clean:   ## remove the venv and every cache of this folder
	rm -rf $(VENV) .clients .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
