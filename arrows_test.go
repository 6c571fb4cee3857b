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

// rooms is which rooms of ours the packages of a room may import; a package is in the room with the longest path that it has.
// What writes state lives under kvstate, what reads it stands above, and nothing points back. What only tests import is
// marked. Within a room Go itself allows no circle; apart has what else must not be.
var rooms = map[string][]string{
	"protos": {},
	// The format of recordings: the server writes it, the replay reads it.
	"recording": {},
	"internal":  {}, // utilities that know nothing of engines
	"kvstate":   {"internal", "protos"},
	"picker":    {"kvstate"},
	"extproc":   {"internal", "kvstate", "picker", "protos (test)", "recording"},
	"status":    {"extproc", "kvstate", "picker"},
	// The configuration as it is written, and what is made of it.
	"replica/config": {"extproc", "kvstate", "picker", "protos"},
	"envoy-configs":  {"extproc", "protos", "replica/config"},
	// One running replica: all parts, wired.
	"replica":    {"docs", "envoy-configs", "extproc", "internal", "kvstate", "picker", "protos", "recording", "replica/config", "status"},
	"carrier":    {"extproc", "internal", "kvstate", "protos", "replica", "replica/config"}, // Tandem inside Envoy: the library, which alone knows C
	"cmd/tandem": {"docs", "envoy-configs", "extproc", "internal", "kvstate", "picker", "protos", "recording", "replay", "replica", "replica/config", "status"},
	// Measuring: the product's own decisions against modelled engines.
	"replay": {"kvstate", "picker", "recording"},
	// The engines of the tests import nothing of the product: what they shared with it they could not catch.
	"e2e":           {"replay (test)"},
	"e2e/enginesim": {},
	"cmd/enginesim": {"e2e/enginesim", "internal", "kvstate (test)"},
	"scripts":       {},
	"docs":          {"protos (test)", "replica/config (test)"},
	"deploy":        {"envoy-configs (test)", "replica/config (test)"},
	".":             {"extproc (test)"}, // the names of the dialects
}

// apart are packages that must not import another one although their room may.
var apart = map[string][]string{
	"extproc/pass":       {"extproc", "extproc/envoywire"}, // one pass of a request knows neither gRPC nor Envoy's messages
	"extproc/plan":       {"extproc", "extproc/envoywire"},
	"extproc/kvtransfer": {"extproc", "extproc/envoywire"},
	"extproc/journey":    {"extproc", "extproc/envoywire"}, // nor does the life of a request
	// what follows from a request's end reads how it ended, not a message of Envoy's
	"extproc/ended":     {"extproc/envoywire"},
	"extproc/telemetry": {"extproc/envoywire"},
	"extproc/usage":     {"extproc/envoywire"},
	"extproc/faults":    {"extproc/envoywire"},
	"extproc/reclaim":   {"extproc/envoywire"},
	"extproc/replan":    {"extproc/envoywire"},
	// the second transport does not stand on the first, nor does what both are made of
	"carrier/filter":     {"extproc", "extproc/envoywire"},
	"carrier":            {"replica/beside"},
	"carrier/replicas":   {"replica/beside", "extproc", "extproc/envoywire"},
	"extproc/core":       {"extproc", "extproc/envoywire"},
	"extproc/concurrent": {"extproc/envoywire"},
	"replica":            {"envoy-configs", "extproc", "internal/grpcserver", "replica/gatewayextension", "replica/xds"},
	"replica/config":     {"extproc"},
	"replica/assign":     {"extproc"},
}

// helpsTests are what the tests of all rooms may import.
var helpsTests = []string{"internal/budget", "e2e/loopback", "e2e/redisserver", "e2e/realengines"}

