package configv1

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"sigs.k8s.io/yaml"
)

// Mistakes are all that is wrong with a configuration.
type Mistakes []Mistake

// Mistake is one thing that is wrong.
type Mistake struct {
	Path   string // as one would write it: pools[0].endpoints[1].role; "" for the whole
	Remedy string // what is wrong, and what would be right
}

func (m Mistake) String() string {
	if m.Path == "" {
		return m.Remedy
	}
	return m.Path + ": " + m.Remedy
}

// Error lists the mistakes, a line each.
func (m Mistakes) Error() string {
	lines := make([]string, len(m))
	for i := range m {
		lines[i] = m[i].String()
	}
	return strings.Join(lines, "\n")
}

func (m *Mistakes) add(path, format string, args ...any) {
	*m = append(*m, Mistake{path, fmt.Sprintf(format, args...)})
}

// Load reads a configuration file. Warnings name what is accepted but has no effect in this release. An error is
// [Mistakes] or says why the file cannot be read.
func Load(path string) (c *Config, warnings []string, err error) {
	if path == "" {
		return nil, nil, errors.New("no configuration file given (-f FILE)")
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the configuration: %w", err)
	}
	c, warnings, err = Parse(text)
	if err != nil {
		return nil, nil, fmt.Errorf("%s:\n%w", path, err)
	}
	return c, warnings, nil
}

// Parse reads a configuration from YAML text, with defaults filled in.
func Parse(text []byte) (c *Config, warnings []string, err error) {
	asJSON, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		return nil, nil, Mistakes{{"", "not readable as YAML: " + err.Error()}}
	}
	d := json.NewDecoder(bytes.NewReader(asJSON))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, nil, Mistakes{{"", "not readable as YAML: " + err.Error()}}
	}
	c = &Config{}
	var m Mistakes
	checkShape(&m, "", tree, c.ProtoReflect().Descriptor())
	if len(m) == 0 {
		if err := protojson.Unmarshal(asJSON, c); err != nil {
			m.add("", "%v", err)
		}
	}
	if len(m) == 0 {
		setDefaults(c)
		warnings = validate(&m, c)
	}
	if len(m) > 0 {
		slices.SortStableFunc(m, func(a, b Mistake) int { return strings.Compare(a.Path, b.Path) })
		return nil, nil, m
	}
	return c, warnings, nil
}
