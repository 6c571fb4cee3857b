// Package orders accepts operators' orders on the admin port of a running replica, and passes them to the other
// replicas.
package orders

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"tandem/kvstate"
	"tandem/kvstate/operator"
	"tandem/replica/config/diff"
	"tandem/status/words"
)

// Orders pause and resume a pool, pause, drain and resume an endpoint, change its weight, and read the configuration
// again. With Redis all but the last apply to all replicas, until they are revoked at any of them; without Redis they
// apply to this replica until it ends. The header [HoldsFor] of an answer has the replicas, [Warning] what the order
// leaves without endpoints.
//
//	POST   /api/pools/{pool}/pause | resume
//	POST   /api/pools/{pool}/endpoints/{endpoint}/pause | resume | drain?timeout=5m
//	PUT    /api/pools/{pool}/endpoints/{endpoint}/weight   {"weight": 50}
//	DELETE /api/pools/{pool}/endpoints/{endpoint}/weight
//	POST   /api/reload
type Orders struct {
	TokenFile string // "": orders are refused
	State     *kvstate.State
	Reload    func(context.Context) ([]diff.Change, error)
	Replicas  *operator.Operator // nil: there is no Redis
	Log       *slog.Logger
	StateOf   func(*kvstate.Endpoint) string // as `tandem status` shows it; nil: not shown
}

// Register adds the orders to the admin port. Call it before the replica answers others' questions.
func (o *Orders) Register(mux *http.ServeMux) {
	const pool, endpoint = "/api/pools/{pool}/", "/api/pools/{pool}/endpoints/{endpoint}/"
	mux.HandleFunc("POST "+pool+"pause", o.allowed(o.pool(true)))
	mux.HandleFunc("POST "+pool+"resume", o.allowed(o.pool(false)))
	mux.HandleFunc("POST "+endpoint+"pause", o.allowed(o.endpoint(func(e *kvstate.Override) { e.Paused = true })))
	mux.HandleFunc("POST "+endpoint+"resume", o.allowed(o.endpoint(func(e *kvstate.Override) { e.Paused = false })))
	mux.HandleFunc("DELETE "+endpoint+"weight", o.allowed(o.endpoint(func(e *kvstate.Override) { e.Weight = 0 })))
	mux.HandleFunc("PUT "+endpoint+"weight", o.allowed(o.weight))
	mux.HandleFunc("POST "+endpoint+"drain", o.allowed(o.drain))
	mux.HandleFunc("POST /api/reload", o.allowed(o.readAgain))
	if o.Replicas != nil {
		o.Replicas.Answer(aboutLoad, o.answerLoad)
	}
}

// allowed passes requests with the token on. It compares hashes, in constant time: the time reveals neither the token
// nor its length.
func (o *Orders) allowed(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		want, err := ReadToken(o.TokenFile)
		if err != nil {
			o.refused(r, err)
			message := "this replica started without admin.tokenFile: set it in its file, and restart the replica"
			if o.TokenFile != "" {
				message = fmt.Sprintf("admin.tokenFile, %s, has no token of at least %d characters that this replica "+
					"can read; its log says why", o.TokenFile, minToken)
			}
			AnswerError(w, http.StatusForbidden, "no orders are taken here: "+message)
			return
		}
		scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if !sameToken(strings.TrimSpace(token), want) || !strings.EqualFold(scheme, "bearer") {
			o.refused(r, "wrong token")
			w.Header().Set("WWW-Authenticate", "Bearer")
			AnswerError(w, http.StatusUnauthorized, "the token is missing or wrong (Authorization: Bearer TOKEN)")
			return
		}
		next(w, r)
	}
}

// taken logs an order that takes effect.
func (o *Orders) taken(r *http.Request, more ...any) {
	o.Log.Info("order", append([]any{"method", r.Method, "path", r.URL.Path, "from", r.RemoteAddr}, more...)...)
}

// refuse answers and logs an order that has no effect.
func (o *Orders) refuse(w http.ResponseWriter, r *http.Request, status int, message string) {
	o.refused(r, message)
	AnswerError(w, status, message)
}

func (o *Orders) refused(r *http.Request, why any) {
	o.Log.Warn("order refused", "method", r.Method, "path", r.URL.Path, "from", r.RemoteAddr, "err", why)
}

// AnswerError answers with an error, in the shape that orders have.
func AnswerError(w http.ResponseWriter, status int, message string) {
	w.Header().Set("content-type", contentJSON)
	w.WriteHeader(status)
	words.WriteJSON(w, map[string]any{"error": map[string]string{"message": message}})
}

