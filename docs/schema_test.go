package docs

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"sigs.k8s.io/yaml"

	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

const (
	schemaFile = "tandem.schema.json"
	valuesFile = "../deploy/helm/tandem/values.schema.json"
)

// The JSON Schema of the configuration, for editors and, as a part of its own, for the chart's values.
func TestSchema(t *testing.T) {
	s := schemas{comments: comments(read(t, "../protos/config/v1/config.proto")), definitions: map[string]any{}}
	root := s.message((&configv1.Config{}).ProtoReflect().Descriptor())
	whole := map[string]any{"$schema": "http://json-schema.org/draft-07/schema#", "title": "Configuration of Tandem",
		"definitions": s.definitions, "$ref": root["$ref"]}
	values := map[string]any{}
	require.NoError(t, json.Unmarshal([]byte(read(t, valuesFile)), &values))
	properties, ok := values["properties"].(map[string]any)
	require.True(t, ok)
	properties["config"] = map[string]any{"allOf": []any{root, map[string]any{"required": []string{"pools"}}}}
	values["definitions"] = withoutRequired(t, s.definitions)
	for file, want := range map[string]any{schemaFile: whole, valuesFile: values} {
		text := written(t, want)
		if *update {
			require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		}
		require.Equal(t, text, read(t, file), "run go test ./docs -update")
	}
}

// withoutRequired leaves out what must be there, except of pools: the chart fills in the rest.
func withoutRequired(t *testing.T, definitions map[string]any) map[string]any {
	t.Helper()
	text, err := json.Marshal(definitions)
	require.NoError(t, err)
	out := map[string]map[string]any{}
	require.NoError(t, json.Unmarshal(text, &out))
	all := map[string]any{}
	for name, of := range out {
		if name != "Pool" {
			delete(of, "required")
		}
		all[name] = of
	}
	return all
}

func written(t *testing.T, v any) string {
	t.Helper()
	var b bytes.Buffer
	to := json.NewEncoder(&b)
	to.SetEscapeHTML(false)
	to.SetIndent("", " ")
	require.NoError(t, to.Encode(v))
	return b.String()
}

// schemas makes the schema of a message, and of those within it.
type schemas struct {
	comments    map[string]string
	definitions map[string]any // by message
}

func (s *schemas) message(d protoreflect.MessageDescriptor) map[string]any {
	name := string(d.Name())
	ref := map[string]any{"$ref": "#/definitions/" + name}
	if s.definitions[name] != nil {
		return ref
	}
	properties := map[string]any{}
	of := map[string]any{"type": orNothing("object"), "additionalProperties": false, "properties": properties}
	s.definitions[name] = of // before its fields: a message may be within itself
	if text := s.comments[name]; text != "" {
		of["description"] = text
	}
	var required []string
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		about := s.comments[name+"."+string(f.Name())]
		value := s.value(f)
		if f.IsList() {
			value = map[string]any{"type": orNothing("array"), "items": value}
		}
		if absent, _ := proto.GetExtension(f.Options(), configv1.E_Absent).(string); absent != "" {
			about += " Default: " + absent + "."
		}
		if value["$ref"] != nil && about != "" {
			value = map[string]any{"allOf": []any{value}} // beside $ref nothing counts
		}
		if about != "" {
			value["description"] = strings.TrimSpace(about)
		}
		properties[f.JSONName()] = value
		if strings.Contains(about, "Required.") || strings.Contains(about, "Required, unique.") {
			required = append(required, f.JSONName())
		}
	}
	if required != nil {
		of["required"] = required
	}
	return ref
}

// orNothing is a type that may be empty in YAML, which counts as absent.
func orNothing(kind string) []string { return []string{kind, "null"} }

