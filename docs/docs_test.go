// Package docs holds Tandem's documentation, and the tests that keep it true to the code: the reference of the configuration
// is made from config.proto and the defaults in force, every metric and every error code has its line, configurations that
// are shown are valid, and links lead somewhere.
//
//	go test ./docs -update     rewrites the reference in configuration.md
package docs

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/reflect/protoreflect"

	configv1 "tandem/protos/config/v1"
)

var update = flag.Bool("update", false, "rewrite the reference in configuration.md")

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(text)
}

const referenceBegins, referenceEnds = "<!-- reference: go test ./docs -update -->\n", "<!-- end of reference -->\n"

func TestConfigurationReference(t *testing.T) {
	text := read(t, "configuration.md")
	before, rest, ok := strings.Cut(text, referenceBegins)
	require.True(t, ok)
	_, after, ok := strings.Cut(rest, referenceEnds)
	require.True(t, ok)
	want := before + referenceBegins + reference(t) + referenceEnds + after
	if *update {
		require.NoError(t, os.WriteFile("configuration.md", []byte(want), 0o600))
		return
	}
	require.Equal(t, want, text, "run go test ./docs -update")
}

// least shows the defaults: it holds what is required and no more.
const least = `{pools: [{name: x, kvTransfer: nixl, endpoints: [{address: "10.0.0.1:1", role: prefill}, {address: "10.0.0.2:1", role: decode}]}]}`

// reference is a table for every message of the configuration.
func reference(t *testing.T) string {
	t.Helper()
	c, _, err := configv1.Parse([]byte(least))
	require.NoError(t, err)
	w := writer{comments: comments(read(t, "../protos/config/v1/config.proto"))}
	w.children("", c.ProtoReflect())
	return w.out.String()
}

// comments are those of fields, by message and field name, and of messages, by message name.
func comments(proto string) map[string]string {
	field := regexp.MustCompile(`^  (?:repeated |optional )?\w+ (\w+) = \d+;`)
	message := regexp.MustCompile(`^message (\w+) \{`)
	out, in, comment := map[string]string{}, "", []string(nil)
	for line := range strings.Lines(proto) {
		line = strings.TrimRight(line, "\n")
		if text, ok := strings.CutPrefix(strings.TrimLeft(line, " "), "// "); ok {
			comment = append(comment, text)
			continue
		}
		if m := message.FindStringSubmatch(line); m != nil {
			in = m[1]
			out[in] = strings.Join(comment, " ")
		} else if m := field.FindStringSubmatch(line); m != nil {
			out[in+"."+m[1]] = strings.Join(comment, " ")
		}
		comment = nil
	}
	return out
}

type writer struct {
	comments map[string]string
	out      strings.Builder
}

func (w *writer) comment(f protoreflect.FieldDescriptor) string {
	return w.comments[string(f.Parent().Name())+"."+string(f.Name())]
}

// children writes a section for every message within m.
func (w *writer) children(path string, m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.Kind() != protoreflect.MessageKind {
			continue
		}
		at, value := join(path, f.JSONName()), protoreflect.Message(nil)
		if !f.IsList() {
			value = m.Get(f).Message()
		} else if list := m.Get(f).List(); list.Len() > 0 {
			at, value = at+"[]", list.Get(0).Message()
		} else {
			continue
		}
		w.section(at, w.comment(f), value)
		w.children(at, value)
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// section is the table of one message; what is a message itself gets a section of its own.
func (w *writer) section(path, about string, m protoreflect.Message) {
	var rows strings.Builder
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		if f := fields.Get(i); f.Kind() != protoreflect.MessageKind {
			meaning, byDefault := w.describe(f, m)
			fmt.Fprintf(&rows, "| `%s` | %s | %s |\n", f.JSONName(), byDefault, meaning)
		}
	}
	if more := w.comments[string(m.Descriptor().Name())]; more != "" {
		about += " " + more
	}
	fmt.Fprintf(&w.out, "### `%s`\n\n%s\n\n", path, about)
	if rows.Len() > 0 {
		fmt.Fprintf(&w.out, "| field | default | meaning |\n|---|---|---|\n%s\n", rows.String())
	}
}

// describe takes a field's comment apart: what it says of the default goes into that column, unless the code knows.
func (w *writer) describe(f protoreflect.FieldDescriptor, m protoreflect.Message) (meaning, byDefault string) {
	var kept []string
	for _, s := range strings.SplitAfter(w.comment(f), ". ") {
		s = strings.TrimSpace(s)
		switch {
		case strings.HasPrefix(s, "Default: "):
			byDefault = strings.TrimSuffix(strings.TrimPrefix(s, "Default: "), ".")
		case strings.HasPrefix(s, "Default"):
		case s == "Required.":
			byDefault = "required"
		case strings.HasPrefix(s, "Required"):
			byDefault = "required"
			kept = append(kept, s)
		default:
			kept = append(kept, s)
		}
	}
	if byDefault == "" {
		byDefault = valueOf(f, m)
	}
	return strings.ReplaceAll(strings.Join(kept, " "), "|", `\|`), byDefault
}