// answerUnknown turns an error of the state into an answer. If the pool does not exist, it names those that do, and if
// the endpoint does not, the pool's.
func (o *Orders) answerUnknown(w http.ResponseWriter, r *http.Request, err error) {
	if !errors.Is(err, kvstate.ErrUnknown) {
		o.refuse(w, r, http.StatusConflict, err.Error())
		return
	}
	var names []string
	p := o.State.Pool(r.PathValue("pool"))
	if p == nil {
		for _, other := range o.State.Pools() {
			names = append(names, other.Spec.Name)
		}
	} else {
		for _, e := range p.Endpoints() {
			names = append(names, e.DisplayName())
		}
	}
	o.refuse(w, r, http.StatusNotFound, fmt.Sprintf("%v; there are: %s", err, listed(names)))
}

// listed joins names, at most the first few.
func listed(names []string) string {
	const shown = 8
	if len(names) > shown {
		names = append(names[:shown:shown], fmt.Sprintf("and %d more", len(names)-shown))
	}
	return strings.Join(names, ", ")
}

func (o *Orders) pool(paused bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("pool")
		o.refresh(r.Context())
		if err := o.State.PausePool(name, paused); err != nil {
			o.answerUnknown(w, r, err)
			return
		}
		o.taken(r)
		h := o.publish(r.Context(), target{Pool: name})
		h.writeTo(w)
		if warning := o.afterPool(name, paused); warning != "" {
			w.Header().Set(Warning, warning)
		}
		words.WriteJSON(w, map[string]any{"pool": name, "paused": paused})
	}
}

// afterPool is the warning about a pool that was paused or resumed.
func (o *Orders) afterPool(name string, paused bool) string {
	if paused {
		return fmt.Sprintf("pool %s takes no requests now: clients get 503", name)
	}
	var still []string
	if p := o.State.Pool(name); p != nil {
		for _, e := range p.Endpoints() {
			if e.Paused() {
				still = append(still, e.DisplayName())
			}
		}
	}
	if len(still) == 0 {
		return ""
	}
	return fmt.Sprintf("these endpoints of pool %s stay paused: %s", name, listed(still))
}

// Ordered is the answer to an order about an endpoint, for each of its addresses.
type Ordered struct {
	Address  string `json:"address"`
	Paused   bool   `json:"paused"`
	Weight   int    `json:"weight"`
	Requests int64  `json:"requests"` // running there, sent by the replicas that the order applies to
	State    string `json:"state,omitempty"`
}

// Print writes the endpoints that an order was about, for a terminal.
func Print(w io.Writer, found []Ordered) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "endpoint\tstate\tweight\trequests")
	for _, e := range found {
		fmt.Fprintf(t, "%s\t%s\t%d %%\t%d\n", e.Address, words.State(e.State, e.Paused), e.Weight, e.Requests)
	}
	_ = t.Flush()
}

// endpoint is an order that changes an endpoint; its log line ends with more.
func (o *Orders) endpoint(change func(*kvstate.Override), more ...any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if found, ok := o.order(w, r, change, more...); ok {
			h := o.publish(r.Context(), targetOf(r))
			h.writeTo(w)
			o.warn(w, r.PathValue("pool"), found)
			words.WriteJSON(w, o.shown(&h, found))
		}
	}
}

// Warning is the header of an answer to an order that leaves a pool without an endpoint of a role, or that gives work
// to an endpoint that gets none for another reason: a sentence.
const Warning = "tandem-warning"

// warn adds the warning if one of the endpoints has weight 0 in the configuration; if one is paused, and none of its
// role is left that takes new requests; or if one is not paused, and gets no requests since it failed.
func (o *Orders) warn(w http.ResponseWriter, pool string, ordered []*kvstate.Endpoint) {
	p := o.State.Pool(pool)
	if p == nil {
		return
	}
	drained := slices.IndexFunc(ordered, func(e *kvstate.Endpoint) bool { return e.Drained })
	if drained >= 0 {
		w.Header().Set(Warning, ordered[drained].DisplayName()+
			" has weight 0 in the configuration, and gets no requests until that is changed there")
		return
	}
	for _, leg := range []struct {
		role          kvstate.Role
		name, without string
	}{
		{kvstate.RoleDecode, "decode", "no request can be served"},
		{kvstate.RolePrefill, "prefill", "decode endpoints compute the prompts, where the pool allows it"},
	} {
		has := func(e *kvstate.Endpoint) bool { return e.Role&leg.role != 0 }
		stopped := slices.ContainsFunc(ordered, func(e *kvstate.Endpoint) bool { return has(e) && e.Paused() })
		left := slices.ContainsFunc(p.Endpoints(), func(e *kvstate.Endpoint) bool { return has(e) && e.TakesWork() })
		if stopped && !left {
			w.Header().Set(Warning, fmt.Sprintf("no %s endpoint of pool %s takes requests now: %s",
				leg.name, p.Spec.Name, leg.without))
			return // without decode, prefill does not matter
		}
	}
	failed := slices.IndexFunc(ordered, func(e *kvstate.Endpoint) bool { return !e.Paused() && e.Failed() })
	if failed >= 0 {
		w.Header().Set(Warning, ordered[failed].DisplayName()+
			" failed, and gets no requests until it answers Tandem's probes: look whether its engine runs")
	}
}

