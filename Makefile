# make quickstart   the whole main job on a real model, on this machine
# make test         everything that CI runs
# Both do all the set-up themselves.
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PY = $(VENV)/bin/python
# Test files at once, one thread each: two cores are busy without waiting for each other. In their order: by number of
# tests, files of one long test would come last and leave a core idle for minutes.
JOBS ?= 2
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# OpenMP threads that spin while they wait take the cores that others need.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: install quickstart test check quick serve-test soak bench

install:
	@scripts/install.sh $(VENV)

quickstart: install
	$(VENV)/bin/octavo quickstart $(ARGS)

test: check
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not soak and not serve and not gpu" \
		--cov=octavo/formats --cov=octavo/store --cov-report=term:skip-covered -q
	$(PY) -m coverage report --include='octavo/formats/*,octavo/store/*' --fail-under=95
	$(MAKE) --no-print-directory serve-test

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

quick: install
	$(PY) -m pytest -m "not slow and not soak and not serve and not gpu" -q

serve-test: install
	@scripts/vllm_env.sh $(VLLM_VENV)
	OCTAVO_TEST_VLLM=$(abspath $(VLLM_VENV))/bin/python $(PY) -m pytest -m serve -q tests/serve

soak: install
	$(PY) -m pytest -m soak -q
