// Package layout writes YAML for readers. A value is on one line if it fits, and a comment above its value.
package layout

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Encode writes a node. What has no comments in it and fits stands on one line; in a block the short things come
// before the long ones. The same node always makes the same bytes.
func Encode(root *yaml.Node) ([]byte, error) {
	layOut(root, 0)
	var out bytes.Buffer
	e := yaml.NewEncoder(&out)
	e.SetIndent(2)
	e.CompactSeqIndent()
	if err := e.Encode(root); err != nil {
		return nil, fmt.Errorf("printing YAML: %w", err)
	}
	return out.Bytes(), nil
}

// width is how long lines may be.
const width = 120

// layOut decides what stands on one line, from a column on.
func layOut(n *yaml.Node, column int) {
	if length, ok := onOneLine(n); ok && column+length <= width {
		n.Style |= yaml.FlowStyle
		return
	}
	if n.Kind == yaml.SequenceNode {
		for _, item := range n.Content {
			comment := wrapped(item.HeadComment, column) // stands above the item, however that is laid out
			item.HeadComment = ""
			layOut(item, column+2)
			item.HeadComment = comment
		}
		return
	}
	var first, short, long []*yaml.Node
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, v := n.Content[i], n.Content[i+1]
		key.HeadComment, v.HeadComment = wrapped(key.HeadComment, column), wrapped(v.HeadComment, column+2)
		inner := column + 2
		if length, ok := onOneLine(v); ok && column+len(key.Value)+2+length <= width {
			inner = column + len(key.Value) + 2
		}
		if v.Kind != yaml.ScalarNode {
			layOut(v, inner)
		}
		switch {
		case key.Value == "@type" || key.Value == "name":
			first = append(first, key, v)
		case key.Value == "match":
			short = slices.Insert(short, 0, key, v)
		case v.Style&yaml.FlowStyle != 0 || v.Kind == yaml.ScalarNode:
			short = append(short, key, v)
		default:
			long = append(long, key, v)
		}
	}
	n.Content = slices.Concat(first, short, long)
}

// wrapped breaks a note into lines, from a column on.
func wrapped(note string, column int) string {
	var out strings.Builder
	length := 0
	for word := range strings.FieldsSeq(note) {
		switch {
		case out.Len() == 0:
		case column+len("# ")+length+1+len(word) > width:
			out.WriteByte('\n')
			length = 0
		default:
			out.WriteByte(' ')
			length++
		}
		out.WriteString(word)
		length += len(word)
	}
	return out.String()
}

// onOneLine is how long a node is on one line, if it may stand on one.
func onOneLine(n *yaml.Node) (length int, ok bool) {
	if n.HeadComment != "" || n.Style&yaml.LiteralStyle != 0 {
		return 0, false
	}
	if n.Kind == yaml.ScalarNode {
		return len(n.Value) + 2, true
	}
	for _, c := range n.Content {
		l, ok := onOneLine(c)
		if !ok {
			return 0, false
		}
		length += l
	}
	return length + 2, true
}

// Scalar is a value with its tag; text of several lines is a block.
func Scalar(tag, value string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: value}
	if strings.Contains(value, "\n") {
		n.Style = yaml.LiteralStyle
	}
	return n
}

// Field is members of a mapping: names, each followed by its text.
func Field(pairs ...string) (out []*yaml.Node) {
	for _, text := range pairs {
		out = append(out, Scalar("!!str", text))
	}
	return out
}
