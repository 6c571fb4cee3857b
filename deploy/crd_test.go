package deploy

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// schemas are the OpenAPI schemas of custom resources, by apiVersion and kind.
type schemas map[string]map[string]any

// releases are the Go modules whose CRDs manifests are held against, and where in them these lie.
func releases() map[string]string {
	return map[string]string{
		"sigs.k8s.io/gateway-api@v1.6.1":                             "config/crd/standard/*.yaml",
		"sigs.k8s.io/gateway-api-inference-extension@v1.5.0":         "config/crd/bases/*.yaml",
		"github.com/envoyproxy/gateway@v1.9.1":                       "charts/gateway-helm/charts/crds/crds/generated/*.yaml",
		"istio.io/api@v1.29.0":                                       "kubernetes/customresourcedefinitions.gen.yaml",
		"github.com/prometheus-operator/prometheus-operator@v0.85.0": "example/prometheus-operator-crd/*s.yaml",
		"github.com/kedacore/keda/v2@v2.21.0":                        "config/crd/bases/keda.sh_scaledobjects.yaml",
	}
}

// loadSchemas reads the CRDs out of Go's module cache, where they are downloaded once.
func loadSchemas(t *testing.T) schemas {
	t.Helper()
	out := schemas{}
	for module, pattern := range releases() {
		files, err := filepath.Glob(filepath.Join(moduleDir(t, module), pattern))
		require.NoError(t, err)
		require.NotEmpty(t, files, module)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			for doc := range strings.SplitSeq(string(text), "\n---") {
				out.add(t, doc)
			}
		}
	}
	return out
}

func moduleDir(t *testing.T, module string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	dir := t.TempDir() // outside of our module
	download := func() ([]byte, error) {
		cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module)
		cmd.Dir = dir
		return cmd.Output()
	}
	text, err := download()
	for tries := 1; err != nil && tries < 4 && os.Getenv("TANDEM_REQUIRE_TOOLS") != ""; tries++ { // a proxy that hiccups is no fault of the manifests
		<-time.After(time.Duration(tries) * 3 * time.Second)
		text, err = download()
	}
	var got struct{ Dir, Error string }
	if err == nil {
		err = json.Unmarshal(text, &got)
	}
	if err != nil || got.Dir == "" {
		missing := fmt.Sprintf("the CRDs of %s are not to be had: %v %s", module, err, text)
		if os.Getenv("TANDEM_REQUIRE_TOOLS") != "" {
			t.Fatal(missing)
		}
		t.Skip(missing)
	}
	return got.Dir
}

func (s schemas) add(t *testing.T, doc string) {
	var crd struct {
		Kind string `json:"kind"`
		Spec struct {
			Group string `json:"group"`
			Names struct {
				Kind string `json:"kind"`
			} `json:"names"`
			Versions []struct {
				Name   string `json:"name"`
				Schema struct {
					Open map[string]any `json:"openAPIV3Schema"`
				} `json:"schema"`
			} `json:"versions"`
		} `json:"spec"`
	}
	require.NoError(t, yaml.Unmarshal([]byte(doc), &crd))
	if crd.Kind != "CustomResourceDefinition" {
		return
	}
	for _, v := range crd.Spec.Versions {
		s[crd.Spec.Group+"/"+v.Name+" "+crd.Spec.Names.Kind] = v.Schema.Open
	}
}

// check holds a value against a structural schema as the API server does with fieldValidation=Strict: fields that it does not
// know are mistakes too. CEL rules are not evaluated.
func check(path string, value any, schema map[string]any) (mistakes []string) {
	if schema["x-kubernetes-preserve-unknown-fields"] == true && schema["properties"] == nil {
		return nil
	}
	bad := func(format string, args ...any) {
		mistakes = append(mistakes, path+": "+fmt.Sprintf(format, args...))
	}
	if enum, ok := schema["enum"].([]any); ok && !slices.Contains(enum, value) {
		bad("%v is not one of %v", value, enum)
	}
	switch v := value.(type) {
	case nil:
		if schema["nullable"] != true {
			bad("is null")
		}
	case map[string]any:
		if kind := schema["type"]; kind != "object" {
			bad("is an object, not %v", kind)
			break
		}
		mistakes = append(mistakes, checkObject(path, v, schema)...)
	case []any:
		if kind := schema["type"]; kind != "array" {
			bad("is a list, not %v", kind)
			break
		}
		if most, ok := schema["maxItems"].(float64); ok && float64(len(v)) > most {
			bad("has %d items, at most %v", len(v), most)
		}
		if least, ok := schema["minItems"].(float64); ok && float64(len(v)) < least {
			bad("has %d items, at least %v", len(v), least)
		}
		items, _ := schema["items"].(map[string]any)
		for i, item := range v {
			mistakes = append(mistakes, check(fmt.Sprintf("%s[%d]", path, i), item, items)...)
		}
	default:
		mistakes = append(mistakes, checkScalar(path, value, schema)...)
	}
	return mistakes
}

func checkObject(path string, v map[string]any, schema map[string]any) (mistakes []string) {
	properties, _ := schema["properties"].(map[string]any)
	additional, open := schema["additionalProperties"].(map[string]any)
	required, _ := schema["required"].([]any)
	for _, name := range required {
		if _, there := v[name.(string)]; !there {
			mistakes = append(mistakes, fmt.Sprintf("%s.%s: is required", path, name))
		}
	}
	names := make([]string, 0, len(v))
	for name := range v {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		switch property, known := properties[name].(map[string]any); {
		case known:
			mistakes = append(mistakes, check(path+"."+name, v[name], property)...)
		case open:
			mistakes = append(mistakes, check(path+"."+name, v[name], additional)...)
		case path == "" && (name == "apiVersion" || name == "kind" || name == "metadata"):
		case schema["x-kubernetes-preserve-unknown-fields"] == true, path == ".metadata":
		default:
			mistakes = append(mistakes, path+"."+name+": unknown field")
		}
	}
	return mistakes
}

func checkScalar(path string, value any, schema map[string]any) (mistakes []string) {
	bad := func(format string, args ...any) {
		mistakes = append(mistakes, path+": "+fmt.Sprintf(format, args...))
	}
	kind, _ := schema["type"].(string)
	either := schema["x-kubernetes-int-or-string"] == true
	switch v := value.(type) {
	case string:
		if kind != "string" && !either {
			bad("is text, not %s", kind)
		}
		if pattern, ok := schema["pattern"].(string); ok && !regexp.MustCompile(pattern).MatchString(v) {
			bad("%q does not match %s", v, pattern)
		}
		if most, ok := schema["maxLength"].(float64); ok && float64(len(v)) > most {
			bad("is longer than %v", most)
		}
	case float64:
		if kind != "integer" && kind != "number" && !either || kind == "integer" && v != math.Trunc(v) {
			bad("is the number %v, not %s", v, kind)
		}
		if least, ok := schema["minimum"].(float64); ok && v < least {
			bad("%v is below %v", v, least)
		}
		if most, ok := schema["maximum"].(float64); ok && v > most {
			bad("%v is above %v", v, most)
		}
	case bool:
		if kind != "boolean" {
			bad("is %v, not %s", v, kind)
		}
	}
	return mistakes
}
