package main

import (
	"strconv"
	"strings"
)

// output is the whole answer of one sequence, known as soon as its prompt's KV is: a function of every token of the
// prompt, so that a single wrong block shows.
type output struct {
	digest     uint64
	given      int    // tokens of the answer that another engine has given already
	n          int    // tokens
	finish     string // stop, length, tool_calls
	stopReason string // JSON: null, or the stop string or token that ended it
	text       string // where it is not simply the generated tokens: cut at a stop, or a tool call's arguments
	literal    bool   // text is used
	tool       string // name of the called function
}

const (
	shortestAnswer = 16 // tokens, when nobody says how many
	longestAnswer  = 48
)

func mixChoice(digest uint64, choice int) uint64 {
	if choice == 0 {
		return digest
	}
	return mix(digest^k0, uint64(choice)^k1)
}

// answer plans choice number "choice" of a prompt whose KV hashes to digest, from its token number given on. room is what
// max_model_len leaves.
func (q *request) answer(digest uint64, choice, room, given int) output {
	o := output{digest: mixChoice(digest, choice), given: given, finish: "length", stopReason: "null"}
	natural := shortestAnswer + int(mix(o.digest, k2)%(longestAnswer-shortestAnswer+1)) - given
	switch {
	case q.maxTokens >= 0:
		o.n = int(q.maxTokens)
	case int64(natural) < q.minTokens:
		o.n, o.finish = int(q.minTokens), "stop"
	default:
		o.n, o.finish = natural, "stop"
	}
	if o.n >= room {
		o.n, o.finish = room, "length"
	}
	if name, args := q.calledTool(o.digest); name != "" {
		o.callTool(name, args, q.maxTokens)
		return o
	}
	o.applyStops(q)
	return o
}

// tokens are syllables of four bytes, a few of them with what must be escaped or is not ASCII.
const (
	consonants = "bdfgklmnprstvwzh"
	vowels     = "aeio"
)

var oddTokens = [...]string{" né", "\nso ", ` "q"`, ` \o `, "\tun ", "übe", "→ ", " œ."}

// token is the text of token i.
func (o *output) token(i int) string {
	if o.literal {
		return o.text[min(len(o.text), i*tokenBytes):min(len(o.text), (i+1)*tokenBytes)]
	}
	x := mix(o.digest^k2, uint64(i+o.given+1)*k1)
	if x%53 == 0 {
		return oddTokens[(x>>8)%uint64(len(oddTokens))]
	}
	return string([]byte{' ', consonants[x>>8&15], vowels[x>>16&3], consonants[x>>24&15]})
}

// whole is the text of all tokens.
func (o *output) whole() string {
	if o.literal {
		return o.text
	}
	var b strings.Builder
	b.Grow(o.n * tokenBytes)
	for i := range o.n {
		b.WriteString(o.token(i))
	}
	return b.String()
}

// applyStops ends the answer at the first stop string or stop token after min_tokens.
func (o *output) applyStops(q *request) {
	if len(q.stop) == 0 && len(q.stopIDs) == 0 {
		return
	}
	full := o.whole()
	for i := max(0, int(q.minTokens)-1); i < o.n; i++ {
		tok := full[i*tokenBytes : (i+1)*tokenBytes]
		for _, id := range q.stopIDs {
			if id == tokenID([]byte(tok)) {
				o.cut(full[:i*tokenBytes], i+1, strconv.FormatUint(uint64(id), 10))
				return
			}
		}
		upTo := full[:(i+1)*tokenBytes]
		for _, stop := range q.stop {
			from := max(0, i*tokenBytes-len(stop)+1)
			if at := strings.Index(upTo[from:], stop); at >= 0 && stop != "" {
				end := from + at
				if q.includeStop {
					end += len(stop)
				}
				o.cut(full[:end], i+1, string(appendQuoted(nil, stop)))
				return
			}
		}
	}
}

func (o *output) cut(text string, tokens int, reason string) {
	o.literal, o.text, o.n = true, text, tokens
	o.finish, o.stopReason = "stop", reason
}

// calledTool is the function that tool_choice forces, and arguments that fit its schema roughly.
func (q *request) calledTool(digest uint64) (name, args string) {
	if !isArray(q.tools) || isNull(q.toolChoice) {
		return "", ""
	}
	wanted := ""
	switch choice := string(q.toolChoice); {
	case choice == `"required"` || string(text(get(q.toolChoice, "type"))) == "any":
	case isObject(q.toolChoice):
		if wanted = string(text(get(get(q.toolChoice, "function"), "name"))); wanted == "" {
			wanted = string(text(get(q.toolChoice, "name")))
		}
		if wanted == "" {
			return "", ""
		}
	default:
		return "", ""
	}
	eachElement(q.tools, func(tool []byte) bool {
		def := tool
		if f := get(tool, "function"); isObject(f) {
			def = f
		}
		name = string(text(get(def, "name")))
		schema := get(def, "parameters")
		if schema == nil {
			schema = get(def, "input_schema")
		}
		args = string(appendArguments(nil, schema, digest))
		return wanted != "" && name != wanted
	})
	return name, args
}

// appendArguments makes a value for every property of a JSON schema object.
func appendArguments(dst, schema []byte, digest uint64) []byte {
	dst = append(dst, '{')
	first := true
	if props := get(schema, "properties"); isObject(props) {
		eachMember(props, func(key, prop []byte) {
			if !first {
				dst = append(dst, ", "...)
			}
			first = false
			dst = append(appendQuoted(dst, string(key)), ": "...)
			digest = mix(digest, k1)
			dst = appendValue(dst, prop, digest)
		})
	}
	return append(dst, '}')
}

func appendValue(dst, prop []byte, digest uint64) []byte {
	if values := get(prop, "enum"); isArray(values) {
		eachElement(values, func(v []byte) bool {
			dst = append(dst, v...)
			return false
		})
		return dst
	}
	switch string(text(get(prop, "type"))) {
	case "integer", "number":
		return strconv.AppendUint(dst, digest%1000, 10)
	case "boolean":
		return strconv.AppendBool(dst, digest%2 == 0)
	case "array":
		return append(dst, "[]"...)
	case "object":
		return appendArguments(dst, prop, digest)
	case "null":
		return append(dst, "null"...)
	}
	o := output{digest: digest}
	return appendQuoted(dst, strings.TrimSpace(o.token(0)+o.token(1)))
}

// callTool makes the answer a call. Cut short by max_tokens it is plain text, as the parser finds no call in it.
func (o *output) callTool(name, args string, maxTokens int64) {
	o.literal, o.text = true, args
	o.n = max(1, (len(args)+tokenBytes-1)/tokenBytes)
	if maxTokens >= 0 && int64(o.n) > maxTokens {
		o.n, o.finish = int(maxTokens), "length"
		o.text = args[:o.n*tokenBytes]
		return
	}
	o.tool, o.finish = name, "tool_calls"
}
