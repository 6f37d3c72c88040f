# `make test` and `make drill` need Python 3.11+, git, make and a package index; they make their own virtual environment.
#   make test [TORCH=2.13.0] [ARGS="-k placement"]     every fast test, and a real case of each promise; pytest's closing line last
#   make test TORCH=lowest                             the same with the lowest versions that pyproject.toml allows, torch's too
#   make test-all [TORCH=2.13.0] [ARGS="-k placement"] all tests, those that are marked `long` as well: hours
#   make drill [ARGS="--scenario replace"]             several nodes on this machine, broken on purpose
#   make fuzz [SECONDS=60]                             hostile bytes for everything that reads bytes from outside
#   make torture [SEEDS=200] [REAL_SEEDS=20] [FIRST=0] random schedules of faults: simulated, then with real processes
#   make bench [ARGS="--quick"]                        saves and loads, compared with stock torch's and others': tables, JSON, plots
#   make bench-peers                                   installs the others that `make bench` compares with, without what they need
#   make bench-bucket [ARGS="--quick"]                 our clients of a bucket compared with s3fs, on a real S3 server (root)
#   make bench-planning [ARGS="--ranks 64,1024"]       the coordinator's work for many ranks and items, compared with stock torch's
#   make frameworks                                  installs Lightning, Transformers, Ray, ... and runs their examples
#   make megatron                                    installs Megatron-Bridge for CPUs, and runs our manager in it
#   make referee [TORCH_TESTS=~/pytorch]               torch's own checkpoint tests, with stock storage and with ours
#   make chaos [ARGS="--ways manager --points 8"]       ckpt-chaos kills two ranks at each file event: stock DCP and ours, a table
#   make chaos-bench [ARGS="--targets hf_trainer"]      ckpt-chaos' own programs with our class for each framework, a table
#   make compat [ARGS="2.13.0 2.15.0"]                 checkpoints written under each version of torch, read under all
#   make audit [ARGS="-s osv"]                         known vulnerabilities of the pinned dependencies, where the index knows
#   make docs                                          the documentation's site into build/site; a warning is an error
#   make dist [TORCH=2.13.0] [ARGS="--extras s3"]      wheel and sdist, checked, and what works with the wheel alone
#   make image                                         an OCI image of the agent without torch, into build/image (root)
#   make sbom                                          CycloneDX of the wheel with its dependencies, and of the image
#   make check                                         linters, types and the fast tests
PYTHON ?= python3
TORCH  ?=
ARGS   ?=
# What builds a release; the workflow passes hashed versions.
DIST_TOOLS ?= build hatchling twine
# Files of tests that run at once. Half of the workers begin with the files that wait (WAITING in tests/conftest.py), the others
# compute: two cores are idle for a fifth of the time with three workers, and for less with four, which take 7:14 in place of 8:30.
JOBS   ?= 4
SEEDS  ?= 1000
SECONDS ?= 60
FIRST  ?= 0
REAL_SEEDS ?= $(shell expr $(SEEDS) / 10)

# Another torch gets an environment of its own, without torchvision: its wheels want exactly the torch they were built for.
VENV    := .venv$(if $(TORCH),-$(TORCH))
EXTRAS  := drill,s3,completion,test,dev
BIN     := $(VENV)/bin
STAMP   := $(VENV)/installed
FAST    := not multiprocess and not fault and not long and not radosgw
# The tests of other frameworks need more packages than the rest together: `make frameworks`.
# Hundreds of agents start in a run: without compiled files each of them compiles this package.
unexport PYTHONDONTWRITEBYTECODE
PYTEST   = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 15 --ignore tests/frameworks

.PHONY: test test-all drill torture fuzz bench-bucket bench-planning check fast lint types hints install clean bench bench-peers frameworks megatron referee compat audit docs dist image sbom chaos chaos-bench frameworks-installed
.DEFAULT_GOAL := test

# A test reads the site in a browser: `docs` builds it.
test: $(STAMP) docs
	@$(PYTEST) -m "not long" $(ARGS)

test-all: $(STAMP)
	@$(PYTEST) -o faulthandler_timeout=7500 $(ARGS)

drill: $(STAMP)
	@$(BIN)/replicated-ckpt drill $(ARGS)

torture: $(STAMP)
	@$(BIN)/python -m tests.fault.torture --first $(FIRST) --seeds $(SEEDS)
	@$(BIN)/python -m tests.fault.torture --first $(FIRST) --seeds $(REAL_SEEDS) --processes

fuzz: $(STAMP)
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

bench: $(STAMP)
	@$(BIN)/python -m benchmarks $(ARGS)

# They name versions of torch and more that are not ours; what they really need besides is in the extra.
bench-peers: $(STAMP)
	@$(BIN)/pip install --quiet --no-deps -c $(VENV)/constraints.txt $$($(BIN)/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["bench-peers"])')

