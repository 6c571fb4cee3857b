package replicas

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"tandem/carrier/filter"
	"tandem/replica/config"
)

// routeOf returns the route as the filter has it; nil: routes are Tandem's own, which takes a file.
func routeOf(m *config.Module) *filter.Route {
	if !m.Routed() {
		return nil
	}
	r := &filter.Route{}
	if m.Route != nil {
		r.Cluster, r.Strict, r.Holds = m.Route.Cluster, m.Route.Strict, m.Route.Hold
		if m.Route.Rule != nil {
			r.Rule = strconv.Itoa(*m.Route.Rule)
		}
	}
	return r
}

// keyOf names the replica of a configuration of the filter. Without a name, another configuration is another replica.
func keyOf(m *config.Module) string {
	switch {
	case m.Name != "":
		return m.Name
	case m.File != "":
		return m.File
	}
	sum := sha256.Sum256(m.Tandem)
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

// mayRead refuses a file that a policy names, unless it lies in the folder for that. Symbolic links are followed: files
// of a ConfigMap are links.
func (o *Operator) mayRead(file string) error {
	inside, err := filepath.Rel(o.Files, filepath.Clean(file))
	if err != nil || !filepath.IsLocal(inside) || !filepath.IsAbs(file) || strings.HasPrefix(inside, "..") {
		return fmt.Errorf("file: %.200q is not in %s, where the gateway's owner has the files that policies may name "+
			"(files in operator.yaml, docs/howto/envoy-gateway-module.md)", file, o.Files)
	}
	return nil
}
