# Two commands do all set-up on a fresh machine: `make demo` and `make test`. Both make their own environment in .venv.
# Any build of torch >= 2.11 serves; TORCH names the one to install (PyPI's Linux build of it carries CUDA).
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
OLD_TRITON := .cache/triton-3.6
# One thread a process: tests run side by side, and the demo gives each rank a core.
export OMP_NUM_THREADS ?= 1

.PHONY: compat compat-flashinfer compat-flashinfer-write demo test lint unit oldest-triton bench-cpu format clean

demo: $(VENV)/.installed
	$(BIN)/headfit compare --tp 2 --report demo_report --json demo_report/compare.json
	$(BIN)/headfit doctor --model deepseek-v4-flash --tp 2 --gpu sm_90

test: lint unit oldest-triton

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The oldest supported Triton, beside the newest that the environment holds.
oldest-triton: $(VENV)/.installed $(OLD_TRITON)/.installed
	PYTHONPATH=$(OLD_TRITON) $(BIN)/python -m pytest -n 2 --dist worksteal tests/test_offline_compile.py

# The plug-ins against real engine releases: downloads about 3 GB into .cache/compat, writes docs/compat.md.
compat: $(VENV)/.installed compat-flashinfer
	$(BIN)/python compat/run.py

# The probes against real FlashInfer and FlashMLA releases: about 1 GB into .cache/wheels; -write records what they say.
compat-flashinfer: $(VENV)/.installed
	nice -n 19 $(BIN)/python compat/check_flashinfer.py
	HEADFIT_FLASHINFER_SOURCES=.cache/flashinfer $(BIN)/python -m pytest -q tests/test_kernels_flashinfer.py -k real

compat-flashinfer-write: $(VENV)/.installed
	nice -n 19 $(BIN)/python compat/check_flashinfer.py --write

bench-cpu: $(VENV)/.installed
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/cpu.py

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q -e ".[dev]"
	touch $@

$(OLD_TRITON)/.installed:
	$(BIN)/pip install -q --no-deps --target $(OLD_TRITON) triton==3.6.0
	touch $@

clean:
	rm -rf $(VENV) .cache demo_report build dist
