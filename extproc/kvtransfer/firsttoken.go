package kvtransfer

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"

	"tandem/extproc/openai"
)

// lmcacheFirst is lmcache with ret_first_tok, as LMCache's own proxy uses it: P's answer has the token that it sampled
// (kv_transfer_params.first_tok); D gets the prompt's token ids followed by that token, and computes only the rest of
// the answer; the router delivers P's token to the client.
//
// LMCache's proxy asks /tokenize for the ids, and sends them to P too, over /v1/completions. Tandem sends P the
// client's own body and asks for the ids (return_token_ids, vLLM 0.10.2): they come from P's own template, tools
// included, without another request. A chat's messages stay in the body with prompt; D ignores them as unknown members.
//
// Requests that D could not continue in that way are sent as with lmcache. So are those whose first token gives the
// client no text: a part of a character, reasoning, a tool call.
type lmcacheFirst struct{ lmcache }

// Prefill keeps the client's stop strings: if one ends the answer at its first token, the answer is complete.
func (d lmcacheFirst) Prefill(r *openai.Request, p *openai.Patch, pair *Pair) {
	if r.Uncontinuable() != "" {
		d.lmcache.Prefill(r, p, pair)
		return
	}
	d.limit(r, p, "max_tokens", openai.FieldMaxTokens)
	d.limitOwn(r, p, "max_completion_tokens", openai.FieldMaxCompletionTokens)
	if n, ok := r.Int(openai.FieldMinTokens); ok && n > 1 {
		p.Set("min_tokens", openai.FieldMinTokens, d.one)
	}
	p.Set("stream", openai.FieldStream, d.no)
	if r.StreamOptionsAllowed() {
		p.Delete(openai.FieldStreamOptions)
	}
	p.Set("return_token_ids", openai.FieldReturnTokenIDs, []byte("true"))
	spec := d.spec(append(make([]byte, 0, 256), `{"ret_first_tok":true,"disagg_spec":`...), pair)
	p.Set("kv_transfer_params", openai.FieldKVTransferParams, append(spec, '}'))
}

// ReadAnswer builds Params for D and the client. An answer without a first token is read as with lmcache.
func (d lmcacheFirst) ReadAnswer(body []byte, _ *Pair) (Answer, error) {
	scanned, err := openai.ScanAnswer(body)
	if err != nil {
		return Answer{}, fmt.Errorf("reading P's answer: %w", err)
	}
	a := counts(&scanned)
	a.PromptIDs = scanned.PromptIDs
	token := firstToken(scanned.Params)
	if token == nil {
		return a, nil
	}
	var first firstAnswer
	switch err := first.read(body); {
	case err != nil:
		a.Unused = err.Error()
	case first.finish == `"stop"`:
		a.Final = first.final()
	case first.finish != `"length"`:
		a.Unused = "P finished for " + first.finish
	case !tokenIDs(scanned.PromptIDs):
		a.Unused = "P did not answer the prompt's token ids"
	case len(scanned.PromptIDs)+len(first.text)+len(first.id) > MaxParamsBytes/2:
		a.Unused = "the prompt's token ids are too long"
	default:
		a.Params = first.params(scanned.PromptIDs, token, a.CachedTokens)
	}
	return a, nil
}

// firstToken returns P's token id, nil if P was not asked for one or does not support it.
func firstToken(params []byte) (id []byte) {
	c := cursor{b: params}
	_ = c.object(func(key, value []byte, _ int) error {
		if string(key) == "first_tok" {
			if _, err := strconv.ParseUint(string(value), 10, 32); err == nil {
				id = value
			}
		}
		return nil
	})
	return id
}

// firstAnswer has the members of P's answer that are read: JSON text within it.
type firstAnswer struct {
	body, choice   []byte
	choiceAt       int
	id, created    []byte
	model          []byte
	text           []byte // of the token
	finish         string
	reasons, calls bool
}

var errNoText = errors.New("the first token is no text by itself")

