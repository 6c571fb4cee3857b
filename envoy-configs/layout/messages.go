package layout

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Messages makes YAML of messages of Envoy's API, with notes as comments.
type Messages struct {
	Notes  map[proto.Message]map[string]string // by the field's name in Envoy's API, "" for the message itself
	Packed map[*anypb.Any]proto.Message        // what an Any was made of
	Err    error                               // the first message that Packed lacks
}

// Node is a message as YAML: fields by their names in Envoy's API, as its documentation has them.
func (m *Messages) Node(message protoreflect.Message) *yaml.Node {
	switch v := message.Interface().(type) {
	case *anypb.Any:
		return m.any(v)
	case *durationpb.Duration:
		return Scalar("!!str", strconv.FormatFloat(v.AsDuration().Seconds(), 'f', -1, 64)+"s")
	case *wrapperspb.UInt32Value:
		return Scalar("!!int", strconv.FormatUint(uint64(v.GetValue()), 10))
	case *wrapperspb.BoolValue:
		return Scalar("!!bool", strconv.FormatBool(v.GetValue()))
	case *structpb.Struct:
		out := &yaml.Node{Kind: yaml.MappingNode}
		for _, name := range slices.Sorted(maps.Keys(v.GetFields())) {
			out.Content = append(out.Content, Scalar("!!str", name), m.Node(v.GetFields()[name].ProtoReflect()))
		}
		return out
	case *structpb.Value:
		return m.free(v)
	}
	out := &yaml.Node{Kind: yaml.MappingNode}
	why := m.Notes[message.Interface()]
	fields := message.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if !message.Has(f) {
			continue
		}
		key := Scalar("!!str", string(f.Name()))
		key.HeadComment = why[string(f.Name())]
		out.Content = append(out.Content, key, m.field(f, message.Get(f)))
	}
	out.HeadComment = why[""]
	return out
}

func (m *Messages) any(a *anypb.Any) *yaml.Node {
	message, ok := m.Packed[a]
	if !ok {
		m.Err = cmp.Or(m.Err, fmt.Errorf("%s was not packed by the model", a.GetTypeUrl()))
		return &yaml.Node{Kind: yaml.MappingNode}
	}
	out := m.Node(message.ProtoReflect())
	key := Scalar("!!str", "@type")
	key.Style = yaml.DoubleQuotedStyle
	out.Content = append([]*yaml.Node{key, Scalar("!!str", a.GetTypeUrl())}, out.Content...)
	return out
}

// free is a value of arbitrary JSON, as far as the model has any.
func (m *Messages) free(v *structpb.Value) *yaml.Node {
	switch k := v.GetKind().(type) {
	case *structpb.Value_StructValue:
		return m.Node(k.StructValue.ProtoReflect())
	case *structpb.Value_StringValue:
		return Scalar("!!str", k.StringValue)
	default:
		return Scalar("!!null", "null")
	}
}

func (m *Messages) field(f protoreflect.FieldDescriptor, v protoreflect.Value) *yaml.Node {
	switch {
	case f.IsMap():
		out, entries := &yaml.Node{Kind: yaml.MappingNode}, map[string]*yaml.Node{}
		v.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
			entries[k.String()] = m.single(f.MapValue(), v)
			return true
		})
		for _, name := range slices.Sorted(maps.Keys(entries)) {
			out.Content = append(out.Content, Scalar("!!str", name), entries[name])
		}
		return out
	case f.IsList():
		out := &yaml.Node{Kind: yaml.SequenceNode}
		for i := range v.List().Len() {
			out.Content = append(out.Content, m.single(f, v.List().Get(i)))
		}
		return out
	default:
		return m.single(f, v)
	}
}

func (m *Messages) single(f protoreflect.FieldDescriptor, v protoreflect.Value) *yaml.Node {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return m.Node(v.Message())
	case protoreflect.EnumKind:
		if f.Enum().FullName() == "envoy.type.v3.StatusCode" { // 503 says more than ServiceUnavailable
			return Scalar("!!int", strconv.Itoa(int(v.Enum())))
		}
		return Scalar("!!str", string(f.Enum().Values().ByNumber(v.Enum()).Name()))
	case protoreflect.StringKind:
		return Scalar("!!str", v.String())
	case protoreflect.BoolKind:
		return Scalar("!!bool", v.String())
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		return Scalar("!!float", v.String())
	default:
		return Scalar("!!int", v.String())
	}
}
