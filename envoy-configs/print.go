package envoyconfigs

import (
	"bytes"
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"tandem/envoy-configs/layout"
)

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
	switch v := message.Interface().(type) {
	case *anypb.Any:
		return b.anyNode(v)
	case *durationpb.Duration:
		return layout.Scalar("!!str", strconv.FormatFloat(v.AsDuration().Seconds(), 'f', -1, 64)+"s")
	case *wrapperspb.UInt32Value:
		return layout.Scalar("!!int", strconv.FormatUint(uint64(v.GetValue()), 10))
	case *wrapperspb.BoolValue:
		return layout.Scalar("!!bool", strconv.FormatBool(v.GetValue()))
	case *structpb.Struct:
		out := &yaml.Node{Kind: yaml.MappingNode}
		for _, name := range slices.Sorted(maps.Keys(v.GetFields())) {
			out.Content = append(out.Content, layout.Scalar("!!str", name), b.node(v.GetFields()[name].ProtoReflect()))
		}
		return out
	case *structpb.Value:
		return b.structNode(v)
	}
	out := &yaml.Node{Kind: yaml.MappingNode}
	why := b.notes[message.Interface()]
	fields := message.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if !message.Has(f) {
			continue
		}
		key := layout.Scalar("!!str", string(f.Name()))
		key.HeadComment = why[string(f.Name())]
		out.Content = append(out.Content, key, b.fieldNode(f, message.Get(f)))
	}
	out.HeadComment = why[""]
	return out
}

func (b *notebook) anyNode(a *anypb.Any) *yaml.Node {
	message, ok := b.packed[a]
	if !ok {
		b.err = cmp.Or(b.err, fmt.Errorf("%s was not packed by the model", a.GetTypeUrl()))
		return &yaml.Node{Kind: yaml.MappingNode}
	}
	out := b.node(message.ProtoReflect())
	key := layout.Scalar("!!str", "@type")
	key.Style = yaml.DoubleQuotedStyle
	out.Content = append([]*yaml.Node{key, layout.Scalar("!!str", a.GetTypeUrl())}, out.Content...)
	return out
}

// structNode is a value of free JSON, as far as the model has any.
func (b *notebook) structNode(v *structpb.Value) *yaml.Node {
	switch k := v.GetKind().(type) {
	case *structpb.Value_StructValue:
		return b.node(k.StructValue.ProtoReflect())
	case *structpb.Value_StringValue:
		return layout.Scalar("!!str", k.StringValue)
	default:
		return layout.Scalar("!!null", "null")
	}
}

func (b *notebook) fieldNode(f protoreflect.FieldDescriptor, v protoreflect.Value) *yaml.Node {
	switch {
	case f.IsMap():
		out, entries := &yaml.Node{Kind: yaml.MappingNode}, map[string]*yaml.Node{}
		v.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
			entries[k.String()] = b.singleNode(f.MapValue(), v)
			return true
		})
		for _, name := range slices.Sorted(maps.Keys(entries)) {
			out.Content = append(out.Content, layout.Scalar("!!str", name), entries[name])
		}
		return out
	case f.IsList():
		out := &yaml.Node{Kind: yaml.SequenceNode}
		for i := range v.List().Len() {
			out.Content = append(out.Content, b.singleNode(f, v.List().Get(i)))
		}
		return out
	default:
		return b.singleNode(f, v)
	}
}

func (b *notebook) singleNode(f protoreflect.FieldDescriptor, v protoreflect.Value) *yaml.Node {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return b.node(v.Message())
	case protoreflect.EnumKind:
		if f.Enum().FullName() == "envoy.type.v3.StatusCode" { // 503 says more than ServiceUnavailable
			return layout.Scalar("!!int", strconv.Itoa(int(v.Enum())))
		}
		return layout.Scalar("!!str", string(f.Enum().Values().ByNumber(v.Enum()).Name()))
	case protoreflect.StringKind:
		return layout.Scalar("!!str", v.String())
	case protoreflect.BoolKind:
		return layout.Scalar("!!bool", v.String())
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		return layout.Scalar("!!float", v.String())
	default:
		return layout.Scalar("!!int", v.String())
	}
}
