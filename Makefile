# Needs Python 3.11 or newer (with venv) and make; everything else goes into .venv, nothing outside this directory.

SHELL := /bin/sh
.SHELLFLAGS := -euc
.ONESHELL:
.SUFFIXES:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
FUZZ_SECONDS ?= 600
CHAOS_SECONDS ?= 300
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)

# A pyenv shim may be on PATH and still refuse to run, so each candidate has to answer.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 python; do \
    $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$name; break; }; done)
endif
PYTHON_VERSION := $(if $(PYTHON),$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null))

# The name of a stamp says what was installed: other locks or another Python have another stamp, so a checkout that
# changes them installs again and one that does not starts at once. File times mean nothing in a fresh clone.
sum = $(PYTHON_VERSION)-$(firstword $(shell cat pyproject.toml $(1) 2>/dev/null | cksum))
RUN_STAMP := $(VENV)/run-$(call sum,requirements-build.lock requirements.lock)
DEV_STAMP := $(VENV)/dev-$(call sum,requirements-build.lock requirements.lock requirements-dev.lock)

# HOME may be missing, empty or read-only.
export UV_CACHE_DIR ?= $(CURDIR)/$(VENV)/cache/uv
export PIP_CACHE_DIR ?= $(CURDIR)/$(VENV)/cache/pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Kept compiled modules are a third of a start, and of what the tests start several hundred times.
export PYTHONDONTWRITEBYTECODE :=

# Shell functions for the recipes that install. uv does not read pip's configuration, so what pip was told on this
# machine (an index of the company's, a directory of wheels, a certificate) is handed over; when uv still cannot get
# through, pip does the same work, more slowly.
define INSTALL_FUNCTIONS
pip_setting() {
    for section in global install :env:; do
        printf '%s\n' "$$pip_config" | sed -n "s/^$$section\.$$1='\(.*\)'\$$/\1/p" | sed 's/\\n/ /g'
    done | grep . | tail -n 1 || true
}
give() { if [ -n "$$2" ] && ! printenv "$$1" >/dev/null; then export "$$1=$$2"; fi; }
set_up_uv() {
    pip_config=$$($(BIN)/python -m pip config list 2>/dev/null || true)
    give UV_DEFAULT_INDEX "$$(pip_setting index-url)"
    give SSL_CERT_FILE "$$(pip_setting cert)"
    export UV_SYSTEM_CERTS=1 UV_PYTHON_DOWNLOADS=never UV_NO_CONFIG=1
}
set_up_uv_to_install() {
    set_up_uv
    # pip looks in all of these, and so may uv: the hashes of the lock decide which file is taken. A lock is not made
    # from them, as a place that holds a few files of a version would leave out the hashes of the others.
    give UV_INDEX "$$(pip_setting extra-index-url)"
    give UV_FIND_LINKS "$$(pip_setting find-links | tr ' ' ',')"
    export UV_INDEX_STRATEGY=unsafe-best-match
}
make_venv() {
    if [ -z "$(PYTHON_VERSION)" ]; then
        echo "Python 3.11 or newer is needed and none was found on PATH; install it, or say where it is:" >&2
        echo "    make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2
        exit 1
    fi
    if ! $(BIN)/python -m pip --version 2>/dev/null | grep -q "(python $(PYTHON_VERSION))"; then
        echo "Making $(VENV) with Python $(PYTHON_VERSION) ..."
        if ! $(PYTHON) -m venv --clear $(VENV); then
            rm -rf $(VENV)
            echo "Python $(PYTHON_VERSION) could not make a virtual environment." >&2
            echo "On Debian and Ubuntu its venv module is a package of its own: apt-get install python3-venv" >&2
            exit 1
        fi
    fi
}
install() {
    echo "Installing $$1 ..."
    if ! $(BIN)/python -m uv --version >/dev/null 2>&1 ||
       ! $(BIN)/python -m uv pip install --quiet --python $(BIN)/python --require-hashes -r "$$1"; then
        echo "Installing $$1 with pip ..."
        $(BIN)/python -m pip install -qq --require-hashes -r "$$1" || {
            echo "The packages of $$1 could not be installed: see above. They come from the package index that" >&2
            echo "pip is configured for; nothing else is downloaded." >&2
            exit 1
        }
    fi
}
install_all() {
    make_venv
    $(BIN)/python -m pip install -qq --require-hashes -r requirements-build.lock ||
        echo "uv and the build backend could not be installed: see above." >&2
    set_up_uv_to_install
    install "$$1"
    # Editable, from this tree, with the build backend of requirements-build.lock: nothing is resolved or downloaded.
    $(BIN)/python -m pip install -qq --no-deps --no-build-isolation --no-index --editable .
}
endef

