# `make` says what there is. Everything that a target needs it sets up itself.

GO      ?= go
BIN     := bin
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)

# go-nvml's generated C calls deprecated functions on purpose; nothing of ours hides behind this.
export CGO_CFLAGS  := $(CGO_CFLAGS) -Wno-deprecated-declarations
# NVML's functions are bound when they are first called, after the library is loaded. Some distributions' compilers bind
# all at the start (-z now), and such a program would not start.
export CGO_LDFLAGS := $(CGO_LDFLAGS) -Wl,-z,lazy
export GOFLAGS     := $(GOFLAGS) -trimpath

# gRPC's tracing and HTTP/2 in net/http are linked for nothing: the one is off, the other would serve metrics.
TAGS    := grpcnotrace,nethttpomithttp2
LDFLAGS := -s -w -X main.version=$(VERSION)
# The daemon is loaded at a random address, and what the loader has written is read-only before main begins. The table
# of bound functions must stay writable: NVML's are bound late (above). Static programs are not position independent: Go
# would make them ask for a dynamic loader, which a container's host need not have.
HARDEN  := -buildmode=pie -ldflags '$(LDFLAGS) -extldflags=-Wl,-z,relro'
LINT    := $(GO) tool -modfile=$(CURDIR)/tools/go.mod golangci-lint

.DEFAULT_GOAL := help

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## install what demo and test need from the system (root), or say what is missing
	@scripts/setup

.PHONY: build
build: ## bin/gpu-cdi-plugin, bin/prestart-hook (static) and bin/gpu-sim
	$(GO) build -tags '$(TAGS)' $(HARDEN) -o $(BIN)/gpu-cdi-plugin ./cmd/gpu-cdi-plugin
	CGO_ENABLED=0 $(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/prestart-hook ./cmd/prestart-hook
	CGO_ENABLED=0 $(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/gpu-sim ./cmd/gpu-sim

.PHONY: demo
demo: setup build ## GPUs into containers, step by step: those of this host, or simulated ones
	@BIN=$(BIN) scripts/demo

.PHONY: test
test: setup build peers ## everything: unit, golden, race detector, fuzz smoke, end to end on real engines
	scripts/test

.PHONY: peers
peers: ## bin/peers: pinned builds of other projects' programs that tests run and compare with
	@scripts/peers $(BIN)/peers

.PHONY: lint
lint: ## golangci-lint, formatting, the import arrows, shell scripts
	@files=$$(git ls-files '*.go' | grep -v /testdata/ | xargs gofmt -l); \
		test -z "$$files" || { echo "not gofmt-clean: $$files"; exit 1; }
	@for f in scripts/*; do sh -n "$$f" || exit 1; done; bash -n .ci/run
	$(LINT) run ./...
	cd test/allocation/peer && $(LINT) run ./...
	cd test/devicemanager && $(LINT) run ./...

.PHONY: bench
bench: setup build ## benchmarks; those of whole programs beside a floor and a peer in the same run
	$(GO) test -run '^$$' -bench . -benchmem $$($(GO) list ./... | grep -v /test/)
	$(GO) test -timeout 40m -run '^$$' -bench . ./test/bench ./test/allocation
	$(GO) test -C test/allocation/peer -timeout 20m -run '^$$' -bench . .

.PHONY: generate
generate: ## generated and golden files, anew
	$(GO) generate ./...
	scripts/golden

.PHONY: gpu-check
gpu-check: build ## the whole flow on a real driver; writes docs/hardware.md
	@scripts/peers $(BIN)/peers nvidia runc
	scripts/gpu-check

.PHONY: clean
clean: ## remove what was built
	rm -rf $(BIN)
