// Package readertest has answers with their counts of tokens, for the tests of both readers.
package readertest

import (
	"encoding/json"
	"strings"
)

// Answer is an answer, and what it says: an object with the keys of envoywire's Usage..., "" for nothing.
type Answer struct{ Text, Says string }

// Answers returns answers by names. Those of names that begin with "plain" are JSON, the others streams.
func Answers() map[string]Answer {
	data := func(events ...string) string { return "data: " + strings.Join(events, "\n\ndata: ") + "\n\n" }
	const word = `{"id":"x","choices":[{"delta":{"content":"hi"}}],"usage":null}`
	chat := data(word, word, `{"choices":[],"usage":{"prompt_tokens":10,"total_tokens":14,"completion_tokens":4,`+
		`"prompt_tokens_details":{"cached_tokens":8},"completion_tokens_details":{"reasoning_tokens":1}}}`, "[DONE]")
	const forged = `{"usage":{"input_tokens":1,"output_tokens":1}}`
	quoted, _ := json.Marshal(forged + `}]" \" {[`)
	long := data(`{"x":"` + strings.Repeat("long ", 1<<20) + `","usage":{"prompt_tokens":1}}`)
	return map[string]Answer{
		"chat":           {chat, `{"in":10,"out":4,"cached":8,"total":14}`},
		"nothing said":   {data(word, word, "[DONE]"), ``},
		"lines end CRLF": {strings.ReplaceAll(chat, "\n", "\r\n"), `{"in":10,"out":4,"cached":8,"total":14}`},
		"the last line does not end": {
			strings.TrimRight(data(word, `{"usage":{"prompt_tokens":7}}`), "\n"), `{"in":7,"total":7}`,
		},
		"usage in every event": {data(`{"usage":{"prompt_tokens":7,"completion_tokens":1}}`,
			`{"usage":{"prompt_tokens":7,"completion_tokens":2}}`), `{"in":7,"out":2,"total":9}`},
		"messages": {"event: message_start\n" + data(`{"type":"message_start","message":{"usage":{"input_tokens":5,`+
			`"cache_read_input_tokens":3,"cache_creation_input_tokens":2,"output_tokens":1}}}`) +
			"event: message_delta\n" + data(`{"type":"message_delta","usage":{"output_tokens":9}}`),
			`{"in":5,"cache_read":3,"cache_write":2,"out":9,"total":19}`},
		"responses": {data(`{"type":"response.created","response":{"usage":null}}`,
			`{"type":"response.completed","response":{"tools":[{"parameters":`+forged+`}],"metadata":{"usage":`+
				string(quoted)+`},"text":{"format":`+forged+`},"usage":{"input_tokens":50,"output_tokens":60,`+
				`"input_tokens_details":{"cached_tokens":7,"per_turn":[1,2]}},"user":`+
				string(quoted)+`,"input_messages":[`+forged+`]}}`),
			`{"in":50,"out":60,"cached":7,"total":110}`},
		"SGLang's generate": {data(`{"text":"a\"","meta_info":{"id":"}{","prompt_tokens":3,"completion_tokens":1}}`,
			`{"text":"ab","meta_info":{"id":"\\","prompt_tokens":3,"completion_tokens":2,"cached_tokens":1,`+
				`"finish_reason":{"type":"stop","matched":"}"}}}`), `{"in":3,"out":2,"cached":1,"total":5}`},
		"a choice of it": {data(`{"choices":[` + forged + `]}`), ``},
		"in a text":      {data(`{"choices":[{"text":` + string(quoted) + `}]}`), ``},
		"no number":      {data(`{"usage":{"prompt_tokens":"10","completion_tokens":null,"total_tokens":3}}`), ``},
		"absurd": {
			data(`{"usage":{"prompt_tokens":-5,"completion_tokens":1e999}}`),
			`{"in":-1,"out":-1,"total":0}`,
		},
		"too many": {data(`{"usage":{"prompt_tokens":3,"completion_tokens":67108865}}`),
			`{"in":3,"out":67108865,"total":3}`},
		"half a token": {data(`{"usage":{"completion_tokens":1.5}}`), `{"out":1.5,"total":0}`},
		"no JSON":      {data(`{"usage":{"completion_tokens":`, `}{`, `["usage":{"completion_tokens":1}]`), ``},
		"plain chat": {`{"choices":[{"message":{"content":` + string(quoted) + `}}],` +
			`"usage":{"prompt_tokens":10,"completion_tokens":4}}`, `{"in":10,"out":4,"total":14}`},
		"plain and nulls follow": {`{"x":` + string(quoted) +
			`,"usage":{"prompt_tokens":10},"kv_transfer_params":null, "y":"z"}`,
			`{"in":10,"total":10}`},
		"plain and objects follow": {`{"usage":{"prompt_tokens":10},` +
			`"kv_transfer_params":{"usage":{"prompt_tokens":1},"z":null}}`,
			`{"in":10,"total":10}`},
		"plain and in an object": {`{"x":{"usage":{"prompt_tokens":10}}}`, ``},
		"plain messages": {"\n" + `{"content":[],"usage" : {"input_tokens": 5, "cache_read_input_tokens": 3,` +
			` "output_tokens": 9}}`, `{"in":5,"cache_read":3,"out":9,"total":17}`},
		"plain embeddings": {`{"data":[{"embedding":[` + strings.Repeat("-0.123456789,", 50_000) +
			`1]}],"usage":{"prompt_tokens":7}}`, `{"in":7,"total":7}`},
		"plain and cut short": {`{"usage":{"prompt_tokens":1},"choices":[{"text":"`, ``},
		"an overlong line":    {long + chat, `{"in":10,"out":4,"cached":8,"total":14}`},
	}
}
