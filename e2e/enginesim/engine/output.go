package engine

import (
	"strconv"
	"strings"
	"unicode/utf8"

	"tandem/e2e/enginesim/jsontext"
)

// Sampling has the members of a request that determine how its answer ends.
type Sampling struct {
	MaxTokens   int64 // -1: not given
	MinTokens   int64
	N           int64 // choices
	Stop        []string
	StopIDs     []uint32
	IncludeStop bool
	Tools       []byte
	ToolChoice  []byte
}

// Output is the whole answer of one sequence, known as soon as its prompt's KV is: a function of every token of the
// prompt, so a single wrong block changes it.
type Output struct {
	Digest     uint64
	given      int    // tokens of the answer that another engine has already given
	N          int    // tokens
	Finish     string // stop, length, tool_calls
	StopReason string // JSON: null, or the stop string or token that ended it
	Text       string // set if it is not simply the generated tokens: cut at a stop, or a tool call's arguments
	Literal    bool   // text is used
	Tool       string // name of the called function
	Reasoning  int    // so many tokens at the beginning of a stream are reasoning
	hold       int    // characters that a stream holds back, because a stop string may begin there
	stopped    bool   // text ends where a stop begins
}

const (
	shortestAnswer = 16 // tokens, if the request sets no length
	longestAnswer  = 48
)

func mixChoice(digest uint64, choice int) uint64 {
	if choice == 0 {
		return digest
	}
	return Mix(digest^K0, uint64(choice)^K1)
}

// Answer plans choice number "choice" of a prompt whose KV hashes to digest, from its token number given on. room is
// the number of tokens that max_model_len leaves.
func (s *Sampling) Answer(digest uint64, choice, room, given int) Output {
	o := Output{Digest: mixChoice(digest, choice), given: given, Finish: "length", StopReason: "null"}
	natural := shortestAnswer + int(Mix(o.Digest, k2)%(longestAnswer-shortestAnswer+1)) - given
	switch {
	case s.MaxTokens >= 0:
		o.N = int(s.MaxTokens)
	case int64(natural) < s.MinTokens:
		o.N, o.Finish = int(s.MinTokens), "stop"
	default:
		o.N, o.Finish = natural, "stop"
	}
	if o.N >= room {
		o.N, o.Finish = room, "length"
	}
	if name, args := s.calledTool(o.Digest); name != "" {
		o.callTool(name, args, s.MaxTokens)
		return o
	}
	o.applyStops(s)
	for _, stop := range s.Stop {
		if !s.IncludeStop {
			o.hold = max(o.hold, utf8.RuneCountInString(stop)-1)
		}
	}
	return o
}

// generated returns the output with all of the text that was generated, that of a stop string too.
func (o *Output) generated() *Output {
	if !o.stopped {
		return o
	}
	whole := *o
	whole.Literal = false
	return &whole
}

// Delta returns the text of a stream's event of token i: what the tokens up to there have added, except for as many
// characters at the end as a stop string may still begin with (vLLM 0.32.0, v1/engine/detokenizer.py:85).
func (o *Output) Delta(i int) string {
	if o.hold == 0 {
		return o.Token(i)
	}
	text := []rune(o.Whole())
	upTo := func(i int) (n int) {
		if i == o.N-1 {
			return len(text)
		}
		for j := range i + 1 {
			n += utf8.RuneCountInString(o.generated().Token(j))
		}
		return min(max(n-o.hold, 0), len(text))
	}
	return string(text[upTo(i-1):upTo(i)])
}

// Continued looks for the longest end of a prompt that is the beginning of the answer to what precedes it: a request
// that continues the answer of another engine. It returns the digest of that prompt, and the number of tokens that were
// given already, or 0.
func Continued(ids []uint32, blockSize int) (digest uint64, given int) {
	t := NewTokenizer(blockSize, false)
	for n := 1; n < len(ids); n++ {
		t.Tokens(ids[n-1 : n])
		before := Output{Digest: t.digest()}
		same := 0
		for i, id := range ids[n:] {
			if TokenID([]byte(before.Token(i))) != id {
				break
			}
			same++
		}
		if same == len(ids)-n {
			return before.Digest, same
		}
	}
	return 0, 0
}

// Tokens are syllables of four bytes; a few contain characters that must be escaped or are not ASCII.
const (
	consonants = "bdfgklmnprstvwzh"
	vowels     = "aeio"
)

var oddTokens = [...]string{" né", "\nso ", ` "q"`, ` \o `, "\tun ", "übe", "→ ", " œ."}

// Token returns the text of token i.
func (o *Output) Token(i int) string {
	if o.Literal {
		return o.Text[min(len(o.Text), i*TokenBytes):min(len(o.Text), (i+1)*TokenBytes)]
	}
	x := Mix(o.Digest^k2, uint64(i+o.given+1)*K1)
	if x%53 == 0 {
		return oddTokens[(x>>8)%uint64(len(oddTokens))]
	}
	return string([]byte{' ', consonants[x>>8&15], vowels[x>>16&3], consonants[x>>24&15]})
}

