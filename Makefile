# One virtual environment for everything; remove .venv to start afresh.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard cpp/*) \
	$(shell find python/entropykv -type f -not -name '*.pyc')

SMOLLM2 = $$($(BIN)/python -c 'from entropykv import models; print(models.smollm2().path)')

.PHONY: demo test test-cpp test-reference lint architectures bench bench-kernels install clean

install: $(VENV)/.installed

$(VENV)/.tools: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q "llama-cpp-python==0.3.36" "scikit-build-core>=0.10" "pybind11>=2.12" \
		"cmake>=3.18,<4" ninja
	touch $@

$(VENV)/.installed: $(VENV)/.tools $(SOURCES)
	$(BIN)/pip install -q --no-build-isolation ".[test]"
	touch $@

demo: install  ## a real model answers a question about a long document, full cache against 0.2
	$(BIN)/python examples/demo.py

test: install test-cpp  ## all tests
	$(BIN)/python -m pytest

test-cpp: $(VENV)/.tools  ## the C++ tests under the address and undefined behaviour sanitizers
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/cpp -G Ninja -DENTROPYKV_TESTS=ON \
		-DENTROPYKV_SANITIZE=ON -DENTROPYKV_WARNINGS_AS_ERRORS=ON \
		-DCMAKE_BUILD_TYPE=RelWithDebInfo > /dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/cpp
	build/cpp/store_test
	build/cpp/state_test
	build/cpp/cold_test
	build/cpp/large_test

test-reference: install  ## the tests against torch and transformers, and of replicas under Ray
	$(BIN)/pip install -q --no-build-isolation ".[reference,ray]"
	$(BIN)/python -m pytest -m "reference or replicas"

lint: install  ## ruff, mypy --strict, clang-format
	$(BIN)/pip install -q ".[lint]" --no-build-isolation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror cpp/*.cpp cpp/*.hpp tests/cpp/*.cpp tests/cpp/*.hpp \
		benchmarks/micro/*.cpp

architectures: install  ## which store serves which architecture: the table of the package and of docs/
	$(BIN)/python -m tests.architectures.table

bench: install  ## the figures of the README; on an otherwise idle machine
	$(BIN)/entropykv bench -m "$(SMOLLM2)"
	$(BIN)/entropykv bench --demo bitnet
	$(BIN)/entropykv eval -m "$(SMOLLM2)" --text benchmarks/texts/heldout_prose_*.txt \
		benchmarks/texts/heldout_code_*.txt --equal-bytes --kv-budget 0.2,0.1 \
		--policy auto,adaptive,uniform,entropy,layer,layer-range,recency,streaming
	$(BIN)/python benchmarks/recall.py
	$(BIN)/python benchmarks/calibration.py

# ARGUMENTS="--dims 64 --groups 3 --threads 2" and the like; all: benchmarks/micro/kernel_bench.cpp
bench-kernels: $(VENV)/.tools  ## decode kernels (against a plain read) and eviction, each alone
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/bench -G Ninja -DENTROPYKV_BENCHMARKS=ON \
		-DCMAKE_BUILD_TYPE=Release > /dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/bench
	build/bench/kernel_bench $(ARGUMENTS)
	build/bench/store_bench

clean:
	rm -rf $(VENV) build
