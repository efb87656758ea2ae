# `make` lists the targets. Each sets up what it needs.

GO      ?= go
BIN     := bin
# A tree without its history can be built and tested, but not released.
VERSION ?= $(shell scripts/version 2>/dev/null || echo "$$(cat VERSION)-unknown")
# The version of a release (without it, what scripts/version prints), and its architectures (without them, both).
RELEASE ?=
ARCHS   ?=

# Each flag is there once, also in a make that another one runs: their number changes what cgo compiles.
comma := ,
once   = $(filter-out $(2),$(1)) $(2)
# The generated C code of go-nvml calls deprecated functions on purpose.
export CGO_CFLAGS  := $(call once,$(CGO_CFLAGS),-Wno-deprecated-declarations)
# The functions of NVML must be bound when they are first called, after its library is loaded. Some compilers bind all
# functions at the start by default (-z now); then the program would not start.
export CGO_LDFLAGS := $(call once,$(CGO_LDFLAGS),-Wl$(comma)-z$(comma)lazy)
export GOFLAGS     := $(GOFLAGS) -trimpath

# Tracing of gRPC, which is off, and HTTP/2, which metrics do not need, are not linked.
TAGS    := grpcnotrace,nethttpomithttp2
LDFLAGS := -s -w -X main.version=$(VERSION) -X gpu-cdi-plugin/internal/cli.version=$(VERSION)
# The daemon is loaded at a random address, and what the loader has written is read-only before main begins. The table
# of bound functions must stay writable: NVML's are bound late (above). Static programs are not position independent: Go
# would make them depend on a dynamic loader, which a container's host need not have. There is no build ID, which depends
# on the path of the C compiler.
HARDEN  := -buildmode=pie -ldflags '$(LDFLAGS) -buildid= -extldflags=-Wl,-z,relro'
LINT    := $(GO) tool -modfile=$(CURDIR)/tools/go.mod golangci-lint
LINT_PATH := $(GO) tool -modfile=$(CURDIR)/tools/go.mod -n golangci-lint

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## install the packages that demo and test need (root), or print what is missing
	@scripts/setup

