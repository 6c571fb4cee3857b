// Package tandem_test holds what no single package can: which package may know which, and that each says what it is.
package tandem_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
)

const module = "tandem"

// arrows is what each package may import of ours: what writes state lives under kvstate, what reads it stands above, and
// nothing points back. What only tests import is marked. A new package needs a row, and what nobody imports is taken out.
var arrows = map[string][]string{
	"kvstate":               {"internal/periodic", "kvstate/prefixindex", "kvstate/receivebuffer", "kvstate/kvroom", "kvstate/kvloads", "kvstate/standstill", "kvstate/fleetclock", "kvstate/paramstore", "kvstate/inferencepolicy", "kvstate/lengths", "kvstate/speed"},
	"envoy-configs/inside":  {},
	"envoy-configs/lua":     {},
	"envoy-configs/logwhen": {},
	"envoy-configs/match":   {},
	"envoy-configs/usage":   {},
	"extproc/names":         {},
	"extproc/ended":         {"extproc/names"},
	// The life of a request: it knows neither gRPC nor Envoy's messages.
	"extproc/journey":                 {"extproc/ended", "extproc/kvtransfer", "extproc/telemetry", "extproc/usage", "kvstate"},
	"extproc/usage":                   {"extproc/ended", "extproc/kvtransfer", "internal/ledger"},
	"extproc/usage/reader":            {"extproc/ended", "extproc/names (test)", "extproc/usage/reader/readertest (test)"},
	"extproc/usage/reader/readertest": {},
	"internal/ledger":                 {},
	"extproc/faults":                  {"extproc/ended", "extproc/kvtransfer", "extproc/plan", "extproc/telemetry", "kvstate"},
	"extproc/replan": {
		"extproc/concurrent", "extproc/ended", "extproc/names", "extproc/faults", "extproc/kvtransfer", "extproc/openai",
		"extproc/pass", "extproc/plan", "extproc/reclaim",
	},
	"internal/enginesim/web":   {},
	"kvstate/engineclock":      {"internal/zmtp"},
	"kvstate/kvloads":          {},
	"kvstate/kvroom":           {},
	"kvstate/lengths":          {},
	"kvstate/speed":            {},
	"kvstate/standstill":       {},
	"kvstate/fleetclock":       {},
	"envoy-configs/cors":       {"protos/config/v1"},
	"envoy-configs/layout":     {},
	"extproc/models":           {"kvstate"},
	"internal/enginesim/front": {},
	"kvstate/paramstore":       {},
	"internal/assign":          {"internal/guard", "kvstate", "kvstate/redisstore", "picker", "picker/roles", "e2e/redisserver (test)", "extproc"},
	"picker/roles":             {"kvstate", "picker"},
	"replay/engine":            {"kvstate", "picker"},
	"kvstate/inferencepolicy":  {},
	"internal/config/diff":     {"internal/config", "protos/config/v1"},
	"internal/hostcheck":       {"protos/config/v1"},
	"kvstate/prefixindex":      {},
	"kvstate/receivebuffer":    {},
	"kvstate/enginehttp":       {"kvstate"},
	"kvstate/discovery":        {"internal/guard", "internal/periodic", "kvstate", "kvstate/enginehttp", "kvstate/inferencepolicy"},
	"kvstate/kvevents": {
		"internal/guard", "internal/zmtp", "kvstate", "kvstate/prefixindex", "kvstate/redisstore (test)",
		"e2e/loopback (test)", "e2e/redisserver (test)",
	},
	"kvstate/registrations": {"internal/periodic", "internal/zmtp"},
	"kvstate/redisstore": {
		"internal/guard", "kvstate", "kvstate/prefixindex", "kvstate/redisstore/decode", "kvstate/redisstore/lag",
		"kvstate/redisstore/redisclient", "kvstate/redisstore/roster", "protos/state/v1", "e2e/loopback (test)",
		"e2e/redisserver (test)", "kvstate/fleetclock", "kvstate/paramstore (test)",
	},
	"kvstate/redisstore/decode":      {"protos/state/v1"},
	"kvstate/redisstore/lag":         {},
	"kvstate/redisstore/redisclient": {},
	"kvstate/scrape":                 {"internal/guard", "kvstate", "kvstate/enginehttp"},
	"internal/logwriter":             {},
	"internal/zmtp":                  {"internal/guard"},
	"kvstate/notices":                {"internal/periodic", "internal/zmtp"},
	"kvstate/tokenize":               {"internal/guard", "kvstate", "kvstate/enginehttp"},
	"kvstate/redisstore/roster":      {"protos/state/v1"},
	"kvstate/operator": {
		"internal/guard", "kvstate", "kvstate/redisstore", "kvstate/redisstore/roster", "e2e/redisserver (test)",
	},
	"kvstate/membership": {
		"internal/guard", "kvstate/redisstore", "kvstate/redisstore/roster", "kvstate (test)",
		"protos/state/v1 (test)", "e2e/redisserver (test)",
	},
	"picker":                     {"kvstate"},
	"picker/admission":           {"kvstate", "picker"},
	"replay":                     {"kvstate", "picker", "picker/admission", "replay/engine", "replay/traces", "picker/roles"},
	"replay/traces":              {"replay/engine"},
	"replay/report":              {"replay"},
	"extproc/openai":             {},
	"extproc/telemetry":          {"extproc/ended", "extproc/names", "extproc/kvtransfer", "extproc/openai", "extproc/usage", "kvstate", "picker"},
	"extproc/envoywire":          {"extproc/ended", "extproc/names", "extproc/openai", "extproc/envoywire/wiretest (test)"},
	"extproc/envoywire/wiretest": {},
	"extproc/kvtransfer/packed":  {},
	"extproc/kvtransfer":         {"extproc/kvtransfer/packed", "extproc/openai", "internal/guard", "kvstate", "kvstate/enginehttp", "protos/ticket/v1 (test)", "kvstate/standstill"},
	"extproc/plan":               {"extproc/kvtransfer", "extproc/openai", "kvstate", "kvstate/inferencepolicy (test)", "kvstate/prefixindex", "picker"},
	"extproc/reclaim":            {"extproc/ended", "extproc/kvtransfer", "internal/guard", "kvstate", "kvstate/enginehttp", "picker"},
	"extproc/latebinding": {
		"extproc/plan", "internal/guard", "kvstate", "picker", "picker/admission", "extproc/kvtransfer (test)",
		"extproc/openai (test)",
	},
	"extproc/answer":         {"extproc/kvtransfer", "extproc/openai"},
	"extproc/migration":      {"extproc/openai"},
	"extproc/concurrent":     {"extproc/names", "extproc/envoywire", "extproc/kvtransfer", "extproc/openai", "extproc/plan"},
	"extproc/endpointpicker": {"extproc/envoywire", "extproc/openai", "extproc/plan"},
	"extproc/paths":          {},
	// One pass of a request: it knows neither gRPC nor Envoy's messages.
	"extproc/pass": {
		"extproc/answer", "extproc/concurrent", "extproc/faults", "extproc/kvtransfer", "extproc/latebinding",
		"extproc/migration",
		"extproc/models", "extproc/openai", "extproc/paths", "extproc/plan", "extproc/reclaim", "extproc/telemetry",
		"internal/guard", "kvstate", "kvstate/enginehttp", "kvstate/prefixindex", "kvstate/standstill", "picker",
	},
	"extproc": {
		"extproc/answer", "extproc/concurrent", "extproc/ended", "extproc/journey", "extproc/names", "extproc/endpointpicker", "extproc/latebinding", "extproc/paths",
		"extproc/pass", "extproc/plan", "extproc/reclaim", "extproc/telemetry", "internal/guard", "extproc/envoywire",
		"extproc/openai", "extproc/kvtransfer", "kvstate", "picker (test)", "internal/memory",
		"extproc/envoywire/wiretest (test)", "extproc/replan", "extproc/faults", "extproc/usage", "extproc/models", "kvstate/inferencepolicy (test)", "kvstate/prefixindex (test)",
	},
	"protos/config/v1": {},
	"internal/config": {
		"kvstate/standstill",
		"extproc", "extproc/endpointpicker", "extproc/latebinding", "extproc/migration", "extproc/pass", "extproc/paths",
		"extproc/kvtransfer",
		"extproc/plan", "kvstate", "kvstate/discovery", "kvstate/kvevents", "kvstate/redisstore", "picker",
		"protos/config/v1", "picker/admission (test)", "kvstate/engineclock",
	},
	"protos/state/v1":        {},
	"protos/ticket/v1":       {},
	"protos/envoygateway/v1": {},
	"envoy-configs": {"internal/config", "protos/config/v1", "e2e/loopback (test)", "envoy-configs/inside", "envoy-configs/lua", "envoy-configs/layout", "envoy-configs/cors", "envoy-configs/logwhen",
		"envoy-configs/match", "envoy-configs/usage", "extproc/names", "extproc/usage/reader/readertest (test)",
	},
	"cmd/tandem": {
		"envoy-configs", "extproc/kvtransfer", "extproc/telemetry", "internal/config", "internal/livecheck",
		"internal/logwriter", "internal/orders", "internal/replica", "internal/version", "kvstate/enginehttp",
		"picker", "picker/admission", "picker/roles", "protos/config/v1", "replay", "replay/report", "replay/traces", "status", "status/words",
		"e2e/loopback (test)",
	},
	// One running replica: all parts, wired.
	"internal/replica": {
		"docs", "envoy-configs", "extproc", "extproc/kvtransfer", "extproc/pass", "extproc/telemetry",
		"internal/assign", "internal/certificates", "internal/config", "internal/config/diff",
		"internal/fleetmetrics", "internal/gatewayextension", "internal/grpcserver", "internal/guard",
		"internal/hostcheck", "internal/livecheck", "internal/memory", "internal/orders", "internal/xds",
		"kvstate", "kvstate/discovery", "kvstate/kvevents", "kvstate/membership", "kvstate/notices",
		"kvstate/operator", "kvstate/redisstore", "kvstate/registrations", "kvstate/scrape", "kvstate/tokenize",
		"extproc/usage", "protos/config/v1", "status", "status/words",
	},
	// Tandem inside Envoy: the library, which alone knows C, and a request in it.
	"carrier":        {"carrier/filter", "internal/replica", "internal/version"},
	"carrier/tokens": {"extproc/ended", "extproc/names", "extproc/openai", "extproc/usage/reader"},
	"carrier/filter": {
		"extproc/answer", "extproc/concurrent", "extproc/ended", "extproc/journey", "extproc/names", "extproc/faults", "extproc/kvtransfer",
		"extproc/latebinding", "extproc/migration", "extproc/models", "extproc/openai", "extproc/pass", "extproc/paths",
		"extproc/plan", "extproc/reclaim", "extproc/telemetry", "internal/guard", "internal/memory", "internal/periodic",
		"carrier/tokens", "kvstate", "extproc (test)", "extproc/usage (test)",
	},
	// The engines of the tests: what they shared with the product they could not catch.
	"cmd/enginesim": {
		"internal/enginesim/api", "internal/enginesim/connector", "internal/enginesim/engine",
		"internal/enginesim/fault", "internal/enginesim/handover", "internal/version",
		"internal/enginesim/jsontext (test)",
		"kvstate/engineclock (test)",
	},
	"internal/enginesim/api": {
		"internal/enginesim/connector", "internal/enginesim/engine", "internal/enginesim/fault",
		"internal/enginesim/jsontext", "internal/enginesim/request", "internal/enginesim/web", "internal/enginesim/front",
	},
	"internal/enginesim/request": {
		"internal/enginesim/connector", "internal/enginesim/engine", "internal/enginesim/jsontext",
	},
	"internal/enginesim/connector": {
		"internal/enginesim/engine", "internal/enginesim/fault", "internal/enginesim/handover",
		"internal/enginesim/jsontext", "internal/enginesim/pdbuffer",
	},
	"internal/enginesim/handover": {"internal/enginesim/engine"},
	"internal/enginesim/pdbuffer": {"internal/enginesim/engine"},
	"internal/enginesim/engine":   {"internal/enginesim/jsontext"},
	"internal/enginesim/jsontext": {},
	"internal/enginesim/fault":    {},
	"e2e":                         {"e2e/loopback (test)"}, // black box
	"e2e/bench": {
		"e2e/bench/capacity", "e2e/bench/http1", "e2e/bench/ledger", "e2e/loopback", "e2e/process",
	},
	"e2e/bench/http1":             {},
	"e2e/bench/capacity":          {},
	"e2e/bench/ledger":            {"e2e/process"},
	"e2e/loopback":                {}, // for tests
	"e2e/process":                 {"e2e/loopback"},
	"e2e/redisserver":             {"e2e/loopback"}, // for tests
	"e2e/realengines":             {"e2e/loopback"}, // for tests
	"e2e/vllm":                    {"e2e/realengines (test)"},
	"e2e/sglang":                  {"e2e/realengines (test)"},
	"e2e/cluster":                 {},
	"e2e/foreign":                 {"e2e/loopback (test)", "e2e/realengines (test)"},
	"status":                      {"status/words", "extproc/telemetry", "extproc/pass", "kvstate", "kvstate/operator", "picker", "picker/roles", "kvstate/fleetclock", "status/written"},
	"status/words":                {"extproc/usage"},
	"status/written":              {"kvstate"},
	"deploy/observability/promql": {}, // a module of its own: Prometheus' parsers
	"deploy":                      {"envoy-configs (test)", "internal/config (test)", "e2e/loopback (test)"},
	"docs":                        {"internal/config (test)", "protos/config/v1 (test)"},
	"internal/grpcserver":         {"internal/memory"}, // knows gRPC, not Envoy
	"internal/livecheck": {
		"status/words",
		"extproc/kvtransfer", "internal/config", "kvstate", "kvstate/enginehttp", "protos/config/v1",
		"e2e/loopback (test)",
	},
	"internal/orders":       {"status/words", "kvstate", "kvstate/operator", "internal/config/diff"},
	"internal/memory":       {"internal/periodic"},
	"internal/periodic":     {},
	"internal/version":      {},
	"internal/guard":        {},
	"internal/budget":       {},                            // for the tests of all
	".":                     {"extproc/kvtransfer (test)"}, // the names of the dialects
	"internal/certificates": {"protos/config/v1"},
	"internal/fleetmetrics": {
		"kvstate", "kvstate/kvevents", "kvstate/notices", "kvstate/redisstore", "kvstate/redisstore/lag",
		"kvstate/scrape", "kvstate/prefixindex (test)", "picker/roles",
	},
	// Envoy's configuration, served.
	"internal/gatewayextension": {
		"envoy-configs", "extproc/names", "internal/guard", "protos/config/v1", "protos/envoygateway/v1",
		"internal/config (test)",
	},
	"internal/xds": {"envoy-configs", "internal/config (test)", "protos/config/v1 (test)", "e2e/loopback (test)"},
}

