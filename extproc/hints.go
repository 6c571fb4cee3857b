package extproc

import "strings"

// Names of the Endpoint Picker protocol (gateway-api-inference-extension, docs/proposals/004-endpoint-picker-protocol, v1.0.0).
const (
	namespaceLB         = "envoy.lb"
	namespaceSubset     = "envoy.lb.subset_hint"
	keySubset           = "x-gateway-destination-endpoint-subset"
	keyServed           = "x-gateway-destination-endpoint-served"
	reasonNoEndpoints   = "rejected-no-endpoints"
	reasonSaturated     = "rejected-saturated"
	headerDropped       = "x-llm-d-request-dropped-reason"
	maxSubset           = 4096                                 // endpoints that a hint may name
	headerTestSelected  = "x-conformance-test-served-endpoint" // what the conformance suite reads of an answer
	headerTestSelection = "test-epp-endpoint-selection"        // ... and sets on a request
)

// hints are what a gateway says beside the request, in metadata_context.
type hints struct {
	subset    []string // ip:port, or ip for any port
	hasSubset bool     // a subset may be empty, and is then no endpoint at all
	served    string   // the endpoint that gave the answer
}

// readMetadata reads core.v3.Metadata{1: map<string, Struct> filter_metadata}.
func (m *message) readMetadata(c *cursor, end int) {
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
			case number == 2 && wire == wireBytes && (namespace == namespaceSubset || namespace == namespaceLB):
				m.readHints(c, c.length(entryEnd), namespace)
			default:
				c.skip(wire, entryEnd)
			}
		}
	}
}

// name reads a text that is not kept; "" for one that nobody asks for.
func (m *message) name(c *cursor, end int) string {
	mark := len(m.arena)
	text := c.text(&m.arena, end)
	m.arena = m.arena[:mark]
	switch string(text) {
	case namespaceLB:
		return namespaceLB
	case namespaceSubset:
		return namespaceSubset
	case keySubset:
		return keySubset
	case keyServed:
		return keyServed
	}
	return ""
}

// readHints reads Struct{1: map<string, Value>} of one namespace.
func (m *message) readHints(c *cursor, end int, namespace string) {
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
			case number == 2 && wire == wireBytes && key == keySubset && namespace == namespaceSubset:
				m.hints.hasSubset = true
				m.readSubset(c, c.length(entryEnd))
			case number == 2 && wire == wireBytes && key == keyServed && namespace == namespaceLB:
				m.readServed(c, c.length(entryEnd))
			default:
				c.skip(wire, entryEnd)
			}
		}
	}
}

// readSubset reads Value{3: string_value, "a,b"} or Value{6: ListValue{1: repeated Value{3: string_value}}}: gateways write
// either (Envoy Gateway's header_to_metadata can only write the first).
func (m *message) readSubset(c *cursor, end int) {
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

func (m *message) addSubset(c *cursor, end int) {
	mark := len(m.arena)
	text := c.text(&m.arena, end)
	m.hints.subset = addresses(m.hints.subset, string(text))
	m.arena = m.arena[:mark]
}

// addresses appends the parts of a comma list.
func addresses(dst []string, list string) []string {
	for part := range strings.SplitSeq(list, ",") {
		if part = strings.TrimSpace(part); part != "" && len(dst) < maxSubset {
			dst = append(dst, part)
		}
	}
	return dst
}

func (m *message) readServed(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number == 3 && wire == wireBytes {
			mark := len(m.arena)
			m.hints.served = string(c.text(&m.arena, end))
			m.arena = m.arena[:mark]
		} else {
			c.skip(wire, end)
		}
	}
}

// destination is dynamic_metadata{"envoy.lb": {"x-gateway-destination-endpoint": list}}: a Struct in a Struct.
func destination(list string) []byte {
	value := bytesLen(len(list))                               // Value{3: string_value}
	entry := bytesLen(len(headerEndpoint)) + bytesLen(value)   // map entry {1: key, 2: value}
	inner := bytesLen(entry)                                   // Struct{1: fields}
	outerValue := bytesLen(inner)                              // Value{5: struct_value}
	outer := bytesLen(len(namespaceLB)) + bytesLen(outerValue) // map entry
	b := appendLen(make([]byte, 0, bytesLen(outer)), 1, outer)
	b = appendText(b, 1, namespaceLB)
	b = appendLen(b, 2, outerValue)
	b = appendLen(b, 5, inner)
	b = appendLen(b, 1, entry)
	b = appendText(b, 1, headerEndpoint)
	b = appendLen(b, 2, value)
	return appendText(b, 3, list)
}