// value is the schema of one value of a field.
func (s *schemas) value(f protoreflect.FieldDescriptor) map[string]any {
	words, _ := proto.GetExtension(f.Options(), configv1.E_Words).(string)
	span, _ := proto.GetExtension(f.Options(), configv1.E_Range).(string)
	switch f.Kind() {
	case protoreflect.MessageKind:
		return s.message(f.Message())
	case protoreflect.BoolKind:
		return map[string]any{"type": orNothing("boolean")}
	case protoreflect.DoubleKind:
		return map[string]any{"type": orNothing("number")}
	case protoreflect.Int32Kind, protoreflect.Int64Kind:
		if strings.HasSuffix(f.JSONName(), "Bytes") {
			return map[string]any{"type": []string{"integer", "string", "null"}, "pattern": `^\d+([kKMG]i?)?B?$`}
		}
		return map[string]any{"type": orNothing("integer")}
	}
	text := map[string]any{"type": orNothing("string")}
	switch {
	case f.Name() == "kv_transfer":
		text["enum"] = config.Dialects()
	case words != "" && !f.IsList():
		text["enum"] = append(anys(strings.Fields(words)), nil)
	case span != "":
		text["pattern"] = `^(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+$`
	}
	return text
}

func anys(texts []string) (out []any) {
	for _, t := range texts {
		out = append(out, t)
	}
	return out
}

// schemaCheck returns a check of YAML by a schema.
func schemaCheck(t *testing.T, file string) func(text string) error {
	t.Helper()
	c := jsonschema.NewCompiler()
	schema, err := jsonschema.UnmarshalJSON(strings.NewReader(read(t, file)))
	require.NoError(t, err)
	require.NoError(t, c.AddResource("tandem.json", schema))
	compiled := c.MustCompile("tandem.json")
	return func(text string) error {
		asJSON, err := yaml.YAMLToJSON([]byte(text))
		require.NoError(t, err)
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(asJSON))
		require.NoError(t, err)
		return compiled.Validate(value)
	}
}

// The schema takes every configuration of the repository (TestConfigurationsShownAreValid has those of pages), and refuses
// what the check refuses, with the place.
func TestSchemaTakesAndRefuses(t *testing.T) {
	check := schemaCheck(t, schemaFile)
	n := 0
	for _, glob := range []string{"../envoy-configs/*/tandem.yaml", "../deploy/*/tandem.yaml", "../deploy/*/*/*/tandem.yaml"} {
		files, err := filepath.Glob(glob)
		require.NoError(t, err)
		for _, file := range files {
			if text := read(t, file); strings.Contains(text, "\npools:") {
				require.NoError(t, check(text), file)
				n++
			}
		}
	}
	require.Greater(t, n, 5)
	const pool = "pools:\n- name: x\n  kvTransfer: nixl\n  endpoints: [{address: 'a:1', role: prefill}, {address: 'b:1', role: decode}]\n"
	require.NoError(t, check(pool+"  split:\n"), "empty counts as absent")
	for text, at := range map[string]string{
		pool + "  splitt: always\n":              "splitt",
		pool + "  split: sometimes\n":            "/pools/0/split",
		pool + "  prefillTimeout: {base: 1}\n":   "/pools/0/prefillTimeout/base",
		pool + "envoy: {maxBodyBytes: plenty}\n": "/envoy/maxBodyBytes",
		"pools: [{name: x}]":                     "kvTransfer",
		"pools: [{name: x, kvTransfer: nxil}]":   "/pools/0/kvTransfer",
	} {
		require.ErrorContains(t, check(text), at)
	}
}

// merged returns values over others, as Helm merges them.
func merged(under, over map[string]any) map[string]any {
	out := maps.Clone(under)
	for name, value := range over {
		below, isMap := out[name].(map[string]any)
		if more, ok := value.(map[string]any); ok && isMap {
			value = merged(below, more)
		}
		out[name] = value
	}
	return out
}

// Values of the chart that pages show are those that it takes.
func TestValuesShownAreValid(t *testing.T) {
	check, n := schemaCheck(t, valuesFile), 0
	defaults := map[string]any{}
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "../deploy/helm/tandem/values.yaml")), &defaults))
	for _, page := range pages(t) {
		for _, m := range regexp.MustCompile(`(?m)^( +)# values\.yaml\n((?: +.*\n)+)`).FindAllStringSubmatch(read(t, page), -1) {
			shown := map[string]any{}
			text := strings.ReplaceAll("\n"+m[2], "\n"+m[1], "\n")
			require.NoError(t, yaml.Unmarshal([]byte(text), &shown), "%s: %s", page, text)
			whole, err := yaml.Marshal(merged(defaults, shown))
			require.NoError(t, err)
			require.NoError(t, check(string(whole)), "%s: %s", page, text)
			n++
		}
	}
	require.Greater(t, n, 3)
}
