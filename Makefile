# make env   environment in .venv (first run about 90 s); on a machine with a GPU in .venv-cuda, with SGLang for CUDA
# make compiled  the hot path in machine code, the planner and the row copies in C++ (2 min); make plain  without them again
# make demo  a served model: short, long and decode instances behind the router
#            CUDA=0 or CUDA=1, with any of these, chooses the engine instead of asking nvidia-smi
# make check style, types, architecture and quick unit tests (90 s): what one runs all day
# make test  further: all unit tests, one setting of every mechanism on real SGLang (10 min)
# make test-all  further: every setting, random plans, each role killed and stopped at every stage (35 min)
# make test-k8s  discovery, rights and leases on a real Kubernetes API server, built once from Debian's packages (8 min);
#                the Helm chart over many values; Prometheus over a cluster, and the alerts
# make lint  style, types and architecture
# make docs  the documents as a site with search, in build/site; a dead link is an error
# make dist  wheel (with compiled modules), sdist and the Helm chart, in dist

PYTHON ?= python3
ifeq ($(origin CUDA),undefined)
CUDA := $(if $(shell nvidia-smi -L 2>/dev/null | grep '^GPU [0-9]'),1,0)
endif
ifeq ($(CUDA),0)
VENV := .venv
LOCK := requirements/cpu.lock
TORCH := torch==2.13.0
ENGINE := SGLang on the CPU
else ifeq ($(CUDA),1)
VENV := .venv-cuda
LOCK := requirements/cuda.lock
TORCH := $(shell grep '^torch==' $(LOCK))
ENGINE := SGLang on CUDA
else
$(error CUDA is $(CUDA): 0 is the CPU, 1 is CUDA; left out, nvidia-smi is asked)
endif
BIN := $(VENV)/bin
TRITON := 3.8.0
STAMP := $(VENV)/.env-$(shell cat $(LOCK) pyproject.toml Makefile | cksum | cut -d' ' -f1)
# What runs for every request is compiled: again when one of its sources has changed.
HOT_SOURCES := $(shell $(PYTHON) tools/compile_hot_path.py --list)
COMPILED := $(VENV)/.compiled-$(shell cat $(HOT_SOURCES) | cksum | cut -d' ' -f1)
NATIVE_SOURCES := $(shell $(PYTHON) tools/build_native.py --list)
NATIVE := $(VENV)/.native-$(shell cat $(NATIVE_SOURCES) | cksum | cut -d' ' -f1)
# Triton is not for the engine, which on a CPU has stand-ins for it, but for the tests of the kernels.
KERNELS := $(VENV)/kernels/.triton-$(TRITON)
# Ray Data for `sglang-ext batch run --engine ray`; TRL and lm-eval as clients that judge scores: each in a folder of its
# own beside the environment, whose packages they use, too.
RAY := $(VENV)/ray/.installed-$(shell cksum < requirements/ray.lock | cut -d' ' -f1)
JUDGES := $(VENV)/judges/.installed-$(shell cksum < requirements/judges.lock | cut -d' ' -f1)
# Transports of the handshake.
NIXL := $(VENV)/nixl/.installed-$(shell cksum < requirements/nixl.lock | cut -d' ' -f1)
MOONCAKE := $(VENV)/mooncake/.installed-$(shell cksum < requirements/mooncake.lock | cut -d' ' -f1)
# What instances need to send spans, and the protocol by which tests read them.
TRACES := $(VENV)/traces/.installed-$(shell cksum < requirements/traces.lock | cut -d' ' -f1)
# S3-compatible storage: the client, and the server of the tests.
S3 := $(VENV)/s3/.installed-$(shell cksum < requirements/s3.lock | cut -d' ' -f1)
# What renders and checks the Helm chart.
CHARTS := $(VENV)/charts/.installed-$(shell cksum < requirements/charts.lock | cut -d' ' -f1)
DOCS := $(VENV)/docs/.installed-$(shell cksum < requirements/docs.lock | cut -d' ' -f1)
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' python/sglang_ext/__init__.py)
IMPORTED := $(VENV)/.imported
IMPORTS := import importlib, sglang_ext.engine.launch; from sglang_ext.engine.preload import MODULES; [importlib.import_module(name) for name in MODULES]
# Bytecode is kept, also where the caller's environment forbids it: the imports of SGLang take twice as long without.
unexport PYTHONDONTWRITEBYTECODE
PYTEST_ARGS ?=
# Tests of engines wait more than they compute, so there is one worker more than cores; a module is not divided among
# workers, and those that start engines come first.
WORKERS ?= $(shell expr $$(nproc) + 1)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=40

.PHONY: env compiled plain linted check cuda-lock kernels-env ray-env judges-env nixl-env mooncake-env charts-env traces-env s3-env docs-env docs dist chart demo test test-all test-k8s unit lint format clean
.DEFAULT_GOAL := env

env: $(STAMP)

# Compiled modules are an optimisation: the router and the decisions of an instance in machine code (mypyc), the planner
# and the row copies in C++. Everything runs without them. `make plain` removes them.
compiled: $(STAMP)
	@$(MAKE) --no-print-directory -j2 $(COMPILED) $(NATIVE)

plain: $(STAMP)
	@$(BIN)/python tools/compile_hot_path.py --remove
	@$(BIN)/python tools/build_native.py --remove
	@rm -f $(VENV)/.compiled-* $(VENV)/.native-*