func (o *Orders) order(
	w http.ResponseWriter, r *http.Request, change func(*kvstate.Override), more ...any,
) ([]*kvstate.Endpoint, bool) {
	o.refresh(r.Context())
	found, err := o.State.SetOverride(r.PathValue("pool"), r.PathValue("endpoint"), change)
	if err != nil {
		o.answerUnknown(w, r, err)
		return nil, false
	}
	o.taken(r, more...)
	return found, true
}

func targetOf(r *http.Request) target { return target{r.PathValue("pool"), r.PathValue("endpoint")} }

func (o *Orders) weight(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Weight int `json:"weight"`
	}
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxTokenFile)).Decode(&body)
	if err != nil || body.Weight < 1 || body.Weight > 10_000 {
		o.refuse(w, r, http.StatusBadRequest, `the body must be {"weight": N}, N from 1 to 10000 in per cent; `+
			`to give no more work to an endpoint, pause it`)
		return
	}
	o.endpoint(func(e *kvstate.Override) { e.Weight = body.Weight }, "weight", body.Weight)(w, r)
}

// Bounds of an order to drain: how long it waits, and how often it checks.
const (
	DrainDefault = 30 * time.Second
	drainLongest = 30 * time.Minute
	drainLook    = 50 * time.Millisecond
	drainAsk     = 250 * time.Millisecond // interval of the questions to other replicas
	drainFetch   = time.Second            // for decode to fetch the KV of prefill's last requests
)

// drain pauses an endpoint and waits until no replica has requests running on it: 200. If the time is over before that:
// 202, and the endpoint stays paused. Decode may still fetch KV from a prefill endpoint then, which nothing reports, so
// drain waits a while longer.
func (o *Orders) drain(w http.ResponseWriter, r *http.Request) {
	limit := DrainDefault
	if text := r.URL.Query().Get("timeout"); text != "" {
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 || d > drainLongest {
			o.refuse(w, r, http.StatusBadRequest, "timeout must be a duration of at most "+drainLongest.String())
			return
		}
		limit = d
	}
	found, ok := o.order(w, r, func(e *kvstate.Override) { e.Paused = true })
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), limit)
	defer cancel()
	h := o.publish(r.Context(), targetOf(r))
	quiet := o.quiet(ctx, &h, found, targetOf(r))
	if quiet && slices.ContainsFunc(found, func(e *kvstate.Endpoint) bool { return e.Role&kvstate.RolePrefill != 0 }) {
		select {
		case <-r.Context().Done():
		case <-time.After(drainFetch):
		}
	}
	h.writeTo(w)
	o.warn(w, r.PathValue("pool"), found)
	if !quiet {
		w.Header().Set("content-type", contentJSON)
		w.WriteHeader(http.StatusAccepted)
	}
	words.WriteJSON(w, o.shown(&h, found))
}

// quiet waits until nothing is reserved on the endpoints, here and at the replicas that the order applies to; false if
// it gave up.
func (o *Orders) quiet(ctx context.Context, h *Holds, endpoints []*kvstate.Endpoint, t target) bool {
	tick := time.NewTicker(drainLook)
	defer tick.Stop()
	for asked := time.Now(); ; {
		busy := int64(0)
		for _, e := range endpoints {
			requests, _ := e.Load()
			busy += requests
		}
		if busy == 0 && !h.busy() {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
		if busy == 0 && h.Fleet && time.Since(asked) >= drainAsk {
			o.ask(ctx, h, t)
			asked = time.Now()
		}
	}
}

func (o *Orders) readAgain(w http.ResponseWriter, r *http.Request) {
	changes, err := o.Reload(context.WithoutCancel(r.Context()))
	if err != nil {
		o.refuse(w, r, http.StatusUnprocessableEntity, err.Error())
		return
	}
	o.taken(r)
	type change struct {
		Path    string `json:"path"`
		Before  string `json:"before"`
		Now     string `json:"now"`
		Restart bool   `json:"takes_restart"`
	}
	out := []change{}
	for _, c := range changes {
		out = append(out, change{c.Path, c.Before, c.After, !c.Live})
	}
	words.WriteJSON(w, map[string]any{"changes": out})
}

const contentJSON = "application/json"