func (f *firstAnswer) read(body []byte) error {
	f.body = body
	var choices []byte
	var choicesAt int
	err := members(body, func(key, value []byte, at int) error {
		switch string(key) {
		case "id":
			f.id = value
		case "created":
			f.created = value
		case "model":
			f.model = value
		case "choices":
			choices, choicesAt = value, at
		}
		return nil
	})
	if err != nil {
		return err
	}
	if f.choice, f.choiceAt, err = onlyElement(choices); err != nil {
		return fmt.Errorf("choices: %w", err)
	}
	f.choiceAt += choicesAt
	choice := cursor{b: f.choice}
	err = choice.object(func(key, value []byte, _ int) error {
		switch string(key) {
		case "finish_reason":
			f.finish = string(value)
		case "text":
			f.text = value
		case "message":
			return f.readMessage(value)
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case f.finish == `"stop"`:
		return nil
	case len(f.id) == 0 || f.id[0] != '"' || len(f.created) == 0 || len(f.created) > 20:
		return errors.New("an answer without id or time")
	case len(f.text) <= 2 || f.text[0] != '"' || bytes.Contains(f.text, []byte("\uFFFD")) ||
		bytes.Contains(bytes.ToLower(f.text), []byte(`\ufffd`)):
		return errNoText
	case f.reasons || f.calls:
		return errNoText
	}
	return nil
}

func (f *firstAnswer) readMessage(message []byte) error {
	c := cursor{b: message}
	return c.object(func(key, value []byte, _ int) error {
		present := string(value) != "null" && string(value) != `""` && string(value) != "[]"
		switch string(key) {
		case "content":
			f.text = value
		case "reasoning", "reasoning_content":
			f.reasons = f.reasons || present
		case "tool_calls", "function_call":
			f.calls = f.calls || present
		}
		return nil
	})
}

// params writes the hand-over: the continuation, with D's prompt in front.
func (f *firstAnswer) params(ids, token []byte, cached int64) []byte {
	out := append(make([]byte, 0, len(ids)+len(token)+len(f.text)+len(f.id)+128), `{"prompt":`...)
	out = append(out, bytes.TrimRight(ids[:len(ids)-1], " \t\r\n")...)
	out = append(append(append(out, ','), token...), "],"...)
	rest := appendContinuation(nil,
		&openai.Continuation{ID: f.id, Created: f.created, Model: f.model, Text: f.text, Cached: cached})
	return append(out, rest[1:]...)
}

// final returns P's answer without the members that Tandem asked for.
func (f *firstAnswer) final() []byte {
	choice := without(f.choice, "prompt_token_ids", "token_ids")
	end := f.choiceAt + len(f.choice)
	whole := append(append(append([]byte(nil), f.body[:f.choiceAt]...), choice...), f.body[end:]...)
	return without(whole, "prompt_token_ids", "kv_transfer_params")
}

// Continue sets the ids as D's prompt. A completion's own prompt is renamed to a member that engines ignore, so that
// undoing it takes no space in a ticket. The limits are reduced by P's token. A chat without a limit gets null, since
// a completion's default would be 16.
func (lmcacheFirst) Continue(r *openai.Request, p *openai.Patch, params []byte) (answer []byte, err error) {
	to, ids, err := readContinuation(params)
	if err != nil {
		return nil, err
	}
	limit, ok := r.TokenLimit()
	if !ok || limit == 1 || !tokenIDs(ids) {
		return nil, errNotContinuation
	}
	p.Rename(openai.FieldPrompt, "prompt_of_client")
	p.Insert("prompt", ids)
	left := []byte("null")
	if limit > 0 {
		left = strconv.AppendInt(nil, limit-1, 10)
	}
	p.Set("max_tokens", openai.FieldMaxTokens, left)
	to.Chat = r.API() == openai.Chat
	if to.Chat && r.Has(openai.FieldMaxCompletionTokens) {
		p.Set("max_completion_tokens", openai.FieldMaxCompletionTokens, left)
	}
	if n, ok := r.Int(openai.FieldMinTokens); ok && n > 0 {
		p.Set("min_tokens", openai.FieldMinTokens, strconv.AppendInt(nil, n-1, 10))
	}
	return appendContinuation(nil, to), nil
}

var errNotContinuation = fmt.Errorf("%w: not those of a first token", ErrParams)

// appendContinuation appends the part of Params after the prompt, which is all that a ticket carries of them.
func appendContinuation(dst []byte, c *openai.Continuation) []byte {
	dst = append(append(dst, `{"chat":`...), strconv.FormatBool(c.Chat)...)
	dst = append(append(dst, `,"id":`...), c.ID...)
	dst = append(append(dst, `,"created":`...), c.Created...)
	if c.Model != nil {
		dst = append(append(dst, `,"model":`...), c.Model...)
	}
	dst = append(append(dst, `,"text":`...), c.Text...)
	return append(strconv.AppendInt(append(dst, `,"cached":`...), c.Cached, 10), '}')
}

// ReadContinuation reads the continuation from a ticket when D's answer arrives.
func ReadContinuation(answer []byte) (*openai.Continuation, error) {
	c, _, err := readContinuation(answer)
	return c, err
}

func readContinuation(b []byte) (to *openai.Continuation, prompt []byte, err error) {
	to = &openai.Continuation{Cached: -1}
	c := cursor{b: b}
	err = c.object(func(key, value []byte, _ int) error {
		switch string(key) {
		case "prompt":
			prompt = value
		case "chat":
			to.Chat = string(value) == "true"
		case "id":
			to.ID = value
		case "created":
			to.Created = value
		case "model":
			to.Model = value
		case "text":
			to.Text = value
		case "cached":
			to.Cached, _ = strconv.ParseInt(string(value), 10, 64)
		}
		return nil
	})
	if err != nil || len(to.ID) < 2 || len(to.Created) == 0 || len(to.Text) < 2 {
		return nil, nil, errors.Join(errNotContinuation, err)
	}
	return to, prompt, nil
}