referee: $(STAMP)
	@$(BIN)/pip install --quiet -c $(VENV)/constraints.txt -e '.[$(EXTRAS),referee]'
	@$(BIN)/python -m tests.referee $(if $(TORCH_TESTS),--torch-tests '$(TORCH_TESTS)') $(ARGS)

chaos: $(STAMP)
	@$(BIN)/python -m tests.referee.chaos $(ARGS)

bench-bucket: $(STAMP)
	@$(BIN)/python -m benchmarks.bucket $(ARGS)

bench-planning: $(STAMP)
	@$(BIN)/python -m benchmarks.planning $(ARGS)

chaos-bench: frameworks-installed
	@$(BIN)/python -m tests.referee.chaos.bench $(ARGS)

# The extra wants an older fsspec and s3fs than those that are pinned.
frameworks-installed: $(STAMP)
	@grep -vE '^(fsspec|s3fs)==' $(VENV)/constraints.txt > $(VENV)/constraints-frameworks.txt
	@$(BIN)/pip install --quiet -c $(VENV)/constraints-frameworks.txt -e '.[frameworks,s3]'

frameworks: frameworks-installed
	@$(BIN)/python -m pytest tests/frameworks $(ARGS)

# Each version of torch in an environment of its own; none of ours is needed.
compat:
	@$(PYTHON) tools/compat.py $(ARGS)

# In an environment of its own: the tool that looks for weaknesses is not among the packages that it looks at.
audit:
	@test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && .venv-audit/bin/pip install --quiet pip-audit; }
	@.venv-audit/bin/python tools/audit.py $(ARGS)

# Both in environments of their own, outside the one that is tested; the site needs the package's text, not torch.
docs:
	@test -x .venv-docs/bin/mkdocs || { $(PYTHON) -m venv .venv-docs && .venv-docs/bin/pip install --quiet \
	  $$($(PYTHON) -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])'); }
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)

dist:
	@rm -rf dist .venv-dist .venv-wheel && $(PYTHON) -m venv .venv-dist && .venv-dist/bin/pip install --quiet $(DIST_TOOLS)
	@.venv-dist/bin/python -m build --no-isolation --outdir dist . && .venv-dist/bin/twine check --strict dist/*
	@$(PYTHON) tools/wheel_alone.py dist/*.whl $(if $(TORCH),--torch $(TORCH)) $(ARGS)

# In an environment of its own: it needs pip alone.
image:
	@test -x build/image-venv/bin/pip || $(PYTHON) -m venv build/image-venv
	@PYTHON=build/image-venv/bin/python tools/agent_image/build.sh build/image $(ARGS)

# Of the wheel with what pip picks for it (after `make dist`), and of the image. Its tools are hashed for Python 3.11.
sbom:
	@test -x build/sbom-venv/bin/cyclonedx-py || { $(PYTHON) -m venv build/sbom-venv && \
	  build/sbom-venv/bin/pip install --quiet --no-deps --require-hashes -r tools/release-requirements.txt; }
	@mkdir -p build/sbom
	@build/sbom-venv/bin/cyclonedx-py environment --validate --output-reproducible --pyproject pyproject.toml \
	  -o build/sbom/replicated-ckpt.cdx.json .venv-wheel
	@build/sbom-venv/bin/cyclonedx-py requirements --validate --output-reproducible --pyproject pyproject.toml \
	  -o build/sbom/replicated-ckpt-agent-image.cdx.json tools/agent_image/requirements.txt

check: lint types fast hints

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

fast: $(STAMP)
	@$(BIN)/python -m pytest -m "$(FAST)" $(ARGS)

hints:
	@$(PYTHON) tools/hints.py

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "replicated-ckpt needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV); torch is large, the first time takes minutes."
	@$(PYTHON) -m venv $(VENV)
ifdef TORCH
ifeq ($(TORCH),lowest)
	@$(BIN)/python tools/lowest.py > $(VENV)/constraints.txt
else
	@{ sed '/^# --- torch/,$$d' constraints.txt; echo 'torch==$(TORCH)'; } > $(VENV)/constraints.txt
endif
	@$(BIN)/pip install --quiet -c $(VENV)/constraints.txt torch
else
	@cp constraints.txt $(VENV)/constraints.txt
endif
	@$(BIN)/pip install --quiet -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]' $(if $(TORCH),,torchvision)
	@touch $@

# Bridge says that it needs Python 3.12; with 3.11 the test runs as well.
megatron: $(STAMP)
	@$(PYTHON) -m venv build/megatron
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' > \
	  $$(build/megatron/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_from_venv.pth
	@build/megatron/bin/pip install --quiet --prefer-binary --no-deps --ignore-requires-python $$($(BIN)/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["megatron"])')
	@build/megatron/bin/python -m pytest tests/frameworks/test_megatron_bridge.py $(ARGS)

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
