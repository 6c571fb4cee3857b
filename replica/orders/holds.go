package orders

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"tandem/kvstate"
	"tandem/kvstate/operator"
)

// HoldsFor is the header of an answer with the replicas that an order applies to: a [Holds] as JSON.
const HoldsFor = "tandem-holds-for"

// Holds is the set of replicas that an order applies to.
type Holds struct {
	Fleet    bool     `json:"fleet"`            // all replicas, also those that start later
	Replicas int      `json:"replicas"`         // those that have applied it, the asked one included
	Silent   []string `json:"silent,omitempty"` // living replicas that did not confirm it within a second
	Redis    bool     `json:"redis"`            // the configuration has state.redis

	// replicas that did not end in order and are not living; one that only hung applies the order when it is back
	Gone []operator.Gone `json:"gone,omitempty"`

	load map[string]int64 // of the other replicas that answered, by address
}

// String returns it in words for people.
func (h *Holds) String() string {
	switch {
	case !h.Redis:
		return "this replica only, until it ends: without state.redis give the order to each"
	case !h.Fleet:
		return "this replica only, as Redis does not answer; the others follow when it does"
	case len(h.Silent) > 0:
		return fmt.Sprintf("%s; no answer yet from %s%s", counted(h.Replicas), strings.Join(h.Silent, ", "), h.gone())
	case len(h.Gone) > 0:
		return counted(h.Replicas) + h.gone()
	case h.Replicas == 1:
		return "all replicas; this is the only one now"
	}
	return fmt.Sprintf("all %d replicas", h.Replicas)
}

// Drained describes what follows when no request of the replicas that hold an order runs on its endpoint any more. It
// is an error if another replica may still send requests there.
func (h *Holds) Drained() (string, error) {
	switch {
	case !h.Redis:
		return "drained: nothing that this replica sent runs there", nil
	case !h.Fleet:
		return "", errors.New("nothing that this replica sent runs there, but others may still send requests: " +
			"drain again when Redis answers")
	case len(h.Gone) > 0:
		return fmt.Sprintf("drained of what living replicas sent; answers to requests that %s sent may still run",
			h.goneNames()), nil
	}
	return "drained: it may be stopped now", nil
}

func counted(replicas int) string {
	if replicas == 1 {
		return "this replica"
	}
	return fmt.Sprintf("%d replicas", replicas)
}

// gone ends the sentence with the replicas that are gone: nobody knows whether they hang or have ended.
func (h *Holds) gone() string {
	if len(h.Gone) == 0 {
		return ""
	}
	return fmt.Sprintf("; %s died or hangs, and applies the order if it comes back", h.goneNames())
}

func (h *Holds) goneNames() string {
	names := make([]string, len(h.Gone))
	for i, g := range h.Gone {
		names[i] = g.Name
	}
	return strings.Join(names, ", ")
}

func (h *Holds) writeTo(w http.ResponseWriter) {
	if text, err := json.Marshal(h); err == nil {
		w.Header().Set(HoldsFor, string(text))
	}
}

// busy reports whether other replicas have, or may have, requests running on the target.
func (h *Holds) busy() bool {
	if len(h.Silent) > 0 {
		return true
	}
	for _, n := range h.load {
		if n > 0 {
			return true
		}
	}
	return false
}

// shown returns the endpoints as an answer has them.
func (o *Orders) shown(h *Holds, found []*kvstate.Endpoint) (out []Ordered) {
	for _, e := range found {
		requests, _ := e.Load()
		one := Ordered{Address: e.Addr, Paused: e.Paused(), Weight: e.Weight(), Requests: requests + h.load[e.Addr]}
		if o.StateOf != nil {
			one.State = o.StateOf(e)
		}
		out = append(out, one)
	}
	return out
}

// target is a pool, or an endpoint of it by address or name.
type target struct {
	Pool     string `json:"pool"`
	Endpoint string `json:"endpoint"`
}

// refresh applies orders that were given at other replicas, so that the next order changes their result.
func (o *Orders) refresh(ctx context.Context) {
	if o.Replicas != nil {
		_ = o.Replicas.Sync(ctx) // without Redis the known state is changed
	}
}

// publish publishes an order that was given here, and asks the other replicas about its target.
func (o *Orders) publish(ctx context.Context, t target) (h Holds) {
	h = Holds{Replicas: 1, Redis: o.Replicas != nil}
	if o.Replicas == nil {
		return h
	}
	if err := o.Replicas.Publish(ctx); err != nil {
		o.Log.Warn("an order holds for this replica only, until Redis answers", "err", err)
		return h
	}
	h.Fleet = true
	o.ask(ctx, &h, t)
	return h
}

// aboutLoad is the question for the requests that run on a target. Its answer proves that the earlier orders have been
// applied.
const aboutLoad = "load"

// ask asks the other replicas for their requests on the target.
func (o *Orders) ask(ctx context.Context, h *Holds, t target) {
	question, err := json.Marshal(t)
	if err != nil {
		return
	}
	answers, err := o.Replicas.Ask(ctx, aboutLoad, question)
	if err != nil && ctx.Err() == nil {
		o.Log.Warn("other replicas were not asked whether they apply an order", "err", err)
	}
	h.Silent, h.Gone, h.Replicas, h.load = answers.Silent, answers.Gone, 1, map[string]int64{}
	for _, a := range answers.Of {
		var load map[string]int64
		if json.Unmarshal(a.Body, &load) != nil {
			h.Silent = append(h.Silent, a.Name)
			continue
		}
		h.Replicas++
		for addr, n := range load {
			h.load[addr] += n
		}
	}
}

// answerLoad answers another replica's question about a target: this replica's requests there, by address.
func (o *Orders) answerLoad(question []byte) []byte {
	var t target
	if json.Unmarshal(question, &t) != nil {
		return nil
	}
	load := map[string]int64{}
	if pool := o.State.Pool(t.Pool); pool != nil && t.Endpoint != "" {
		for _, e := range pool.Find(t.Endpoint) {
			load[e.Addr], _ = e.Load()
		}
	}
	out, err := json.Marshal(load)
	if err != nil {
		return nil
	}
	return out
}
