// Package reclaim frees the KV blocks of orphaned hand-overs. A hand-over is orphaned if its decode never comes:
// the client disconnected between the hops, or the request continued without it. The prefill endpoint keeps the
// blocks until its lease ends (vLLM from 0.22: 30 s) or, in older releases, until a timeout of minutes (0.12 to
// 0.21: 480 s). If the pool is configured so (strandedBlocks: cleanupDecode), a decode endpoint fetches them,
// because these releases free them for nothing else. This must never happen if a decode endpoint may have received
// the parameters: that endpoint notifies P itself, and the same parameters sent again can return another request's
// text.
//
//  1. [Reclaimer.Record] stores the parameters when P's answer is read, and again when pass 2 decides.
//  2. [Reclaimer.Ended], [Reclaimer.NotConnected] and [Reclaimer.NotFollowed] remove the record when the access log
//     entry reports the end of the request, and find out whether this replica must act.
//  3. [Reclaimer.Run] sends the cleanup decodes.
package reclaim

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"log/slog"
	randv2 "math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
	"tandem/internal/guard"
	"tandem/internal/periodic"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
	"tandem/picker"
)

// Why a hand-over was orphaned: label values of a metric. The causes of a replan without a failed endpoint are used
// as well.
const (
	ClientGone   = "client_gone"   // between the hops
	NoDecode     = "no_decode"     // the request ended with an error before a decode endpoint was asked
	Replanned    = "replanned"     // P answered so late that another endpoint had been asked
	DecodeFailed = "decode_failed" // possibly after it fetched
	AnswerCut    = "answer_cut"    // P's answer was cut off or is too large: its parameters are unknown
	NoRoom       = "no_room"       // no other endpoint had room for the KV, so P answers
	Standstill   = "standstill"    // decode stands still, would fetch it too late, and computes the prompt instead
)

// Observer counts the results of hand-overs.
type Observer interface {
	Orphaned(pool, prefill, why string)
	Reclaimed(pool, result string)
}

// Policy is a pool's configuration of orphaned hand-overs.
type Policy struct {
	Cleanup bool // a decode endpoint fetches them
	Dialect kvtransfer.Dialect
	Place   picker.Policy
}

// Enabled reports whether the pool's orphaned hand-overs are fetched.
func (p *Policy) Enabled() bool { return p.Cleanup && p.Dialect.Prefill != nil }

// Options are what a [Reclaimer] needs.
type Options struct {
	State    *kvstate.State
	Log      *slog.Logger
	Observer Observer
	Policy   func(pool string) Policy
	TTL      time.Duration // of KV parameters, from P's answer on
}

// Reclaimer keeps the records of hand-overs and sends the cleanup decodes. It is safe for concurrent use.
type Reclaimer struct {
	Options
	records records
	queue   chan cleanup
	queued  atomic.Int64 // bytes of parameters in queue
}

// New returns a Reclaimer without records.
func New(o Options) *Reclaimer { return &Reclaimer{Options: o, queue: make(chan cleanup, maxCleanups)} }

// cleanup is one hand-over to be fetched and discarded.
type cleanup struct {
	id        kvtransfer.ID // of the hand-over's ticket
	requestID string
	record    *record
}

// unsure is a result: another replica that cannot be asked may have sent the cleanup.
const unsure = "unsure"

// Limits. Whatever exceeds them is left to the engine's own timeout.
const (
	maxCleanups     = 256
	workers         = 4
	cleanupTimeout  = 10 * time.Second
	dialTimeout     = 2 * time.Second
	maxCleanupBytes = 1 << 20 // of an answer, which is discarded
	maxTries        = 3       // endpoints; all but the last refused the connection
)

// Enabled reports whether a pool's orphaned hand-overs are fetched.
func (r *Reclaimer) Enabled(pool string) bool {
	policy := r.Policy(pool)
	return policy.Enabled()
}

// Held returns the bytes of parameters in records and in cleanups.
func (r *Reclaimer) Held() (recorded, queued int64) {
	r.records.mu.Lock()
	defer r.records.mu.Unlock()
	return int64(r.records.bytes), r.queued.Load()
}

// Record stores the parameters of a hand-over that is about to leave this replica: after P's answer was read, or in
// pass 2 (decided). If the request has ended already, it is reclaimed.
func (r *Reclaimer) Record(t *kvtransfer.Ticket, requestID string, params []byte, decode string, decided bool) {
	if params != nil {
		r.reclaimOver(t.ID, requestID, r.records.add(t, params, decode, decided, r.State.HasReplicas()))
	}
}

// Confirm records that no other replica has read the answer of a recorded hand-over.
func (r *Reclaimer) Confirm(id kvtransfer.ID, requestID string) {
	r.reclaimOver(id, requestID, r.records.confirm(id))
}

