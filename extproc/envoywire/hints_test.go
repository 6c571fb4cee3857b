package envoywire

import (
	"math/rand/v2"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// FuzzMetadata: hints of any shape are read or refused as by the generated code.
func FuzzMetadata(f *testing.F) {
	f.Add(`{"x-gateway-destination-endpoint-subset":["a:1","b:2"]}`)
	f.Add(`{"x-gateway-destination-endpoint-subset":"a:1,b:2","other":{"deep":[1,null,true]}}`)
	f.Fuzz(func(t *testing.T, text string) {
		s := &structpb.Struct{}
		if s.UnmarshalJSON([]byte(text)) != nil {
			return
		}
		var want []string
		switch v := s.GetFields()[keySubset].GetKind().(type) {
		case *structpb.Value_StringValue:
			want = Addresses(nil, v.StringValue)
		case *structpb.Value_ListValue:
			for _, item := range v.ListValue.GetValues() {
				want = Addresses(want, item.GetStringValue())
			}
		}
		got := unmarshalled(t, &extprocv3.ProcessingRequest{MetadataContext: &corev3.Metadata{
			FilterMetadata: map[string]*structpb.Struct{NamespaceSubset: s, "other": s},
		}})
		require.Equal(t, want, got.Hints.Subset)
		_, has := s.GetFields()[keySubset]
		require.Equal(t, has, got.Hints.HasSubset)
	})
}

// unmarshalled returns a message as the server reads it, in pieces.
func unmarshalled(t *testing.T, r *extprocv3.ProcessingRequest) *Message {
	wire, err := proto.Marshal(r)
	require.NoError(t, err)
	var m Message
	require.NoError(t, m.Unmarshal(split(wire, rand.New(rand.NewPCG(1, 2)))))
	return &m
}