// guarded are modules that only some packages may see, tests included.
var guarded = map[string][]string{
	"github.com/envoyproxy/": {
		"internal/xds", "internal/gatewayextension", "extproc (test)", "extproc/envoywire (test)",
		"extproc/envoywire/wiretest", "envoy-configs", "envoy-configs/inside", "envoy-configs/usage", "envoy-configs/logwhen",
	},
	"k8s.io/": {
		"kvstate/discovery", "deploy (test)",
	},
	"go.opentelemetry.io/": {
		"extproc", "extproc/telemetry", "internal/replica", "e2e (test)",
	},
	"google.golang.org/grpc": {
		"internal/xds", "internal/gatewayextension", "extproc/telemetry", "extproc", "extproc/envoywire",
		"internal/grpcserver", "e2e (test)", "envoy-configs (test)",
	},
	"github.com/prometheus/": {
		"internal/xds", "internal/gatewayextension", "extproc (test)", "extproc/telemetry", "internal/replica",
		"internal/fleetmetrics", "internal/enginesim/api", "internal/enginesim/connector",
		"internal/enginesim/engine", "deploy/observability/promql (test)", "extproc/usage", "carrier/filter (test)",
	},
	"github.com/redis/": {
		"kvstate/redisstore", "kvstate/redisstore/redisclient", "kvstate/operator", "kvstate/membership (test)",
	},
	"github.com/go-zeromq/": {
		"kvstate/kvevents (test)", "kvstate/registrations (test)", "internal/zmtp (test)", "kvstate/notices (test)",
		"internal/enginesim/handover", "internal/enginesim/connector", "internal/enginesim/engine",
		"cmd/enginesim (test)", "kvstate/engineclock (test)",
	},
	"sigs.k8s.io/": {
		"internal/config", "kvstate/discovery", "envoy-configs (test)", "internal/gatewayextension (test)",
		"deploy (test)", "docs (test)",
	},
	"google.golang.org/protobuf": {
		"internal/xds (test)", "internal/gatewayextension", "protos/envoygateway/v1", "internal/replica",
		"internal/config", "internal/config/diff", "kvstate/membership (test)", "kvstate/redisstore", "kvstate/redisstore/decode",
		"protos/state/v1", "extproc (test)", "extproc/envoywire (test)", "extproc/envoywire/wiretest",
		"extproc/kvtransfer", "protos/config/v1", "protos/ticket/v1", "envoy-configs", "envoy-configs/inside", "envoy-configs/layout", "docs (test)",
	},
}