// reclaimOver reclaims a hand-over whose request had ended before; nil: it had not.
func (r *Reclaimer) reclaimOver(id kvtransfer.ID, requestID string, h *record) {
	if h != nil {
		r.orphaned(id, requestID, h, h.over)
	}
}

// Orphaned records why no decode will fetch the hand-over of a ticket, unless pass 2 has opened the ticket. It consumes
// the ticket: the request cannot use these parameters any more.
func (r *Reclaimer) Orphaned(t *kvtransfer.Ticket, requestID, why string) {
	if !r.State.HandOvers.Consume(t.ID) {
		return
	}
	r.Left(t, why)
	if h := r.records.take(t.ID); h != nil {
		r.enqueue(t.ID, requestID, h)
	}
}

// Left counts a hand-over whose blocks will not be fetched, once. Until its lease ends they take room in P's memory.
func (r *Reclaimer) Left(t *kvtransfer.Ticket, why string) {
	if !r.State.HandOvers.Consume(t.ID.Orphaned()) {
		return
	}
	r.Observer.Orphaned(t.Pool, t.Prefill, why)
	r.Strand(t)
}

// Strand is Left without the count.
func (r *Reclaimer) Strand(t *kvtransfer.Ticket) {
	policy, pool := r.Policy(t.Pool), r.State.Pool(t.Pool)
	if pool == nil || policy.Dialect.Lease == 0 || policy.Enabled() {
		return
	}
	if e := pool.Endpoint(t.Prefill); e != nil {
		kvstate.Strand(r.State, e, t.PromptTokens, policy.Dialect.Lease)
	}
}

// Unfetched reclaims the hand-over of a request in pass 2 that goes to P itself, or to a decode endpoint that computes
// the prompt. Nobody gets the parameters.
func (r *Reclaimer) Unfetched(t *kvtransfer.Ticket, requestID string, params []byte, why string) {
	if !r.Enabled(t.Pool) {
		r.Left(t, why)
		return
	}
	r.Record(t, requestID, params, t.Prefill, true)
	if h := r.records.take(t.ID); h != nil {
		r.orphaned(t.ID, requestID, h, why)
	}
}

// NotFollowed is Orphaned for a prefill leg whose answer came too late to be followed, if it came. t is the leg's
// ticket.
func (r *Reclaimer) NotFollowed(t *kvtransfer.Ticket, requestID, why string) {
	if h := r.takeNotFollowed(t, why); h != nil && h.read && r.State.HandOvers.Consume(t.ID) {
		r.orphaned(t.ID, requestID, h, why)
	}
}

// takeNotFollowed removes the record of a prefill leg whose pass ended and which no other pass followed. If the
// connection to a replica breaks, Envoy asks another one, so two replicas may have read the same answer, and the
// entry does not tell them apart. Redis does. Without Redis, a replica acts only if Envoy ended its stream, because
// then Envoy has asked no other.
func (r *Reclaimer) takeNotFollowed(t *kvtransfer.Ticket, why string) *record {
	if !r.Enabled(t.Pool) {
		return nil
	}
	return r.records.end(t.ID, why, time.Now().Add(r.TTL))
}

// Ended reclaims the hand-over of a request that has ended, if no decode endpoint received it. t is the ticket that
// the request ended with. here: this replica made the pass's reservations.
func (r *Reclaimer) Ended(t *kvtransfer.Ticket, e *ended.Pass, here bool) {
	why := NoDecode
	if e.ClientGone {
		why = ClientGone
	}
	var h *record
	unused := false
	switch t.Stage {
	case kvtransfer.PrefillLeg: // Envoy did not receive the redirect made from P's answer
		h = r.takeNotFollowed(t, why)
		unused = h != nil && h.read
	case kvtransfer.HandOver: // pass 2 did not decide, or Envoy did not receive its decision
		h = r.records.take(t.ID)
		// this replica's, if another read P's answer too
		unused = h != nil && h.read && !e.Asked() && h.expires.UnixMilli() == t.Expires.UnixMilli()
	case kvtransfer.DecodeLeg:
		h = r.records.take(t.ID)
		unused = h != nil && h.decided && !e.Asked() && here // here, so that it is the decision that Envoy received
		if unused {
			h.unreached = e.Tries > 0
		}
	}
	if unused {
		r.orphaned(t.ID, string(e.RequestID), h, why)
	}
}

// NotConnected reclaims the hand-over of a decode leg whose endpoint refused the connection: the request continues
// without the parameters, which are still valid. here: this replica made the pass's reservations.
func (r *Reclaimer) NotConnected(t *kvtransfer.Ticket, requestID string, here bool) {
	if h := r.records.take(t.ID); h != nil && h.decided && here {
		h.unreached = true
		r.enqueue(t.ID, requestID, h)
	}
}

