package kvtransfer

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"

	"tandem/extproc/openai"
)

// trtllm is TensorRT-LLM's disaggregated_params, context first: P ("context server") computes the prompt and answers
// an opaque state and the ids by which D ("generation server") finds the KV; D gets them back with another
// request_type. The context engine stops after one step by itself, so the client's limits stay: if they end the answer
// there, P's answer is the client's.
//
// Ids have up to 63 bits. They are copied as text and never become floats.
//
// Read from tensorrt_llm/serve/openai_disagg_service.py, openai_protocol.py and disaggregated_params.py (2026), and
// AIBrix pd/engine/trtllm.go.
type trtllm struct{ no []byte }

func newTRTLLM() trtllm { return trtllm{[]byte("false")} }

func trtllmDialect(*Options) (Dialect, error) {
	d := newTRTLLM()
	return Dialect{
		Name: "trtllm", Engine: EngineTRTLLM, Engines: Engines{Experimental: true},
		APIs:    []openai.API{openai.Chat, openai.Completions},
		Prefill: d.Prefill, ReadAnswer: d.ReadAnswer, DecodeMember: d.DecodeMember, Completion: d.Completion,
	}, nil
}

func (d trtllm) Prefill(_ *openai.Request, p *openai.Patch, pair *Pair) {
	p.Set("stream", openai.FieldStream, d.no)
	p.Delete(openai.FieldStreamOptions)
	var room [96]byte
	ask := append(room[:0], `{"request_type":"context_only","disagg_request_id":`...)
	p.Set("disaggregated_params", openai.FieldDisaggregatedParams,
		append(strconv.AppendUint(ask, disaggRequestID(pair.Attempt), 10), '}'))
}

// disaggRequestID returns a unique id of at least 2^62: the engine takes ids below 2^42 for its own.
func disaggRequestID(attempt [16]byte) uint64 { return binary.BigEndian.Uint64(attempt[:8])>>2 | 1<<62 }

// ReadAnswer reads D's parameters from P's only choice, or finds that the answer is already complete.
func (trtllm) ReadAnswer(body []byte, pair *Pair) (Answer, error) {
	a, _, err := usage(body)
	if err != nil {
		return Answer{}, fmt.Errorf("reading P's answer: %w", err)
	}
	var c contextAnswer
	if err := c.read(body); err != nil {
		return Answer{}, fmt.Errorf("reading P's answer: %w: %w", ErrParams, err)
	}
	switch string(c.finish) {
	case "", "null", `"length"`, `"not_finished"`:
	default:
		a.Final = c.final()
		return a, nil
	}
	if a.Params, err = c.forDecode(disaggRequestID(pair.Attempt)); err != nil {
		return Answer{}, fmt.Errorf("disaggregated_params of P's answer: %w: %w", ErrParams, err)
	}
	return a, nil
}

// DecodeMember appends the members that ReadAnswer made: of a chat, D takes prompt_token_ids instead of its template.
func (trtllm) DecodeMember(dst, params []byte) []byte { return append(dst, params...) }

// Completion sets P's parameters, and P's token ids as the prompt, so that D need not tokenise. A completion has no
// member prompt_token_ids.
func (trtllm) Completion(p *openai.Patch, params []byte) error {
	return members(append(append([]byte{'{'}, params...), '}'), func(key, value []byte, _ int) error {
		switch string(key) {
		case "disaggregated_params":
			p.Set("disaggregated_params", openai.FieldDisaggregatedParams, value)
		case "prompt_token_ids":
			p.Set("prompt", openai.FieldPrompt, value)
		}
		return nil
	})
}

// contextAnswer has the members of a context server's answer that are read: JSON text within it.
type contextAnswer struct {
	body, choice             []byte
	choiceAt                 int // where choice starts in body
	finish                   []byte
	params                   []byte // disaggregated_params
	usage                    []byte
	tokenIDs, tokenIDsBase64 []byte // prompt_token_ids; newer servers can answer them packed in base64
}

func (c *contextAnswer) read(body []byte) error {
	c.body = body
	var choices []byte
	var choicesAt int
	err := members(body, func(key, value []byte, at int) error {
		switch string(key) {
		case "choices":
			choices, choicesAt = value, at
		case "usage":
			c.usage = value
		case "prompt_token_ids":
			c.tokenIDs = value
		case "prompt_token_ids_b64":
			c.tokenIDsBase64 = value
		case "disaggregated_params": // AIBrix looks here too
			c.params = value
		}
		return nil
	})
	if err != nil {
		return err
	}
	if c.choice, c.choiceAt, err = onlyElement(choices); err != nil {
		return fmt.Errorf("choices: %w", err)
	}
	c.choiceAt += choicesAt
	choice := cursor{b: c.choice}
	return choice.object(func(key, value []byte, _ int) error {
		switch string(key) {
		case "finish_reason":
			c.finish = value
		case "disaggregated_params":
			if string(value) != "null" {
				c.params = value
			}
		}
		return nil
	})
}

