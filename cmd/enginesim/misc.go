package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// The paths that do not generate.

// recorded reads the body, records the request, and lets fn answer.
func (s *sim) recorded(fn func(w http.ResponseWriter, r *http.Request, body []byte)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		rec := s.records.start(r)
		defer rec.finish()
		rec.set(func() { rec.Leg = "plain" })
		s.metrics.requests.add(pathLabel(r)+"\x00plain", 1)
		c := &call{s: s, w: w, r: r, rec: rec, req: &request{}}
		body, put, err := s.body(w, r)
		defer put()
		if err != nil {
			c.refuseBody(err)
			return
		}
		s.records.setBody(rec, body)
		if c.inject(s.fail.take("plain", r.URL.Path, false)) {
			return
		}
		fn(&statusWriter{w, rec}, r, body)
	}
}

// pathLabel is the path as it is registered, so that a metric's labels stay few.
func pathLabel(r *http.Request) string {
	_, path, found := strings.Cut(r.Pattern, " ")
	switch {
	case r.Pattern == "/":
		return "other"
	case !found:
		return r.Pattern
	}
	return path
}

type statusWriter struct {
	http.ResponseWriter
	rec *record
}

func (w *statusWriter) WriteHeader(status int) {
	w.rec.setStatus(status)
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusWriter) Write(b []byte) (int, error) {
	n, err := w.ResponseWriter.Write(b)
	w.rec.set(func() { w.rec.AnswerBytes += n })
	return n, err
}

