package envoyconfigs

import (
	"fmt"
	"maps"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// notebook remembers why a model sets what it sets, for whoever prints it.
type notebook struct {
	notes  map[proto.Message]notes
	packed map[*anypb.Any]proto.Message // what an Any was made of, whose notes are known
	err    error                        // the first message that could not be packed
}

// notes say why a message, or one of its fields, is as it is: by the field's name in Envoy's API, "" for the message
// itself.
type notes map[string]string

func newNotebook() *notebook {
	return &notebook{notes: map[proto.Message]notes{}, packed: map[*anypb.Any]proto.Message{}}
}

// note adds notes to a message of the model.
func (b *notebook) note(message proto.Message, n notes) {
	if b.notes[message] == nil {
		b.notes[message] = notes{}
	}
	maps.Copy(b.notes[message], n)
}

// noted adds notes to a message of the model and returns the message.
func noted[M proto.Message](b interface {
	note(message proto.Message, n notes)
}, message M, n notes) M {
	b.note(message, n)
	return message
}

// pack makes an Any of a message, which must not change afterwards.
func (b *notebook) pack(message proto.Message) *anypb.Any {
	a := &anypb.Any{}
	if err := anypb.MarshalFrom(a, message, proto.MarshalOptions{Deterministic: true}); err != nil && b.err == nil {
		b.err = fmt.Errorf("packing %s: %w", message.ProtoReflect().Descriptor().FullName(), err)
	}
	b.packed[a] = message
	return a
}

// extension is one of Envoy's extension points, filled.
func (b *notebook) extension(name string, config proto.Message) *corev3.TypedExtensionConfig {
	return &corev3.TypedExtensionConfig{Name: name, TypedConfig: b.pack(config)}
}
