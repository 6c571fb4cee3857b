package e2e

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Every command in README, CONTRIBUTING and docs/ is in one of these lists. A command that is in none of them fails
// the test, and so does an entry that no page has any more:
//
//   - those of documentedRun are run, in this order, in a directory that holds the README's tandem.yaml;
//   - of `make` the target must exist, and of `go test` and `go run` the packages and the names in -run and -bench;
//   - those of documentedOnly are not run here, for the given reason.
//
// documentedRun: servers stay up until the test ends, as later commands need them.
var documentedRun = []string{
	"openssl rand -hex 32 > ticket.key && chmod 600 ticket.key",
	"openssl rand -hex 32 > admin.token && chmod 600 admin.token",
	"tandem serve -f tandem.yaml --check",
	"tandem envoy -f tandem.yaml > envoy.yaml",
	"tandem envoy -f tandem.yaml --xds > envoy-xds.yaml",
	"tandem serve -f tandem.yaml",
	"envoy -c envoy.yaml",
	`curl http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' -d '{"model":"MODEL","messages":[{"role":"user","content":"Hello"}],"max_tokens":16}'`,
	`curl http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' -d "{\"model\":\"MODEL\",\"messages\":[{\"role\":\"user\",\"content\":\"$(seq -s ' ' 1 9000)\"}],\"max_tokens\":16}"`,
	`curl --compressed http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' -d '{"model":"MODEL","messages":[{"role":"user","content":"Hello"}],"max_tokens":16}'`,
	`curl http://127.0.0.1:8080/v1/chat/completions -H "authorization: Bearer $(cat engine.key)" -H 'content-type: application/json' -d '{"model":"MODEL","messages":[{"role":"user","content":"Hello"}],"max_tokens":16}'`,
	`curl -H "authorization: Bearer $(cat engine.key)" http://127.0.0.1:8080/v1/models`,
	"curl http://127.0.0.1:8080/v1/models/MODEL",
	"curl http://ENDPOINT/health",
	"curl http://127.0.0.1:9090/readyz",
	"tandem status -f tandem.yaml",
	"tandem status -f tandem.yaml --this-replica",
	"tandem requests -f tandem.yaml",
	"tandem explain -f tandem.yaml --tokens 8000",
	"tandem explain -f tandem.yaml -o json",
	"tandem explain REQUEST_ID -f tandem.yaml",
	"curl http://127.0.0.1:8080/v1/audio/transcriptions -F model=MODEL -F file=@speech.wav",
	"tandem weights chat 10.0.0.1:8000 50 -f tandem.yaml",
	`curl -X POST -H "Authorization: Bearer $(cat admin.token)" 'http://127.0.0.1:9090/api/pools/chat/endpoints/10.0.0.1:8000/drain?timeout=5m'`,
	"tandem drain chat 10.0.0.1:8000 -f tandem.yaml --timeout 5m",
	"tandem resume chat 10.0.0.1:8000 -f tandem.yaml",
	"tandem pause chat -f tandem.yaml",
	"tandem resume chat -f tandem.yaml",
	"tandem record start -f tandem.yaml --for 24h",
	"tandem record status -f tandem.yaml",
	"tandem record stop -f tandem.yaml",
	"tandem envoy -f deploy/envoy-gateway/tandem.yaml --for envoy-gateway | kubectl apply -f -",
}

// documentedShows has the output that pages show for commands.
var documentedShows = map[string]string{
	"tandem requests -f tandem.yaml": `(?s)split +127.*decode_alone \(cheaper than two hops\) +-`,
	// A few milliseconds decide which is cheaper, depending on the time since earlier requests.
	"tandem explain -f tandem.yaml --tokens 8000":                                           `^(Split: \S+ computes the prompt, \S+ answers|Decode alone on \S+): .* cheaper than`,
	"tandem explain REQUEST_ID -f tandem.yaml":                                              `^Request \S+, \S+ ago, (.|\n)*\. *\n(Split: \S+ computes|Decode alone on)`,
	"curl http://127.0.0.1:8080/v1/models/MODEL":                                            `"id": ?"tiny"`,
	"curl http://127.0.0.1:8080/v1/audio/transcriptions -F model=MODEL -F file=@speech.wav": `body_bytes`,
	"tandem status -f tandem.yaml":                                                          `(?s)^Tandem .*ready.*prefill +up`,
}