func (r *Reclaimer) orphaned(id kvtransfer.ID, requestID string, h *record, why string) {
	r.Observer.Orphaned(h.pool, h.prefill, why)
	r.enqueue(id, requestID, h)
}

// enqueue schedules a hand-over to be fetched and discarded. Its ticket may be consumed, but no decode endpoint was
// asked or will be.
func (r *Reclaimer) enqueue(id kvtransfer.ID, requestID string, h *record) {
	r.State.HandOvers.Consume(id)
	result := "no_room"
	if h.params != nil {
		result = "too_many"
		if r.queued.Add(int64(len(h.params))) <= maxRecordBytes {
			select {
			case r.queue <- cleanup{id, requestID, h}:
				return
			default:
			}
		}
		r.queued.Add(-int64(len(h.params)))
	}
	r.Observer.Reclaimed(h.pool, result)
}

// claims reports whether this replica must send a cleanup. The cleanup consumes an id of its own, and the other
// replicas must confirm it: a ticket consumed twice may cost one request its KV, but a cleanup sent twice may cost
// another request its text.
func (r *Reclaimer) claims(c cleanup) bool {
	first, known := r.State.HandOvers.ConsumeConfirmed(c.id.Cleanup())
	if !known {
		r.Observer.Reclaimed(c.record.pool, unsure)
	}
	return first && known
}

// Run sends the cleanup decodes, and removes expired records, until ctx ends.
func (r *Reclaimer) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { periodic.Run(ctx, sweepInterval, r.records.sweep) })
	for range workers {
		running.Go(func() { guard.Keep(ctx, "clean-up", func() { r.work(ctx) }) })
	}
}

func (r *Reclaimer) work(ctx context.Context) {
	client := enginehttp.New(cleanupTimeout, func(t *http.Transport) {
		t.MaxIdleConnsPerHost, t.IdleConnTimeout, t.DialContext = 1, time.Second,
			(&net.Dialer{Timeout: dialTimeout}).DialContext
	})
	defer client.CloseIdle()
	for {
		select {
		case <-ctx.Done():
			return
		case c := <-r.queue:
			r.fetch(ctx, client, c)
		}
	}
}

// fetch sends the cleanup decode. Its prompt is one token, so the decode endpoint reads one block (the last: vLLM
// reads missing blocks from the end) and notifies the prefill endpoint that it is done, which frees them all. The
// block is not that prompt's KV: the token generated from it is discarded, and a unique salt keeps it out of the
// decode endpoint's prefix cache. An endpoint that refused the connection has received nothing, so another one is
// tried.
func (r *Reclaimer) fetch(ctx context.Context, client *enginehttp.Client, c cleanup) {
	h := c.record
	defer r.queued.Add(-int64(len(h.params)))
	if !r.claims(c) {
		return
	}
	policy := r.Policy(h.pool)
	pool := r.State.Pool(h.pool)
	result, decode := "no_endpoint", ""
	var err error
	var tried []string
	for range maxTries {
		if time.Now().After(h.expires) {
			result = "too_late"
			break
		}
		d := r.pick(&policy, pool, h, tried)
		if d == nil {
			break
		}
		decode, tried = d.Addr, append(tried, d.Addr)
		if result, err = r.ask(ctx, client, &policy, d, c); !refused(err) {
			break
		}
	}
	r.Observer.Reclaimed(h.pool, result)
	r.Log.Info("cleanup decode for an orphaned hand-over", "request_id", c.requestID, "prefill", h.prefill, "decode",
		decode, "result", result, "err", err)
}

func (r *Reclaimer) ask(ctx context.Context, client *enginehttp.Client, policy *Policy, d *kvstate.Endpoint,
	c cleanup) (result string, err error) {
	body := append([]byte(`{"prompt":"a","max_tokens":1,"cache_salt":"`+rand.Text()+`",`),
		policy.Dialect.DecodeMember(nil, c.record.params)...)
	body = append(body, '}')
	resp, err := client.Post(ctx, d, "/v1/completions", body, http.Header{"X-Request-Id": {c.requestID}})
	if err != nil {
		return "failed", err
	}
	_, _ = io.CopyN(io.Discard, resp.Body, maxCleanupBytes)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "failed", nil
	}
	return "ok", nil
}

