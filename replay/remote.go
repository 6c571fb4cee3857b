package replay

import (
	"slices"

	"tandem/kvstate"
	"tandem/picker"
	"tandem/picker/admission"
)

// heard is what a replica is told of a request that waits at another one, as a kvstate.Queued has it.
type remoteRequest struct {
	tokens int64
	blocks int
	hits   []int32 // by position in the pool, as they were when it was told
}

// tellWaits has the other replicas know of a request that waits here, and of what endpoints hold of it where that
// has changed.
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
	w := admission.Waiting{ID: j.id, Arrived: j.arrived, Work: j.work, Replica: uint64(r.number) + 1}
	r.publish(func(other *replica) {
		other.remote[w.ID] = h
		other.queue.AddRemote(w)
	})
}

// gone takes out what does not wait at another replica any more; sent: since it was its turn.
func (r *replica) removeRemote(id uint64, sent bool) {
	if r.queue.RemoveRemote(id, sent) {
		delete(r.remote, id)
	}
}

// look is heard as a request, with its hits in the view.
func (h *remoteRequest) look(q *picker.Request, v *kvstate.View) {
	*q = picker.Request{PromptTokens: h.tokens, Blocks: h.blocks, Split: true}
	for i := range v.Endpoints {
		v.Endpoints[i].Hit = int(h.hits[i])
	}
	v.Uses = v.Uses[:0]
}
