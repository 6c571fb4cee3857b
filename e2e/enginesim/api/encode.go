package api

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
	"tandem/e2e/enginesim/request"
)

// An encode engine (vLLM's ec_producer) makes embeddings of a chat's media and answers their location,
// ec_transfer_params: an object for each by its hash. The engine that computes the prompt (ec_consumer) fetches them
// there, once, and encodes the rest by itself. Read in vLLM 0.33.0 (docs/features/disagg_encoder.md,
// examples/disaggregated/disaggregated_encoder), not recorded from a running one. The members of an entry are between
// the engines; these are this simulator's.

// encodings are the embeddings that an encode engine keeps for others.
type encodings struct {
	mu    sync.Mutex
	lease time.Duration
	kept  map[string][]time.Time // by hash: when each copy expires
}

func newEncodings(lease time.Duration) *encodings {
	return &encodings{lease: lease, kept: map[string][]time.Time{}}
}

func (e *encodings) put(hash string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.kept[hash] = append(e.kept[hash], time.Now().Add(e.lease))
}

// take removes one copy; false if there is none.
func (e *encodings) take(hash string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sweep()
	n := len(e.kept[hash])
	if n == 0 {
		return false
	}
	e.kept[hash] = e.kept[hash][:n-1]
	return true
}

func (e *encodings) held() (n int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sweep()
	for _, copies := range e.kept {
		n += int64(len(copies))
	}
	return n
}

func (e *encodings) reset() {
	e.mu.Lock()
	defer e.mu.Unlock()
	clear(e.kept)
}

// sweep drops expired copies, which are in the order of their expiry.
func (e *encodings) sweep() {
	now := time.Now()
	for hash, copies := range e.kept {
		for len(copies) > 0 && now.After(copies[0]) {
			copies = copies[1:]
		}
		if e.kept[hash] = copies; len(copies) == 0 {
			delete(e.kept, hash)
		}
	}
}

// encode answers a request to an encode engine.
func (c *call) encode() {
	if bad := c.req.CheckModel(c.s.limits()); bad != nil {
		c.refuse(bad)
		return
	}
	hashes, texts := c.req.Media()
	switch {
	case c.req.API != request.Chat || len(hashes) == 0:
		c.breach(&engine.Violation{Kind: "nothing_to_encode",
			Message: "an encode engine generates nothing: it takes chats with media"})
		return
	case texts || c.req.Stream || c.req.Kv.Given:
		c.breach(&engine.Violation{Kind: "not_for_encode",
			Message: "text, a stream or kv_transfer_params at an engine that only encodes"})
		return
	}
	_, port, _ := net.SplitHostPort(c.s.Addr())
	params := []byte{'{'}
	for i, hash := range hashes {
		c.s.encodings.put(hash)
		if slices.Contains(hashes[:i], hash) {
			continue
		}
		if i > 0 {
			params = append(params, ',')
		}
		params = fmt.Appendf(params,
			`%q:{"peer_host":%q,"peer_port":%s,"shape":[576,1024],"address":140234567890123456789}`, hash,
			c.s.cfg.AdvertiseHost, port)
	}
	c.rec.set(func() { c.rec.EncodedHere = len(hashes) })
	c.id = c.answerID()
	body := fmt.Appendf(nil,
		`{"id":%q,"object":"chat.completion","created":%d,"model":%q,"choices":[{"index":0,`+
			`"message":{"role":"assistant","content":""},"finish_reason":"stop"}],`+
			`"usage":{"prompt_tokens":%d,"completion_tokens":1,"total_tokens":%d},"ec_transfer_params":%s}}`, c.id,
		c.created, c.req.Model, 576*len(hashes), 576*len(hashes)+1, params)
	c.writeAnswerBody(body)
}

// serveEncoding sends an embedding to another engine.
func (s *Server) serveEncoding(w http.ResponseWriter, r *http.Request) {
	if !s.encodings.take(r.PathValue("hash")) {
		w.WriteHeader(http.StatusNotFound)
	}
}

// takeEncodings fetches the embeddings that ec_transfer_params name, and encodes the other media of the prompt here.
func (c *call) takeEncodings() *engine.Error {
	params := c.req.Raw("ec_transfer_params")
	if c.req.API != request.Chat {
		return nil
	}
	hashes, _ := c.req.Media()
	named := map[string][]byte{}
	if !jsontext.IsNull(params) {
		if !jsontext.IsObject(params) {
			return engine.Pydantic("dict_type", "ec_transfer_params", "Input should be a valid dictionary", params)
		}
		jsontext.EachMember(params, func(key, val []byte) { named[string(key)] = val })
	}
	fetched, here := 0, 0
	for _, hash := range hashes {
		entry, ok := named[hash]
		switch {
		case ok:
			v, err := c.fetchEncoding(hash, entry)
			if v != nil && !c.s.cfg.Faithful {
				return c.breached(v)
			}
			if err != nil || v != nil {
				here++
				continue
			}
			fetched++
		case !c.req.Kv.RemotePrefill: // media whose KV is fetched need no embeddings
			here++
		}
	}
	for hash := range named {
		if !slices.Contains(hashes, hash) && !c.s.cfg.Faithful {
			return c.breached(&engine.Violation{Kind: "foreign_encoding",
				Message: "ec_transfer_params tell of media that the prompt does not have: " + hash})
		}
	}
	c.rec.set(func() { c.rec.Encoded, c.rec.EncodedHere = fetched, here })
	return nil
}

func (c *call) fetchEncoding(hash string, entry []byte) (*engine.Violation, error) {
	host := string(jsontext.Text(jsontext.Get(entry, "peer_host")))
	port, ok := jsontext.Integer(jsontext.Get(entry, "peer_port"))
	if host == "" || !ok {
		return &engine.Violation{Kind: "incomplete_params",
			Message: "ec_transfer_params without peer_host or peer_port"}, nil
	}
	if string(jsontext.Get(entry, "address")) != "140234567890123456789" {
		return &engine.Violation{Kind: "altered_params",
			Message: "ec_transfer_params are not as the encode engine wrote them"}, nil
	}
	ctx, cancel := context.WithTimeout(c.r.Context(), c.s.cfg.LoadTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost,
		"http://"+net.JoinHostPort(host, strconv.FormatInt(port, 10))+"/sim/encodings/"+hash, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return &engine.Violation{Kind: "unknown_encoding",
			Message: "the encode engine does not have " + hash + ": it was fetched before, or has expired"}, nil
	}
	return nil, nil
}

// breached counts a violation, and returns the error for the client.
func (c *call) breached(v *engine.Violation) *engine.Error {
	c.n.Violate(v, c.Xid)
	c.rec.set(func() { c.rec.Violation = v.Kind })
	return asAPIError(v)
}

func (c *call) breach(v *engine.Violation) { c.refuse(c.breached(v)) }
