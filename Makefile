# Needs make and Python 3.11 or newer; everything else is set up in .venv.
#   make quickstart   the main job on the embedded CPU engine: services, sweep, report
#   make e2e-deploy   a cluster's life on two test hosts, with real ssh and Docker; as root
#   make test         lint, types and tests, with coverage
#   make test-hosts   tests on real Docker engines and networks; as root
# Settings (make NAME=VALUE ...):
#   PYTHON            the Python that makes .venv          (default: python3)
#   TORCH_INDEX_URL   where to take torch from             (default: see tools/setup_env.py)
#   PYTEST_ARGS       more arguments for pytest
#   WORKERS           test processes                       (default: one for each core)

PYTHON ?= python3
TORCH_INDEX_URL ?=
PYTEST_ARGS ?=
WORKERS ?= auto

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SGLANG_VENV := .venv-sglang
SGLANG_READY := $(SGLANG_VENV)/.ready
PACKAGES := ddtree_ops ddtree_engine ddtree_kernels
TYPING := .typing/ddtree_ops .typing/ddtree_engine .typing/ddtree_kernels

.PHONY: help setup quickstart e2e-deploy e2e-gateway e2e-runbooks test lint lint-playbooks lint-dockerfiles molecule typecheck unit test-hosts test-sglang format kernels-aot clean

help:
	@sed -n '1,11p' Makefile | sed 's/^# \{0,1\}//'

setup: $(READY)

$(READY): pyproject.toml setup.py tools/setup_env.py
	$(PYTHON) tools/setup_env.py --venv $(VENV) --torch-index-url "$(TORCH_INDEX_URL)"
	@touch $@

quickstart: $(READY)
	$(BIN)/ddtree quickstart

# Needs root, debootstrap, and nothing of Docker on this machine: that runs inside the hosts. Some minutes.
e2e-deploy: $(READY)
	$(BIN)/python tools/e2e/deploy_story.py

# On the same hosts: a gateway whose replica is killed under load, and every runbook's play.
e2e-gateway: $(READY)
	$(BIN)/python tools/e2e/gateway_story.py

e2e-runbooks: $(READY)
	$(BIN)/python tools/e2e/runbook_story.py

test: lint lint-playbooks lint-dockerfiles typecheck unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-playbooks: $(READY)
	cd playbooks && PATH="$(CURDIR)/$(BIN):$$PATH" ansible-lint --offline --profile production

lint-dockerfiles: $(READY)
	$(BIN)/hadolint dockerfiles/*.Dockerfile

# Every role on this machine, below a temporary root: syntax, converge, idempotence, verify. Some minutes.
molecule: $(READY)
	for role in playbooks/roles/*/; do \
	    (cd $$role && PATH="$(CURDIR)/$(BIN):$$PATH" molecule test) || exit 1; \
	done

typecheck: $(READY) $(TYPING)
	$(BIN)/mypy $(addprefix -p ,$(PACKAGES))

# Test workers and the servers they start write coverage files of their own: `coverage combine` joins them.
unit: $(READY)
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest -n $(WORKERS) -m "not docker" --ignore=tests/integration/sglang $(PYTEST_ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

# What needs hosts: real Docker engines, sshd and networks, all made for the tests. Needs root, docker.io (its daemon
# alone), openssh-server, iproute2, busybox-static and debootstrap. The coverage is that of `make test` and this together.
test-hosts: $(READY)
	$(BIN)/coverage run -m pytest -n $(WORKERS) -m docker --ignore=tests/integration/sglang $(PYTEST_ARGS)
	$(BIN)/coverage combine -q --append
	$(BIN)/coverage report

# The plugin against the real SGLang 0.5.23, without its heavy dependencies: another environment, about 2 GB.
test-sglang: $(SGLANG_READY)
	$(SGLANG_VENV)/bin/python -m pytest tests/integration/sglang $(PYTEST_ARGS)

$(SGLANG_READY): tools/make_sglang_venv.py
	$(PYTHON) tools/make_sglang_venv.py --venv $(SGLANG_VENV) --torch-index-url "$(TORCH_INDEX_URL)"
	@touch $@

# Compiles every kernel for sm_90 and sm_120; needs no GPU, takes minutes, fails where one does not fit.
kernels-aot: $(READY)
	$(BIN)/python -m ddtree_kernels.aot

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy sees the packages under their import names through links.
.typing/ddtree_ops: ; @mkdir -p .typing && ln -sfn ../ddtree_ops $@
.typing/ddtree_engine: ; @mkdir -p .typing && ln -sfn ../engine_patch $@
.typing/ddtree_kernels: ; @mkdir -p .typing && ln -sfn ../kernels $@

clean:
	rm -rf $(VENV) $(SGLANG_VENV) .typing .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info .coverage .coverage.*
