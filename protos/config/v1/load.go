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

// Load reads a configuration file. Warnings name what is accepted but has no effect, or probably not the one meant. An
// error is [Mistakes] or says why the file cannot be read.
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

// Parse reads a configuration from YAML text, with defaults filled in. An error is [Mistakes].
func Parse(text []byte) (c *Config, warnings []string, err error) {
	var m Mistakes
	c = m.read(text)
	if len(m) == 0 {
		setDefaults(c)
		warnings = validate(&m, c)
	}
	if len(m) > 0 {
		slices.SortStableFunc(m, func(a, b Mistake) int { return comparePaths(a.Path, b.Path) })
		return nil, nil, m
	}
	return c, warnings, nil
}

// read turns the text into a message, if its shape is right.
func (m *Mistakes) read(text []byte) *Config {
	c := &Config{}
	asJSON, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		m.unreadable(err)
		return c
	}
	d := json.NewDecoder(bytes.NewReader(asJSON))
	d.UseNumber() // a number must come through as it was written
	var tree any
	if err := d.Decode(&tree); err != nil {
		m.unreadable(err)
		return c
	}
	if object, ok := tree.(map[string]any); ok {
		checkShape(m, "", object, c.ProtoReflect().Descriptor())
	} else {
		m.add("", "the file must hold a mapping, with extProc, envoy, pools and so on; it holds %s", kindOf(tree))
	}
	if len(*m) > 0 {
		return c
	}
	if err := protojson.Unmarshal(asJSON, c); err != nil {
		m.add("", "%v", err)
	}
	return c
}

// unreadable adds what the YAML reader found, which may be several things, a line each: duplicate keys are among them.
func (m *Mistakes) unreadable(err error) {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	text = strings.TrimPrefix(text, "unmarshal errors:\n")
	for line := range strings.Lines(text) {
		m.add("", "not readable as YAML: %s", strings.TrimSpace(line))
	}
}
