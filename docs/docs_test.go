// Package docs holds Tandem's documentation, and the tests that keep it true to the code: the reference of the configuration
// is made from config.proto and the defaults in force, every metric and every error code has its line, configurations that
// are shown are valid, and links lead somewhere.
//
//	go test ./docs -update     rewrites the reference in configuration.md, and plots/ from the tables of benchmarks.md
package docs

import (
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

var update = flag.Bool("update", false, "rewrite the reference in configuration.md and the plots")

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

// reference is a table for every message of the configuration.
func reference(t *testing.T) string {
	t.Helper()
	c := &configv1.Config{}
	fill(c.ProtoReflect())
	for _, dialect := range []string{"nixl", "lmcache", "orchestrated", "offload"} { // some defaults are those of a dialect
		c.Pools[0].KvTransfer, c.Pools[0].Endpoints[0].Role = dialect, "both"
		config.SetDefaults(c)
	}
	c.Pools[0].KvTransfer, c.Pools[0].Endpoints[0].Role = "", ""
	w := writer{t: t, comments: comments(read(t, "../protos/config/v1/config.proto")), sections: map[string]string{}}
	w.children("", c.ProtoReflect())
	require.NotContains(t, w.out.String(), "` |  |", "a field without a default")
	require.NotContains(t, w.out.String(), "| `0` |", "a field without a default: say Default 0, or what Absent means")
	return w.out.String()
}

// fill makes every message there is within m, each list with one.
func fill(m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		switch {
		case f.Kind() != protoreflect.MessageKind:
		case f.IsList():
			fill(m.Mutable(f).List().AppendMutable().Message())
		default:
			fill(m.Mutable(f).Message())
		}
	}
}

// comments are those of fields, by message and field name, and of messages, by message name.
func comments(proto string) map[string]string {
	field := regexp.MustCompile(`^  (?:repeated |optional )?\w+ (\w+) = \d+(?: \[.*\])?;`)
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
	t        *testing.T
	comments map[string]string
	out      strings.Builder
	sections map[string]string // path of the first one with these rows and notes
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

// lineWidth is the longest line that the reference may have, tables included, in characters.
const lineWidth = 120

// section writes one message: a table with a line for each field, and a list of what does not fit into it. Fields that
// are messages themselves get sections of their own.
func (w *writer) section(path, about string, m protoreflect.Message) {
	var rows, notes strings.Builder
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		if f := fields.Get(i); f.Kind() != protoreflect.MessageKind {
			w.field(f, m, &rows, &notes)
		}
	}
	if more := w.comments[string(m.Descriptor().Name())]; more != "" {
		about += " " + more
	}
	fmt.Fprintf(&w.out, "### `%s`\n\n%s\n", path, wrap(about, ""))
	table := rows.String() + notes.String()
	if first := w.sections[table]; first != "" && notes.Len() > 0 {
		fmt.Fprintf(&w.out, "The fields are those of [`%s`](#%s).\n\n", first, anchors("# " + first)[0])
		return
	}
	w.sections[table] = path
	if rows.Len() > 0 {
		fmt.Fprintf(&w.out, "| field | default | meaning |\n|---|---|---|\n%s\n", rows.String())
	}
	if notes.Len() > 0 {
		fmt.Fprintf(&w.out, "%s\n", notes.String())
	}
}

// longDefault is the length from which on a default stands below the table.
const longDefault = 40

// field writes the row of one field, with the first sentence of its comment, and the other sentences as a note. The
// range is in the row if it fits.
func (w *writer) field(f protoreflect.FieldDescriptor, m protoreflect.Message, rows, notes *strings.Builder) {
	meaning, byDefault := w.describe(f, m)
	if len(byDefault) > longDefault {
		meaning = append(meaning, "Default: "+byDefault+".")
		byDefault = "below"
	}
	escape := strings.NewReplacer("|", `\|`)
	format := func(byDefault string) string {
		return fmt.Sprintf("| `%s` | %s | %s |\n", f.JSONName(), escape.Replace(byDefault), escape.Replace(meaning[0]))
	}
	row := format(byDefault)
	if span, _ := proto.GetExtension(f.Options(), configv1.E_Range).(string); span != "" {
		if with := format(byDefault + "; " + span); utf8.RuneCountInString(with) <= lineWidth {
			row = with
		} else {
			meaning = append(meaning, "Range: "+span+".")
		}
	}
	require.LessOrEqual(w.t, utf8.RuneCountInString(row), lineWidth+1, "the first sentence of a comment is too long: %s", row)
	rows.WriteString(row)
	if len(meaning) > 1 {
		notes.WriteString(wrap("- `"+f.JSONName()+"`: "+strings.Join(meaning[1:], " "), "  "))
	}
}

