package envoyconfigs

import (
	"bytes"
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"

	"tandem/envoy-configs/layout"
)

// notebook keeps the reasons for what a model sets, so that they can be printed with it.
type notebook struct {
	notes  map[proto.Message]notes
	packed map[*anypb.Any]proto.Message // the messages that were packed into an Any, which have the notes
	err    error                        // the first message that could not be packed
}

// notes say why a message, or one of its fields, is as it is: by the field's name in Envoy's API, "" for the message
// itself.
type notes = map[string]string

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

// extension returns the configuration of an extension of Envoy.
func (b *notebook) extension(name string, config proto.Message) *corev3.TypedExtensionConfig {
	return &corev3.TypedExtensionConfig{Name: name, TypedConfig: b.pack(config)}
}

// print writes a message of the model as YAML, with the model's notes as comments and an overview above all.
func (b *notebook) print(overview string, message proto.Message) ([]byte, error) {
	var out bytes.Buffer
	for line := range strings.SplitSeq(overview, "\n") {
		out.WriteString(strings.TrimRight("# "+line, " ") + "\n")
	}
	text, err := b.printNode(b.node(message.ProtoReflect()))
	out.Write(text)
	return out.Bytes(), err
}

func (b *notebook) printNode(root *yaml.Node) ([]byte, error) {
	if b.err != nil {
		return nil, b.err
	}
	return layout.Encode(root) //nolint:wrapcheck // it says what failed
}

// fields are those of a message, in the order of their names.
func (b *notebook) fields(message proto.Message) iter.Seq2[string, *yaml.Node] {
	content := b.node(message.ProtoReflect()).Content
	values := map[string]*yaml.Node{}
	for i := 0; i < len(content); i += 2 {
		values[content[i].Value] = content[i+1]
	}
	return func(yield func(string, *yaml.Node) bool) {
		for _, name := range slices.Sorted(maps.Keys(values)) {
			if !yield(name, values[name]) {
				return
			}
		}
	}
}

// node is a message as YAML: fields by their names in Envoy's API, as its documentation has them.
func (b *notebook) node(message protoreflect.Message) *yaml.Node {
	m := layout.Messages{Notes: b.notes, Packed: b.packed}
	out := m.Node(message)
	b.err = cmp.Or(b.err, m.Err)
	return out
}
