package envoywire

import "strings"

// Names of the Endpoint Picker protocol (gateway-api-inference-extension, docs/proposals/004-endpoint-picker-protocol,
// v1.0.0).
const (
	namespaceLB         = "envoy.lb"
	NamespaceSubset     = "envoy.lb.subset_hint"
	keySubset           = "x-gateway-destination-endpoint-subset"
	keyServed           = "x-gateway-destination-endpoint-served"
	ReasonNoEndpoints   = "rejected-no-endpoints"
	ReasonSaturated     = "rejected-saturated"
	HeaderDropped       = "x-llm-d-request-dropped-reason"
	maxSubset           = 4096                                 // endpoints in a hint
	HeaderTestSelected  = "x-conformance-test-served-endpoint" // the conformance suite reads it in answers
	headerTestSelection = "test-epp-endpoint-selection"        // ... and sets on a request
)

// Hints are a gateway's additions to the request, in metadata_context.
type Hints struct {
	Subset    []string // ip:port, or ip for any port
	HasSubset bool     // distinguishes an empty subset, which allows no endpoint, from none
	Served    string   // the endpoint that answered
}

// readMetadata reads core.v3.Metadata{1: map<string, Struct> filter_metadata}.
func (m *Message) readMetadata(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number != 1 || wire != wireBytes {
			c.skip(wire, end)
			continue
		}
		entryEnd := c.length(end)
		namespace := ""
		for number, wire := c.field(entryEnd); number != 0; number, wire = c.field(entryEnd) {
			switch {
			case number == 1 && wire == wireBytes:
				namespace = m.name(c, entryEnd)
			case number == 2 && wire == wireBytes && (namespace == NamespaceSubset || namespace == namespaceLB):
				m.readHints(c, c.length(entryEnd), namespace)
			default:
				c.skip(wire, entryEnd)
			}
		}
	}
}

// name reads a text that is not stored; "" if it is not one of the known names.
func (m *Message) name(c *cursor, end int) string {
	mark := len(m.arena)
	text := c.text(&m.arena, end)
	m.arena = m.arena[:mark]
	switch string(text) {
	case namespaceLB:
		return namespaceLB
	case NamespaceSubset:
		return NamespaceSubset
	case keySubset:
		return keySubset
	case keyServed:
		return keyServed
	}
	return ""
}

// readHints reads Struct{1: map<string, Value>} of one namespace.
func (m *Message) readHints(c *cursor, end int, namespace string) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number != 1 || wire != wireBytes {
			c.skip(wire, end)
			continue
		}
		entryEnd := c.length(end)
		key := ""
		for number, wire := c.field(entryEnd); number != 0; number, wire = c.field(entryEnd) {
			switch {
			case number == 1 && wire == wireBytes:
				key = m.name(c, entryEnd)
			case number == 2 && wire == wireBytes && key == keySubset && namespace == NamespaceSubset:
				m.Hints.HasSubset = true
				m.readSubset(c, c.length(entryEnd))
			case number == 2 && wire == wireBytes && key == keyServed && namespace == namespaceLB:
				m.readServed(c, c.length(entryEnd))
			default:
				c.skip(wire, entryEnd)
			}
		}
	}
}

// readSubset reads Value{3: string_value, "a,b"} or Value{6: ListValue{1: repeated Value{3: string_value}}}: gateways
// write either (Envoy Gateway's header_to_metadata can only write the first).
func (m *Message) readSubset(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 3 && wire == wireBytes:
			m.addSubset(c, end)
		case number == 6 && wire == wireBytes:
			listEnd := c.length(end)
			for number, wire := c.field(listEnd); number != 0; number, wire = c.field(listEnd) {
				if number != 1 || wire != wireBytes {
					c.skip(wire, listEnd)
					continue
				}
				valueEnd := c.length(listEnd)
				for number, wire := c.field(valueEnd); number != 0; number, wire = c.field(valueEnd) {
					if number == 3 && wire == wireBytes {
						m.addSubset(c, valueEnd)
					} else {
						c.skip(wire, valueEnd)
					}
				}
			}
		default:
			c.skip(wire, end)
		}
	}
}

func (m *Message) addSubset(c *cursor, end int) {
	mark := len(m.arena)
	text := c.text(&m.arena, end)
	m.Hints.Subset = Addresses(m.Hints.Subset, string(text))
	m.arena = m.arena[:mark]
}

// Addresses appends the parts of a comma list.
func Addresses(dst []string, list string) []string {
	for part := range strings.SplitSeq(list, ",") {
		if part = strings.TrimSpace(part); part != "" && len(dst) < maxSubset {
			dst = append(dst, part)
		}
	}
	return dst
}

func (m *Message) readServed(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number == 3 && wire == wireBytes {
			mark := len(m.arena)
			m.Hints.Served = string(c.text(&m.arena, end))
			m.arena = m.arena[:mark]
		} else {
			c.skip(wire, end)
		}
	}
}