// pick chooses the endpoint of a cleanup: any that the prefill endpoint may pair with, and the one that the request
// did not reach only if there is no other. If the blocks were pushed, it is the one that has them. nil: there is
// none.
func (r *Reclaimer) pick(policy *Policy, pool *kvstate.Pool, h *record, tried []string) *kvstate.Endpoint {
	if pool == nil || policy.Dialect.DecodeMember == nil {
		return nil
	}
	if policy.Dialect.Push != nil {
		if d := pool.Endpoint(h.decode); d != nil && !d.Failed() && len(tried) == 0 {
			return d
		}
		return nil
	}
	var v kvstate.View
	r.State.View(pool, nil, &v)
	prefill := slices.IndexFunc(v.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint.Addr == h.prefill })
	if prefill < 0 {
		return nil // it has left, and its blocks with it
	}
	choose := picker.Picker{Policy: policy.Place}
	if h.unreached {
		tried = append(slices.Clip(tried), h.decode)
	}
	i, err := choose.PickDecode(&picker.Request{PromptTokens: 1, Model: h.model, Rand: randv2.Uint64(),
		Faults: picker.Faults{Excluded: tried}}, &v, prefill)
	if err != nil {
		return nil
	}
	return v.Endpoints[i].Endpoint
}

// refused reports whether a call failed before there was a connection.
func refused(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// record is one hand-over of a pool that cleans up (strandedBlocks: cleanupDecode). It is kept by its id from P's
// answer until the request ends. By then its ticket is consumed and its parameters are with Envoy, and only the
// access log shows whether they were sent to a decode endpoint.
type record struct {
	pool, model     string
	prefill, decode string // addresses; decode is the last choice
	params          []byte // nil: they exceeded the limit
	expires         time.Time
	unreached       bool // decode was tried without a connection

	// The reason why no pass followed, if the prefill leg's pass ended before P's answer was recorded, or before it
	// was certain that no other replica has read it (sure). "": it has not ended.
	over string
	sure bool

	// What this replica did with it. Every replica receives every access log entry, and only one may act on it: the one
	// that read P's answer or, after Envoy has received pass 2's decision, the one that decided.
	read, decided bool
}

// records are the hand-overs of running requests, bounded in number and bytes.
type records struct {
	mu    sync.Mutex
	bytes int
	kept  map[kvtransfer.ID]*record
}

const (
	maxRecords     = 1 << 16
	maxRecordBytes = 64 << 20
	sweepInterval  = time.Second
)

// confirm records that no other replica has read the answer of a hand-over. It removes and returns the record of a
// request that has ended.
func (o *records) confirm(id kvtransfer.ID) *record {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.kept[id]
	if h == nil {
		return nil
	}
	if h.sure = true; h.over == "" {
		return nil
	}
	o.remove(id, h)
	return h
}

// add records a hand-over. It removes and returns the record of a request that has ended.
func (o *records) add(t *kvtransfer.Ticket, params []byte, decode string, decided, sure bool) (over *record) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.kept[t.ID]
	if h == nil {
		h = &record{}
		if !o.put(t.ID, h) {
			return nil
		}
	}
	if h.pool == "" {
		h.pool, h.model, h.prefill, h.expires = t.Pool, t.Model, t.Prefill, t.Expires
		if o.bytes+len(params) <= maxRecordBytes {
			h.params = bytes.Clone(params)
			o.bytes += len(params)
		}
	}
	h.decode, h.read, h.decided, h.sure = decode, h.read || !decided, h.decided || decided, h.sure || sure
	if h.over != "" && h.sure {
		o.remove(t.ID, h)
		return h
	}
	return nil
}

// put stores a record and reports whether the limit allowed it. The caller holds the lock.
func (o *records) put(id kvtransfer.ID, h *record) bool {
	if len(o.kept) >= maxRecords {
		return false
	}
	if o.kept == nil {
		o.kept = map[kvtransfer.ID]*record{}
	}
	o.kept[id] = h
	return true
}

// remove is called with the lock held.
func (o *records) remove(id kvtransfer.ID, h *record) {
	delete(o.kept, id)
	o.bytes -= len(h.params)
}

// end is called instead of take when a prefill leg's pass has ended and no other pass followed. Access log entries
// arrive on a stream of their own: if P's answer is not recorded yet, or if another replica may have read it, the
// reason is stored for add and confirm.
func (o *records) end(id kvtransfer.ID, why string, expires time.Time) *record {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.kept[id]
	switch {
	case h == nil && len(o.kept) < maxRecords/2: // the answer may never come: half of the limit for these
		o.put(id, &record{over: why, expires: expires})
	case h != nil && h.over == "" && h.sure:
		o.remove(id, h)
		return h
	case h != nil:
		h.over = why
	}
	return nil
}

// take removes and returns a record; nil if there is none.
func (o *records) take(id kvtransfer.ID) *record {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.kept[id]
	if h == nil || h.over != "" {
		return nil
	}
	o.remove(id, h)
	return h
}

// sweep removes expired records: after that time no decode endpoint may be asked.
func (o *records) sweep(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, h := range o.kept {
		if now.After(h.expires) {
			o.remove(id, h)
		}
	}
}
