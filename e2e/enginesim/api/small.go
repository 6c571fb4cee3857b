package api

import (
	"bytes"
	"cmp"
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

	"tandem/e2e/enginesim/connector"
	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
	"tandem/e2e/enginesim/request"
)

// The paths that do not generate.

// recorded reads the body, records the request, and lets fn answer.
func (s *Server) recorded(fn func(w http.ResponseWriter, r *http.Request, body []byte)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		rec := s.Records.start(r)
		defer rec.finish()
		rec.set(func() { rec.Leg = "plain" })
		s.Metrics.Requests.Add(pathLabel(r)+"\x00plain", 1)
		c := s.newCall(w, r, rec, &request.Request{})
		body, put, err := s.body(w, r)
		defer put()
		if err != nil {
			c.refuseBody(err)
			return
		}
		s.Records.setBody(rec, body)
		if c.inject(c.takeRule("plain", body)) {
			return
		}
		fn(&statusWriter{w, rec}, r, body)
	}
}

// pathLabel returns the registered path, which bounds the label values of a metric.
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
	rec *Record
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

func (s *Server) serveHealth(w http.ResponseWriter, _ *http.Request) {
	if s.dying.Load() {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	if s.cfg.Connector == connector.SGLang {
		// SGLang sends itself a request, and looks a second later whether the scheduler has done anything (0.5.23,
		// http_server.py, health_generate).
		time.Sleep(time.Second)
	}
	w.WriteHeader(http.StatusOK)
}

func (s *Server) serveModels(w http.ResponseWriter, _ *http.Request) {
	dst := []byte(`{"object":"list","data":[`)
	for i, m := range s.limits().Models {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = jsontext.AppendQuoted(append(dst, `{"id":`...), m)
		dst = append(dst, `,"object":"model"`...)
		dst = jsontext.AppendInt(dst, "created", s.Started.Unix())
		dst = jsontext.AppendStr(dst, "owned_by", s.cfg.Connector.Owner())
		dst = jsontext.AppendStr(dst, "root", s.cfg.Models[0])
		if i < len(s.cfg.Models) {
			dst = append(dst, `,"parent":null`...)
		} else {
			dst = jsontext.AppendStr(dst, "parent", s.cfg.Models[0])
		}
		dst = jsontext.AppendInt(dst, "max_model_len", int64(s.cfg.MaxModelLen))
		dst = append(dst, `,"permission":[{"id":"modelperm-`+engine.Hex16()+`","object":"model_permission",`+
			`"created":`...)
		dst = strconv.AppendInt(dst, s.Started.Unix(), 10)
		dst = append(dst, `,"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,`+
			`"allow_search_indices":false,`...)
		dst = append(dst, `"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,`+
			`"is_blocking":false}]}`...)
	}
	writeRaw(w, http.StatusOK, append(dst, "]}"...))
}

// small reads a body of one of the small APIs.
func (s *Server) small(w http.ResponseWriter, body []byte) (*request.Request, bool) {
	var room [16]jsontext.Member
	members, err := jsontext.ScanObject(room[:0], body)
	q := &request.Request{Members: members}
	if err != nil {
		writeRaw(w, http.StatusBadRequest,
			errorBody(engine.BadRequest("1 validation error:\n  {'type': 'json_invalid', 'msg': '%v'}", err),
				request.None))
		return q, false
	}
	if bad := q.ReadCommon(connector.None); bad != nil {
		writeRaw(w, bad.Status, errorBody(bad, request.None))
		return q, false
	}
	if bad := q.CheckModel(s.limits()); bad != nil && bad.Status == http.StatusNotFound {
		writeRaw(w, bad.Status, errorBody(bad, request.None))
		return q, false
	}
	return q, true
}

// serveTokenize is POST /tokenize, of a prompt or of messages.
func (s *Server) serveTokenize(w http.ResponseWriter, _ *http.Request, body []byte) {
	q, ok := s.small(w, body)
	if !ok {
		return
	}
	q.API, q.ReturnIDs = request.Completions, true
	if !jsontext.IsNull(q.Raw("messages")) {
		q.API = request.Chat
	}
	prompts, bad := q.Render(s.cfg.BlockSize)
	if bad != nil {
		writeRaw(w, bad.Status, errorBody(bad, request.None))
		return
	}
	dst := append([]byte(nil), `{"count":`...)
	dst = strconv.AppendInt(dst, int64(prompts[0].N), 10)
	dst = jsontext.AppendInt(dst, "max_model_len", int64(s.cfg.MaxModelLen))
	dst = jsontext.AppendIDs(jsontext.AppendKey(dst, "tokens"), prompts[0].Ids)
	writeRaw(w, http.StatusOK, append(dst, `,"token_strs":null}`...))
}

func (s *Server) serveDetokenize(w http.ResponseWriter, _ *http.Request, body []byte) {
	q, ok := s.small(w, body)
	if !ok {
		return
	}
	ids, ok := jsontext.TokenIDs(q.Raw("tokens"))
	if !ok {
		bad := engine.Pydantic("list_type", "tokens", "Input should be a valid list of integers", q.Raw("tokens"))
		writeRaw(w, bad.Status, errorBody(bad, request.None))
		return
	}
	var txt []byte
	for _, id := range ids {
		txt = engine.AppendToken(txt, id)
	}
	writeRaw(w, http.StatusOK, append(jsontext.AppendQuoted([]byte(`{"prompt":`), string(txt)), '}'))
}

// serveEmbeddings is POST /v1/embeddings: eight numbers made of the input's tokens.
func (s *Server) serveEmbeddings(w http.ResponseWriter, _ *http.Request, body []byte) {
	q, ok := s.small(w, body)
	if !ok {
		return
	}
	q.API = request.Completions
	q.Members = append(q.Members, jsontext.Member{Key: []byte("prompt"), Raw: q.Raw("input")})
	prompts, bad := q.Render(s.cfg.BlockSize)
	if bad != nil {
		writeRaw(w, bad.Status, errorBody(bad, request.None))
		return
	}
	model := q.Model
	if model == "" {
		model = s.cfg.Models[0]
	}
	dst := append([]byte(nil), `{"id":"embd-`+engine.Hex16()+`","object":"list"`...)
	dst = jsontext.AppendInt(dst, "created", time.Now().Unix())
	dst = jsontext.AppendStr(dst, "model", model)
	dst = append(dst, `,"data":[`...)
	total := 0
	for i, p := range prompts {
		if i > 0 {
			dst = append(dst, ',')
		}
		total += p.N
		dst = append(dst, `{"index":`...)
		dst = strconv.AppendInt(dst, int64(i), 10)
		dst = append(dst, `,"object":"embedding","embedding":[`...)
		for d := range 8 {
			if d > 0 {
				dst = append(dst, ',')
			}
			dst = strconv.AppendFloat(dst, float64(int16(p.Digest>>(8*d)))/(1<<15), 'f', 6, 64)
		}
		dst = append(dst, "]}"...)
	}
	dst = append(dst, `],"usage":{"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(total), 10)
	dst = jsontext.AppendInt(dst, "total_tokens", int64(total))
	writeRaw(w, http.StatusOK, append(dst, `,"completion_tokens":0,"prompt_tokens_details":null}}`...))
}

// serveAudio is POST /v1/audio/transcriptions. Its transcription is the size and hash of the body, and of the file in
// it, so that a test can check that an upload arrived completely.
func (s *Server) serveAudio(w http.ResponseWriter, r *http.Request, body []byte) {
	sum := sha256.Sum256(body)
	dst := fmt.Appendf(nil,
		`{"text":"%d bytes, sha256 %s","usage":{"type":"duration","seconds":1},"body_bytes":%d,"body_sha256":"%s"`,
		len(body), hex.EncodeToString(sum[:]), len(body), hex.EncodeToString(sum[:]))
	if file, n, model := readUpload(r, body); file != "" {
		named := request.Request{Model: model}
		if bad := named.CheckModel(s.limits()); bad != nil && bad.Status == http.StatusNotFound {
			writeRaw(w, bad.Status, errorBody(bad, request.None))
			return
		}
		dst = fmt.Appendf(dst, `,"file_bytes":%d,"file_sha256":"%s"`, n, file)
		dst = jsontext.AppendStr(dst, "model", model)
	}
	writeRaw(w, http.StatusOK, append(dst, '}'))
}

func (s *Server) serveUnknown(w http.ResponseWriter, r *http.Request, _ []byte) {
	e := &engine.Error{Status: http.StatusNotFound, Typ: "NotFoundError", Message: "Not Found"}
	probe := r.Clone(r.Context())
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		probe.Method = method
		if _, pattern := s.mux.Handler(probe); pattern != "" && pattern != "/" {
			e = &engine.Error{Status: http.StatusMethodNotAllowed, Typ: "MethodNotAllowedError",
				Message: "Method Not Allowed"}
		}
	}
	writeRaw(w, e.Status, errorBody(e, request.None))
}

func writeNotFound(w http.ResponseWriter) {
	e := &engine.Error{Status: http.StatusNotFound, Typ: "NotFoundError", Message: "Not Found"}
	writeRaw(w, e.Status, errorBody(e, request.None))
}

// State is the answer of GET /sim/state: figures that an operator of the demo compares.
type State struct {
	EngineID        string           `json:"engine_id"`
	Role            engine.Role      `json:"role"`
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

// State returns the answer of GET /sim/state.
func (s *Server) State() State {
	st := State{EngineID: s.EngineID, Role: s.cfg.Role, BlocksHeld: s.Held(), ViolationsBy: map[string]int64{}}
	for _, n := range s.ranks {
		st.add(n)
	}
	return st
}

// add adds a data-parallel rank's counts.
func (st *State) add(n *connector.Node) {
	m, l := n.Metrics, n.Ledger
	all, used := n.Pool.Size()
	st.Blocks, st.BlocksUsed = st.Blocks+all, st.BlocksUsed+used
	st.Running, st.Waiting = st.Running+m.Running.Load(), st.Waiting+m.Waiting()
	st.Given, st.Fetched = st.Given+l.Given.Load(), st.Fetched+l.Fetched.Load()
	st.Released, st.Expired = st.Released+l.Freed.Load(), st.Expired+l.Expired.Load()
	st.FailedTransfers += m.FailedTransfers.Load()
	st.ExternalTokens += m.External.Load()
	st.HeldFor = append(st.HeldFor, l.HeldFor()...)
	m.Violations.Each(func(kind string, n int64) {
		st.Violations += n
		if n > 0 {
			st.ViolationsBy[kind] += n
		}
	})
}

func (s *Server) serveState(w http.ResponseWriter, _ *http.Request) { writeJSONValue(w, s.State()) }

// serveInfo is SGLang's /server_info, with the members that a router reads.
func (s *Server) serveInfo(w http.ResponseWriter) {
	writeJSONValue(w, map[string]any{"disaggregation_mode": s.DisaggregationMode(),
		"dp_size": s.cfg.DpSize, "served_model_name": s.cfg.Models[0], "version": "0.5.23",
		"page_size": s.cfg.BlockSize, "kv_cache_dtype": s.cfg.KVDtype, "revision": revision(s.cfg.Revision)})
}

// serveConfig is vLLM's /server_info, with the members that tandem serve --check --live reads of a connector.
func (s *Server) serveConfig(w http.ResponseWriter, _ *http.Request) {
	role := map[engine.Role]string{engine.RolePrefill: "kv_producer", engine.RoleDecode: "kv_consumer"}[s.cfg.Role]
	name := s.cfg.Connector.VLLM()
	if !s.cfg.DevMode || name == "" {
		writeNotFound(w)
		return
	}
	writeJSONValue(w, map[string]any{"vllm_config": map[string]any{
		"model_config": map[string]any{"model": s.cfg.Models[0], "revision": revision(s.cfg.Revision),
			"dtype": "torch.float32", "quantization": nil},
		"cache_config": map[string]any{"block_size": s.cfg.BlockSize, "cache_dtype": s.cfg.KVDtype,
			"sliding_window": nil, "enable_prefix_caching": true},
		"parallel_config": map[string]any{"tensor_parallel_size": max(s.cfg.Tp, 1), "pipeline_parallel_size": 1},
		"kv_transfer_config": map[string]any{"kv_connector": name, "kv_role": cmp.Or(role, "kv_both"),
			"kv_connector_extra_config": s.extraConfig()}}})
}

// extraConfig are the settings of the NIXL connector that decide about leases, as far as they are not its defaults.
func (s *Server) extraConfig() map[string]any {
	extra := map[string]any{}
	if s.cfg.Lease != 30*time.Second {
		extra["kv_lease_duration"] = s.cfg.Lease.Seconds()
	}
	if s.cfg.Bidirectional {
		extra["bidirectional_kv_xfer"], extra["decoder_kv_blocks_ttl"] = true, s.cfg.DecoderTTL.Seconds()
	}
	return extra
}

func revision(name string) any {
	if name == "" {
		return nil
	}
	return name
}

// serveReset is POST /sim/reset: it clears the recorded requests, the failure rules, the prefix cache, held blocks and
// the enginesim_ counters; vLLM's own counters stay.
func (s *Server) serveReset(w http.ResponseWriter, _ *http.Request) {
	s.Faults.Clear()
	s.ranks.resume()
	s.Records.reset()
	s.encodings.reset()
	for _, n := range s.ranks {
		n.Forget()
		n.Pool.ResetPrefixCache()
		m := n.Metrics
		for _, c := range []*engine.Counters{&m.Violations, &m.RoleMismatch, &m.Requests, &m.Injected} {
			c.Reset()
		}
		m.Aborted.Store(0)
	}
	writeJSONValue(w, s.State())
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