// wrap breaks a text into lines of lineWidth characters, all but the first indented.
func wrap(text, indent string) string {
	var out strings.Builder
	used := 0
	for i, word := range strings.Fields(text) {
		n := utf8.RuneCountInString(word)
		switch {
		case i == 0:
		case used+1+n > lineWidth:
			out.WriteString("\n" + indent)
			used = len(indent)
		default:
			out.WriteByte(' ')
			used++
		}
		out.WriteString(word)
		used += n
	}
	return out.String() + "\n"
}

// describe takes a field's comment apart, into sentences and the default, which the code may know better.
func (w *writer) describe(f protoreflect.FieldDescriptor, m protoreflect.Message) (meaning []string, byDefault string) {
	stated := ""
	for _, s := range strings.SplitAfter(w.comment(f), ". ") {
		s = strings.TrimSpace(s)
		switch {
		case strings.HasPrefix(s, "Default: "):
			byDefault = strings.TrimSuffix(strings.TrimPrefix(s, "Default: "), ".")
		case strings.HasPrefix(s, "Default "):
			stated = strings.TrimSuffix(strings.TrimPrefix(s, "Default "), ".")
		case s == "Required.":
			byDefault = "required"
		case strings.HasPrefix(s, "Required"):
			byDefault = "required"
			meaning = append(meaning, s)
		default:
			meaning = append(meaning, s)
		}
	}
	if absent, _ := proto.GetExtension(f.Options(), configv1.E_Absent).(string); absent != "" {
		byDefault = "`" + absent + "`"
	}
	switch {
	case byDefault != "":
	case stated != "" && !m.Has(f):
		byDefault = stated
	default:
		byDefault = valueOf(f, m)
		absent := slices.IndexFunc(meaning, func(s string) bool { return strings.HasPrefix(s, "Absent: ") })
		if absent < 0 || byDefault != "`0`" && byDefault != "none" {
			break
		}
		// Zero and empty stand for absent.
		what := strings.TrimSuffix(strings.TrimPrefix(meaning[absent], "Absent: "), ".")
		if byDefault == "`0`" || len(what) <= longDefault && absent > 0 {
			byDefault, meaning = what, slices.Delete(meaning, absent, absent+1)
		}
	}
	return meaning, byDefault
}

