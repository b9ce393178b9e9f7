# make demo   the whole loop on this machine, a few minutes
# make test   the whole test suite
# Both make .venv first, once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check

export HF_HUB_OFFLINE := 1

.PHONY: demo test test-all chaos lint format clean

demo: $(INSTALLED)
	$(BIN)/lorabridge demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow"

test-all: $(INSTALLED)
	$(BIN)/python -m pytest

# Kill processes of a running demo, one after another: make chaos ROUNDS=20 SEED=1
ROUNDS ?= 5
SEED ?= 0
chaos: $(INSTALLED)
	$(BIN)/python -m tests.chaos --rounds $(ROUNDS) --seed $(SEED)

lint: $(INSTALLED) .mypy/lorabridge
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.mypy $(BIN)/mypy -p lorabridge.bridge -p lorabridge.trainer -p lorabridge.rollout
	MYPYPATH=.mypy $(BIN)/mypy tests

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch's CPU build is looked for where pip looks anyway, and in PyTorch's own index only if it is not there.
$(INSTALLED): requirements-cpu.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-deps -r requirements-cpu.txt || \
	  $(PIP) install --quiet --no-deps -r requirements-cpu.txt --extra-index-url $(TORCH_CPU_INDEX)
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# The type checker finds lorabridge.bridge through a folder that is named as the package is.
.mypy/lorabridge:
	mkdir -p .mypy
	ln -s .. $@

clean:
	rm -rf $(VENV) .mypy .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
