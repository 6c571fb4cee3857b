package envoywire

import (
	"encoding/binary"
	"math"
)

// Destination returns dynamic_metadata{"envoy.lb": {"x-gateway-destination-endpoint": list}}: a Struct in a Struct.
func Destination(list string) []byte {
	value := bytesLen(len(list))                               // Value{3: string_value}
	entry := bytesLen(len(HeaderEndpoint)) + bytesLen(value)   // map entry {1: key, 2: value}
	inner := bytesLen(entry)                                   // Struct{1: fields}
	outerValue := bytesLen(inner)                              // Value{5: struct_value}
	outer := bytesLen(len(namespaceLB)) + bytesLen(outerValue) // map entry
	b := appendLen(make([]byte, 0, bytesLen(outer)), 1, outer)
	b = appendText(b, 1, namespaceLB)
	b = appendLen(b, 2, outerValue)
	b = appendLen(b, 5, inner)
	b = appendLen(b, 1, entry)
	b = appendText(b, 1, HeaderEndpoint)
	b = appendLen(b, 2, value)
	return appendText(b, 3, list)
}

// MetadataField is one field of dynamic metadata: a text or, where that is empty, a number.
type MetadataField struct {
	Name, Text string
	Number     float64
}

// Metadata encodes dynamic metadata of one namespace, {namespace: {name: value, ...}}. Empty fields are left out.
func Metadata(namespace string, fields ...MetadataField) []byte {
	var inner []byte
	for _, f := range fields {
		switch {
		case f.Text != "":
			inner = appendField(inner, f.Name, appendText(nil, 3, f.Text)) // Value{3: string_value}
		case f.Number != 0:
			number := binary.LittleEndian.AppendUint64(appendTag(nil, 2, wireI64), math.Float64bits(f.Number))
			inner = appendField(inner, f.Name, number) // Value{2: number_value}
		}
	}
	return appendField(nil, namespace, appendText(nil, 5, inner)) // Value{5: struct_value}
}

// appendField appends Struct{1: fields{1: name, 2: value}}.
func appendField(b []byte, name string, value []byte) []byte {
	return appendText(b, 1, appendText(appendText(nil, 1, name), 2, value))
}