# Bytecode is made of what is imported, when it is imported, not of all that is installed: a minute less.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "make env: Python 3.11 or newer is needed (set PYTHON=...)")'
	@echo "[env] engine: $(ENGINE) ($(if $(filter 1,$(CUDA)),CUDA=0 is the CPU,CUDA=1 is CUDA))"
	@test -x $(BIN)/python || { echo "[env 1/4] creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "[env 2/4] installing $(TORCH)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile $(if $(filter 1,$(CUDA)),--no-deps) $(TORCH)
	@echo "[env 3/4] installing $$(grep -c == $(LOCK)) locked packages"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-compile -r $(LOCK)
	@echo "[env 4/4] installing sglang-ext"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.env-*; touch $@

$(COMPILED): $(STAMP)
	@$(BIN)/python tools/compile_hot_path.py
	@rm -f $(VENV)/.compiled-*; touch $@

$(NATIVE): $(STAMP)
	@$(BIN)/python tools/build_native.py
	@rm -f $(VENV)/.native-*; touch $@

# Whether the packages for CUDA go together: pip says so, without installing any.
cuda-lock: env
	@$(BIN)/python -m pytest -q --full tests/unit/test_cuda_environment.py

kernels-env: $(KERNELS)

$(KERNELS): | $(STAMP)
	@echo "[env] installing triton $(TRITON) for the tests of the kernels"
	@rm -rf $(VENV)/kernels
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-compile --target $(VENV)/kernels triton==$(TRITON)
	@touch $@

ray-env: $(RAY)

judges-env: $(JUDGES)

nixl-env: $(NIXL)

mooncake-env: $(MOONCAKE)

charts-env: $(CHARTS)

traces-env: $(TRACES)

s3-env: $(S3)

docs-env: $(DOCS)

$(RAY): FOLDER := ray
$(JUDGES): FOLDER := judges
$(NIXL): FOLDER := nixl
$(MOONCAKE): FOLDER := mooncake
$(CHARTS): FOLDER := charts
$(TRACES): FOLDER := traces
$(S3): FOLDER := s3
$(DOCS): FOLDER := docs
$(RAY) $(JUDGES) $(NIXL) $(MOONCAKE) $(CHARTS) $(TRACES) $(S3) $(DOCS): | $(STAMP)
	@echo "[env] installing the packages of requirements/$(FOLDER).lock into $(VENV)/$(FOLDER)"
	@rm -rf $(VENV)/$(FOLDER)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-compile --target $(VENV)/$(FOLDER) -r requirements/$(FOLDER).lock
	@$(if $(filter mooncake,$(FOLDER)),tools/fetch_rdma_libraries $(VENV)/mooncake/mooncake_transfer_engine_non_cuda.libs)
	@touch $@

docs: $(DOCS)
	@PYTHONPATH=$(VENV)/docs NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

DIST ?= dist
dist: env
	@rm -rf $(DIST); $(BIN)/python -m hatchling build -d $(DIST)
	@$(MAKE) --no-print-directory chart

# What `helm package` makes of the chart.
chart:
	@mkdir -p $(DIST)
	@tar --sort=name --owner=0 --group=0 --numeric-owner -czf $(DIST)/sglang-ext-$(VERSION).tgz -C deploy/helm \
	  --exclude='*.tgz' --exclude='*.md' sglang-ext

demo: env
	@$(BIN)/python examples/demo.py --device $(if $(filter 1,$(CUDA)),cuda,cpu) $(if $(KEEP),--keep) $(if $(TP),--decode-tp $(TP))

lint: env
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/check_structure.py

# The bytecode of the tests and of SGLang, made once instead of by each worker of pytest; an error is reported there.
tests/__pycache__: | $(STAMP)
	@$(BIN)/python -m pytest -q --collect-only >/dev/null 2>&1 || true

$(IMPORTED): | $(STAMP)
	@SGLANG_USE_CPU_ENGINE=1 $(BIN)/python -c '$(IMPORTS)' >/dev/null 2>&1 || true
	@touch $@

linted: env
	@$(MAKE) --no-print-directory -j3 lint tests/__pycache__ $(NATIVE) $(IMPORTED)

check: env
	@$(MAKE) --no-print-directory -j3 lint tests/__pycache__ $(NATIVE)
	@$(BIN)/python -m pytest -q -n $$(nproc) -m 'not slow' tests/unit $(PYTEST_ARGS)

test: linted $(S3)
	@$(PYTEST) $(PYTEST_ARGS)

test-all: linted $(COMPILED) $(KERNELS) $(RAY) $(JUDGES) $(NIXL) $(MOONCAKE) $(CHARTS) $(TRACES) $(S3) $(DOCS)
	@$(PYTEST) --full $(PYTEST_ARGS)

test-k8s: env $(CHARTS)
	@tools/build_kube_apiserver
	@tools/fetch_prometheus
	@$(BIN)/python -m pytest --kubernetes tests/kubernetes tests/unit/test_chart.py tests/unit/test_chart_scaling.py tests/unit/test_monitoring.py $(PYTEST_ARGS)

unit: env $(KERNELS) $(RAY)
	@$(PYTEST) tests/unit $(PYTEST_ARGS)

format: env
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

clean:
	rm -f router/sglang_ext_router/compiled_sources.json; find python router -name '*.so' -delete
	rm -rf .venv .venv-cuda build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis run
