package plan

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/cespare/xxhash/v2"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Stored responses (OpenAI's Responses API: store, background, previous_response_id) stay in the engine that made
// them. Engines take the id of a new response from the body's request_id (vLLM and SGLang:
// ResponsesRequest.request_id). So Tandem puts the endpoint's name into it, and every replica finds the endpoint
// again without storing anything.

// Holder finds the endpoint that a request to the Responses API is bound to. stored is false if it is not bound.
func (r *Request) Holder(pool *kvstate.Pool) (e *kvstate.Endpoint, stored bool) {
	if r.Client.API() != openai.Responses {
		return nil, false
	}
	if id, ok := r.Client.String(openai.FieldPreviousResponseID); ok {
		if e := HolderOf(pool, id); e != nil {
			return e, true
		}
	}
	return nil, r.Client.True(openai.FieldStore) || r.Client.True(openai.FieldBackground)
}

// ToHolder decides for the one hop to the endpoint that holds, or will hold, a request's response.
func ToHolder(r *Request, e *kvstate.Endpoint, p *Policy) *Decision {
	d := Pass(r, e, len(r.Client.Body()), "stored_response", p)
	if !r.Client.Has(openai.FieldRequestID) {
		r.Patch.Reset(&r.Client)
		r.Patch.Set("request_id", openai.FieldRequestID, strconv.AppendQuote(nil, newResponseID(e)))
		d.Edits, d.Ticket.Undo, _ = r.Edits(p)
		d.Ticket.BodyBytes = d.Edits.Len(len(r.Client.Body()))
	}
	return d
}

// newResponseID makes an id that names the endpoint: 16 random hexadecimal digits and 16 of the address's hash.
func newResponseID(e *kvstate.Endpoint) string {
	return fmt.Sprintf("resp_%016x%016x", rand.Uint64(), xxhash.Sum64String(e.Addr))
}

// HolderOf finds the endpoint that a response id names; nil if it is not one of the pool's.
func HolderOf(pool *kvstate.Pool, id string) *kvstate.Endpoint {
	digits, ok := strings.CutPrefix(id, "resp_")
	if !ok || len(digits) != 32 {
		return nil
	}
	sum, err := strconv.ParseUint(digits[16:], 16, 64)
	if err != nil {
		return nil
	}
	all := pool.Endpoints()
	i := slices.IndexFunc(all, func(e *kvstate.Endpoint) bool { return xxhash.Sum64String(e.Addr) == sum })
	if i < 0 {
		return nil
	}
	return all[i]
}

// StoredResponse extracts the id from /v1/responses/{id} and the paths below it.
func StoredResponse(path string) (id string, ok bool) {
	rest, ok := strings.CutPrefix(path, "/v1/responses/")
	if !ok {
		return "", false
	}
	if i := strings.IndexAny(rest, "/?"); i >= 0 {
		rest = rest[:i]
	}
	return rest, rest != ""
}

// FindHolder finds the endpoint that a response id names, in any of the pools.
func FindHolder(pools []*kvstate.Pool, id string) (*kvstate.Pool, *kvstate.Endpoint) {
	for _, pool := range pools {
		if e := HolderOf(pool, id); e != nil {
			return pool, e
		}
	}
	return nil, nil
}