// onlyElement returns the element of a list that must have exactly one.
func onlyElement(list []byte) (element []byte, at int, err error) {
	c := cursor{b: list}
	if !c.take('[') {
		return nil, 0, errors.New("not a list")
	}
	more, err := c.next(true, ']')
	if err != nil || !more {
		return nil, 0, errors.Join(errors.New("none"), err)
	}
	at = c.i
	if !c.value() {
		return nil, 0, errNotJSON
	}
	element = list[at:c.i]
	if more, err := c.next(false, ']'); err != nil || more {
		return nil, 0, errors.New("more than one")
	}
	return element, at, nil
}

// forDecode writes D's members: P's parameters with another request_type, and the token ids, so that D does not make
// them again.
func (c *contextAnswer) forDecode(id uint64) ([]byte, error) {
	if len(c.params) > MaxParamsBytes/2 {
		return nil, fmt.Errorf("%d bytes, more than %d", len(c.params), MaxParamsBytes/2)
	}
	out := append(make([]byte, 0, len(c.params)+64), `"disaggregated_params":{"request_type":"generation_only"`...)
	var contextID, disaggID []byte
	seen := map[string]bool{}
	params := cursor{b: c.params}
	err := params.object(func(key, value []byte, _ int) error {
		if seen[string(key)] || len(seen) == 64 {
			return fmt.Errorf("%.40q is there twice, or there are too many members", key)
		}
		seen[string(key)] = true
		switch string(key) {
		case "request_type":
			return nil
		case "ctx_usage": // P's usage, for a D that knows the member: releases refuse unknown ones
			if string(value) == "null" && len(c.usage) > 0 {
				value = c.usage
			}
		case "ctx_request_id":
			contextID = value
		case "disagg_request_id":
			disaggID = value
		}
		out = append(openai.AppendQuoted(append(out, ','), key), ':')
		out = append(out, value...)
		return nil
	})
	switch {
	case err != nil:
		return nil, err
	case !isID(contextID):
		return nil, refuse([]byte("ctx_request_id"), contextID, "an integer of 64 bits")
	case disaggID != nil && string(disaggID) != "null" && string(disaggID) != strconv.FormatUint(id, 10):
		return nil, refuse([]byte("disagg_request_id"), disaggID, "the one that P was sent")
	}
	return c.appendTokenIDs(append(out, '}'))
}

// isID reports whether a value is an integer that fits 64 bits.
func isID(value []byte) bool {
	_, err := strconv.ParseUint(string(value), 10, 64)
	return err == nil
}

// appendTokenIDs appends prompt_token_ids, from either form of P's answer. Without them D tokenises by itself.
func (c *contextAnswer) appendTokenIDs(out []byte) ([]byte, error) {
	const key = `,"prompt_token_ids":`
	switch {
	case len(c.tokenIDs) > 0 && c.tokenIDs[0] == '[':
		if len(out)+len(key)+len(c.tokenIDs) > MaxParamsBytes {
			return out, nil
		}
		if !tokenIDs(c.tokenIDs) {
			return nil, errors.New("prompt_token_ids: not a list of token ids")
		}
		return append(append(out, key...), c.tokenIDs...), nil
	case len(c.tokenIDsBase64) > 2 && c.tokenIDsBase64[0] == '"':
		packed, err := base64.StdEncoding.AppendDecode(nil, c.tokenIDsBase64[1:len(c.tokenIDsBase64)-1])
		if err != nil || len(packed)%4 != 0 {
			return nil, errors.New("prompt_token_ids_b64: not base64 of 32-bit integers")
		}
		if len(out)+len(key)+3*len(packed) > MaxParamsBytes { // an id of ten digits and its comma is 11 bytes for 4
			return out, nil
		}
		out = append(append(out, key...), '[')
		for i := 0; i < len(packed); i += 4 {
			id := int32(binary.LittleEndian.Uint32(packed[i:]))
			if id < 0 {
				return nil, errors.New("prompt_token_ids_b64: a negative id")
			}
			if i > 0 {
				out = append(out, ',')
			}
			out = strconv.AppendInt(out, int64(id), 10)
		}
		return append(out, ']'), nil
	}
	return out, nil
}

// tokenIDs reports whether a value is a non-empty list of integers from 0 to 2^32-1.
func tokenIDs(list []byte) bool {
	c := cursor{b: list}
	if !c.take('[') {
		return false
	}
	for first := true; ; first = false {
		more, err := c.next(first, ']')
		if err != nil || !more {
			return err == nil && !first
		}
		n, end := digits(list, c.i)
		if end == c.i || n > math.MaxUint32 {
			return false
		}
		c.i = end
	}
}

// final returns P's answer without the members that are not for a client.
func (c *contextAnswer) final() []byte {
	choice := without(c.choice, "disaggregated_params")
	end := c.choiceAt + len(c.choice)
	whole := append(append(append([]byte(nil), c.body[:c.choiceAt]...), choice...), c.body[end:]...)
	return without(whole, "disaggregated_params", "prompt_token_ids", "prompt_token_ids_b64")
}

// without returns an object without some of its members; the others stay unchanged.
func without(object []byte, names ...string) []byte {
	out := make([]byte, 0, len(object))
	out = append(out, '{')
	_ = members(object, func(key, value []byte, _ int) error { // it was read before
		if slices.Contains(names, string(key)) {
			return nil
		}
		out = append(openai.AppendQuoted(comma(out), key), ':')
		out = append(out, value...)
		return nil
	})
	return append(out, '}')
}