// valueOf is what the code fills in.
func valueOf(f protoreflect.FieldDescriptor, m protoreflect.Message) string {
	if !m.IsValid() || !m.Has(f) {
		return ""
	}
	if !f.IsList() {
		return fmt.Sprintf("`%v`", m.Get(f))
	}
	var items []string
	for i := range m.Get(f).List().Len() {
		items = append(items, fmt.Sprintf("%q", m.Get(f).List().Get(i).String()))
	}
	return "`[" + strings.Join(items, ", ") + "]`"
}

// Every code that a client or an operator may meet is explained; metrics are in observability_test.go.
func TestOperationsKnowsAll(t *testing.T) {
	operations := read(t, "operations.md")
	found := 0
	for file, pattern := range map[string]string{
		"../extproc/*.go":            `(?:BadRequest|Unavailable)\("([a-z_]+)"|a\.why = (?:true, )?"([a-z_]+)"|Cause = "([a-z_]+)"`,
		"../extproc/openai/*.go":     `BadRequest\("([a-z_]+)"|Code: "([a-z_]+)"`,
		"../extproc/openai/split.go": `return "([a-z_]+)"`,
		"../envoy-configs/replies.go": `(?:ourFault|clientsFault), "([a-z_]+)"|Code: "([a-z_]+)"|` +
			`"code":"([a-z_]+)"`,
	} {
		files, err := filepath.Glob(file)
		require.NoError(t, err)
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(read(t, name), -1) {
				found++
				what := strings.Join(m[1:], "")
				require.True(t, strings.Contains(operations, "`"+what+"`"), "operations.md does not explain %s of %s", what, name)
			}
		}
	}
	require.Greater(t, found, 40, "the patterns find nothing any more")
}

// pages are all documents of the repository.
func pages(t *testing.T) []string {
	t.Helper()
	out := []string{"../README.md", "../CHANGELOG.md", "../CONTRIBUTING.md"}
	for _, pattern := range []string{"*.md", "adr/*.md"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		out = append(out, files...)
	}
	require.Greater(t, len(out), 10)
	return out
}

func TestConfigurationsShownAreValid(t *testing.T) {
	shown := regexp.MustCompile("(?s)```yaml\n(.*?)```")
	for _, page := range pages(t) {
		for _, m := range shown.FindAllStringSubmatch(read(t, page), -1) {
			_, _, err := configv1.Parse([]byte(m[1]))
			require.NoError(t, err, "%s:\n%s", page, m[1])
		}
	}
}

func TestLinksLeadSomewhere(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#\s]+)(?:#[^)]*)?\)|src="([^"]+)"`)
	for _, page := range pages(t) {
		for _, m := range link.FindAllStringSubmatch(read(t, page), -1) {
			target := m[1] + m[2]
			if strings.Contains(target, "://") {
				continue
			}
			_, err := os.Stat(filepath.Join(filepath.Dir(page), target))
			require.NoError(t, err, "%s links to %s", page, target)
		}
	}
}

// The dialect and the term of the price that CONTRIBUTING shows compile in the places where it says that they belong.
func TestWorkedExamplesCompile(t *testing.T) {
	for _, example := range []struct{ dir, begins, before string }{
		{"../extproc/kvtransfer", "// handle is", "package kvtransfer\n\nimport (\n\t\"fmt\"\n\n\t\"tandem/extproc/openai\"\n)\n\nvar _ Dialect = newHandle()\n\n"},
		{"../picker", "const fullFrom", "package picker\n\nimport \"tandem/kvstate\"\n\n"},
	} {
		_, shown, ok := strings.Cut(read(t, "../CONTRIBUTING.md"), example.begins)
		require.True(t, ok, example.begins)
		shown, _, _ = strings.Cut(shown, "```")
		source := filepath.Join(t.TempDir(), "worked.go")
		require.NoError(t, os.WriteFile(source, []byte(example.before+example.begins+shown), 0o600))
		place, err := filepath.Abs(filepath.Join(example.dir, "worked.go"))
		require.NoError(t, err)
		overlay := filepath.Join(t.TempDir(), "overlay.json")
		require.NoError(t, os.WriteFile(overlay, fmt.Appendf(nil, `{"Replace":{%q:%q}}`, place, source), 0o600))
		out, err := exec.Command("go", "build", "-overlay", overlay, example.dir).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
}

// The house in design.md has a line for every folder that somebody may look for.
func TestTheHouseIsWhole(t *testing.T) {
	_, house, ok := strings.Cut(read(t, "design.md"), "## The house\n")
	require.True(t, ok)
	house, _, _ = strings.Cut(house, "Imports go one way")
	for _, pattern := range []string{"../*/*.go", "../cmd/*/*.go", "../kvstate/*/*.go", "../extproc/*/*.go", "../protos/*/*/*.go"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, f := range files {
			name := filepath.Base(filepath.Dir(f))
			if strings.HasPrefix(f, "../protos/") {
				name = filepath.Base(filepath.Dir(filepath.Dir(f))) + "/" + name
			} else {
				name += "/"
			}
			require.Contains(t, house, name, "design.md does not say what lies in %s", filepath.Dir(f))
		}
	}
}
