package config

import (
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// checkShape checks a tree of JSON values against a message: names and kinds. An empty YAML value counts as absent,
// except in a list. Invalid values are removed from the tree, so that the rest can be checked too; sizes become
// numbers.
func checkShape(m *ValidationErrors, path string, object map[string]any, d protoreflect.MessageDescriptor) {
	for name, value := range object {
		at := Join(path, name)
		field := d.Fields().ByJSONName(name)
		ok := false
		switch {
		case field == nil:
			m.addUnknown(path, name, d)
		case value == nil:
		case !field.IsList():
			object[name], ok = checkValue(m, at, value, field)
		default:
			ok = checkList(m, at, value, field)
		}
		if !ok {
			delete(object, name)
		}
	}
}

func checkList(m *ValidationErrors, path string, value any, field protoreflect.FieldDescriptor) bool {
	list, ok := value.([]any)
	if !ok {
		m.add(path, "must be a list, is %s", kindOf(value))
		return false
	}
	for i, item := range list { // an invalid item stays as an empty one, so that the others keep their positions
		if list[i], ok = checkValue(m, fmt.Sprintf("%s[%d]", path, i), item, field); ok {
			continue
		}
		switch field.Kind() {
		case protoreflect.MessageKind:
			list[i] = map[string]any{}
		case protoreflect.StringKind:
			list[i] = ""
		case protoreflect.BoolKind:
			list[i] = false
		default:
			list[i] = json.Number("0")
		}
	}
	return true
}

// checkValue returns the value in the form that protojson reads; false if it is invalid.
func checkValue(m *ValidationErrors, path string, value any, field protoreflect.FieldDescriptor) (any, bool) {
	switch field.Kind() {
	case protoreflect.MessageKind:
		object, ok := value.(map[string]any)
		if ok {
			checkShape(m, path, object, field.Message())
		} else {
			m.add(path, "must be a mapping, is %s", kindOf(value))
		}
		return value, ok
	case protoreflect.StringKind:
		if b, ok := value.(bool); ok && len(wordsOf(field)) > 0 { // yes or no, which YAML reads as true and false
			return fmt.Sprint(b), true // the check of its words names those that are allowed
		}
		return value, checkText(m, path, value, field)
	case protoreflect.DoubleKind:
		_, ok := value.(json.Number)
		if !ok {
			m.add(path, "must be a number, is %s", kindOf(value))
		}
		return value, ok
	case protoreflect.BoolKind:
		_, ok := value.(bool)
		if !ok {
			m.add(path, "must be true or false, is %s", kindOf(value))
		}
		return value, ok
	case protoreflect.Int32Kind:
		return value, checkWhole(m, path, value, math.MinInt32, math.MaxInt32)
	default: // int64; config.proto has no other kinds, as a test checks
		if text, ok := value.(string); ok && strings.HasSuffix(field.JSONName(), "Bytes") {
			return checkSize(m, path, text)
		}
		return value, checkWhole(m, path, value, math.MinInt64, math.MaxInt64)
	}
}

// checkSize reads a size with a unit as Kubernetes writes it: 16Mi, 512Ki, 1G.
func checkSize(m *ValidationErrors, path, text string) (any, bool) {
	n, ok := bytesOf(text)
	if !ok {
		m.add(path, "%.40q is not a size such as 16Mi, 512Ki or 16777216", text)
		return nil, false
	}
	return json.Number(strconv.FormatInt(n, 10)), true
}

func bytesOf(text string) (n int64, ok bool) {
	digits := strings.TrimRight(text, "kKMGiB")
	factor, ok := map[string]int64{
		"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30,
	}[strings.TrimSuffix(text[len(digits):], "B")]
	n, err := strconv.ParseInt(digits, 10, 64)
	if !ok || err != nil || n < 0 || n > math.MaxInt64/factor {
		return 0, false
	}
	return n * factor, true
}

// sizeText returns a size with the largest unit that divides it: 16Mi, 512Ki, 1000.
func sizeText(bytes int64) string {
	unit := ""
	for _, next := range []string{"Ki", "Mi", "Gi"} {
		if bytes == 0 || bytes%1024 != 0 {
			break
		}
		bytes, unit = bytes/1024, next
	}
	return strconv.FormatInt(bytes, 10) + unit
}

// variable matches text that a shell or a template would replace.
var variable = regexp.MustCompile(`\$\{[A-Za-z_][A-Za-z0-9_]*\}`)

// notReplaced is the error about a ${VARIABLE} in the file.
const notReplaced = "%.60s is not replaced here: write the value, fill the file in before (envsubst), or use the " +
	"setting that names a file where it is a secret"

func checkText(m *ValidationErrors, path string, value any, field protoreflect.FieldDescriptor) bool {
	text, ok := value.(string)
	number, isNumber := value.(json.Number)
	_, limit, _ := rangeOf(field)
	isDuration := limit != ""
	switch {
	case ok && variable.MatchString(text):
		m.add(path, notReplaced, variable.FindString(text))
		return false
	case ok:
	case isNumber && number == "0" && isDuration:
		m.add(path, "must have a unit, is 0: leave it out for the default, or write 1s for a second")
	case isNumber && isDuration:
		m.add(path, "must have a unit, is %s: %ss for seconds, %sms for milliseconds", number, number, number)
	case isNumber && slices.Contains([]string{"listen", "address", "admin"}, field.JSONName()):
		m.add(path, "must be host:port, is the number %s: 127.0.0.1:%s for this machine alone", number, number)
	case value == nil:
		m.add(path, "is empty")
	default:
		m.add(path, "must be text, is %s: put it in quotes", kindOf(value))
	}
	return ok
}

func checkWhole(m *ValidationErrors, path string, value any, least, most int64) bool {
	number, ok := value.(json.Number)
	if !ok {
		m.add(path, "must be a whole number, is %s", kindOf(value))
		return false
	}
	n, err := number.Int64()
	if ok = err == nil && n >= least && n <= most; !ok {
		m.add(path, "must be a whole number between %d and %d, is %s", least, most, number)
	}
	return ok
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

// Join appends a name to a path. A name that is not a plain word is quoted: it comes from the file, and errors are
// lines.
func Join(path, name string) string {
	if strings.ContainsFunc(name, notInName) || len(name) > 60 {
		name = fmt.Sprintf("%.60q", name)
	}
	if path == "" {
		return name
	}
	return path + "." + name
}

// addUnknown adds the error about an unknown field of the message at path, with the field that was probably meant, or
// with all fields.
func (m *ValidationErrors) addUnknown(path, name string, d protoreflect.MessageDescriptor) {
	var all []string
	for i := range d.Fields().Len() {
		all = append(all, d.Fields().Get(i).JSONName())
	}
	if what, gone := goneFields[name]; gone {
		m.add(Join(path, name), "is gone %s", what)
		return
	}
	near := engineFields[strings.NewReplacer("_", "", "-", "").Replace(strings.ToLower(name))]
	if !slices.Contains(all, near) {
		near = nearest(name, all)
	}
	if near == "" {
		m.add(Join(path, name), "unknown field; known here: %s", strings.Join(all, ", "))
		return
	}
	m.add(Join(path, name), "unknown field; did you mean %s?", near)
	(*m)[len(*m)-1].meant = Join(path, near)
}

// engineFields translate what engines and other routers call a field, in lower case without _ and -.
var engineFields = map[string]string{
	"kvconnector": "kvTransfer", "kvtransferconfig": "kvTransfer", "kveventsconfig": "kvEvents", "kvrole": "role",
	"host": "address", "port": "address", "url": "address",
}

// goneFields are settings of earlier builds: why they are gone, and what to do.
var goneFields = map[string]string{
	"registration": "with kvTransfer p2p-nccl: remove it",
	"kvPort":       "with kvTransfer p2p-nccl: remove it",
	"bidirectional": "since decode appends a conversation's next turn (docs/adr/0103): remove it, and set " +
		"declineExpired if the engines run with bidirectional_kv_xfer",
	"turnTtl": "with nixl.bidirectional: remove it",
}

// nearest returns the name with the least edit distance to a misspelt one, "" if none is near.
func nearest(misspelt string, names []string) string {
	best, distance := "", min(len(misspelt), 30)/3+2
	for _, name := range names {
		if n := editDistance(strings.ToLower(misspelt), strings.ToLower(name), distance); n < distance {
			best, distance = name, n
		}
	}
	return best
}

// editDistance returns the Levenshtein distance, at most limit.
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