// pure is all that the decision may need of the world: no clock, no lock, no I/O, no chance of its own.
var pure = []string{"cmp", "errors", "fmt", "io", "math", "math/bits", "slices", "sort", "strings"}

// vague are names that say nothing about what a package is for.
var vague = []string{"util", "utils", "common", "base", "helper", "helpers", "manager", "misc", "impl"}

// source is one Go file of ours.
type source struct {
	dir, file string
	test      bool
	generated bool
	ast       *ast.File
}

func (s source) imports() []string {
	var out []string
	for _, i := range s.ast.Imports {
		p, _ := strconv.Unquote(i.Path.Value)
		out = append(out, p)
	}
	return out
}

// sources are all Go files below the root, whatever their build tags.
func sources(t *testing.T) []source {
	t.Helper()
	out, err := parsed()
	require.NoError(t, err)
	require.NotEmpty(t, out)
	return out
}

// parsed parses all files, once for all tests.
var parsed = sync.OnceValues(func() (out []source, err error) {
	err = filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() && p != "." && (strings.HasPrefix(name, ".") || name == "testdata" || name == "shared" || name == "bin") {
			return filepath.SkipDir
		}
		if d.IsDir() || path.Ext(name) != ".go" {
			return nil
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), p, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		out = append(out, source{
			dir: filepath.ToSlash(filepath.Dir(p)), file: filepath.ToSlash(p),
			test: strings.HasSuffix(name, "_test.go"), generated: ast.IsGenerated(f), ast: f,
		})
		return nil
	})
	return out, err
})