.PHONY: build
build: ## bin/gpu-cdi-plugin; and static: bin/device-manager (gpu-run), bin/prestart-hook, bin/launcher and bin/gpu-sim
	$(GO) build -tags '$(TAGS)' $(HARDEN) -o $(BIN)/gpu-cdi-plugin ./cmd/gpu-cdi-plugin
	CGO_ENABLED=0 $(GO) build -tags '$(TAGS)' -ldflags '$(LDFLAGS)' -o $(BIN)/device-manager ./cmd/device-manager
	ln -sf device-manager $(BIN)/gpu-run
	CGO_ENABLED=0 $(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/prestart-hook ./cmd/prestart-hook
	CGO_ENABLED=0 $(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/launcher ./cmd/launcher
	CGO_ENABLED=0 $(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/gpu-sim ./cmd/gpu-sim

.PHONY: demo
demo: setup build ## GPUs into containers, step by step: those of this host, or simulated ones
	@BIN=$(BIN) scripts/demo

.PHONY: cluster
cluster: setup build ## a Kubernetes cluster with simulated GPUs, until Ctrl-C: prints how to use it with kubectl and helm
	@scripts/peers $(BIN)/peers containerd kubelet controlplane helm
	@$(GO) run ./test/cluster/up

.PHONY: test
test: setup build ## unit, golden, race detector, end to end on podman, runc, crun and simulated nodes: minutes
	scripts/test

.PHONY: test-all
test-all: setup build peers ## what test does not run: kubelet, containerd, comparisons with peers, fuzz, soaks
	@for set in dist publish repositories; do scripts/setup $$set || exit; done # /etc must not change in scripts/test
	scripts/test --all

.PHONY: test-drivers
test-drivers: setup build ## the user space of real drivers, 470 to 555, from Debian's archive; test-all has two of them
	$(GO) test -vet=off -timeout 60m -v ./test/drivers -args -drivers all

.PHONY: test-engines
test-engines: setup build ## the engines of Debian trixie and sid on a simulated node; writes docs/engines.md
	$(GO) test -vet=off -timeout 60m -v ./test/suites -args -whole

.PHONY: peers
peers: ## bin/peers: pinned builds of other projects' programs that tests run and compare with
	@scripts/peers $(BIN)/peers

# The linter opens the sources that the build cache names. With -trimpath checkouts in different directories share what
# cgo wrote, which names the first of them, and that may be gone. test/devicemanager and test/engines have no cgo: there
# the linter uses the packages of the kubelet and of engines as their tests compile them, which takes minutes.
lint: GOFLAGS := $(filter-out -trimpath,$(GOFLAGS))
.PHONY: lint
lint: ## golangci-lint, formatting, the import arrows, shell scripts
	@files=$$(git ls-files '*.go' | grep -v /testdata/ | xargs gofmt -l); \
		test -z "$$files" || { echo "not gofmt-clean: $$files"; exit 1; }
	@for f in scripts/* deploy/packages/*.sh test/dist/testdata/*.sh test/drivers/testdata/*.sh \
		test/lib/boot/*.sh test/suites/testdata/*.sh; do sh -n "$$f" || exit 1; done; bash -n .ci/run
	$(LINT) run ./...
	cd test/allocation/peer && $(LINT) run ./...
	linter=$$($(LINT_PATH)) && cd tools/dist && $$linter run ./...
	linter=$$($(LINT_PATH)) && cd test/devicemanager && CGO_ENABLED=0 GOFLAGS='$(GOFLAGS) -trimpath' \
		$$linter run --timeout 20m ./...
	linter=$$($(LINT_PATH)) && cd test/engines && CGO_ENABLED=0 GOFLAGS='$(GOFLAGS) -trimpath' \
		$$linter run --timeout 20m ./...

# Manual pages and completions of both programs, in REFERENCE; for scripts/dist.
.PHONY: reference
reference:
	help=$$(CGO_ENABLED=0 $(GO) run ./cmd/prestart-hook --help) && \
		$(GO) run -tags '$(TAGS),reference' $(HARDEN) ./cmd/gpu-cdi-plugin '$(REFERENCE)' "$$help"
	CGO_ENABLED=0 $(GO) run -tags '$(TAGS),reference' ./cmd/device-manager '$(REFERENCE)'

.PHONY: dist
dist: ## dist/: what a release is: tar, deb and rpm for amd64 and arm64, the image, the chart, the list of modules, checksums
	@version='$(RELEASE)'; [ "$$version" ] || version=$$(scripts/version) || exit; \
		rm -rf dist && scripts/dist "$$version" dist $(ARCHS)

.PHONY: publish
publish: ## add dist/ to the repositories in DIR for apt, dnf and registries, signed with KEY: docs/releasing.md
	@scripts/publish dist '$(DIR)' '$(KEY)'

.PHONY: bench
bench: setup build ## benchmarks; those of whole programs beside a floor and a peer in the same run
	$(GO) test -run '^$$' -bench . -benchmem $$($(GO) list ./... | grep -v /test/)
	$(GO) test -timeout 40m -run '^$$' -bench . ./test/bench ./test/allocation
	$(GO) test -timeout 20m -run '^$$' -bench . -benchtime 1x ./test/cluster
	$(GO) test -C test/allocation/peer -timeout 20m -run '^$$' -bench . .

.PHONY: bench-manager
bench-manager: ## the device manager beside the kubelet's, in one run: a table
	$(GO) test -C test/devicemanager -timeout 30m -run '^$$' -bench Managers -benchtime 1x .

.PHONY: generate
generate: ## write the generated and golden files
	$(GO) generate ./...
	scripts/golden

.PHONY: gpu-check
gpu-check: build ## try everything on a real driver; appends to docs/hardware.md
	@scripts/peers $(BIN)/peers runc
	scripts/gpu-check

.PHONY: clean
clean: ## remove what was built: bin and dist
	rm -rf $(BIN) dist
