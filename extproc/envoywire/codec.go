package envoywire

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Codec encodes [Reply] and decodes [Message] and [LogBatch] in place, and leaves all other messages to gRPC's protobuf
// codec. It belongs to one server (grpc.ForceServerCodecV2) and is not registered for the process.
type Codec struct {
	fallback encoding.CodecV2
}

// NewCodec returns the codec.
func NewCodec() Codec { return Codec{encoding.GetCodecV2(proto.Name)} }

// Name implements encoding.CodecV2.
func (Codec) Name() string { return proto.Name }

// Marshal implements encoding.CodecV2.
func (c Codec) Marshal(v any) (mem.BufferSlice, error) {
	if r, ok := v.(*Reply); ok {
		return r.Marshal(), nil
	}
	return c.fallback.Marshal(v)
}

// Unmarshal implements encoding.CodecV2.
func (c Codec) Unmarshal(data mem.BufferSlice, v any) error {
	switch m := v.(type) {
	case *Message:
		return m.Unmarshal(data)
	case *LogBatch:
		return m.Unmarshal(data)
	}
	return c.fallback.Unmarshal(data, v)
}