var documentedOnly = map[string]string{
	"ENVOY_DYNAMIC_MODULES_SEARCH_PATH=/path/to/bin envoy -c envoy.yaml":                     "TestInsideTutorial",
	"curl --retry 30 --retry-all-errors --retry-delay 1 -fs http://127.0.0.1:8080/v1/models": "TestOneMachineTutorial",
	"uvx --from dist/*.whl tandem demo":                                                      "PyPI; TestWheel holds the package together, TestDemo runs the same",
	"tandem run --prefill http://10.0.1.1:8000 --decode http://10.0.2.1:8000":                "TestRun, at other addresses",
	"e2e/vllm/run.sh": "5.5 GiB of vLLM, and minutes",
	"tandem run --prefill http://127.0.0.1:28101 --decode http://127.0.0.1:28201":                   "5.5 GiB of vLLM; TestRun, at other addresses",
	"kubectl create secret generic tandem-ticket --from-literal=ticket.key=$(openssl rand -hex 32)": "make e2e-cluster",
	"kubectl apply -k deploy/kustomize/base":                                                        "make e2e-cluster",
	"docker compose -f deploy/observability/compose.yaml up":                                        "a container engine; go test ./docs holds the file to its schema",
	`vllm serve MODEL --port 8000 --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer","kv_connector_extra_config":{"kv_lease_duration":120}}'`:         "a GPU; make e2e-vllm runs it on CPU",
	"go run ./e2e/bench -shapes json1k,json220k,json400k,sse256 -clients 16 -variant 'inside: inside=/path/to/bin'":                                                              "minutes",
	"e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealLeases -v ./e2e/vllm":                                                                                              "5.5 GiB of vLLM, and minutes",
	"e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealMemory -v ./e2e/vllm":                                                                                              "5.5 GiB of vLLM, and minutes",
	"e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealBoth -v ./e2e/vllm":                                                                                                "5.5 GiB of vLLM, and minutes",
	"e2e/vllm/run.sh go test -tags vllm -count 1 -run 'TestRealMistakes|TestRealBlockSizes' -v ./e2e/vllm":                                                                       "5.5 GiB of vLLM, and minutes",
	"e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealRoles -v ./e2e/vllm":                                                                                               "5.5 GiB of vLLM, and minutes",
	"e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealRanks -v ./e2e/vllm":                                                                                               "5.5 GiB of vLLM, and minutes",
	"tandem envoy -f tandem.yaml --for envoy-gateway --namespace llm --name chat --image REGISTRY/tandem-envoy:VERSION | kubectl apply -f -":                                     "TestModulePagePrints",
	"helm install chat deploy/helm/tandem --namespace llm --create-namespace -f values.yaml":                                                                                     "make e2e-cluster",
	"helm install chat deploy/helm/tandem --namespace llm -f values.yaml --dry-run":                                                                                              "make e2e-cluster",
	"helm upgrade eg oci://docker.io/envoyproxy/gateway-helm --version v1.9.1 -n envoy-gateway-system --reuse-values --set config.envoyGateway.extensionApis.enableBackend=true": "make e2e-cluster",
	"kubectl -n envoy-gateway-system rollout restart deployment envoy-gateway":                                                                                                   "make e2e-cluster",
	"kubectl -n envoy-gateway-system port-forward $(kubectl -n envoy-gateway-system get service -l gateway.envoyproxy.io/owning-gateway-name=chat -o name) 8080:80":              "a cluster",
	"kubectl -n llm delete envoyextensionpolicy chat":                                                                                                                            "make e2e-cluster",
	"helm -n llm uninstall chat": "make e2e-cluster",
	`kubectl -n llm patch gateway NAME --type json -p '[{"op":"remove","path":"/spec/infrastructure/parametersRef"}]'`: "make e2e-cluster",
	"kubectl -n llm delete envoyproxy NAME":                                "make e2e-cluster",
	"tandem requests --admin http://127.0.0.1:9090/llm.chat":               "a cluster",
	"tandem envoy --for envoy-gateway --check --namespace llm --name chat": "TestModulePagePrints, of a file",
	"docker buildx build -f deploy/Dockerfile --target library-alone --build-arg VERSION=$(scripts/version.sh) -t REGISTRY/tandem-library:VERSION --push .":                          "a container engine",
	"kubectl create secret generic tenants --from-literal=team-a=KEY --from-literal=team-b=KEY":                                                                                      "TestEnvoyGatewayTokenLimits writes the Secret",
	"kubectl apply -f deploy/envoy-gateway/extension/limit-tokens.yaml":                                                                                                              "make e2e-gateway",
	"kubectl apply -f deploy/envoy-gateway/extension/policy.yaml":                                                                                                                    "make e2e-cluster",
	"helm upgrade eg oci://docker.io/envoyproxy/gateway-helm --version v1.9.1 -n envoy-gateway-system --reuse-values -f deploy/envoy-gateway/extension/helm-values.yaml":             "make e2e-cluster",
	`curl http://GATEWAY/v1/chat/completions -H 'content-type: application/json' -d "{\"model\":\"MODEL\",\"messages\":[{\"role\":\"user\",\"content\":\"$(seq -s ' ' 1 9000)\"}]}"`: "make e2e-cluster",
	"kubectl get envoypatchpolicy": "a cluster",
	"kubectl -n llm get gateway":   "a cluster",
	"kubectl -n llm get pods":      "a cluster",
	"docker buildx build -f deploy/Dockerfile --platform linux/amd64,linux/arm64 --build-arg VERSION=$(scripts/version.sh) -t REGISTRY/tandem:VERSION --push .": "a container engine",
	"docker buildx build -f deploy/Dockerfile --target inside --build-arg VERSION=$(scripts/version.sh) -t REGISTRY/tandem-envoy:VERSION --push .":              "a container engine",
	"kubectl apply -k": "part of a sentence",
	"kubectl logs":     "part of a sentence",
	"kubectl get hpa":  "a cluster",
	"kubectl apply -f deploy/examples/autoscaling.yaml":                                                                "a cluster; go test ./deploy holds it to its schema",
	"curl -s http://127.0.0.1:9090/metrics | grep '^tandem_engines_wanted'":                                            "a minute of traffic; TestOperationsKnowsAll has its name",
	"kubectl create secret generic tandem-ticket --from-file=ticket.key --dry-run=client -o yaml | kubectl apply -f -": "a cluster",
	`mkdir -p bin && curl -fsSL "$RELEASE/tandem-0.1.0-linux-amd64.tar.gz" | tar -xz --strip-components 1 -C bin`:      "no release is published yet",
	"docker load": "a container engine; TANDEM_OCI=1 go test ./deploy unpacks and runs the archive",
	`curl -si http://127.0.0.1:8080/v1/chat/completions -H "tandem-explain: $(cat admin.token)" -H 'content-type: application/json' -d @request.json | grep -i x-tandem-explain`: "TestSheddingAndExplaining",
	"go test ./replica -run TestMetricsPage -update": "writes to the tree",
	`for i in $(seq 1 300); do curl -s http://127.0.0.1:PORT/v1/chat/completions -H 'content-type: application/json' -d "{\"model\":\"tiny\",\"stream\":true,\"stream_options\":{\"include_usage\":true},\"messages\":[{\"role\":\"user\",\"content\":\"$(seq -s ' ' $i $((i + RANDOM % 6000)))\"}],\"max_tokens\":100}" > answer & sleep .5; done`: "minutes; make truth sends such traffic",
	`tandem replay --recording FOLDER/recordings --advise 4 --html answer.html`:                                           "make truth",
	`tandem profile ENGINE --to profile.json`:                                                                             "make truth",
	`tandem replay --recording FOLDER/recordings --profile profile.json --advise 8`:                                       "make truth",
	`tandem replay --recording recordings --what-if 4+4 --what-if 8 --what-if "8 roles:auto" --what-if "load:2" --needed`: "a recording of a day",
	`tandem replay --recording recordings --advise 8`:                                                                     "a recording of a day",
	"tandem serve -f tandem.yaml --check --live":                                                                          "TestCheckLive",
	"helm install router deploy/helm/tandem --namespace llm --create-namespace -f values.yaml":                            "a cluster",
	"kubectl port-forward deploy/router 9090":                                                                             "a cluster",
	"kubectl get pods -n envoy-gateway-system":                                                                            "a cluster",
	"kubectl -n llm port-forward svc/router-envoy 8080:80":                                                                "a cluster",
	"curl http://127.0.0.1:8080/v1/models":                                                                                "it follows the two before",
	"envoy -c envoy.yaml --disable-hot-restart > envoy.log 2>&1":                                                          "the same is run, with its log in the test's",
	"go test ./cmd/tandem -run TestCommandReference -update":                                                              "writes to the tree",
	"envoy -c envoy-xds.yaml --service-node edge-1 --drain-time-s 3600 --disable-hot-restart":                             "TestXDSChangesUnderLoad",
	"tandem status -f tandem.yaml --watch":                                                                                "runs until Ctrl-C; TestStatusInATerminal",
	"tandem demo --stay":                                                                                                  "waits for Ctrl-C; TestDemoInterrupted",
	"go test . -run TestNotice -update":                                                                                   "writes to the tree",
	"go test ./docs -update":                                                                                              "writes to the tree",
	"go test ./picker -update":                                                                                            "writes to the tree",
	"go test ./extproc/kvtransfer -update":                                                                                "writes to the tree",
}