func TestArrowsGoOneWay(t *testing.T) {
	used := map[string]bool{}
	for _, s := range sources(t) {
		allowed, known := arrows[s.dir]
		if !known {
			t.Errorf("%s: the package has no row in arrows: say what it may import", s.dir)
		}
		for _, p := range s.imports() {
			ours, ok := strings.CutPrefix(p, module+"/")
			if !ok || (s.test && (ours == s.dir || ours == "internal/budget")) {
				continue
			}
			as, found := permission(allowed, ours, s.test)
			if !found {
				t.Errorf("%s imports %s", s.file, p)
			}
			if !s.test || as != ours {
				used[s.dir+" -> "+as] = true
			}
		}
	}
	for dir, allowed := range arrows {
		for _, to := range allowed {
			if !used[dir+" -> "+to] {
				t.Errorf("%s: nothing imports %q any more; if tests do, mark it (test)", dir, to)
			}
		}
	}
}

// permission returns the entry of allowed by which a file may have name: name itself, or for tests "name (test)".
func permission(allowed []string, name string, test bool) (as string, found bool) {
	if slices.Contains(allowed, name) {
		return name, true
	}
	return name + " (test)", test && slices.Contains(allowed, name+" (test)")
}

func TestGuardedModulesStayWhereTheyBelong(t *testing.T) {
	used := map[string]bool{}
	for _, s := range sources(t) {
		for _, p := range s.imports() {
			for prefix, dirs := range guarded {
				if !strings.HasPrefix(p, prefix) {
					continue
				}
				as, found := permission(dirs, s.dir, s.test)
				if !found {
					t.Errorf("%s imports %s, which only %v may", s.file, p, dirs)
				}
				if !s.test || as != s.dir {
					used[prefix+" in "+as] = true
				}
			}
		}
	}
	for prefix, dirs := range guarded {
		for _, dir := range dirs {
			if !used[prefix+" in "+dir] {
				t.Errorf("%q: %q does not import it any more; if its tests do, mark it", prefix, dir)
			}
		}
	}
}