// Whole returns the text of all tokens.
func (o *Output) Whole() string {
	if o.Literal {
		return o.Text
	}
	var b strings.Builder
	b.Grow(o.N * TokenBytes)
	for i := range o.N {
		b.WriteString(o.Token(i))
	}
	return b.String()
}

// applyStops ends the answer at the first stop string or stop token after min_tokens.
func (o *Output) applyStops(q *Sampling) {
	if len(q.Stop) == 0 && len(q.StopIDs) == 0 {
		return
	}
	full := o.Whole()
	for i := max(0, int(q.MinTokens)-1); i < o.N; i++ {
		tok := full[i*TokenBytes : (i+1)*TokenBytes]
		for _, id := range q.StopIDs {
			if id == TokenID([]byte(tok)) {
				o.cut(full[:i*TokenBytes], i+1, strconv.FormatUint(uint64(id), 10))
				return
			}
		}
		upTo := full[:(i+1)*TokenBytes]
		for _, stop := range q.Stop {
			from := max(0, i*TokenBytes-len(stop)+1)
			if at := strings.Index(upTo[from:], stop); at >= 0 && stop != "" {
				end := from + at
				if q.IncludeStop {
					end += len(stop)
				}
				o.cut(full[:end], i+1, string(jsontext.AppendQuoted(nil, stop)))
				return
			}
		}
	}
}

func (o *Output) cut(text string, tokens int, reason string) {
	o.Literal, o.stopped, o.Text, o.N = true, true, text, tokens
	o.Finish, o.StopReason = "stop", reason
}

// calledTool returns the function that tool_choice forces, and arguments that roughly fit its schema.
func (s *Sampling) calledTool(digest uint64) (name, args string) {
	if !jsontext.IsArray(s.Tools) || jsontext.IsNull(s.ToolChoice) {
		return "", ""
	}
	wanted := ""
	switch choice := string(s.ToolChoice); {
	case choice == `"required"` || string(jsontext.Text(jsontext.Get(s.ToolChoice, "type"))) == "any":
	case jsontext.IsObject(s.ToolChoice):
		if wanted = string(jsontext.Text(jsontext.Get(jsontext.Get(s.ToolChoice, "function"), "name"))); wanted == "" {
			wanted = string(jsontext.Text(jsontext.Get(s.ToolChoice, "name")))
		}
		if wanted == "" {
			return "", ""
		}
	default:
		return "", ""
	}
	jsontext.EachElement(s.Tools, func(tool []byte) bool {
		def := tool
		if f := jsontext.Get(tool, "function"); jsontext.IsObject(f) {
			def = f
		}
		name = string(jsontext.Text(jsontext.Get(def, "name")))
		schema := jsontext.Get(def, "parameters")
		if schema == nil {
			schema = jsontext.Get(def, "input_schema")
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
	if props := jsontext.Get(schema, "properties"); jsontext.IsObject(props) {
		jsontext.EachMember(props, func(key, prop []byte) {
			if !first {
				dst = append(dst, ", "...)
			}
			first = false
			dst = append(jsontext.AppendQuoted(dst, string(key)), ": "...)
			digest = Mix(digest, K1)
			dst = appendValue(dst, prop, digest)
		})
	}
	return append(dst, '}')
}

func appendValue(dst, prop []byte, digest uint64) []byte {
	if values := jsontext.Get(prop, "enum"); jsontext.IsArray(values) {
		jsontext.EachElement(values, func(v []byte) bool {
			dst = append(dst, v...)
			return false
		})
		return dst
	}
	switch string(jsontext.Text(jsontext.Get(prop, "type"))) {
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
	o := Output{Digest: digest}
	return jsontext.AppendQuoted(dst, strings.TrimSpace(o.Token(0)+o.Token(1)))
}

// callTool turns the answer into a call. If max_tokens cuts it, it is plain text, because the parser finds no call in
// it.
func (o *Output) callTool(name, args string, maxTokens int64) {
	o.Literal, o.Text = true, args
	o.N = max(1, (len(args)+TokenBytes-1)/TokenBytes)
	if maxTokens >= 0 && int64(o.N) > maxTokens {
		o.N, o.Finish = int(maxTokens), "length"
		o.Text = args[:o.N*TokenBytes]
		return
	}
	o.Tool, o.Finish = name, "tool_calls"
}

// TokenIDs returns the ids of an answer's tokens from..to.
func (o *Output) TokenIDs(from, to int) []uint32 {
	ids := make([]uint32, 0, to-from)
	for i := from; i < to; i++ {
		ids = append(ids, TokenID([]byte(o.generated().Token(i))))
	}
	return ids
}