// pasted are pages all of whose commands run in one bash as they stand, but for those of a cluster: in TestInsideTutorial,
// TestOneMachineTutorial and TestHowTosPasted.
var pasted = map[string]bool{
	"../docs/tutorial/inside-envoy.md": true, "../docs/tutorial/one-machine.md": true, "../docs/howto/rotate-keys.md": true,
	"../docs/howto/upgrade.md": true, "../docs/howto/tls.md": true, "../docs/howto/existing-envoy.md": true,
}

// pastedInCluster is the page all of whose commands TestTutorial of e2e/cluster runs as they stand.
const pastedInCluster = "../docs/tutorial/kubernetes.md"

// makeTargets are targets that pages name, with the reason why they are not run here: they run these tests, or take
// long.
var makeTargets = map[string]string{
	"build": "the tests build the same", "carrier": "minutes; TestInside", "e2e-inside": "minutes", "tools": "brought the Envoy of this test", "test": "runs this test", "race": "runs this test", "truth": "minutes, on an idle machine", "demo": "TestDemo",
	"bench": "minutes", "bench-go": "minutes", "stress": "minutes", "page": "needs Chromium", "attack": "minutes", "bench-peers": "minutes, and PyPI", "bench-long": "minutes, and gigabytes", "before-after": "45 minutes, and PyPI", "replay": "minutes", "load": "minutes", "capacity": "minutes", "soak": "20 minutes", "speed": "minutes, and an idle machine", "idle": "minutes",
	"fuzz": "minutes", "lint": "minutes, the first time", "generate": "writes to the tree", "workflows": "part of make lint", "sizes": "a report, in CI", "site": "minutes, and PyPI", "release": "go test ./deploy builds the same", "wheel": "TestWheel in ./deploy", "observability": "a module of its own; in CI",
	"e2e-envoys":   "minutes, and PyPI",
	"deploy-check": "minutes, the first time", "e2e-gateway": "root, and 3 GB", "e2e-vllm": "5.5 GiB", "e2e-vllm-pairs": "5.5 GiB", "e2e-vllm-stores": "5.5 GiB", "e2e-sglang": "6.7 GiB", "e2e-oracles": "7 GiB", "e2e-releases": "7 GiB", "e2e-kube": "minutes, and 10 GB of builds", "e2e-cluster": "root, and 10 GB of builds", "e2e-failures": "minutes",
	"e2e-foreign": "minutes, and GitHub",
}

