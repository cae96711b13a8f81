# Needs GNU make, bash and a Python 3.11 or newer; everything else is set up in this folder
# (.venv*, build, dist) on first use. What lacks a Debian package installs it as root, and else says
# which, and how to get it: QEMU, podman and the like are wanted by `test` and `test-guest` only.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DEFAULT_GOAL := help

bin := .venv/bin
pytest := $(bin)/python -m pytest
# What is soon over, without root and without any program from outside.
unit := not (claims or netns or podman or guest or prometheus or systemd or bench)

.PHONY: help
help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

.PHONY: demo
demo: .venv/run ## the agent on a simulated host, step by step; no GPU, no root
	@$(bin)/cdi-agent demo

.PHONY: check
check: .venv/dev ## format, lint, types, import contracts
	$(bin)/ruff format --check
	$(bin)/ruff check
	$(bin)/mypy
	$(bin)/lint-imports --no-logo

.PHONY: format
format: .venv/dev ## format, and mend what ruff can mend
	$(bin)/ruff format
	$(bin)/ruff check --fix

.PHONY: unit
unit: .venv/dev ## the tests that need neither root, other programs, nor patience
	$(pytest) -m "$(unit)"

.PHONY: test
test: packages-test .venv/dev ## all tests; as root nothing is skipped
	$(pytest)

.PHONY: test-guest
test-guest: packages-test .venv/dev ## only the tests on a real kernel, in QEMU
	$(pytest) -m guest

.PHONY: bench
bench: .venv/dev .venv-bench/run ## measure latencies, CPU and memory; prints tables
	CDI_AGENT_PYTHON=$(CURDIR)/.venv-bench/bin/python \
	  $(pytest) -m bench --capture=no --timeout=600

.PHONY: wheel
wheel: .venv/dev ## build the sdist, and the wheel from it, into dist/
	rm -rf dist
	$(bin)/python -m build --no-isolation >/dev/null
	ls dist

.PHONY: test-wheel
test-wheel: wheel ## the unit tests against the installed wheel
	.ci/test-wheel $(bin)/python .venv-wheel -m "$(unit)"

.PHONY: test-newest
test-newest: wheel ## the same with the newest Python on this machine, be it the oldest too
	@newest=$$(.ci/find-python --newest); minor='import sys; print(*sys.version_info[:2])'; \
	if [[ $$($$newest -c "$$minor") == $$($(bin)/python -c "$$minor") ]]; then \
	  echo "test-newest: this machine has no newer Python than .venv's"; \
	fi; \
	.ci/test-wheel "$$newest" .venv-newest -m "$(unit)"

.PHONY: install
install: ## as root: the agent as a service of this host, in PREFIX (/opt/cdi-agent)
	@.ci/debian-packages run
	@systemd/install

.PHONY: uninstall
uninstall: ## as root: take it away again, its specs too; the configuration stays
	@systemd/install uninstall

.PHONY: lock
lock: ## write the lock files anew
	.ci/lock "$$(.ci/find-python)"

.PHONY: clean
clean: ## remove what was made here
	rm -rf .venv .venv-* build dist .*_cache .hypothesis

# As root this installs them. Else a test that lacks something is skipped, and says what it lacks.
.PHONY: packages-test
packages-test:
	@.ci/debian-packages test || test $$EUID -ne 0

# The virtual environment, as a user has it (run), and with the tools to work on it (dev).
.venv/run: requirements-build.lock requirements.lock pyproject.toml
	@.ci/debian-packages run
	@echo "Setting up .venv (once) ..."
	@$(bin)/python -c "" 2>/dev/null || "$$(.ci/find-python)" -m venv --clear .venv
	@.ci/install-locked .venv run
	@$(bin)/python -m pip --disable-pip-version-check install --quiet --no-deps \
	  --no-build-isolation --editable .
	@touch $@

# With nothing but what a user's installation has: structlog imports rich if it is there.
.venv-bench/run: .venv/dev requirements.lock
	@$(bin)/python -m venv --clear .venv-bench
	@.ci/install-locked .venv-bench run
	@touch $@

.venv/dev: .venv/run requirements-dev.lock
	@.ci/install-locked .venv dev
	@touch $@
