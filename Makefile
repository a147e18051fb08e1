# One virtual environment for everything; remove .venv to start afresh.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard cpp/*) \
	$(shell find python/entropykv -type f -not -name '*.pyc')

SMOLLM2 = $$($(BIN)/python -c 'from entropykv import models; print(models.smollm2().path)')

.PHONY: demo test test-cpp test-reference fuzz lint architectures bench bench-kernels install clean

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

test-reference: install  ## the tests against torch and transformers, and of replicas under Ray
	$(BIN)/pip install -q --no-build-isolation ".[reference,ray]"
	$(BIN)/python -m pytest -m "reference or replicas"

# One run again: make fuzz SEED=7, or the name of a scenario. Longer: make fuzz SECONDS=3600 JOBS=2
# The extension is built with the objects of test-cpp; the sanitizers' runtime is preloaded, so that
# Python and llama.cpp are those that are installed.
FUZZ := build/fuzz
fuzz: install  ## random operations on sessions, under the sanitizers
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/cpp -G Ninja -DENTROPYKV_TESTS=ON \
		-DENTROPYKV_WITH_EXTENSION=ON -DENTROPYKV_SANITIZE=ON -DENTROPYKV_WARNINGS_AS_ERRORS=ON \
		-DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
		-Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)" > /dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/cpp --target _core
	rm -rf $(FUZZ) && mkdir -p $(FUZZ) && cp -r python/entropykv $(FUZZ)
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --install build/cpp --prefix $(FUZZ) > /dev/null
	PYTHONPATH=$(FUZZ) PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=print_stacktrace=1 LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) \
		$$($(CXX) -print-file-name=libstdc++.so)" $(BIN)/python -m tests.fuzz \
		$(if $(SEED),--seed $(SEED)) --seconds $(or $(SECONDS),60) --jobs $(or $(JOBS),1)

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
