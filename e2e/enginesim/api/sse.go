package api

import (
	"errors"
	"io"
	"net/http"
	"strconv"

	"tandem/e2e/enginesim/connector"
	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/fault"
	"tandem/e2e/enginesim/jsontext"
	"tandem/e2e/enginesim/request"
)

// answerer writes one API's answers: as one JSON body, or as the events of a stream.
type answerer interface {
	whole(c *answer) []byte
	// open appends the events that come first, even if the KV load then fails. begin appends the other events before
	// the first token, token the events of token i of a sequence, end those after the last one, fail those of an error
	// after the 200.
	open(c *answer, dst []byte) []byte
	begin(c *answer, dst []byte) []byte
	token(c *answer, dst []byte, q *engine.Sequence, i int) []byte
	end(c *answer, dst []byte) []byte
	fail(c *answer, dst []byte, e *engine.Error) []byte
}

func (c *call) answerer() answerer {
	switch c.req.API {
	case request.Completions:
		return completionsAPI{}
	case request.Responses:
		return &responsesAPI{}
	case request.Messages:
		return messagesAPI{}
	case request.Generate:
		return generateAPI{}
	case request.SGLang:
		return sglangAPI{}
	}
	return chatAPI{}
}

// serveStream answers with server-sent events. As in vLLM the 200 is sent before the engine has done anything, so a
// failed KV load or a violation can only be reported in an event. SGLang sends it with the first event of chat
// completions and completions (openai/serving_chat.py:2426 of 0.5.23), which may be that of a failure.
func (c *call) serveStream() {
	h := c.w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	c.reportLoad()
	out := c.answerer()
	st := stream{c: c, control: http.NewResponseController(c.w), buf: make([]byte, 0, 1024)}
	if c.s.cfg.Connector != connector.SGLang || c.req.API != request.Chat && c.req.API != request.Completions {
		if err := st.begin(); err != nil {
			return
		}
	}
	opened := false
	open := func() {
		if !opened {
			st.buf = out.open(c.answer, st.buf)
		}
		opened = true
	}
	if c.req.API == request.Responses { // vLLM creates the response before the engine has the request
		if open(); st.flush() != nil {
			return
		}
	}
	err := c.generate(func(step int) error {
		if step == 0 {
			open()
			st.buf = out.begin(c.answer, st.buf)
		}
		for _, q := range c.Seqs {
			if step < q.Out.N {
				st.buf = out.token(c.answer, st.buf, q, step)
			}
		}
		return st.flush()
	})
	if st.cut {
		c.reset()
	}
	if st.broken {
		return
	}
	switch {
	case err == nil:
		c.recordUsage()
		st.buf = out.end(c.answer, st.buf)
		if c.req.API == request.Responses {
			c.keepResponse(c.appendResponse(nil, true))
		}
	case c.r.Context().Err() != nil:
		return
	default:
		open()
		e := asAPIError(err)
		e.Load = errors.Is(err, engine.ErrLoadFailed)
		st.buf = out.fail(c.answer, st.buf, e)
	}
	if _ = st.flush(); st.cut {
		c.reset()
	}
}

// stream sends events step by step.
type stream struct {
	c       *call
	control *http.ResponseController
	buf     []byte
	begun   bool // the 200 was sent
	broken  bool // the client has gone, or an injected reset is due
	cut     bool // the latter
}

// begin sends the 200.
func (st *stream) begin() error {
	st.c.w.WriteHeader(http.StatusOK)
	st.c.rec.setStatus(http.StatusOK)
	st.begun = true
	if st.c.rule != nil && st.c.rule.Mode == fault.Comment {
		_, _ = io.WriteString(st.c.w, ": ping\n\n")
	}
	return st.control.Flush()
}

func (st *stream) flush() error {
	if !st.begun {
		if err := st.begin(); err != nil {
			return err
		}
	}
	cut := st.cutAt()
	_, err := st.c.w.Write(st.buf[:cut])
	st.c.rec.set(func() { st.c.rec.AnswerBytes += cut })
	if err == nil {
		err = st.control.Flush()
	}
	st.cut = err == nil && cut < len(st.buf)
	st.buf = st.buf[:0]
	if err != nil || st.cut {
		st.broken = true
		return engine.ErrAborted
	}
	return nil
}

// cutAt returns the number of bytes of the buffer to send: normally all; before an injected reset the rule's number of
// events and half of the next one.
func (st *stream) cutAt() int {
	rule := st.c.rule
	if rule == nil || rule.Mode != fault.StreamReset && rule.Mode != fault.StreamDeath && rule.Mode != fault.MidReset {
		return len(st.buf)
	}
	at := 0 // start of the event
	for i := 1; i < len(st.buf); i++ {
		if st.buf[i-1] != '\n' || st.buf[i] != '\n' {
			continue
		}
		if st.c.sent++; st.c.sent > rule.Events {
			if rule.Mode == fault.StreamDeath {
				st.c.s.die("of a request, as POST /sim/fail says")
			}
			return (at + i) / 2
		}
		at = i + 1
	}
	return len(st.buf)
}

const done = "data: [DONE]\n\n"

// failEvent returns the event of an error after the 200 in vLLM's OpenAI APIs, with the blanks of Python's json.dumps.
func failEvent(dst []byte, e *engine.Error) []byte {
	dst = append(dst, `data: {"error": {"message": `...)
	dst = append(jsontext.AppendQuoted(dst, e.Message), `, "type": `...)
	dst = append(jsontext.AppendQuoted(dst, e.Typ), `, "param": null, "code": `...)
	dst = strconv.AppendInt(dst, int64(e.Status), 10)
	return append(dst, "}}\n\n"+done...)
}

// event appends a named event.
func event(dst []byte, name string, data func(dst []byte) []byte) []byte {
	dst = append(dst, "event: "...)
	dst = append(dst, name...)
	dst = append(dst, "\ndata: "...)
	return append(data(dst), "\n\n"...)
}

func writeLength(w http.ResponseWriter, n int) { w.Header().Set("Content-Length", strconv.Itoa(n)) }

func writeWith(w http.ResponseWriter, status int, body []byte) {
	writeLength(w, len(body))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}
