// Package wiretest creates Envoy's messages for tests.
package wiretest

import (
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// Marshal encodes a message.
func Marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	require.NoError(t, err)
	return b
}

// HeaderMap returns headers of alternating names and values.
func HeaderMap(pairs ...string) *corev3.HeaderMap {
	m := &corev3.HeaderMap{}
	for i := 0; i < len(pairs); i += 2 {
		m.Headers = append(m.Headers, &corev3.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
	}
	return m
}

// Attributes returns ext_proc's attributes of alternating names and values.
func Attributes(pairs ...string) map[string]*structpb.Struct {
	s := &structpb.Struct{Fields: map[string]*structpb.Value{}}
	for i := 0; i < len(pairs); i += 2 {
		s.Fields[pairs[i]] = structpb.NewStringValue(pairs[i+1])
	}
	return map[string]*structpb.Struct{"envoy.filters.http.ext_proc": s}
}