// valueOf is what the code fills in, or what holds where it fills in nothing.
func valueOf(f protoreflect.FieldDescriptor, m protoreflect.Message) string {
	switch {
	case f.IsList() && m.Get(f).List().Len() == 0, f.Kind() == protoreflect.StringKind && !m.Has(f),
		strings.HasSuffix(f.JSONName(), "Port") && m.Get(f).Int() == 0:
		return "none"
	case !f.IsList():
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
		"../extproc/*.go":             `(?:BadRequest|Unavailable)\("([a-z_]+)"|a\.why = (?:true, )?"([a-z_]+)"|Cause = "([a-z_]+)"`,
		"../extproc/openai/*.go":      `BadRequest\("([a-z_]+)"|Code: "([a-z_]+)"`,
		"../extproc/openai/prompt.go": `return "([a-z_]+)"`,
		"../envoy-configs/replies.go": `(?:ourFault|clientsFault), "([a-z_]+)"|Code: "([a-z_]+)"`,
		"../envoy-configs/lua/*.lua":  `"code":"([a-z_]+)"`,
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
	for _, pattern := range []string{"*.md", "*/*.md", "../SECURITY.md", "../CODE_OF_CONDUCT.md"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		out = append(out, files...)
	}
	require.Greater(t, len(out), 10)
	return out
}

func TestConfigurationsShownAreValid(t *testing.T) {
	shown, schema := regexp.MustCompile("(?s)```yaml\n(.*?)```"), schemaCheck(t, schemaFile)
	for _, page := range pages(t) {
		for _, m := range shown.FindAllStringSubmatch(read(t, page), -1) {
			_, _, err := config.Parse([]byte(m[1]))
			require.NoError(t, err, "%s:\n%s", page, m[1])
			require.NoError(t, schema(m[1]), "%s:\n%s", page, m[1])
		}
	}
}

// A row of a table fits on a screen, without the addresses of its links.
func TestTablesFitTheScreen(t *testing.T) {
	const columns = 140
	link := regexp.MustCompile(`\[([^]]*)\]\([^)]*\)`)
	for _, page := range pages(t) {
		for line := range strings.Lines(read(t, page)) {
			if shown := link.ReplaceAllString(strings.TrimSpace(line), "$1"); strings.HasPrefix(shown, "|") {
				require.LessOrEqual(t, utf8.RuneCountInString(shown), columns, "%s: %s", page, shown)
			}
		}
	}
}

// Links within the repository lead to files that exist, and to headings that they have.
// A list of requests that a page shows has the columns of today.
func TestRequestsShownHaveTheirColumns(t *testing.T) {
	head := regexp.MustCompile(`(?m)^ *status {2,}.*request id$`)
	columns := func(line string) []string { return regexp.MustCompile(` {2,}`).Split(strings.TrimSpace(line), -1) }
	today, n := columns(head.FindString(read(t, "../status/testdata/status.txt"))), 0
	for _, page := range pages(t) {
		for _, shown := range head.FindAllString(read(t, page), -1) {
			require.Equal(t, today, columns(shown), page)
			n++
		}
	}
	require.GreaterOrEqual(t, n, 3)
}

// Each page is on the first one, and in the site's menu: what no list names is found by nobody.
func TestEveryPageIsListed(t *testing.T) {
	index, menu := read(t, "index.md"), read(t, "../mkdocs.yml")
	for _, page := range pages(t) {
		if page == "index.md" || strings.HasPrefix(page, "..") || strings.HasPrefix(page, "adr/") {
			continue
		}
		require.Contains(t, index, "("+page+")", "docs/index.md")
		require.Contains(t, menu, "- "+page+"\n", "mkdocs.yml")
	}
}

func TestLinksLeadSomewhere(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#\s]*)(?:#([^)]*))?\)|src="([^"]+)"`)
	for _, page := range pages(t) {
		text := regexp.MustCompile("(?s)```.*?```|`[^`\n]+`").ReplaceAllString(read(t, page), "")
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			target := m[1] + m[3]
			if strings.Contains(target, "://") {
				continue
			}
			target = filepath.Join(filepath.Dir(page), target)
			if m[1]+m[3] == "" {
				target = page
			}
			_, err := os.Stat(target)
			require.NoError(t, err, "%s links to %s", page, target)
			if m[2] != "" {
				require.Contains(t, anchors(read(t, target)), m[2], "%s links to a heading that %s has not", page, target)
			}
		}
	}
}

// Files that the guide names exist, but for those of its examples.
func TestTheGuideNamesFilesThatExist(t *testing.T) {
	examples := []string{"extproc/kvtransfer/handle.go", "testdata/handle/chat.txtar", "testdata/full.txt"}
	var files []string
	require.NoError(t, filepath.WalkDir("..", func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && p != ".." && strings.HasPrefix(d.Name(), ".") && d.Name() != ".github" {
			return filepath.SkipDir
		}
		files = append(files, "/"+filepath.ToSlash(p))
		return err
	}))
	text := regexp.MustCompile("(?s)```.*?```").ReplaceAllString(read(t, "../CONTRIBUTING.md"), "")
	names := regexp.MustCompile("`([A-Za-z0-9_][A-Za-z0-9_./-]*\\.(?:go|md|proto|txtar|txt|json|yaml|yml))`").FindAllStringSubmatch(text, -1)
	require.NotEmpty(t, names)
	for _, name := range names {
		there := func(file string) bool { return strings.HasSuffix(file, "/"+name[1]) }
		if !slices.Contains(examples, name[1]) && !slices.ContainsFunc(files, there) {
			t.Errorf("CONTRIBUTING.md: %s is not there", name[1])
		}
	}
}

