# `make demo` and `make test` set up everything they need; see README.md.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export ANSIBLE_HOME := $(CURDIR)/.cache/ansible
READY := .venv/.ready
BED := python3 tests/testbed/bed.py
BENCH ?= header_cost page_cache second_run one_host transfer_faults distribution

.PHONY: help venv lint test test-unit molecule faults demo demo-down bench release lock lock-vllm lock-check docs

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(READY) ## the control node's environment, from hash-locked files

$(READY): requirements-dev.txt roles/vllm/files/uv.txt tools/bootstrap
	tools/bootstrap

lint: $(READY) ## ruff, yamllint, ansible-lint, generated docs up to date
	ruff check .
	ruff format --check .
	yamllint --strict .
	ansible-lint --strict
	python3 tools/variables.py --check
	python3 tools/release.py check

test-unit: $(READY) ## what needs neither root nor a download beyond the venv
	pytest tests/unit tests/modules

molecule: $(READY) ## each role over ssh on booted hosts
	tests/molecule.sh

faults: $(READY) ## every fault in every state on booted hosts, and the table docs/faults.md
	python3 tests/faults/run.py --docs

test: lint lock-check molecule ## everything: lint, the locks, molecule, unit, modules, the whole play on booted hosts
	# Two at a time: most of it is waiting for hosts.
	pytest -n 2 --dist loadfile tests/unit tests/modules tests/integration

demo: $(READY) ## boot two hosts with a simulated SGLang and take them to vLLM with DFlash
	tests/demo/up.sh

demo-down: ## leave nothing of the demo behind
	$(BED) down demo

bench: $(READY) ## what claims of speed rest on; BENCH=distribution for one (bench/README.md)
	failed=; for name in $(BENCH); do echo "== $$name"; python3 bench/$$name.py || failed="$$failed $$name"; done; \
	  test -z "$$failed" || { echo "over a limit, or failed:$$failed" >&2; exit 1; }

docs: $(READY) ## regenerate the variable reference from the roles' argument specs
	python3 tools/variables.py

release: $(READY) ## CHANGELOG.md out of the fragments, a commit and a tag: make release VERSION=0.2.0
	python3 tools/release.py cut $(VERSION)

lock: $(READY) ## resolve the control node's requirements again
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header requirements.in -o requirements.txt
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header -c requirements.txt requirements-dev.in -o requirements-dev.txt
	uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-header roles/vllm/files/uv.in -o roles/vllm/files/uv.txt
	uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-header roles/transfer/files/swarm.in -o roles/transfer/files/swarm.txt

lock-vllm: $(READY) ## resolve a version of vLLM as of its release: make lock-vllm VERSION=0.26.0 UNTIL=2026-07-26
	python3 tools/lock.py write $(VERSION) $(if $(UNTIL),--until $(UNTIL))

lock-check: $(READY) ## are the locks of vLLM complete for each Python; reads metadata only
	python3 tools/lock.py check