// guarded are modules that only some packages may see, tests included.
var guarded = map[string][]string{
	"github.com/envoyproxy/": {
		"replica/xds", "replica/gatewayextension", "extproc (test)", "extproc/envoywire (test)",
		"extproc/envoywire/wiretest", "envoy-configs", "envoy-configs/inside", "envoy-configs/usage", "envoy-configs/logwhen",
	},
	"k8s.io/": {
		"kvstate/discovery", "deploy (test)",
	},
	"go.opentelemetry.io/": {
		"extproc/core", "extproc/telemetry", "extproc (test)", "replica", "e2e (test)",
	},
	"google.golang.org/grpc": {
		"replica/xds", "replica/gatewayextension", "extproc", "extproc/envoywire",
		"internal/grpcserver", "e2e (test)", "envoy-configs (test)",
	},
	"github.com/prometheus/": {
		"replica/xds", "replica/gatewayextension", "extproc (test)", "extproc/telemetry", "replica",
		"replica/fleetmetrics", "e2e/enginesim/api", "e2e/enginesim/connector",
		"e2e/enginesim/engine", "deploy/observability/promql (test)", "extproc/usage", "extproc/faults (test)", "extproc/journey (test)", "extproc/journey/script",
		"carrier/filter (test)", "carrier/replicas",
	},
	"github.com/redis/": {
		"kvstate/redisstore", "kvstate/redisstore/redisclient", "kvstate/operator",
	},
	"github.com/go-zeromq/": {
		"kvstate/kvevents (test)", "internal/zmtp (test)", "kvstate/notices (test)",
		"e2e/enginesim/handover", "e2e/enginesim/connector", "e2e/enginesim/engine",
		"cmd/enginesim (test)", "kvstate/engineclock (test)",
	},
	"sigs.k8s.io/": {
		"carrier/replicas",
		"replica/config", "kvstate/discovery", "envoy-configs (test)", "replica/gatewayextension (test)",
		"deploy (test)", "docs (test)",
	},
	"google.golang.org/protobuf": {
		"replica/xds (test)", "replica/gatewayextension", "protos/envoygateway/v1", "replica",
		"replica/config", "replica/config/diff", "kvstate/redisstore", "kvstate/redisstore/decode",
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

// roomOf returns the room of a directory.
func roomOf(dir string) string {
	best := ""
	for room := range rooms {
		if (dir == room || strings.HasPrefix(dir, room+"/")) && len(room) > len(best) {
			best = room
		}
	}
	return best
}

func TestArrowsGoOneWay(t *testing.T) {
	used := map[string]bool{}
	for _, s := range sources(t) {
		room := roomOf(s.dir)
		if room == "" {
			t.Errorf("%s: the package is in no room: say in rooms what it may import", s.dir)
		}
		for _, p := range s.imports() {
			ours, ok := strings.CutPrefix(p, module+"/")
			if !ok || s.test && slices.Contains(helpsTests, ours) {
				continue
			}
			if slices.Contains(apart[s.dir], ours) && !s.test {
				t.Errorf("%s imports %s, from which it is to stay apart", s.file, p)
			}
			to := roomOf(ours)
			if to == room {
				continue
			}
			as, found := permission(rooms[room], to, s.test)
			if !found {
				t.Errorf("%s imports %s: %s may not know %s", s.file, p, room, to)
			}
			if !s.test || as != to {
				used[room+" -> "+as] = true
			}
		}
	}
	for room, allowed := range rooms {
		for _, to := range allowed {
			if !used[room+" -> "+to] {
				t.Errorf("%s: nothing imports %q any more; if tests do, mark it (test)", room, to)
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
var dialectsMayBeNamed = []string{"extproc/kvtransfer", "replica/config", "e2e/enginesim/connector", "e2e"}

// otherWords are names that mean something else in a file.
var otherWords = map[string]string{
	"extproc/paths/paths.go sglang":             "an engine, by its paths",
	"kvstate/enginefacts/enginefacts.go sglang": "an engine, by its report", "kvstate/enginefacts/enginefacts.go trtllm": "an engine, by its report",
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

// embedded are the structs with methods that structs in other files embed, with the reason. "before" means that it was so when
// the rule was made: whoever works there gives the part a name, and takes it out.
var embedded = map[string]string{
	"e2e/bench/http1.Conn":           "before",
	"e2e/enginesim/connector.Config": "before",
	"e2e/enginesim/connector.Node":   "before",
	"e2e/enginesim/engine.Config":    "before",
	"e2e/enginesim/engine.Engine":    "before",
	"e2e/enginesim/engine.Job":       "before",
	"e2e/enginesim/engine.Sampling":  "before",
	"e2e/enginesim/engine.Tokenizer": "before",
	"e2e/process.Group":              "before",
	"envoy-configs.notebook":         "before",
	"envoy-configs.settings":         "before",
	"extproc.handler":                "before",
	"extproc.pairLeg":                "before",
	"extproc/envoywire.Message":      "before",
	"extproc/kvtransfer.lmcache":     "a dialect that differs in one part",
	"extproc/kvtransfer.oneToken":    "what all dialects share whose prefill leg answers with one token",
	"extproc/migration.span":         "before",
	"extproc/plan.Policy":            "before",
	"extproc/telemetry.Metrics":      "before",
	"extproc/telemetry.Recent":       "before",
	"extproc/telemetry.Trace":        "before",
	"kvstate.AnswerCounters":         "before",
	"kvstate/discovery.Kubernetes":   "a source that differs in where its targets come from",
	"kvstate/discovery.Static":       "a source that differs in where its targets come from",
	"kvstate/discovery.target":       "what all targets share",
	"kvstate/prefixindex.reading":    "before",
	"picker.Explanation":             "before",
	"picker/roles.Advisor":           "before",
	"replay.Config":                  "before",
	"replay.dynamo":                  "a peer that differs in one part",
	"replay.fleet":                   "what all who choose share",
	"replay.mooncake":                "a peer that differs in one part",
	"replay.peer":                    "what all peers share",
	"replay/engine.Clock":            "before",
	"replay/engine.Job":              "before",
	"replica/config.PoolSpec":        "before",
	"status/written.Output":          "before",
}

// TestNoStructWithMethodsIsEmbeddedAcrossFiles: whoever reads x.Name finds Name in the file of x's type, or by the name of
// the part that has it. Interfaces and plain fields may be embedded.
func TestNoStructWithMethodsIsEmbeddedAcrossFiles(t *testing.T) {
	methods, declaredIn := map[string]bool{}, map[string]string{} // by directory and type
	for _, s := range sources(t) {
		for _, d := range s.ast.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if of := receiver(d); of != "" {
					methods[s.dir+"."+of] = true
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					if typ, ok := spec.(*ast.TypeSpec); ok {
						if _, ok := typ.Type.(*ast.StructType); ok {
							declaredIn[s.dir+"."+typ.Name.Name] = s.file
						}
					}
				}
			}
		}
	}
	seen := map[string]bool{}
	for _, s := range sources(t) {
		if s.test || s.generated {
			continue
		}
		imported := map[string]string{}
		for _, i := range s.ast.Imports {
			p, _ := strconv.Unquote(i.Path.Value)
			if dir, ours := strings.CutPrefix(p, module+"/"); ours {
				name := path.Base(dir)
				if i.Name != nil {
					name = i.Name.Name
				}
				imported[name] = dir
			}
		}
		ast.Inspect(s.ast, func(n ast.Node) bool {
			of, ok := n.(*ast.StructType)
			if !ok {
				return true
			}
			for _, f := range of.Fields.List {
				if len(f.Names) > 0 {
					continue
				}
				typ := f.Type
				if star, ok := typ.(*ast.StarExpr); ok {
					typ = star.X
				}
				name := ""
				switch x := typ.(type) {
				case *ast.Ident:
					name = s.dir + "." + x.Name
				case *ast.SelectorExpr:
					if pkg, ok := x.X.(*ast.Ident); ok {
						name = imported[pkg.Name] + "." + x.Sel.Name
					}
				}
				if !methods[name] || declaredIn[name] == "" || declaredIn[name] == s.file {
					continue
				}
				seen[name] = true
				if embedded[name] == "" {
					t.Errorf("%s embeds %s, which has methods: give it a name", s.file, name)
				}
			}
			return true
		})
	}
	for name := range embedded {
		if !seen[name] {
			t.Errorf("%s: an exception for what nothing embeds any more", name)
		}
	}
}