// The site's Markdown wants four spaces where a list goes on; with fewer the next step of a list is number 1 again.
func TestListsAreIndented(t *testing.T) {
	few := regexp.MustCompile(`(?m)^ {1,3}(?:[-*]|\d+\.) .*$|\n\n {1,3}\S.*`)
	for _, page := range pages(t) {
		if !strings.HasPrefix(page, "..") {
			text := regexp.MustCompile("(?ms)^ *```.*?^ *```").ReplaceAllString(read(t, page), "")
			require.Empty(t, few.FindAllString(text, -1), page)
		}
	}
}

// anchors are those of a page's headings, as GitHub and the site make them.
func anchors(text string) (out []string) {
	text = regexp.MustCompile("(?ms)^```.*?^```").ReplaceAllString(text, "")
	seen := map[string]int{}
	for _, m := range regexp.MustCompile(`(?m)^#{1,6} +(.+?) *$`).FindAllStringSubmatch(text, -1) {
		heading := regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`).ReplaceAllString(m[1], "$1")
		slug := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
				return unicode.ToLower(r)
			}
			return -1
		}, heading)
		if n := seen[slug]; n > 0 {
			out = append(out, fmt.Sprintf("%s-%d", slug, n))
		} else {
			out = append(out, slug)
		}
		seen[slug]++
	}
	return out
}

// The worked examples of CONTRIBUTING compile where it says that they belong. The dialect needs its file and one word in
// makers: with these the tests over all dialects pass, the configuration's among them. Those compile and link two packages
// with all that they import, so make race runs them, which .ci/run does.
func TestWorkedExamples(t *testing.T) {
	const dialect = "../extproc/kvtransfer/dialect.go"
	listed := strings.Replace(read(t, dialect), "\t\tlmcacheDialect,", "\t\thandleDialect, lmcacheDialect,", 1)
	require.NotEqual(t, read(t, dialect), listed)
	for _, example := range []struct {
		file, begins, before string
		more                 map[string]string // files that change
		check                []string
	}{
		{
			"../extproc/kvtransfer/worked.go", "// handle is", "package kvtransfer\n\nimport (\n\t\"fmt\"\n\n\t\"tandem/extproc/openai\"\n)\n\n", map[string]string{dialect: listed},
			[]string{"test", "-vet=off", "-count=1", "-run", "TestNew|TestPrefillEmptyObject|TestDialectDefaults", "../extproc/kvtransfer", "../replica/config"},
		},
		{"../picker/worked.go", "const fullFrom", "package picker\n\nimport \"tandem/kvstate\"\n\n", nil, []string{"build", "../picker"}},
	} {
		_, shown, ok := strings.Cut(read(t, "../CONTRIBUTING.md"), example.begins)
		require.True(t, ok, example.begins)
		shown, _, _ = strings.Cut(shown, "```")
		overlay := map[string]string{}
		put := func(file, text string) {
			place, err := filepath.Abs(file)
			require.NoError(t, err)
			overlay[place] = filepath.Join(t.TempDir(), "overlaid.go")
			require.NoError(t, os.WriteFile(overlay[place], []byte(text), 0o600))
		}
		put(example.file, example.before+example.begins+shown)
		for file, text := range example.more {
			put(file, text)
		}
		list, err := json.Marshal(map[string]any{"Replace": overlay})
		require.NoError(t, err)
		path := filepath.Join(t.TempDir(), "overlay.json")
		require.NoError(t, os.WriteFile(path, list, 0o600))
		if os.Getenv("TANDEM_LONG") == "" {
			example.check = []string{"build", filepath.Dir(example.file)}
		}
		args := append([]string{example.check[0], "-overlay", path}, example.check[1:]...)
		out, err := exec.Command("go", args...).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
}

// The list of packages in design.md has a line for every folder that somebody may look for.
func TestTheHouseIsWhole(t *testing.T) {
	_, house, ok := strings.Cut(read(t, "design.md"), "## The packages\n")
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
