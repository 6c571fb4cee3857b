package extproc

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// codec is gRPC's protobuf codec, but for the three messages that carry the load, which it reads and writes in place.
// It is the codec of one server (grpc.ForceServerCodecV2), not registered for the process. Fuzz tests hold it against
// the generated types.
type codec struct {
	fallback encoding.CodecV2
}

func newCodec() codec { return codec{encoding.GetCodecV2(proto.Name)} }

func (codec) Name() string { return proto.Name }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if r, ok := v.(*reply); ok {
		return r.marshal(), nil
	}
	return c.fallback.Marshal(v)
}

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	switch m := v.(type) {
	case *message:
		return m.unmarshal(data)
	case *logBatch:
		return m.unmarshal(data)
	}
	return c.fallback.Unmarshal(data, v)
}
