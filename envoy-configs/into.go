package envoyconfigs

import (
	"bytes"
	"errors"
	"fmt"
	"net"

	"go.yaml.in/yaml/v3"

	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// Front is the cluster that leads from a listener of the reader's own to Tandem's main listener.
const Front = "tandem-front"

// Into adds what Tandem needs to the static bootstrap of an Envoy that is there already: listeners, clusters, the
// extension for internal listeners, and the cluster [Front]. What has the name of one of these takes its place, so the
// result can be given again after a change of the configuration. All else stays as it is, comments too; routes to the
// front are the reader's.
func Into(mine []byte, c *configv1.Config) ([]byte, error) {
	ours, err := Bootstrap(c)
	if err != nil {
		return nil, err
	}
	var to, from yaml.Node
	if err := yaml.Unmarshal(ours, &from); err != nil {
		return nil, fmt.Errorf("reading Tandem's bootstrap: %w", err)
	}
	if err := yaml.Unmarshal(mine, &to); err != nil {
		return nil, fmt.Errorf("reading your bootstrap: %w", err)
	}
	if len(to.Content) != 1 || to.Content[0].Kind != yaml.MappingNode {
		return nil, errors.New("your bootstrap is not a mapping with static_resources: it must be YAML or JSON of one document")
	}
	root, source := to.Content[0], from.Content[0]
	static, ourStatic := config.Member(root, "static_resources"), config.Member(source, "static_resources")
	if static == nil || static.Kind != yaml.MappingNode {
		return nil, errors.New("your bootstrap has no static_resources: a listener of yours that is static must lead to Tandem; " +
			"for an Envoy whose listeners come over xDS run a second Envoy (docs/howto/existing-envoy.md)")
	}
	front, err := frontCluster(c.GetEnvoy().GetListen())
	if err != nil {
		return nil, err
	}
	if err := add(static, "listeners", config.Member(ourStatic, "listeners")); err != nil {
		return nil, err
	}
	clusters := config.Member(ourStatic, "clusters")
	clusters.Content = append(clusters.Content, front)
	if err := add(static, "clusters", clusters); err != nil {
		return nil, err
	}
	if err := add(root, "bootstrap_extensions", config.Member(source, "bootstrap_extensions")); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	if err := encoder.Encode(&to); err != nil {
		return nil, fmt.Errorf("writing the bootstrap: %w", err)
	}
	return out.Bytes(), nil
}

// add puts named items into a list of a mapping: in place of items of the same name, or at the end.
func add(mapping *yaml.Node, key string, items *yaml.Node) error {
	if items == nil {
		return nil
	}
	list := config.Member(mapping, key)
	switch {
	case list == nil:
		list = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
		mapping.Content = append(mapping.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: key}, list)
	case list.Kind == yaml.ScalarNode && list.Tag == "!!null":
		*list = yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	case list.Kind != yaml.SequenceNode:
		return fmt.Errorf("%s of your bootstrap is not a list", key)
	}
	if len(list.Content) == 0 {
		list.Style = 0
	}
	for _, item := range items.Content {
		name, at := config.Member(item, "name").Value, -1
		for i, old := range list.Content {
			if n := config.Member(old, "name"); n != nil && n.Value == name {
				at = i
			}
		}
		if at < 0 {
			list.Content = append(list.Content, item)
		} else {
			list.Content[at] = item
		}
	}
	return nil
}

// frontCluster is the cluster [Front], with limits that answers of minutes and thousands of requests at a time need.
func frontCluster(listen string) (*yaml.Node, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, fmt.Errorf("envoy.listen: %w", err)
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	var doc yaml.Node
	text := fmt.Sprintf(`name: %s
connect_timeout: 1s
load_assignment:
  cluster_name: %s
  endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: %q, port_value: %s}}}}]}]
circuit_breakers: {thresholds: [{max_connections: 50000, max_pending_requests: 50000, max_requests: 50000}]}
`, Front, Front, host, port)
	if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
		return nil, fmt.Errorf("writing the cluster %s: %w", Front, err)
	}
	return doc.Content[0], nil
}
