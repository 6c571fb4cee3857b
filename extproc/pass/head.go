package pass

import (
	"bytes"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"

	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/picker"
)

// Head is what a transport has received of a request before its body. The values live as long as its stream.
type Head struct {
	Method, Path, Authority      []byte // Path as the client sent it: a gateway's prefix is cut
	ContentType, ContentEncoding []byte
	Authorization                []byte
	Objective, Fairness          []byte // inference objectives
	TTFT, TPOT                   Target
	Explain                      []byte                                 // an operator's token; nil: nobody asks
	Prefilled                    []byte                                 // P's inline answer, base64
	Load                         []byte                                 // that P reports with it (ORCA)
	More                         interface{ Extra(name string) []byte } // headers that settings name
	Twice                        string                                 // see [names.OneValue]; "": no header
}

// checkTwice refuses a request with a header that other readers may understand otherwise.
func (h *Head) checkTwice() error {
	if h.Twice == "" {
		return nil
	}
	return openai.BadRequest("duplicate_header", "", "the header "+h.Twice+" has several values; send one")
}

// extra returns a header that settings name; nil: it is absent.
func (h *Head) extra(name string) []byte {
	if h.More == nil {
		return nil
	}
	return h.More.Extra(name)
}

// Arrival is what a transport knows of a request, besides its head, before it reads the body.
type Arrival struct {
	Upgrade bool   // the client asks for another protocol
	Ended   bool   // nothing follows the head
	Length  []byte // content-length; trailers may follow a body of length 0
	Reads   bool   // if the request is one that is never split: its body is read
	Unfit   error  // the head is too large for a request that is split; nil: it is not
}

// Admit returns the API of a request to a transport that carries out both hops, or refuses what can be refused before
// its body is read.
func (s *Shared) Admit(h *Head, a Arrival) (openai.API, error) {
	if a.Upgrade {
		return openai.PassThrough, openai.NoUpgrade()
	}
	api := s.API(h)
	switch api {
	case openai.Models:
		return api, nil
	case openai.PassThrough:
		return api, s.AdmitOther(h, a)
	}
	if err := openai.CheckHeaders(string(h.ContentType), string(h.ContentEncoding)); err != nil {
		return api, err
	}
	if a.Unfit != nil {
		return api, a.Unfit
	}
	if a.Ended || string(a.Length) == "0" {
		return api, openai.NoBody()
	}
	return api, nil
}

// AdmitOther is Admit for a request that is never split.
func (s *Shared) AdmitOther(h *Head, a Arrival) error {
	if !s.Serves(string(h.Method), string(h.Path)) {
		return openai.NotServed()
	}
	if a.Ended {
		return nil
	}
	return openai.CheckOther(string(h.ContentType), string(h.ContentEncoding), a.Reads)
}

// Name returns the id of a request: the client's own if it is valid, else a new one.
func Name(sent string) (id string, made bool) {
	if openai.RequestID(sent) {
		return sent, false
	}
	return openai.NewRequestID(rand.Uint64(), rand.Uint64()), true
}

// Target is a header with a time, and its name for errors.
type Target struct {
	Name  string
	Value []byte
}

// Objectives are priorities and latency targets of a pool's requests. Requests state them in headers. These count only
// if the pool accepts them, or if a gateway sets them (the Endpoint Picker protocol), because they can delay other
// requests.
type Objectives struct {
	FromHeaders bool
	Default     Objective     // of requests without headers
	Named       []Objective   // names that the header may use, in addition to the cluster's InferenceObjectives
	Miss        picker.OnMiss // what to do with a request whose targets cannot be met
}

// Objective is the priority and targets of a request. Zero means none.
type Objective struct {
	Name       string
	Priority   int32 // higher goes first; below 0: refused under overload
	TTFT, TPOT time.Duration
}

// longestTarget bounds the target in a header; larger values are invalid.
const longestTarget = time.Hour

// readPriority reads the request's objective and, from it, the priority, which requests of all ways have.
func (x *Pass) readPriority() (want Objective, headers bool) {
	o, h := &x.policy.Objectives, &x.Head
	want = o.Default
	headers = o.FromHeaders || x.shared.Gateway != nil
	if headers && len(h.Objective) > 0 {
		want = o.named(string(h.Objective), want)
		if p, known := x.shared.State.Policies.Priority(x.Req.Pool.Spec.Name, string(h.Objective)); known {
			want.Priority = p
		}
	}
	x.want.priority, x.Req.Priority = want.Priority, want.Priority
	return want, headers
}

