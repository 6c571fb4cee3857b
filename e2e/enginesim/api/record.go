package api

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"
)

// Record describes one request in GET /sim/requests. Times in milliseconds.
type Record struct {
	Seq  int64     `json:"seq"`
	Time time.Time `json:"time"`
	wireRecord
	bodyRecord
	Leg       string `json:"leg,omitempty"` // plain, prefill, decode
	Model     string `json:"model,omitempty"`
	Stream    bool   `json:"stream"`
	Status    int    `json:"status"`  // 0 while running
	Outcome   string `json:"outcome"` // running, done, aborted, reset
	Violation string `json:"violation,omitempty"`
	Injected  string `json:"injected,omitempty"`
	tokenRecord
	AnswerBytes     int     `json:"answer_bytes"`
	FirstByteMillis float64 `json:"first_byte_ms"`
	Millis          float64 `json:"ms"`

	mu   *sync.Mutex // the ring's
	body []byte
}

// wireRecord is the request's HTTP part.
type wireRecord struct {
	Method           string              `json:"method"`
	Path             string              `json:"path"` // with the query
	Proto            string              `json:"proto"`
	Host             string              `json:"host"`
	Headers          map[string][]string `json:"headers"`
	TransferEncoding []string            `json:"transfer_encoding,omitempty"`
	RequestID        string              `json:"request_id"`
	Rank             int                 `json:"rank"` // data-parallel
}

// bodyRecord is its body.
type bodyRecord struct {
	BodyBytes  int    `json:"body_bytes"`
	BodySHA256 string `json:"body_sha256"`
	Body       string `json:"body,omitempty"`        // its first 64 KiB, if it is UTF-8
	BodyBase64 []byte `json:"body_base64,omitempty"` // the same if it is not
}

// tokenRecord is the source of its tokens, and of media.
type tokenRecord struct {
	PromptTokens     int `json:"prompt_tokens"`
	CachedTokens     int `json:"cached_tokens"`   // from this engine's own prefix cache
	ExternalTokens   int `json:"external_tokens"` // fetched from another engine
	CompletionTokens int `json:"completion_tokens"`
	Encoded          int `json:"encoded,omitempty"`      // media whose embeddings came from an encode engine
	EncodedHere      int `json:"encoded_here,omitempty"` // ... and those that this engine made
}

// recorder keeps the last requests in a ring: at most count records and count*body bytes.
type recorder struct {
	mu    sync.Mutex
	on    bool
	keep  int // bytes of each body
	ring  []*Record
	total int64
}

func newRecorder(on bool, count, body int) *recorder {
	return &recorder{on: on && count > 0, keep: body, ring: make([]*Record, max(count, 1))}
}

// start opens a record. With recording off it returns a scratch record.
func (r *recorder) start(req *http.Request) *Record {
	rec := &Record{Time: time.Now(), Outcome: "running", mu: new(sync.Mutex)}
	if !r.on {
		return rec
	}
	rec.mu = &r.mu
	rec.Method, rec.Path, rec.Proto, rec.Host = req.Method, req.URL.RequestURI(), req.Proto, req.Host
	rec.Headers, rec.TransferEncoding = req.Header, req.TransferEncoding
	rec.RequestID = req.Header.Get("X-Request-Id")
	r.mu.Lock()
	defer r.mu.Unlock()
	rec.Seq = r.total
	r.ring[r.total%int64(len(r.ring))] = rec
	r.total++
	return rec
}

// setBody stores the beginning of a body and its hash. The caller may reuse the body's memory afterwards.
func (r *recorder) setBody(rec *Record, body []byte) {
	if !r.on {
		rec.BodyBytes = len(body)
		return
	}
	sum := sha256.Sum256(body)
	kept := append([]byte(nil), body[:min(len(body), r.keep)]...)
	r.mu.Lock()
	defer r.mu.Unlock()
	rec.BodyBytes, rec.BodySHA256, rec.body = len(body), hex.EncodeToString(sum[:]), kept
}

func (rec *Record) set(fn func()) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	fn()
}

func (rec *Record) setInjected(mode string) { rec.set(func() { rec.Injected = mode }) }
func (rec *Record) setAborted()             { rec.set(func() { rec.Outcome = "aborted" }) }
func (rec *Record) setStatus(code int) {
	rec.set(func() {
		rec.Status = code
		rec.FirstByteMillis = millis(time.Since(rec.Time))
	})
}

func (rec *Record) finish() {
	rec.set(func() {
		rec.Millis = millis(time.Since(rec.Time))
		if rec.Outcome == "running" {
			rec.Outcome = "done"
		}
	})
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// Last copies the newest n records, oldest first; all if n <= 0. A non-empty id selects those of one x-request-id.
func (r *recorder) Last(n int, id string) []Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := []Record{}
	size := int64(len(r.ring))
	for i := max(0, r.total-size); i < r.total; i++ {
		if rec := r.ring[i%size]; id == "" || rec.RequestID == id {
			out = append(out, *rec)
		}
	}
	if n > 0 && len(out) > n {
		out = out[len(out)-n:]
	}
	return out
}

func (r *recorder) reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.ring)
	r.total = 0
}

// serveRequests is GET /sim/requests?n=&id=.
func (s *Server) serveRequests(w http.ResponseWriter, r *http.Request) {
	n, _ := strconv.Atoi(r.URL.Query().Get("n"))
	list := s.Records.Last(n, r.URL.Query().Get("id"))
	for i := range list {
		rec := &list[i]
		kept := rec.body
		if rec.BodyBytes > len(kept) {
			kept = cutRune(kept)
		}
		if utf8.Valid(kept) {
			rec.Body = string(kept)
		} else {
			rec.BodyBase64 = rec.body
		}
	}
	writeJSONValue(w, list)
}

// cutRune drops an incomplete character from the end of b.
func cutRune(b []byte) []byte {
	for range utf8.UTFMax {
		if r, size := utf8.DecodeLastRune(b); r != utf8.RuneError || size != 1 {
			break
		}
		b = b[:len(b)-1]
	}
	return b
}

func writeJSONValue(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}
