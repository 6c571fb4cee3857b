package openai

import "errors"

// TurnAnswer removes from decode's answer the members that serve the conversation's next turn, if engines hand KV over
// both ways (vLLM's NIXL, bidirectional): kv_transfer_params, which name internal hosts and blocks, and the token ids
// that these blocks belong to, unless the client asked for them.
//
// A complete answer has the parameters at its top, and the ids of prompt and answer (return_token_ids, vLLM 0.10.2) at
// its top or in its only choice. A stream has the prompt's ids in its first event, the answer's in each event, and
// from vLLM 0.33 the parameters in the event with the finish reason. It is for one answer, and for one goroutine.
type TurnAnswer struct {
	// OwnIDs means that the client asked for token ids, and gets them.
	OwnIDs bool
	// Kept is called once the answer has all parts: the parameters, as JSON text, and the ids of prompt and answer. It
	// is not called if a part is missing. It may be nil.
	Kept func(params []byte, ids []uint32)
	// Room is called with the memory that the ids take from now on, in bytes; if it returns false, nothing is kept.
	// nil: always true.
	Room func(bytes int) bool

	params []byte
	ids    []uint32
	prompt bool // ids begin with the prompt's
	broken bool // the ids are incomplete or out of order
}

// maxTurnTokens bounds the ids that are kept of an answer.
const maxTurnTokens = 4 << 20

// Begin implements [Rewriter].
func (*TurnAnswer) Begin(dst []byte) []byte { return dst }

// Whole implements [Rewriter].
func (a *TurnAnswer) Whole(dst, answer []byte) ([]byte, error) {
	if !valid(answer) {
		return dst, errors.New("decode's answer is not JSON")
	}
	answer = answer[skipSpace(answer, 0):]
	a.read(answer)
	a.deliver()
	return a.appendTop(dst, answer, false), nil
}

// Event implements [Rewriter].
func (a *TurnAnswer) Event(dst, event []byte) []byte {
	data := eventObject(event)
	if data == nil {
		return append(append(dst, event...), "\n\n"...)
	}
	a.read(data)
	a.deliver()
	if !a.OwnIDs && a.Kept != nil && onlyTokenIDs(data) {
		return dst
	}
	return appendEvent(dst, event, a.appendTop(nil, data, true))
}

// deliver calls Kept, once all parts are there.
func (a *TurnAnswer) deliver() {
	if a.params != nil && a.prompt && !a.broken && a.Kept != nil {
		a.Kept(a.params, a.ids)
		a.Kept = nil
		a.drop()
	}
	a.params = nil
}

// read reads an answer, or an event of one: the prompt's ids before the answer's, in whichever order they stand.
func (a *TurnAnswer) read(object []byte) {
	if a.Kept == nil {
		return
	}
	var choices []byte
	for key, value := range pairs(object) {
		switch string(key) {
		case "kv_transfer_params":
			if value[0] == '{' {
				a.params = append([]byte(nil), value...)
			}
		case "prompt_token_ids":
			a.add(value, true)
		case "choices":
			choices = value
		}
	}
	n := 0
	for choice := range elements(choices) {
		if n++; n > 1 {
			a.broken = true
			return
		}
		var made []byte
		for key, value := range pairs(choice) {
			switch string(key) {
			case "prompt_token_ids":
				a.add(value, true)
			case "token_ids":
				made = value
			}
		}
		a.add(made, false)
	}
}

// add appends token ids; null adds none.
func (a *TurnAnswer) add(ids []byte, prompt bool) {
	if !present(ids) || a.broken {
		return
	}
	if prompt == a.prompt || prompt && len(a.ids) > 0 { // the prompt's come once, and first
		a.broken = a.broken || prompt || !a.prompt
	}
	a.prompt = a.prompt || prompt
	before := cap(a.ids)
	var ok bool
	a.ids, ok = TokenIDs(a.ids, ids)
	if !ok || len(a.ids) > maxTurnTokens || cap(a.ids) != before && a.Room != nil && !a.Room(4*cap(a.ids)) {
		a.broken = true
	}
	if a.broken {
		a.drop()
	}
}

// drop frees the ids.
func (a *TurnAnswer) drop() {
	if a.ids = nil; a.Room != nil {
		a.Room(0)
	}
}

// appendTop appends an answer, or an event's object, without the members that are not for the client.
func (a *TurnAnswer) appendTop(dst, object []byte, event bool) []byte {
	if len(object) == 0 || object[0] != '{' {
		return append(dst, object...)
	}
	dst = append(dst, '{')
	first := true
	for key, value := range pairs(object) {
		switch string(key) {
		case "kv_transfer_params":
			if event {
				continue
			}
			value = null
		case "prompt_token_ids":
			value = a.orNull(value)
		case "choices":
			value = a.choices(value)
		case "response": // the last event of /v1/responses
			value = a.appendTop(nil, value, false)
		}
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = append(append(AppendQuoted(dst, key), ':'), value...)
	}
	return append(dst, '}')
}

var null = []byte("null")

func (a *TurnAnswer) orNull(value []byte) []byte {
	if a.OwnIDs {
		return value
	}
	return null
}

func (a *TurnAnswer) choices(list []byte) []byte {
	if a.OwnIDs || len(list) == 0 || list[0] != '[' {
		return list
	}
	dst := []byte{'['}
	for choice := range elements(list) {
		if len(dst) > 1 {
			dst = append(dst, ',')
		}
		if choice[0] != '{' {
			dst = append(dst, choice...)
			continue
		}
		dst = appendMembers(dst, choice, func(key string, value []byte) []byte {
			if key == "token_ids" || key == "prompt_token_ids" {
				return null
			}
			return value
		})
	}
	return append(dst, ']')
}

// onlyTokenIDs reports whether vLLM sent a chat's event for its token ids alone: for a token that gives no text yet.
func onlyTokenIDs(chunk []byte) bool {
	deltas := 0
	for key, value := range pairs(chunk) {
		switch string(key) {
		case "usage":
			if present(value) {
				return false
			}
		case "prompt_token_ids":
			if present(value) {
				return false
			}
		case "choices":
			for choice := range elements(value) {
				for key, value := range pairs(choice) {
					switch string(key) {
					case "delta":
						if len(value) < 2 || value[0] != '{' || value[skipSpace(value, 1)] != '}' {
							return false
						}
						deltas++
					case "finish_reason", "logprobs":
						if present(value) {
							return false
						}
					}
				}
			}
		}
	}
	return deltas > 0
}