// documentedCommand begins with a program that pages run, or with variables for it.
var documentedCommand = regexp.MustCompile(`^(?:[A-Z_0-9]+=\S+ )*(make|go|curl|kubectl|docker|openssl|vllm|helm|uvx|pip|promtool|redis-server|for \w+ in|mkdir|mv|cat|diff|until|\(umask|[A-Z]+=\$\(\S+|(?:bin/)?tandem|(?:bin/)?enginesim|(?:\.tools/bin/)?envoy|e2e/vllm/run\.sh) `)

// documented returns the commands of a page: the indented blocks, and parts of running text that begin with a program
// that is always a command.
func documented(t *testing.T, page string) (out []string) {
	t.Helper()
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	joined := strings.ReplaceAll(string(text), " \\\n", " ") // a continued line
	joined = regexp.MustCompile("(?s)\n *```(?:sh|bash)\n(.*?)\n *```").ReplaceAllStringFunc(joined, func(block string) string {
		block = block[strings.Index(block, "```")+3 : strings.LastIndex(block, "\n")]
		return strings.ReplaceAll(block, "\n", "\n    ") // as an indented block
	})
	fenced := regexp.MustCompile("(?s)```.*?```").ReplaceAllString(joined, "")
	var lines []string
	for line := range strings.Lines(fenced) {
		if command, ok := strings.CutPrefix(line, "    "); ok {
			lines = append(lines, strings.Split(strings.TrimPrefix(command, "$ "), " && make ")...)
		}
	}
	for _, m := range regexp.MustCompile("`((?:[A-Z_0-9]+=\\S+ )*(?:make|go|openssl|kubectl|docker|curl|bin/tandem) [^`]+)`").FindAllStringSubmatch(fenced, -1) {
		lines = append(lines, m[1])
	}
	for _, line := range lines {
		line, _, _ = strings.Cut(strings.TrimSpace(line), "  #")
		line = strings.TrimSuffix(strings.Join(strings.Fields(line), " "), " &")
		line = strings.ReplaceAll(line, `\|`, "|") // in a table
		if !documentedCommand.MatchString(line + " ") {
			continue
		}
		line = strings.TrimPrefix(strings.TrimPrefix(line, "bin/"), ".tools/bin/")
		if strings.Contains(line, "e2e/vllm/run.sh") || strings.Contains(line, "vllm serve") {
			line = regexp.MustCompile(`^(?:[A-Z_0-9]+=\S+ )*`).ReplaceAllString(line, "")
		}
		out = append(out, line)
	}
	return out
}

