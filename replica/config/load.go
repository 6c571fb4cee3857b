package config

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

	configv1 "tandem/protos/config/v1"
)

// Load reads a configuration file. Warnings name settings that are accepted but have no effect, or probably not the
// intended one; with an error they are those that do not depend on it. An error is [ValidationErrors], or the reason
// why the file cannot be read. also checks the readable part; its mistakes are added.
func Load(path string,
	also ...func(*configv1.Config) ValidationErrors) (c *configv1.Config, warnings []string, err error) {
	return load(path, nil, also...)
}

func load(path string, before func(*ValidationErrors, *configv1.Config),
	also ...func(*configv1.Config) ValidationErrors) (c *configv1.Config, warnings []string, err error) {
	if path == "" {
		return nil, nil, errors.New("no configuration file given (-f FILE)")
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the configuration (-f names the file): %w", err)
	}
	c, warnings, err = parse(text, before, also...)
	if err != nil {
		return nil, warnings, fmt.Errorf("%s:\n%w", path, err)
	}
	return c, warnings, nil
}

// LoadAdmin reads the admin section of a configuration file for commands, which need nothing else of it. faulty reports
// that the rest of the file has errors. An error is that of [Load]: the section has errors, or cannot be read.
func LoadAdmin(path string) (admin *configv1.Admin, faulty bool, err error) {
	c, _, err := Load(path)
	var found ValidationErrors
	if err == nil || !errors.As(err, &found) {
		return c.GetAdmin(), false, err
	}
	for _, e := range found {
		if e.Path == "" || e.Path == "admin" || strings.HasPrefix(e.Path, "admin.") {
			return nil, false, err
		}
	}
	text, readErr := os.ReadFile(path)
	if readErr != nil {
		return nil, false, fmt.Errorf("reading the configuration: %w", readErr)
	}
	var m ValidationErrors
	if c = m.read(text); c == nil {
		return nil, false, err
	}
	SetDefaults(c)
	return c.GetAdmin(), true, nil
}

// Parse reads a configuration from YAML text, with defaults filled in. Warnings and errors are those of [Load].
func Parse(text []byte,
	also ...func(*configv1.Config) ValidationErrors) (c *configv1.Config, warnings []string, err error) {
	return parse(text, nil, also...)
}

// parse is Parse. before gets the parsed text, without defaults, and may change it; it may be nil.
func parse(text []byte, before func(*ValidationErrors, *configv1.Config),
	also ...func(*configv1.Config) ValidationErrors) (c *configv1.Config, warnings []string, err error) {
	var m ValidationErrors
	var found []warning
	if c = m.read(text); c != nil {
		if before != nil {
			before(&m, c)
		}
		var more ValidationErrors
		SetDefaults(c)
		found = validate(&more, c)
		for _, check := range also {
			more = append(more, check(c)...)
		}
		m = append(m, m.unrelated(more)...)
	}
	if len(m) > 0 {
		slices.SortStableFunc(m, func(a, b ValidationError) int { return comparePaths(a.Path, b.Path) })
		return nil, m.unmisled(found), m
	}
	return c, m.unmisled(found), nil
}

// read turns the text into a message without the parts of the wrong shape; nil if nothing can be read.
func (m *ValidationErrors) read(text []byte) *configv1.Config {
	asJSON, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		m.unreadable(err)
		if asJSON, err = yaml.YAMLToJSON(text); err != nil { // with duplicate keys the rest can still be checked
			if v := variable.Find(text); v != nil { // its brackets may be the cause, in {address: ${HOST}:8000}
				m.add("", notReplaced, v)
			}
			return nil
		}
	}
	d := json.NewDecoder(bytes.NewReader(asJSON))
	d.UseNumber() // a number must keep its spelling
	var tree any
	if err := d.Decode(&tree); err != nil {
		m.unreadable(err)
		return nil
	}
	c := &configv1.Config{}
	object, ok := tree.(map[string]any)
	if !ok {
		m.add("", "the file must hold a mapping, with extProc, envoy, pools and so on; it holds %s", kindOf(tree))
		return nil
	}
	checkShape(m, "", object, c.ProtoReflect().Descriptor())
	if asJSON, err = json.Marshal(object); err == nil {
		err = protojson.Unmarshal(asJSON, c)
	}
	if err != nil {
		m.add("", "%v", err)
		return nil
	}
	return c
}

// unreadable adds the errors of the YAML reader: one or several lines, such as duplicate keys.
func (m *ValidationErrors) unreadable(err error) {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	text = strings.TrimPrefix(text, "unmarshal errors:\n")
	for line := range strings.Lines(text) {
		m.add("", "not readable as YAML: %s", strings.TrimSpace(line))
	}
}
