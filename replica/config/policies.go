package config

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	yaml3 "go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/reflect/protoreflect"

	configv1 "tandem/protos/config/v1"
)

// The configuration of a replica in a gateway's Envoy comes from the policy of a route, or from a file that the
// gateway's owner has mounted. Who writes a policy may not be who owns the gateway: what runs there has the gateway's
// files, network and ports. So a policy may say what inPolicies lists, and nothing else.

// inPolicies are the settings that a policy may have, by their message; "*": all of it. A setting that is not here has
// to be in a file.
var inPolicies = map[protoreflect.Name]string{ //nolint:gochecknoglobals // a table
	"Config": "pools usage envoy",
	"Usage":  "tenant_header tenants",
	"Envoy":  "path_prefixes",
	"Pool": "name models kv_transfer engine paths split long_prompts on_prefill_failure decode_alone " +
		"prefill_attempts prefill_timeout endpoints attempts_time stream_start_timeout answer_timeout kv_timeout " +
		"stranded_blocks session orchestrated members nixl kv_events min_prefill_tokens answer_weight targets roles " +
		"cached_tokens discovery binding queue objectives engine_priority encode label_header continue_streams " +
		"pair_unlike",
	"Endpoint": "address role scheme group transfer release kv_events_port kv_replay_port server_name weight zone " +
		"loras labels data_parallel_ranks node",
	"Transfer": "bootstrap_port handshake_port notify_port tensor_parallel_size data_parallel_size p2p_port",
	"KvEvents": "port replay_port ranks topic tokens token_budget load_bandwidth",
	// only its names: a token of Kubernetes, and files, are the gateway's
	"Discovery":       "dns",
	"NameDiscovery":   "*",
	"PrefillTimeout":  "*",
	"SessionKey":      "*",
	"Orchestrated":    "*",
	"NIXL":            "*",
	"Targets":         "*",
	"Queue":           "*",
	"Objectives":      "*",
	"Objective":       "*",
	"Encode":          "*",
	"ContinueStreams": "*",
	"LoadBandwidth":   "*",
}

// ParsePolicy reads a configuration that stands in a policy. engines are the networks in which its engines may be.
// Warnings and errors are those of [Load].
func ParsePolicy(text []byte, engines []netip.Prefix) (c *configv1.Config, warnings []string, err error) {
	return parse(text, func(m *ValidationErrors, c *configv1.Config) {
		onlyInPolicies(m, "", c.ProtoReflect())
		runInside(m, c)
	}, func(c *configv1.Config) (found ValidationErrors) {
		for i, p := range c.GetPools() {
			if TakesNotices(p) {
				found.add(fmt.Sprintf("pools[%d].kvTransfer", i), "takes notices at a port: "+notInPolicies)
			}
			for j, e := range p.GetEndpoints() {
				if at, err := netip.ParseAddrPort(e.GetAddress()); err == nil && !Contains(engines, at.Addr()) {
					found.add(fmt.Sprintf("pools[%d].endpoints[%d].address", i, j), notAnEngine, at.Addr(), engines)
				}
			}
		}
		return found
	})
}

// LoadRouted is [Load] of a file whose replica runs in a gateway's Envoy, whatever envoy.run says.
func LoadRouted(path string) (*configv1.Config, []string, error) {
	return load(path, runInside)
}

func runInside(_ *ValidationErrors, c *configv1.Config) {
	sub(&c.Envoy)
	c.Envoy.Run = "inside"
}

const (
	notInPolicies = "is not for a policy, whose author may not own the gateway: put the configuration into a file " +
		"of the gateway's, and name that (docs/security.md#in-a-gateways-envoy)"
	notAnEngine = "%s is in none of the networks of engines, %s: the gateway's owner can allow it (engines in " +
		"operator.yaml, docs/howto/envoy-gateway-module.md)"
)

// onlyInPolicies refuses the settings of a message that a policy may not have.
func onlyInPolicies(m *ValidationErrors, path string, message protoreflect.Message) {
	allowed := inPolicies[message.Descriptor().Name()]
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		at := Join(path, field.JSONName())
		switch {
		case allowed != "*" && !slices.Contains(strings.Fields(allowed), string(field.Name())):
			m.add(at, notInPolicies)
		case field.Kind() != protoreflect.MessageKind:
		case field.IsList():
			for i := range value.List().Len() {
				onlyInPolicies(m, fmt.Sprintf("%s[%d]", at, i), value.List().Get(i).Message())
			}
		default:
			onlyInPolicies(m, at, value.Message())
		}
		return true
	})
}

// Contains reports whether an address is in one of the networks.
func Contains(networks []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Contains(a.Unmap().WithZone("")) })
}

// ForPolicy returns the part of a configuration file that a policy needs, as YAML: without what holds in a gateway's
// Envoy anyway (where Tandem and Envoy listen). nil: it has other settings that a policy may not have.
func ForPolicy(text []byte) ([]byte, error) {
	var file yaml3.Node
	if err := yaml3.Unmarshal(text, &file); err != nil || len(file.Content) == 0 {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	top := file.Content[0]
	var kept []*yaml3.Node
	for i := 0; i+1 < len(top.Content); i += 2 {
		if key := top.Content[i].Value; key != "extProc" && key != "replan" && key != "admin" && key != "envoy" {
			kept = append(kept, top.Content[i:i+2]...)
		} else if prefixes := Member(top.Content[i+1], "pathPrefixes"); prefixes != nil {
			name := &yaml3.Node{Kind: yaml3.ScalarNode, Value: "pathPrefixes"}
			paths := &yaml3.Node{Kind: yaml3.MappingNode, Content: []*yaml3.Node{name, prefixes}}
			kept = append(kept, top.Content[i], paths)
		}
	}
	top.Content = kept
	var out bytes.Buffer
	e := yaml3.NewEncoder(&out)
	e.SetIndent(2)
	if err := e.Encode(top); err != nil {
		return nil, fmt.Errorf("writing the configuration: %w", err)
	}
	everywhere := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	if _, _, err := ParsePolicy(out.Bytes(), everywhere); err != nil {
		return nil, nil //nolint:nilerr // the file has been read: what is wrong is that it is no policy's
	}
	return out.Bytes(), nil
}

// Member returns the value of a YAML mapping's member; nil: it has none, or there is no mapping.
func Member(mapping *yaml3.Node, name string) *yaml3.Node {
	for i := 0; mapping != nil && i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == name {
			return mapping.Content[i+1]
		}
	}
	return nil
}
