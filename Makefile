# Everything a newcomer needs: make demo, make test. See README.md.
.DEFAULT_GOAL := help
SHELL := /bin/bash

BIN := bin
GO  ?= go
PYTHON ?= python3
TOOL := $(GO) tool -modfile=deploy/tools/go.mod

export HOLDFAST_TEMPORAL_BIN ?= $(CURDIR)/$(BIN)/holdfast-temporal

.PHONY: help
help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: $(BIN)/holdfast-temporal ## Build bin/holdfast and the development Temporal server
	$(GO) build -o $(BIN)/holdfast ./orchestrator/cmd/holdfast

# The Temporal server is a module of its own: some 450 dependencies that holdfast
# does not carry. Its first build takes minutes, later ones seconds.
$(BIN)/holdfast-temporal: $(wildcard orchestrator/temporaldev/*.go) orchestrator/temporaldev/go.mod orchestrator/temporaldev/go.sum
	@echo "building the development Temporal server (the first time: about 6 minutes on 2 cores)"
	cd orchestrator/temporaldev && $(GO) build -o ../../$(BIN)/holdfast-temporal .

.PHONY: postgres
postgres: ## Find a Postgres, or install one where that is allowed
	@deploy/install-postgres.sh >/dev/null

.PHONY: demo
demo: build postgres ## Run a mixed batch on two simulated engines and print a summary
	@$(BIN)/holdfast demo

.PHONY: demo-faults
demo-faults: build postgres ## The demo while an engine crashes, events are lost and weights change
	@$(BIN)/holdfast demo --faults

.PHONY: demo-trainer
demo-trainer: build postgres ## A Python trainer through six steps, while it and the service are killed
	@$(PYTHON) api/python/examples/demo_trainer.py

.PHONY: test
test: $(BIN)/holdfast-temporal postgres ## Run all tests (real Postgres, real Temporal)
	$(GO) test -timeout 20m ./...
	cd orchestrator/temporaldev && $(GO) vet ./... && $(GO) test ./...

# Built once, outside the tree: a real inference server with its own C++ parts. Later
# versions need headers that a plain machine lacks.
OLLAMA_VERSION := v0.9.0
ENGINE_BIN := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/holdfast/ollama-$(OLLAMA_VERSION)/ollama

# It comes into its place at once, as another checkout may look for it meanwhile.
$(ENGINE_BIN):
	@echo "building the inference server for tests (about 4 minutes on 2 cores)"
	@mkdir -p $(dir $@)
	new=$$(mktemp -d $(dir $@)new.XXXXXX) && \
	GOBIN=$$new CGO_ENABLED=1 GOFLAGS=-p=1 nice $(GO) install github.com/ollama/ollama@$(OLLAMA_VERSION) && \
	mv $$new/ollama $@ && rmdir $$new

.PHONY: test-engine
test-engine: $(ENGINE_BIN) $(BIN)/holdfast-temporal postgres ## The service in front of a real inference server with a tiny model
	REAL_ENGINE_BIN=$(ENGINE_BIN) $(GO) test -tags realengine -count 1 -timeout 10m -run RealEngine ./orchestrator/enginetest ./orchestrator/cli

.PHONY: test-python
test-python: build postgres ## Run the Python client's tests against a real service
	cd api/python && timeout --signal INT --kill-after 2m 15m $(PYTHON) -m unittest discover -t . -s tests

.PHONY: test-race
test-race: $(BIN)/holdfast-temporal postgres ## The concurrent packages under the race detector
	$(GO) test -race -timeout 20m ./orchestrator/pool ./orchestrator/fleet ./orchestrator/engine/... ./orchestrator/service ./orchestrator/kvevents ./orchestrator/weights ./orchestrator/environment/... ./workflows/... ./store ./api

# Every decoder of what engines and models send.
FUZZ_SECONDS := 60
FUZZ_PACKAGES := ./orchestrator/kvevents ./orchestrator/engine ./orchestrator/engine/internal/jsonscan ./orchestrator/toolcall ./orchestrator/transcript

.PHONY: fuzz
fuzz: ## Fuzz every decoder for FUZZ_SECONDS each
	@for package in $(FUZZ_PACKAGES); do \
		targets=$$($(GO) test -list '^Fuzz' $$package) || exit 1; \
		for target in $$(grep '^Fuzz' <<<"$$targets"); do \
			GO=$(GO) deploy/fuzz.sh $$package $$target $(FUZZ_SECONDS) || exit 1; \
		done; \
	done

.PHONY: lint
lint: ## gofmt, go vet, staticcheck, and the determinism check of workflow code
	@test -z "$$(gofmt -l . | tee /dev/stderr)" || { echo "gofmt would change the files above"; exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags realengine ./orchestrator/enginetest ./orchestrator/cli
	$(TOOL) staticcheck ./...
	$(TOOL) workflowcheck -test=false ./workflows

.PHONY: bench
bench: build postgres ## Measure what docs/performance.md reports
	@$(BIN)/holdfast bench

.PHONY: sim
sim: ## Compare admission policies in simulation (under 8 minutes)
	$(GO) run ./orchestrator/cmd/holdfast sim paper

.PHONY: openapi
openapi: ## Write api/openapi.yaml from the code
	$(GO) test ./api -run TestOpenAPI -update

.PHONY: clean
clean: ## Remove binaries and the development data
	rm -rf $(BIN) .holdfast