// documentedPages returns all pages that may have commands.
func documentedPages(t *testing.T) []string {
	t.Helper()
	pages := []string{"../README.md", "../CONTRIBUTING.md"}
	for _, pattern := range []string{"../docs/*.md", "../docs/*/*.md"} {
		more, err := filepath.Glob(pattern)
		require.NoError(t, err)
		pages = append(pages, more...)
	}
	return pages
}

func TestDocumentedCommands(t *testing.T) {
	t.Parallel()
	found := map[string]string{}
	for _, page := range documentedPages(t) {
		for _, command := range documented(t, page) {
			ofCluster, makes := regexp.MustCompile(`^(kubectl|helm) `).MatchString(command), strings.HasPrefix(command, "make ")
			if pasted[page] && !ofCluster && !makes || page == pastedInCluster && !makes {
				continue
			}
			found[command] = page
		}
	}
	require.Greater(t, len(found), 40, "commands are not found any more")
	targets := map[string]bool{}
	for command, page := range found {
		_, elsewhere := documentedOnly[command]
		program := regexp.MustCompile(`^(?:[A-Z_0-9]+=\S+ )*(\S+) ?(.*)`).FindStringSubmatch(command)
		switch {
		case elsewhere || slices.Contains(documentedRun, command):
		case program[1] == "make":
			makes, _, _ := strings.Cut(program[2], " && ")
			for target := range strings.FieldsSeq(makes) {
				if strings.Contains(target, "=") {
					continue // a variable
				}
				targets[target] = true
				if makeTargets[target] == "" {
					t.Errorf("%s: `%s`: add the target to makeTargets with the reason why it is not run here", page, command)
				}
			}
		case program[1] == "go":
			checkGo(t, page, program[2])
		default:
			t.Errorf("%s: `%s` is run by no test: add it to documentedRun, or to documentedOnly with the reason", page, command)
		}
	}
	makefile, err := os.ReadFile("../Makefile")
	require.NoError(t, err)
	for _, target := range slices.Sorted(maps.Keys(makeTargets)) {
		require.True(t, targets[target], "no page has `make %s` any more", target)
		require.Regexp(t, `(?m)^`+target+`:`, string(makefile))
		t.Logf("not run here: make %s (%s)", target, makeTargets[target])
	}
	for _, command := range slices.Sorted(maps.Keys(documentedOnly)) {
		require.Contains(t, found, command, "no page has it any more")
		t.Logf("not run here: %s (%s)", command, documentedOnly[command])
	}
	for _, command := range documentedRun {
		require.Contains(t, found, command, "no page has it any more")
	}
	checkInline(t)
	runDocumented(t)
}

