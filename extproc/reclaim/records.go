package reclaim

import (
	"bytes"
	"sync"
	"time"

	"tandem/extproc/kvtransfer"
)

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

	// What this replica did with it. Every replica receives every access log entry, and only one may act on it: until
	// Envoy has received pass 2's decision, the one that read P's answer; after that, the one that decided.
	read, decided bool
}

// records are the hand-overs of running requests, bounded in number and bytes.
type records struct {
	mu    sync.Mutex
	bytes int
	kept  map[[16]byte]*record

	sweeping bool // the timer is running
}

const (
	maxRecords     = 1 << 16
	maxRecordBytes = 64 << 20
	sweepInterval  = time.Second
)

// confirm records that no other replica has read the answer of a hand-over. It removes and returns the record of a
// request that has ended.
func (o *records) confirm(id [16]byte) *record {
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
func (o *records) put(id [16]byte, h *record) bool {
	if len(o.kept) >= maxRecords {
		return false
	}
	if o.kept == nil {
		o.kept = map[[16]byte]*record{}
	}
	o.kept[id] = h
	if !o.sweeping {
		o.sweeping = true
		time.AfterFunc(sweepInterval, o.sweep)
	}
	return true
}

// remove is called with the lock held.
func (o *records) remove(id [16]byte, h *record) {
	delete(o.kept, id)
	o.bytes -= len(h.params)
}

// end is called instead of take when a prefill leg's pass has ended and no other pass followed. Access log entries
// arrive on a stream of their own: if P's answer is not recorded yet, or if another replica may have read it, the
// reason is stored for add and confirm.
func (o *records) end(id [16]byte, why string, expires time.Time) *record {
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
func (o *records) take(id [16]byte) *record {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.kept[id]
	if h == nil || h.over != "" {
		return nil
	}
	o.remove(id, h)
	return h
}

// sweep removes expired records: after that time no decode endpoint may be asked. It repeats as long as there are
// records.
func (o *records) sweep() {
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, h := range o.kept {
		if now.After(h.expires) {
			o.remove(id, h)
		}
	}
	if o.sweeping = len(o.kept) > 0; o.sweeping {
		time.AfterFunc(sweepInterval, o.sweep)
	}
}
