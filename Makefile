# Two commands on a bare Debian 12 machine, as root: make demo, make test.
# One set of build flags everywhere, so that one build cache serves knoc, its
# tests and the testbed's control plane.
export CGO_ENABLED = 0
export GOFLAGS = -trimpath
export PATH := $(PATH):/usr/local/go/bin

# Go tools that are no part of the product; their version is pinned here.
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
STEP = @.ci/step

.PHONY: all build demo test test-go test-real test-beside test-variants check lint race install-check bench deps packages clean

all: build

build:
	go build -o bin/knoc ./main/knoc

# All that it takes to see a pod run on a real Slurm cluster on this machine.
demo:
	testbed/up
	testbed/demo

# Everything that .ci/run runs: what is quick comes first, and what needs no
# testbed runs beside the testbed's tests, which mostly wait.
test: packages
	$(STEP) 'scripts under shellcheck' $(MAKE) --no-print-directory lint
	$(STEP) 'gofmt, vet, staticcheck, deps.txt' $(MAKE) --no-print-directory check
	$(STEP) 'hermetic tests' $(MAKE) --no-print-directory test-go
	$(STEP) 'testbed' testbed/up
	$(STEP) 'demo' testbed/demo
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-beside test-real
	$(STEP) 'basic tests on the variants' $(MAKE) --no-print-directory test-variants

# What the tests need of this machine beyond Go. The testbed installs its own.
packages:
	$(STEP) 'packages' .ci/packages

# The shells that every rendered script must run under; without this list the
# hermetic tests take those that are there.
test-go test-real race: export KNOC_TEST_SHELLS = dash bash busybox

test-go:
	.ci/gotest ./...

race:
	CGO_ENABLED=1 .ci/gotest -race .

test-beside:
	$(STEP) 'go install from a GOPROXY' $(MAKE) --no-print-directory install-check
	$(STEP) 'hermetic tests with -race' $(MAKE) --no-print-directory race

check:
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo 'these files are not formatted: run gofmt -w'; exit 1; }
	go vet ./... && go vet -tags testbed ./...
	go run $(STATICCHECK) ./...
	go run $(STATICCHECK) -tags testbed ./...
	@.ci/deps | diff -u deps.txt - || { echo 'what is linked has changed: see whether it should, then make deps'; exit 1; }

deps:
	.ci/deps >deps.txt

# What shellcheck says of values that are quoted on purpose, of word lists, and of
# functions that other scripts use.
QUOTED = SC1003,SC1010,SC2016,SC2041,SC2086,SC2088,SC2317

lint:
	shellcheck .ci/run .ci/step .ci/gotest .ci/deps .ci/packages .ci/install-check testbed/up testbed/down testbed/ctl testbed/demo testbed/*.sh
	shellcheck --shell=sh testdata/pods/*.sh
	shellcheck --shell=sh --exclude=$(QUOTED) testdata/scripts/*.sh

install-check:
	.ci/install-check

# The first of the tests keeps a knoc of its own away for seven minutes, while the
# others run.
E2E = .ci/gotest -tags testbed -count=1 -parallel 16 -timeout 30m

test-real:
	$(STEP) 'tests on the testbed' sh -ec '. testbed/run/env; KNOC_E2E_LONG=1 $(E2E) ./testbed/e2e'
	$(STEP) 'against OpenSSH' sh -ec '. testbed/run/env; $(E2E) -run TestOpenSSH .'

# HPC sides of another kind: the other Slurm with a shared home that is as stale as
# NFS, and no accounting.
test-variants:
	for v in '--slurm 26.05 --stale-home' --no-accounting; do \
		testbed/up $$v && . testbed/run/env && $(STEP:@%=%) "basic tests: $$v" $(E2E) -run Basic ./testbed/e2e || exit 1; \
	done
	testbed/up

bench:
	testbed/up
	. testbed/run/env && go run ./testbed/bench

clean:
	rm -rf bin
