package replay

import (
	"slices"

	"tandem/kvstate"
	"tandem/picker"
	"tandem/picker/admission"
)

// remoteRequest is what a replica knows of a request that waits at another one, like kvstate.Queued.
type remoteRequest struct {
	tokens int64
	blocks int
	hits   []int32 // by position in the pool, when it was published
}

// publishQueued publishes to the other replicas that a request waits here, or that endpoints hold another part of its
// prompt.
func (r *replica) publishQueued(j *job, v *kvstate.View) {
	if len(r.replicas) == 1 || r.config.Sharing < 0 {
		return
	}
	h := &remoteRequest{tokens: int64(j.Input), blocks: len(j.Blocks)}
	for i := range v.Endpoints {
		h.hits = append(h.hits, int32(v.Endpoints[i].Hit))
	}
	if slices.Equal(j.published, h.hits) {
		return
	}
	j.published = h.hits
	w := admission.Waiting{ID: j.ID, Arrived: j.arrived, Work: j.work, Replica: uint64(r.number) + 1}
	r.publish(func(other *replica) {
		other.remote[w.ID] = h
		other.queue.AddRemote(w)
	})
}

// removeRemote removes a request that no longer waits at another replica; sent: it was dispatched.
func (r *replica) removeRemote(id uint64, sent bool) {
	if r.queue.RemoveRemote(id, sent) {
		delete(r.remote, id)
	}
}

// look sets q to the request, with its hits in the view.
func (h *remoteRequest) look(q *picker.Request, v *kvstate.View) {
	*q = picker.Request{PromptTokens: h.tokens, Blocks: h.blocks, Split: true}
	for i := range v.Endpoints {
		v.Endpoints[i].Hit = int(h.hits[i])
	}
	v.Uses = v.Uses[:0]
}
