package configv1

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// checkShape holds a tree of JSON values against a message: names and kinds. What is empty in YAML counts as left out,
// but not in a list.
func checkShape(m *Mistakes, path string, object map[string]any, d protoreflect.MessageDescriptor) {
	for name, value := range object {
		at := join(path, name)
		field := d.Fields().ByJSONName(name)
		switch {
		case field == nil:
			m.add(at, "unknown field%s", suggestion(name, d))
		case value == nil:
		case !field.IsList():
			checkValue(m, at, value, field)
		default:
			checkList(m, at, value, field)
		}
	}
}

func checkList(m *Mistakes, path string, value any, field protoreflect.FieldDescriptor) {
	list, ok := value.([]any)
	if !ok {
		m.add(path, "must be a list, is %s", kindOf(value))
		return
	}
	for i, item := range list {
		checkValue(m, fmt.Sprintf("%s[%d]", path, i), item, field)
	}
}

func checkValue(m *Mistakes, path string, value any, field protoreflect.FieldDescriptor) {
	switch field.Kind() {
	case protoreflect.MessageKind:
		if object, ok := value.(map[string]any); ok {
			checkShape(m, path, object, field.Message())
		} else {
			m.add(path, "must be a mapping, is %s", kindOf(value))
		}
	case protoreflect.StringKind:
		checkText(m, path, value, field.JSONName())
	case protoreflect.DoubleKind:
		if _, ok := value.(json.Number); !ok {
			m.add(path, "must be a number, is %s", kindOf(value))
		}
	case protoreflect.BoolKind:
		if _, ok := value.(bool); !ok {
			m.add(path, "must be true or false, is %s", kindOf(value))
		}
	case protoreflect.Int32Kind:
		checkWhole(m, path, value, math.MinInt32, math.MaxInt32)
	default: // int64; config.proto has no other kinds, a test says
		checkWhole(m, path, value, math.MinInt64, math.MaxInt64)
	}
}

// durations are the fields that a number without a unit is likely to be put into.
func durations() []string {
	return []string{"ttl", "base", "perToken", "decodeIdleTimeout", "attemptsTime", "streamStartTimeout", "answerTimeout", "lease", "noticeTimeout", "tokenBudget", "maxWait", "ttft", "tpot"}
}

func checkText(m *Mistakes, path string, value any, field string) {
	_, ok := value.(string)
	number, isNumber := value.(json.Number)
	switch {
	case ok:
	case isNumber && slices.Contains(durations(), field):
		m.add(path, "must have a unit, is %s: %ss for seconds, %sms for milliseconds", number, number, number)
	case value == nil:
		m.add(path, "is empty")
	default:
		m.add(path, "must be text, is %s: put it in quotes", kindOf(value))
	}
}

func checkWhole(m *Mistakes, path string, value any, least, most int64) {
	number, ok := value.(json.Number)
	if !ok {
		m.add(path, "must be a whole number, is %s", kindOf(value))
	} else if n, err := number.Int64(); err != nil || n < least || n > most {
		m.add(path, "must be a whole number between %d and %d, is %s", least, most, number)
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

// join appends a name to a path. One that is no plain word is quoted: it comes from the file, and errors are lines.
func join(path, name string) string {
	if strings.ContainsFunc(name, notInName) || len(name) > 60 {
		name = fmt.Sprintf("%.60q", name)
	}
	if path == "" {
		return name
	}
	return path + "." + name
}

// suggestion names the field that was probably meant, or all there are.
func suggestion(name string, d protoreflect.MessageDescriptor) string {
	var all []string
	for i := range d.Fields().Len() {
		all = append(all, d.Fields().Get(i).JSONName())
	}
	if near := nearest(name, all); near != "" {
		return "; did you mean " + near + "?"
	}
	return "; known here: " + strings.Join(all, ", ")
}

// nearest is the name that differs least from a misspelt one, "" if none is near.
func nearest(misspelt string, names []string) string {
	best, distance := "", min(len(misspelt), 30)/3+2
	for _, name := range names {
		if n := editDistance(strings.ToLower(misspelt), strings.ToLower(name), distance); n < distance {
			best, distance = name, n
		}
	}
	return best
}

// editDistance is Levenshtein's, or limit if it is not below that.
func editDistance(a, b string, limit int) int {
	if len(a) > len(b)+limit {
		return limit
	}
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
	return min(row[len(b)], limit)
}