func (s *sim) serveHealth(w http.ResponseWriter, _ *http.Request) {
	if s.dying.Load() {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	w.WriteHeader(http.StatusOK)
}

func (s *sim) serveModels(w http.ResponseWriter, _ *http.Request) {
	dst := []byte(`{"object":"list","data":[`)
	for i, m := range s.cfg.models {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendQuoted(append(dst, `{"id":`...), m)
		dst = append(dst, `,"object":"model"`...)
		dst = appendInt(dst, "created", s.started.Unix())
		dst = append(dst, `,"owned_by":"vllm"`...)
		dst = appendStr(dst, "root", s.cfg.models[0])
		dst = append(dst, `,"parent":null`...)
		dst = appendInt(dst, "max_model_len", int64(s.cfg.maxModelLen))
		dst = append(dst, `,"permission":[{"id":"modelperm-`+s.random.hex16()+`","object":"model_permission","created":`...)
		dst = strconv.AppendInt(dst, s.started.Unix(), 10)
		dst = append(dst, `,"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,`...)
		dst = append(dst, `"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]}`...)
	}
	writeRaw(w, http.StatusOK, append(dst, "]}"...))
}

// small reads a body of one of the small APIs.
func (s *sim) small(w http.ResponseWriter, body []byte) (*request, bool) {
	var room [16]member
	members, err := scanObject(room[:0], body)
	q := &request{members: members}
	if err != nil {
		writeRaw(w, http.StatusBadRequest, badRequest("1 validation error:\n  {'type': 'json_invalid', 'msg': '%v'}", err).json(apiNone))
		return q, false
	}
	if bad := q.readCommon(connectorNone); bad != nil {
		writeRaw(w, bad.status, bad.json(apiNone))
		return q, false
	}
	if bad := q.checkModel(s.cfg); bad != nil && bad.status == http.StatusNotFound {
		writeRaw(w, bad.status, bad.json(apiNone))
		return q, false
	}
	return q, true
}

// serveTokenize is POST /tokenize, of a prompt or of messages.
func (s *sim) serveTokenize(w http.ResponseWriter, _ *http.Request, body []byte) {
	q, ok := s.small(w, body)
	if !ok {
		return
	}
	q.api, q.returnIDs = apiCompletions, true
	if !isNull(q.raw("messages")) {
		q.api = apiChat
	}
	prompts, bad := q.render(s.cfg.blockSize)
	if bad != nil {
		writeRaw(w, bad.status, bad.json(apiNone))
		return
	}
	dst := append([]byte(nil), `{"count":`...)
	dst = strconv.AppendInt(dst, int64(prompts[0].n), 10)
	dst = appendInt(dst, "max_model_len", int64(s.cfg.maxModelLen))
	dst = appendIDs(appendKey(dst, "tokens"), prompts[0].ids)
	writeRaw(w, http.StatusOK, append(dst, `,"token_strs":null}`...))
}

func (s *sim) serveDetokenize(w http.ResponseWriter, _ *http.Request, body []byte) {
	q, ok := s.small(w, body)
	if !ok {
		return
	}
	ids, ok := tokenIDs(q.raw("tokens"))
	if !ok {
		bad := pydantic("list_type", "tokens", "Input should be a valid list of integers", q.raw("tokens"))
		writeRaw(w, bad.status, bad.json(apiNone))
		return
	}
	var txt []byte
	for _, id := range ids {
		txt = appendToken(txt, id)
	}
	writeRaw(w, http.StatusOK, append(appendQuoted([]byte(`{"prompt":`), string(txt)), '}'))
}

// serveEmbeddings is POST /v1/embeddings: eight numbers made of the input's tokens.
func (s *sim) serveEmbeddings(w http.ResponseWriter, _ *http.Request, body []byte) {
	q, ok := s.small(w, body)
	if !ok {
		return
	}
	q.api = apiCompletions
	q.members = append(q.members, member{[]byte("prompt"), q.raw("input")})
	prompts, bad := q.render(s.cfg.blockSize)
	if bad != nil {
		writeRaw(w, bad.status, bad.json(apiNone))
		return
	}
	model := q.model
	if model == "" {
		model = s.cfg.models[0]
	}
	dst := append([]byte(nil), `{"id":"embd-`+s.random.hex16()+`","object":"list"`...)
	dst = appendInt(dst, "created", time.Now().Unix())
	dst = appendStr(dst, "model", model)
	dst = append(dst, `,"data":[`...)
	total := 0
	for i, p := range prompts {
		if i > 0 {
			dst = append(dst, ',')
		}
		total += p.n
		dst = append(dst, `{"index":`...)
		dst = strconv.AppendInt(dst, int64(i), 10)
		dst = append(dst, `,"object":"embedding","embedding":[`...)
		for d := range 8 {
			if d > 0 {
				dst = append(dst, ',')
			}
			dst = strconv.AppendFloat(dst, float64(int16(p.digest>>(8*d)))/(1<<15), 'f', 6, 64)
		}
		dst = append(dst, "]}"...)
	}
	dst = append(dst, `],"usage":{"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(total), 10)
	dst = appendInt(dst, "total_tokens", int64(total))
	writeRaw(w, http.StatusOK, append(dst, `,"completion_tokens":0,"prompt_tokens_details":null}}`...))
}

// serveAudio is POST /v1/audio/transcriptions. What it heard is how many bytes came and their hash, so that a test can
// tell whether an upload arrived whole: of the body, and of the file in it.
func (s *sim) serveAudio(w http.ResponseWriter, r *http.Request, body []byte) {
	sum := sha256.Sum256(body)
	dst := fmt.Appendf(nil, `{"text":"%d bytes, sha256 %s","usage":{"type":"duration","seconds":1},"body_bytes":%d,"body_sha256":"%s"`,
		len(body), hex.EncodeToString(sum[:]), len(body), hex.EncodeToString(sum[:]))
	if file, n, model := readUpload(r, body); file != "" {
		dst = fmt.Appendf(dst, `,"file_bytes":%d,"file_sha256":"%s"`, n, file)
		dst = appendStr(dst, "model", model)
	}
	writeRaw(w, http.StatusOK, append(dst, '}'))
}

func (s *sim) serveUnknown(w http.ResponseWriter, r *http.Request, _ []byte) {
	e := &apiError{status: http.StatusNotFound, typ: "NotFoundError", message: "Not Found"}
	probe := r.Clone(r.Context())
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		probe.Method = method
		if _, pattern := s.mux.Handler(probe); pattern != "" && pattern != "/" {
			e = &apiError{status: http.StatusMethodNotAllowed, typ: "MethodNotAllowedError", message: "Method Not Allowed"}
		}
	}
	writeRaw(w, e.status, e.json(apiNone))
}

// state is GET /sim/state: what an operator of the demo wants to see balance.
type state struct {
	EngineID        string           `json:"engine_id"`
	Role            role             `json:"role"`
	Running         int64            `json:"running"`
	Waiting         int64            `json:"waiting"`
	Blocks          int              `json:"blocks"`
	BlocksUsed      int              `json:"blocks_used"`
	BlocksHeld      int64            `json:"blocks_held"`
	Given           int64            `json:"given"`
	Fetched         int64            `json:"fetched"`
	Released        int64            `json:"released"`
	Expired         int64            `json:"expired"`
	Violations      int64            `json:"violations"`
	ViolationsBy    map[string]int64 `json:"violations_by,omitempty"`
	FailedTransfers int64            `json:"failed_transfers"`
	ExternalTokens  int64            `json:"external_tokens"`
	HeldFor         []string         `json:"held_for,omitempty"` // x-request-ids of hand-overs that are held
}

func (s *sim) state() state {
	m := s.metrics
	s.pool.mu.Lock()
	all := len(s.pool.blocks) - 1
	used := all - s.pool.freeCount
	s.pool.mu.Unlock()
	st := state{
		EngineID: s.engineID, Role: s.cfg.role, Running: m.running.Load(),
		Waiting: m.waitingCapacity.Load() + m.waitingDeferred.Load(),
		Blocks:  all, BlocksUsed: used, BlocksHeld: s.held(),
		Given: s.ledger.given.Load(), Fetched: s.ledger.fetched.Load(), Released: s.ledger.freed.Load(),
		Expired: s.ledger.expired.Load(), FailedTransfers: m.failedTransfers.Load(), ExternalTokens: m.external.Load(),
		ViolationsBy: map[string]int64{}, HeldFor: s.ledger.heldFor(),
	}
	m.violations.each(func(kind string, n int64) {
		st.Violations += n
		if n > 0 {
			st.ViolationsBy[kind] = n
		}
	})
	return st
}

func (s *sim) serveState(w http.ResponseWriter, _ *http.Request) { writeJSONValue(w, s.state()) }

// serveInfo is SGLang's /server_info, as far as a router looks at it.
func (s *sim) serveInfo(w http.ResponseWriter) {
	writeJSONValue(w, map[string]any{"disaggregation_mode": s.disaggregationMode(),
		"dp_size": s.cfg.dpSize, "served_model_name": s.cfg.models[0], "version": "0.5.23"})
}

// serveReset is POST /sim/reset: the recorded requests, the failure rules, the prefix cache, held blocks and the
// enginesim_ counters go; what vLLM itself counts stays, as counters do.
func (s *sim) serveReset(w http.ResponseWriter, _ *http.Request) {
	s.fail.clear()
	s.records.reset()
	s.ledger.releaseAll()
	s.ledger.forget()
	if s.buffer != nil {
		s.buffer.reset()
	}
	s.encodings.reset()
	s.pool.resetPrefixCache()
	m := s.metrics
	for _, c := range []*counters{&m.violations, &m.roleMismatch, &m.requests, &m.injected} {
		c.reset()
	}
	m.aborted.Store(0)
	writeJSONValue(w, s.state())
}

// readUpload finds the file in a multipart body.
func readUpload(r *http.Request, body []byte) (sha string, size int64, model string) {
	parts, err := multipartReader(r, body)
	if err != nil {
		return "", 0, ""
	}
	for {
		p, err := parts.NextPart()
		if err != nil {
			return sha, size, model
		}
		switch p.FormName() {
		case "file":
			h := sha256.New()
			size, _ = io.Copy(h, p)
			sha = hex.EncodeToString(h.Sum(nil))
		case "model":
			b, _ := io.ReadAll(io.LimitReader(p, 1024))
			model = string(b)
		}
	}
}

func multipartReader(r *http.Request, body []byte) (*multipart.Reader, error) {
	_, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return nil, err
	}
	return multipart.NewReader(bytes.NewReader(body), params["boundary"]), nil
}
