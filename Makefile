# Each target does its own set-up: .venv in the checkout, dependencies, one build of llama.cpp, the small model.
# Stamps in .venv make the second run short; `make clean` starts over.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS   ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PROMPT ?= Write a Python function that checks whether a string is a palindrome, then explain it.

VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
STAMPS := $(VENV)/stamps
NATIVE := CMakeLists.txt pyproject.toml $(wildcard third_party/*.py cpp/*/*.h cpp/*/*.cpp cpp/*.cpp tests/cpp/*)
PYTEST := OMP_WAIT_POLICY=passive $(PY) -m pytest

export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# The virtual environment's own packages only: a PYTHONPATH of the caller must not reach in.
unexport PYTHONPATH

.PHONY: help demo test quick lint format models peers archs sabotage bench asan tsan arm wheel clean

help:
	@echo "make demo      text from a real model by self-speculative decoding, with its acceptance"
	@echo "make test      lint, C++ tests and the Python tests"
	@echo "make lint      ruff, mypy, clang-format        make format    apply the formatters"
	@echo "make models    the larger real models          make peers     llama.cpp's own programs, unpatched"
	@echo "make archs     skip oracle on all architectures   make sabotage  planted faults must be caught"
	@echo "make bench     measurements                    make asan      C++ tests under sanitizers"
	@echo "make wheel     a wheel in dist/                make clean     remove .venv and build"
	@echo "make tsan      the kernels under the thread sanitizer"
	@echo "make arm       the CPU kernels on an emulated ARM machine"

# ---- set-up ----------------------------------------------------------------------------------------------------------

$(STAMPS)/venv:
	@echo "== creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; set PYTHON=") if sys.version_info < (3, 10) else 0'
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# llama-cpp-python has a command of its own: only its Python part is wanted, and pip's wheel cache, which does not know
# CMAKE_ARGS, must not keep it.
$(STAMPS)/bindings: $(STAMPS)/venv
	@echo "== installing the Python part of llama-cpp-python (10 s after a download of 77 MB)"
	@$(PIP) install -q "scikit-build-core>=0.10" "pybind11>=3.0"
	@command -v ninja > /dev/null || $(PIP) install -q ninja
	@command -v cmake > /dev/null || $(PIP) install -q cmake
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" CMAKE_ARGS='-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF' \
	  $(PIP) install -q --no-cache-dir --no-build-isolation llama-cpp-python==0.3.36
	@touch $@

$(STAMPS)/deps: $(STAMPS)/bindings pyproject.toml third_party/requirements.py
	@echo "== installing dependencies (about a minute; hnswlib is compiled)"
	@$(PY) third_party/requirements.py test lint > $(STAMPS)/requirements.txt
	@HNSWLIB_NO_NATIVE=1 $(PIP) install -q -r $(STAMPS)/requirements.txt
	@touch $@

# Progress is ninja's own; everything else goes to the log, whose end is shown when the build fails.
$(STAMPS)/build: $(STAMPS)/deps $(NATIVE)
	@echo "== building pyssd and its llama.cpp (a few minutes the first time)"
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PIP) install -v --no-build-isolation --no-deps \
	  -C cmake.define.PYSSD_CPP_TESTS=ON -e . 2>&1 | tee $(STAMPS)/build.log \
	  | { grep --line-buffered -E '^ *(\[[0-9]+/[0-9]+\]|-- pyssd:)' || true; } \
	  || { grep -n -A5 -E 'rror' $(STAMPS)/build.log | head -40; tail -20 $(STAMPS)/build.log; exit 1; }
	@touch $@

# ---- use -------------------------------------------------------------------------------------------------------------

# models.py says what it fetches on stderr and prints the path; it is quick when the file is there.
demo: $(STAMPS)/build
	@model="$$($(PY) third_party/models.py small)" && $(PY) -m pyssd run "$$model" "$(PROMPT)"

test: lint
	@$(PY) third_party/models.py small > /dev/null
	@echo "== C++ tests"
	@ctest --test-dir "$$($(PY) third_party/requirements.py --build-dir)" --output-on-failure --no-tests=error
	@echo "== Python tests"
	@$(PYTEST) -m "not slow and not gpu"

quick: $(STAMPS)/build
	@$(PYTEST) -x -m "not slow and not gpu and not model"

lint: $(STAMPS)/build
	@echo "== lint"
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/mypy --strict pyssd
	@find cpp tests/cpp -name '*.cpp' -o -name '*.h' | xargs $(VENV)/bin/clang-format --dry-run -Werror

format: $(STAMPS)/deps
	@$(VENV)/bin/ruff check --fix-only --quiet .
	@$(VENV)/bin/ruff format --quiet .
	@find cpp tests/cpp -name '*.cpp' -o -name '*.h' | xargs $(VENV)/bin/clang-format -i

models: $(STAMPS)/deps
	@$(PY) third_party/models.py all

# ---- slow checks -----------------------------------------------------------------------------------------------------

PEERS := build/peers

peers: $(STAMPS)/bindings
	@$(PY) third_party/fetch.py --dest $(PEERS)/llama.cpp --with-tools --no-edits
	@export PATH="$(CURDIR)/$(VENV)/bin:$$PATH"; \
	cmake -S $(PEERS)/llama.cpp -B $(PEERS) -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_CCACHE=OFF \
	  -DGIT_EXE= -DCMAKE_DISABLE_FIND_PACKAGE_Git=ON "-DGIT_EXECUTABLE=cmake;-E;false" \
	  -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_APP=OFF \
	  -DLLAMA_OPENSSL=OFF -DGGML_RPC=ON > $(PEERS)/configure.log 2>&1 \
	  || { tail -20 $(PEERS)/configure.log; exit 1; }; \
	cmake --build $(PEERS) --target llama-bench llama-server test-llama-archs

archs: $(STAMPS)/build peers
	@$(PY) benchmarks/archs.py

sabotage: $(STAMPS)/build
	@$(PY) tests/sabotage.py

bench: $(STAMPS)/build
	@$(PYTEST) -m "slow" --durations=0

ASAN := build/asan

asan: $(STAMPS)/deps
	@export PATH="$(CURDIR)/$(VENV)/bin:$$PATH"; \
	cmake -S . -B $(ASAN) -G Ninja -DCMAKE_BUILD_TYPE=Debug -DPYSSD_SANITIZE=address,undefined -DPYSSD_CPP_TESTS=ON \
	  -DPython_EXECUTABLE="$(CURDIR)/$(PY)" > $(ASAN).log 2>&1 || { tail -20 $(ASAN).log; exit 1; }; \
	cmake --build $(ASAN) --target core_tests
	@ctest --test-dir $(ASAN) --output-on-failure --no-tests=error

TSAN := build/tsan

# OpenMP's runtime is not instrumented, so ggml's own threads; without randomised addresses, which the sanitizer's map of
# memory may not fit. A race fails the run.
tsan: $(STAMPS)/deps
	@mkdir -p $(TSAN); export PATH="$(CURDIR)/$(VENV)/bin:$$PATH"; \
	cmake -S . -B $(TSAN) -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPYSSD_SANITIZE=thread -DGGML_OPENMP=OFF \
	  -DPYSSD_CPP_TESTS=ON -DPython_EXECUTABLE="$(CURDIR)/$(PY)" > $(TSAN).log 2>&1 || { tail -20 $(TSAN).log; exit 1; }; \
	cmake --build $(TSAN) --target test_kernels_graph
	@setarch -R env TSAN_OPTIONS=halt_on_error=1 $(TSAN)/test_kernels_graph && echo "no data race on two and three threads"

arm:
	@PYTHON=$(PYTHON) tests/arm.sh

wheel: $(STAMPS)/build
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PIP) wheel -q --no-build-isolation --no-deps \
	  -C cmake.define.PYSSD_CPP_TESTS=ON -w dist .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