// readObjectives reads the request's priority and targets.
func (x *Pass) readObjectives() error {
	h, w := &x.Head, &x.want
	want, headers := x.readPriority()
	w.onMiss = x.policy.Objectives.Miss
	w.targets = picker.Targets{TTFT: want.TTFT.Seconds(), TPOT: want.TPOT.Seconds()}
	if !headers {
		return nil
	}
	if len(h.Fairness) > 0 {
		w.flow = xxhash.Sum64(h.Fairness) | 1
	}
	if err := h.TTFT.read(&w.targets.TTFT); err != nil {
		return err
	}
	return h.TPOT.read(&w.targets.TPOT)
}

// labels returns the labels in a header that a request's endpoints must have; "": there is no such header.
func (h *Head) labels(header string) (out []string) {
	if header == "" {
		return nil
	}
	for part := range strings.SplitSeq(string(h.extra(header)), ",") {
		if part = strings.TrimSpace(part); part != "" && len(out) < maxLabels {
			out = append(out, part)
		}
	}
	return out
}

// maxLabels bounds the labels of a request that are read.
const maxLabels = 4096

// named returns the objective with a name; the default one if it is unknown.
func (o *Objectives) named(name string, otherwise Objective) Objective {
	for _, n := range o.Named {
		if n.Name == name {
			return n
		}
	}
	return otherwise
}

// read parses a time in milliseconds, if it is present.
func (t *Target) read(seconds *float64) error {
	if len(t.Value) == 0 {
		return nil
	}
	ms, err := strconv.ParseFloat(string(t.Value), 64)
	if err != nil || math.IsNaN(ms) || ms <= 0 || ms > longestTarget.Seconds()*1000 {
		return openai.BadRequest("invalid_target", t.Name,
			t.Name+" must be a number of milliseconds above 0 and at most "+
				strconv.FormatInt(longestTarget.Milliseconds(), 10))
	}
	*seconds = ms / 1000
	return nil
}

// SessionKey is where a request's session name comes from: the first of these that it has. Zero: none.
type SessionKey struct {
	Header string // lower case
	Cookie string
	Body   string // a top-level member with a string
}

// sessionHeaders returns the headers with the session names or labels of any pool. The pool of a request is known
// only after its body has arrived, so all of them are kept until then.
func sessionHeaders(pools map[string]Policy) (names []string) {
	for _, p := range pools {
		if p.Session.Header != "" {
			names = append(names, p.Session.Header)
		}
		if p.Session.Cookie != "" {
			names = append(names, "cookie")
		}
		if p.LabelHeader != "" {
			names = append(names, p.LabelHeader)
		}
		if p.Streams.Header != "" {
			names = append(names, p.Streams.Header)
		}
	}
	return names
}

// of returns the hash of the name of a request's session; 0: none. The kind of source is part of it, so a header's
// value never equals a cookie's.
func (k SessionKey) of(h *Head, r *plan.Request) uint64 {
	if k == (SessionKey{}) {
		return 0
	}
	if v := h.extra(k.Header); k.Header != "" && len(v) > 0 {
		return sessionHash('h', v)
	}
	if v := cookie(h.extra("cookie"), k.Cookie); k.Cookie != "" && len(v) > 0 {
		return sessionHash('c', v)
	}
	if v := r.Client.Text(k.Body); k.Body != "" && len(v) > 0 {
		return sessionHash('b', v)
	}
	return 0
}

func sessionHash(kind byte, name []byte) uint64 {
	var d xxhash.Digest
	d.ResetWithSeed(uint64(kind))
	_, _ = d.Write(name)
	return d.Sum64() | 1
}

// cookie returns the value of a cookie in a Cookie header (RFC 6265, 4.2.1).
func cookie(header []byte, name string) []byte {
	for len(header) > 0 {
		var pair []byte
		pair, header, _ = bytes.Cut(header, []byte(";"))
		key, value, _ := bytes.Cut(bytes.TrimSpace(pair), []byte("="))
		if string(key) == name {
			return bytes.Trim(value, `"`)
		}
	}
	return nil
}

// lower converts a configured header name to its form on the wire.
func (k SessionKey) lower() SessionKey {
	k.Header = strings.ToLower(k.Header)
	return k
}
