package configv1

import (
	"encoding/json"
	"fmt"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// checkShape holds a tree of JSON values against a message: names and kinds.
func checkShape(m *Mistakes, path string, tree any, d protoreflect.MessageDescriptor) {
	object, ok := tree.(map[string]any)
	if !ok {
		if tree != nil || path == "" {
			m.add(path, "must be a mapping, is %s", kindOf(tree))
		}
		return
	}
	for name, value := range object {
		at := join(path, name)
		field := d.Fields().ByJSONName(name)
		if field == nil {
			m.add(at, "unknown field%s", suggestion(name, d))
			continue
		}
		if !field.IsList() {
			checkValue(m, at, value, field)
			continue
		}
		list, ok := value.([]any)
		if !ok {
			if value != nil {
				m.add(at, "must be a list, is %s", kindOf(value))
			}
			continue
		}
		for i, item := range list {
			checkValue(m, fmt.Sprintf("%s[%d]", at, i), item, field)
		}
	}
}

func checkValue(m *Mistakes, path string, value any, field protoreflect.FieldDescriptor) {
	switch field.Kind() {
	case protoreflect.MessageKind:
		checkShape(m, path, value, field.Message())
	case protoreflect.StringKind:
		if _, ok := value.(string); !ok {
			m.add(path, "must be text, is %s (put it in quotes)", kindOf(value))
		}
	default: // integers
		n, ok := value.(json.Number)
		if !ok {
			m.add(path, "must be a whole number, is %s", kindOf(value))
		} else if _, err := n.Int64(); err != nil {
			m.add(path, "must be a whole number, is %s", n)
		}
	}
}

func kindOf(v any) string {
	switch v := v.(type) {
	case nil:
		return "empty"
	case string:
		return "the text " + fmt.Sprintf("%.40q", v)
	case json.Number:
		return "the number " + v.String()
	case bool:
		return fmt.Sprint(v)
	case []any:
		return "a list"
	default:
		return "a mapping"
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// suggestion names the field that was probably meant, or all there are.
func suggestion(name string, d protoreflect.MessageDescriptor) string {
	var all []string
	best, distance := "", len(name)/3+2
	for i := range d.Fields().Len() {
		known := d.Fields().Get(i).JSONName()
		all = append(all, known)
		if n := editDistance(strings.ToLower(name), strings.ToLower(known)); n < distance {
			best, distance = known, n
		}
	}
	if best != "" {
		return "; did you mean " + best + "?"
	}
	return "; known here: " + strings.Join(all, ", ")
}

// editDistance is Levenshtein's.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