.PHONY: help run test soak check format docs fuzz chaos bench lock setup clean

help:
	@echo "make run      set up what is needed and serve on 127.0.0.1:8080 (settings: docs/configuration.md)"
	echo "make test     every test, the ones on a real Postgres included; make test ARGS='tests/tools -k read'"
	echo "make soak     rounds of process trees and races of links, for minutes; prints a tally"
	echo "make check    lint, formatting, types, layers"
	echo "make format   let ruff format and fix what it can"
	echo "make fuzz     ask the service what its OpenAPI document says, for FUZZ_SECONDS (600) with FUZZ_SEED (any)"
	echo "make chaos    kill a service under load for CHAOS_SECONDS (300) with CHAOS_SEED (any), then look what is missing"
	echo "make bench    measure, each figure beside its floor"
	echo "make lock     resolve the locks again; make lock UPGRADE=1 takes the newest allowed versions"
	echo "make setup    only set up the development environment"
	echo "make clean    remove the environment and the caches (never ./data)"

run: $(RUN_STAMP)
	@exec $(BIN)/python -m app serve $(ARGS)

test: $(DEV_STAMP)
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# 200 rounds of each awkward descendant on time-out and on cancel, 60 s of swapped links, in each tier: an hour at most.
soak: $(DEV_STAMP)
	@TOOLCRIB_TEST_ROUNDS=200 TOOLCRIB_TEST_RACE_SECONDS=60 timeout 3600 $(BIN)/python -m pytest -n 0 -s -q \
	    tests/system/test_process_trees.py tests/system/test_link_races.py $(ARGS)

check: $(DEV_STAMP)
	@$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-logo --cache-dir .import_linter_cache

format: $(DEV_STAMP)
	@$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

docs: $(DEV_STAMP)
	@$(BIN)/python -m docs.generate_tools

fuzz: $(DEV_STAMP)
	@exec $(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED))

chaos: $(DEV_STAMP)
	@exec $(BIN)/python -m tests.chaos --seconds $(CHAOS_SECONDS) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) $(ARGS)

bench: $(DEV_STAMP)
	@exec $(BIN)/python -m bench $(ARGS)

setup: $(DEV_STAMP)

$(RUN_STAMP):
	@$(INSTALL_FUNCTIONS)
	install_all requirements.lock
	touch $@

$(DEV_STAMP):
	@$(INSTALL_FUNCTIONS)
	install_all requirements-dev.lock
	touch $(RUN_STAMP) $@

lock: $(DEV_STAMP)
	@$(INSTALL_FUNCTIONS)
	set_up_uv
	compile() {
	    $(BIN)/python -m uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate \
	        --python-version 3.11 $(if $(UPGRADE),--upgrade) "$$@"
	}
	# One environment, and so one image, serves in every role.
	compile pyproject.toml --extra distributed -o requirements.lock
	compile pyproject.toml --group dev -c requirements.lock -o requirements-dev.lock
	compile --group build -c requirements-dev.lock -o requirements-build.lock

clean:
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
	find app migrations tests bench -name __pycache__ -type d -exec rm -rf {} + 2>/dev/null || true
