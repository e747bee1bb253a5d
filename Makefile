# Every target builds .venv by itself when it is missing or older than what it is made from.
.DELETE_ON_ERROR:
.PHONY: help demo test check format bench clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

help: ## show this help
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## compare normalisations on handwritten digits, a few minutes, and write a report to look at
	$(BIN)/balnorm compare digits --norms balnorm batchnorm groupnorm none --seeds 5 --jobs 2 --out studies/demo

test: $(READY) ## run all tests and the examples in the docstrings
	$(BIN)/pytest

check: $(READY) ## formatting, lint and types, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY) ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) ## measure speed and memory, results go to benchmarks/results
	$(BIN)/python -m benchmarks

clean: ## remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist

# torch is pinned and installed from constraints.txt: a looser version brings gigabytes of CUDA to machines without it.
# timm and torchvision serve comparisons only, and without --no-deps would ask for another torch.
$(READY): pyproject.toml constraints.txt Makefile
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps timm torchvision
	touch $@