// The page on the module of Envoy Gateway, taken at its word: its values' configuration, its command without Helm and its
// Services are a whole for its check.
func TestModulePagePrints(t *testing.T) {
	t.Parallel()
	const page = "../docs/howto/envoy-gateway-module.md"
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	bin, err := binaries()
	require.NoError(t, err)
	dir := t.TempDir()
	write := func(name, pattern, prefix string) {
		found := regexp.MustCompile(pattern).FindStringSubmatch(string(text))
		require.NotNil(t, found, pattern)
		shown := regexp.MustCompile(`(?m)^ {7}`).ReplaceAllString(found[1], "")
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(prefix+shown), 0o600))
	}
	write("services.yaml", `(?m)^( +apiVersion: v1\n(?: +.*\n)+)`, "---\n")
	envoy := regexp.MustCompile("`(envoy: {run: inside.*?})`").FindStringSubmatch(string(text))
	require.NotNil(t, envoy)
	write("tandem.yaml", `(?m)^ +config:\n((?: {9}.*\n)+)`, "  "+envoy[1]+"\n")
	commands := strings.Join(documented(t, page), "\n")
	printed := regexp.MustCompile(`(?m)^(tandem envoy -f .*) \| kubectl apply`).FindStringSubmatch(commands)
	check := regexp.MustCompile(`(?m)^tandem envoy .*--check.*`).FindString(commands)
	require.NotNil(t, printed)
	run := exec.Command("/bin/bash", "-c", "set -o pipefail; "+printed[1]+" > printed.yaml; cat printed.yaml services.yaml | "+check+" --resources -")
	run.Dir, run.Env = dir, append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	out, err := run.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, "EnvoyExtensionPolicy llm/chat: nothing is missing\n", string(out))
	resources, err := os.ReadFile(filepath.Join(dir, "printed.yaml"))
	require.NoError(t, err)
	require.Contains(t, string(resources), "protocol: HTTP, port: 80}", "as the page's curl has it")
}

