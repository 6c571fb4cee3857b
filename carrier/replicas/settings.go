package replicas

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"tandem/carrier/filter"
)

// settings are what Envoy's configuration says of the filter (filter_config; of Envoy Gateway: config of a policy's
// dynamicModule).
type settings struct {
	File string `json:"file"` // the configuration of the replica ...
	Log  string `json:"log"`  // the lowest level that is logged; "": info

	// The rest is for a route that is another's.
	Tandem json.RawMessage `json:"tandem"` // ... or the configuration itself
	Name   string          `json:"name"`   // of the replica; "": one of its own for this configuration
	Route  *route          `json:"route"`  // nil, with a file: routes are Tandem's own
}

// route is [filter.Route] as a policy says it.
type route struct {
	Rule    *int   `json:"rule"`    // of the HTTPRoute, whose cluster calls go to
	Cluster string `json:"cluster"` // likewise, by its full name
	Strict  bool   `json:"strict"`
	Hold    bool   `json:"hold"`
}

// routed reports whether the filter's route is another's.
func (s *settings) routed() bool { return s.Route != nil || s.Tandem != nil }

// names are those of replicas: a part of the paths of the operator's port.
var names = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

// read reads the settings. With an error they are those that could be read.
func read(text []byte) (s settings, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err = d.Decode(&s); err != nil {
		_ = json.Unmarshal(text, &s)
		return s, fmt.Errorf("the filter's configuration %.200q is not {file: /path/to/tandem.yaml}, nor that of a "+
			"route's policy (docs/howto/envoy-gateway-module.md): %w", text, err)
	}
	switch {
	case s.File == "" && s.Tandem == nil:
		return s, fmt.Errorf("the filter's configuration %.200q has neither tandem nor file", text)
	case s.File != "" && s.Tandem != nil:
		return s, errors.New("the filter's configuration has both tandem and file: leave one of them out")
	case s.Route != nil && s.Route.Rule != nil && (*s.Route.Rule < 0 || s.Route.Cluster != ""):
		return s, errors.New("route.rule is the number of an HTTPRoute's rule, from 0, and goes without route.cluster")
	case s.Name != "" && !names.MatchString(s.Name):
		return s, fmt.Errorf("name: %.80q is not of letters, digits, dots, - and _, 63 at most", s.Name)
	}
	return s, nil
}

// filters returns the route as the filter has it; nil: routes are Tandem's own, which takes a file. What names none
// and cannot be read otherwise is another's: a printed bootstrap can be read.
func (s *settings) filters() *filter.Route {
	if !s.routed() && s.File != "" {
		return nil
	}
	r := &filter.Route{}
	if s.Route != nil {
		r.Cluster, r.Strict, r.Holds = s.Route.Cluster, s.Route.Strict, s.Route.Hold
		if s.Route.Rule != nil {
			r.Rule = strconv.Itoa(*s.Route.Rule)
		}
	}
	return r
}

// key names the replica. Without a name, another configuration is another replica.
func (s *settings) key() string {
	switch {
	case s.Name != "":
		return s.Name
	case s.File != "":
		return s.File
	}
	sum := sha256.Sum256(s.Tandem)
	return hex.EncodeToString(sum[:4])
}

// Operator is what the owner of a gateway says of Tandem in it: the file that TANDEM_OPERATOR names.
type Operator struct {
	Admin   string         `json:"admin"`   // address of the one operator's port of the process
	Files   string         `json:"files"`   // folder of the files that policies may name
	Engines []netip.Prefix `json:"engines"` // networks of the engines that policies may name
}

// ReadOperator reads that file, with the defaults; "": there is none.
func ReadOperator(file string) (o Operator, err error) {
	o.Admin, o.Files = "127.0.0.1:9090", "/etc/tandem"
	if file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return o, fmt.Errorf("TANDEM_OPERATOR: %w", err)
		}
		if err := yaml.UnmarshalStrict(text, &o); err != nil {
			return o, fmt.Errorf("%s: %w", file, err)
		}
	}
	if o.Engines == nil { // private networks: neither this machine, nor what clouds have on link-local addresses
		for _, p := range []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"} {
			o.Engines = append(o.Engines, netip.MustParsePrefix(p))
		}
	}
	return o, nil
}

// mayRead refuses a file that a policy names, unless it lies in the folder for that. Links count as what they name: a
// ConfigMap in a volume is one.
func (o *Operator) mayRead(file string) error {
	inside, err := filepath.Rel(o.Files, filepath.Clean(file))
	if err != nil || !filepath.IsLocal(inside) || !filepath.IsAbs(file) || strings.HasPrefix(inside, "..") {
		return fmt.Errorf("file: %.200q is not in %s, where the gateway's owner has the files that policies may name "+
			"(files in operator.yaml, docs/howto/envoy-gateway-module.md)", file, o.Files)
	}
	return nil
}