func TestTheDecisionIsPure(t *testing.T) {
	for _, s := range sources(t) {
		if s.dir != "picker" && s.dir != "picker/admission" || s.test {
			continue
		}
		for _, p := range s.imports() {
			if p != module+"/kvstate" && p != module+"/picker" {
				require.Contains(t, pure, p, "%s imports %s", s.file, p)
			}
		}
	}
}

// dialectsMayBeNamed are the packages in which a dialect's name may stand: its own, the configuration, and the simulator. Tests and
// what they are made of (e2e) do not count.
var dialectsMayBeNamed = []string{"extproc/kvtransfer", "internal/config", "internal/enginesim/connector", "e2e"}

// otherWords are names that mean something else in a file.
var otherWords = map[string]string{
	"extproc/paths/paths.go sglang":    "an engine, by its paths",
	"kvstate/scrape/engines.go sglang": "an engine, by its metrics",
	"kvstate/scrape/engines.go trtllm": "an engine, by its metrics",
	"cmd/tandem/replay.go mooncake":    "a trace",
	"replay/run.go mooncake":           "a peer's policy",
	"replay/run.go trtllm":             "a peer's policy",
	"replay/traces/open.go mooncake":   "a trace",
	"replay/suite.go mooncake":         "a trace",
	"replay/suite.go shared":           "a size of fleets",
	"replay/suite_extras.go mooncake":  "a trace",
	"replay/suite_roles.go mooncake":   "a trace",
}