// checkInline holds commands of Tandem within running text to what there is: each command, and each of its flags.
func checkInline(t *testing.T) {
	t.Helper()
	bin, err := binaries()
	require.NoError(t, err)
	spans := []string{"decide", "encode", "prefill", "hand", "decode", "replan", "answer"} // names of spans begin so
	help := map[string]string{}
	n := 0
	for _, page := range documentedPages(t) {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		if strings.Contains(page, "/adr/") || strings.HasSuffix(page, "CHANGELOG.md") {
			continue // they tell of their time
		}
		for _, m := range regexp.MustCompile("`(?:bin/)?tandem ([a-z]+)( [^`]*)?`").FindAllStringSubmatch(string(text), -1) {
			if slices.Contains(spans, m[1]) {
				continue
			}
			if help[m[1]] == "" {
				out, err := exec.Command(filepath.Join(bin, "tandem"), m[1], "--help").CombinedOutput()
				require.NoError(t, err, "%s: %s\n%s", page, m[0], out)
				help[m[1]] = string(out)
			}
			for _, flag := range regexp.MustCompile(`(?:^| )(--[a-z][a-z-]*)`).FindAllStringSubmatch(m[2], -1) {
				require.Contains(t, help[m[1]], flag[1]+" ", "%s: %s", page, m[0])
			}
			n++
		}
	}
	require.Greater(t, n, 40, "commands are not found any more")
}

// checkGo holds a go command to what there is: packages, tests, benchmarks. `make test` and `make bench` run them.
func checkGo(t *testing.T, page, args string) {
	t.Helper()
	words := regexp.MustCompile(`'[^']*'|\S+`).FindAllString(args, -1)
	var functions []string
	for _, w := range words {
		if !strings.HasPrefix(w, "./") {
			continue
		}
		dir, all := strings.CutSuffix(filepath.Join("..", w), "/...")
		err := filepath.WalkDir(dir, func(file string, entry os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if entry.IsDir() && file != dir && !all {
				return filepath.SkipDir
			}
			if strings.HasSuffix(file, "_test.go") {
				functions = append(functions, functionsOf(t, file)...)
			}
			return nil
		})
		require.NoError(t, err, "%s: go %s", page, args)
	}
	for i, w := range words[:len(words)-1] {
		if w != "-run" && w != "-bench" {
			continue
		}
		pattern := strings.Trim(words[i+1], "'")
		if pattern == "^$" {
			continue
		}
		for alternative := range strings.SplitSeq(pattern, "|") {
			name, _, _ := strings.Cut(alternative, "/") // a case of a test
			named := regexp.MustCompile(name)
			if !slices.ContainsFunc(functions, named.MatchString) {
				t.Errorf("%s: go %s: nothing is called %s", page, args, alternative)
			}
		}
	}
}

func functionsOf(t *testing.T, file string) (names []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, m := range regexp.MustCompile(`(?m)^func (\w+)\(`).FindAllStringSubmatch(string(text), -1) {
		names = append(names, m[1])
	}
	return names
}

