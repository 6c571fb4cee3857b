package extproc

import (
	"context"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
)

// This file is what some dialects want beyond bodies: both sides of a pair, room in D's buffer, word that KV has arrived,
// and whoever has the prompt's beginning.

// sideOf is what a dialect is told of an endpoint.
func sideOf(e *kvstate.Endpoint) kvtransfer.Side {
	return kvtransfer.Side{Addr: e.Addr, Transfer: e.Transfer}
}

// side is what is known of the endpoint at an address, which may have left the pool.
func (x *exchange) side(pool *kvstate.Pool, addr string) kvtransfer.Side {
	if pool != nil {
		if e := pool.Endpoint(addr); e != nil {
			return sideOf(e)
		}
	}
	return kvtransfer.Side{Addr: addr}
}

// setPair fills x.pair, which lives in the exchange so that dialects may keep a pointer to it on their stack.
func (x *exchange) setPair(attempt [16]byte, prefill, decode kvtransfer.Side) {
	x.pair = kvtransfer.Pair{RequestID: x.requestID, Attempt: attempt, Prefill: prefill, Decode: decode}
}

// reserveRoom books D when its buffer has room for what P will push, or says why it has none. Meanwhile nothing is sent.
func (x *exchange) reserveRoom(d *kvstate.Endpoint, redirects int, b kvstate.Booking, room int64, patience time.Duration) (id kvstate.ReservationID, why string) {
	if b.PromptTokens > room {
		return 0, "buffer_too_small"
	}
	x.mayWait()
	ctx, cancel := context.WithTimeout(x.stream.Context(), patience)
	defer cancel()
	id, ok := x.s.State.ReserveRoom(ctx, x.s.reservationID(x.bookedAs, redirects, kvstate.RoleDecode), d, b, room, sourceOf(x.stream.Context()))
	if !ok {
		return 0, "buffer_full"
	}
	return id, ""
}

// awaitKV waits until what P has sent is with D, where P is one that sends. D goes on without it in the end: it computes
// what it lacks.
func (x *exchange) awaitKV(t *kvtransfer.Ticket) {
	policy, _ := x.s.policy(t.Pool)
	pusher, ok := policy.Dialect.(kvtransfer.Pusher)
	if !ok {
		return
	}
	x.mayWait()
	if !pusher.Await(x.stream.Context(), &x.pair) && x.stream.Context().Err() == nil {
		x.s.Log.Warn("no word that the KV is with decode: it computes what it lacks", "request_id", x.requestID, "prefill", t.Prefill, "decode", t.Decode)
	}
}

// pullBlocks is from how many blocks of difference on (of blockBytes each, some 1,000 tokens in all) a prefix is fetched
// from another endpoint.
const pullBlocks = 8

// setSource names in x.pair the endpoint that has most of the prompt's beginning, if it is worth more than what the one
// that computes has itself, and if the dialect can make use of it.
func (x *exchange) setSource(policy Policy, computes int) {
	if _, ok := policy.Dialect.(kvtransfer.PrefixPuller); !ok {
		return
	}
	own := &x.view.Endpoints[computes]
	most := own.Hit + pullBlocks - 1
	for i := range x.view.Endpoints {
		c := &x.view.Endpoints[i]
		if c.Hit > most && c.Usable && c.Endpoint.Role&kvstate.RolePrefill != 0 && c.Endpoint.Group == own.Endpoint.Group {
			most = c.Hit
			x.source = sideOf(c.Endpoint)
			x.pair.Source = &x.source
		}
	}
}