// TestDialectsAreNamedInTheirRoom: whoever must know what a dialect does asks kvtransfer.Dialect, and not its name.
func TestDialectsAreNamedInTheirRoom(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range sources(t) {
		if s.test || slices.ContainsFunc(dialectsMayBeNamed, func(dir string) bool { return s.dir == dir || strings.HasPrefix(s.dir, dir+"/") }) {
			continue
		}
		ast.Inspect(s.ast, func(n ast.Node) bool {
			literal, ok := n.(*ast.BasicLit)
			if !ok || literal.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(literal.Value)
			require.NoError(t, err)
			if slices.Contains(kvtransfer.Names(), text) {
				place := s.file + " " + text
				seen[place] = true
				require.Contains(t, otherWords, place, "ask kvtransfer.Dialect what it does, or say what else the word means")
			}
			return true
		})
	}
	for place := range otherWords {
		if !seen[place] {
			t.Errorf("%s: an exception for what is not there", place)
		}
	}
}

func TestPackagesSayWhatTheyAre(t *testing.T) {
	documented := map[string]bool{}
	for _, s := range sources(t) {
		documented[s.dir] = documented[s.dir] || len(strings.TrimSpace(s.ast.Doc.Text())) > 0
		require.NotContains(t, vague, strings.TrimSuffix(s.ast.Name.Name, "_test"), "%s: a name that says nothing", s.file)
		require.NotContains(t, vague, path.Base(s.dir), "%s: a name that says nothing", s.dir)
	}
	for dir, ok := range documented {
		if !ok {
			t.Errorf("package %s has no comment that a newcomer can start from", dir)
		}
	}
}

func TestNothingHappensOnImport(t *testing.T) {
	for _, s := range sources(t) {
		if s.generated {
			continue
		}
		for _, d := range s.ast.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil {
				require.NotEqual(t, "init", f.Name.Name, "%s has an init function", s.file)
			}
		}
	}
}