// runDocumented takes the README at its word: its configuration, with the addresses of simulators, and the commands in turn.
func runDocumented(t *testing.T) {
	t.Helper()
	envoy := tool(t, "ENVOY", "envoy", ".tools/bin/envoy")
	bin, err := binaries()
	require.NoError(t, err)
	dir, f := t.TempDir(), &fleet{t: t}
	for from, to := range map[string]string{filepath.Join(bin, "tandem"): "tandem", envoy: "envoy"} {
		require.NoError(t, os.Symlink(from, filepath.Join(dir, to)))
	}
	deploy, err := filepath.Abs("../deploy")
	require.NoError(t, err)
	require.NoError(t, os.Symlink(deploy, filepath.Join(dir, "deploy")))

	readme, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	config := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindStringSubmatch(string(readme))[1]
	free := ports(t, 13)
	listen, admin := free[0], free[1]
	config = strings.Replace(config, "envoy: {listen: 0.0.0.0:8080}", fmt.Sprintf("envoy: {listen: %q, admin: %q}", listen, free[2]), 1)
	require.Contains(t, config, listen)
	var prefill string
	for i, role := range []string{"prefill", "prefill", "decode", "decode"} {
		addr := free[5+2*i]
		shown := regexp.MustCompile(`address: (10\.0\.\d\.\d:8000), role: ` + role).FindStringSubmatch(config)
		require.NotNil(t, shown, "the README's engines")
		config = strings.Replace(config, shown[1], addr, 1)
		p := startProcess(t, dir, fmt.Sprint("engine-", i), filepath.Join(bin, "enginesim"), "--listen", addr, "--side-channel", free[6+2*i], "--role", role, "--model", "tiny", "--prefill-speed", "20000", "--decode-step", "20ms")
		f.waitFor(p, "http://"+addr+"/health")
		if role == "prefill" {
			prefill = addr
		}
	}
	config += fmt.Sprintf("extProc: {listen: %q}\nreplan: {listen: %q}\nadmin: {listen: %q, tokenFile: %q}\ntickets: {keyFile: %q}\n",
		free[3], free[4], admin, filepath.Join(dir, "admin.token"), filepath.Join(dir, "ticket.key"))
	config = strings.Replace(config, "- name: chat\n", "- name: chat\n  apiKeyFile: "+filepath.Join(dir, "engine.key")+"\n", 1)
	require.Contains(t, config, "apiKeyFile", "as docs/howto/everyday-clients.md has it")
	for file, text := range map[string]string{"engine.key": "s3cret\n", "speech.wav": "RIFF"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600))
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "tandem.yaml"), []byte(config), 0o600))

	here := strings.NewReplacer("127.0.0.1:8080", listen, "127.0.0.1:9090", admin, "10.0.0.1:8000", prefill, "ENDPOINT", prefill, "MODEL", "tiny",
		"REQUEST_ID", "$(curl -s http://"+admin+"/debug/requests?n=1 | grep -m1 request_id | cut -d'\"' -f4)",
		" | kubectl apply -f -", " > resources.yaml", "curl ", "curl -sS --fail-with-body ")
	shell := func(command string) (path string, args []string) {
		return "/bin/bash", []string{"-c", "cd " + dir + " && PATH=" + dir + ":$PATH && " + command}
	}
	for _, command := range documentedRun {
		path, args := shell(here.Replace(command))
		switch command {
		case "tandem serve -f tandem.yaml":
			args[1] = strings.Replace(args[1], "&& tandem", "&& exec tandem", 1)
			f.waitFor(startProcess(t, dir, "tandem", path, args...), "http://"+admin+"/readyz")
		case "envoy -c envoy.yaml":
			args[1] = strings.Replace(args[1], "&& envoy", "&& exec envoy --use-dynamic-base-id", 1) // other tests run Envoys too
			f.waitFor(startProcess(t, dir, "envoy", path, args...), "http://"+free[2]+"/ready")
			require.Eventually(t, func() bool { return f.answers("http://" + listen + "/v1/models") }, patience, 20*time.Millisecond, "Envoy asks Tandem for readiness")
		default:
			cmd := exec.Command(path, args...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s\n%s", command, out)
			t.Logf("%s\n%.300s", command, out)
			if shown, ok := documentedShows[command]; ok {
				require.Regexp(t, shown, string(out), command)
			}
		}
	}
	shownMistakes(t, bin, dir)
}

// answers reports whether there is a 200.
func (f *fleet) answers(url string) bool {
	resp, err := client.Get(url)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	return resp.StatusCode == 200
}

// shownMistakes holds the mistakes that configuration.md shows to what the program says of such a file.
func shownMistakes(t *testing.T, bin, dir string) {
	t.Helper()
	page, err := os.ReadFile("../docs/configuration.md")
	require.NoError(t, err)
	_, shown, ok := strings.Cut(string(page), "    $ tandem serve -f tandem.yaml --check\n")
	require.True(t, ok)
	shown, _, _ = strings.Cut(shown, "\n\n")
	wrong := `pools: [{name: chat, kvTransfer: nixl, split: allways, endpoints: [{address: "10.0.0.1:8000", role: prefil}]}]`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "tandem.yaml"), []byte(wrong), 0o600))
	cmd := exec.Command(filepath.Join(bin, "tandem"), "serve", "-f", "tandem.yaml", "--check")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Equal(t, regexp.MustCompile(`(?m)^    `).ReplaceAllString(shown, ""), strings.TrimSpace(string(out)))
}
