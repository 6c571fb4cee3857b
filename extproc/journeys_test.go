package extproc

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/envoywire"
	"tandem/extproc/faults"
	"tandem/extproc/journey/script"
	"tandem/extproc/names"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// TestJourneys plays the scripts of package journey over the gRPC streams, as Envoy would. The filter inside Envoy plays
// the same ones (carrier/filter).
func TestJourneys(t *testing.T) {
	script.Run(t, "journey/testdata", "ext_proc", *update, func(t *testing.T, s *script.Script) {
		e := &journeyer{Script: s, t: t, s: newStand(t, core.Options{})}
		e.s.policy("chat", s.Policy)
		e.s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}, Facts: s.Facts}, s.Endpoints)
		defer e.s.server.faults.Opened()() // Envoy's log of failed tries
		s.State = e.s.state
		e.q = e.s.newRequest(s.Path, "r-1", s.Body)
		e.play()
		synctest.Wait()
		if !e.stopped { // else its reservations end with it
			require.Zero(t, e.s.state.Bookings.Reservations(), "something stays booked")
		}
		require.Zero(t, e.s.server.Memory.Load())
		s.Counted(e.s.registry)
	})
}

// journeyer is Envoy, with the engines of a script behind it.
type journeyer struct {
	*script.Script
	t    *testing.T
	s    *stand
	q    *request
	last *verdict // of the pass that the request is in

	stopped bool // the replica has
}

// play plays the request to its end.
func (e *journeyer) play() {
	for over, first := false, true; !over; first = false {
		if e.Leaves() {
			sent := 0
			if !first {
				sent = len(e.q.body)
			}
			e.q.leave(sent, synctest.Wait)
			e.leaves()
			return
		}
		v := e.q.pass()
		if e.last = v; v.immediate != nil {
			e.ends(v.status(), string(v.immediate.GetBody()), v.immediate.GetDetails())
			return
		}
		switch v.set[names.HeaderLeg] {
		case plan.LegPrefill:
			over = e.prefill()
		case plan.LegEncode:
			over = e.encode()
		case plan.LegPair:
			over = e.pair()
		default:
			e.Asked('D', v.set[names.HeaderEndpoint], string(v.body))
			over = e.decode(e.next("D"))
		}
	}
}

// next is the next answer; nothing happens while time passes.
func (e *journeyer) next(asked string) script.Answer {
	for {
		if a := e.Next(asked); a.Role != 0 {
			return a
		}
	}
}

func (e *journeyer) ends(status int, body, details string) {
	e.Client(status, body)
	if !e.stopped { // else nobody reads Envoy's log any more
		e.s.log(e.q.entry(status, details))
	}
}

func (e *journeyer) leaves() bool {
	e.ends(0, "", "downstream_remote_disconnect")
	return true
}

func (e *journeyer) prefill() (over bool) {
	e.Asked('P', e.last.set[names.HeaderEndpoint], string(e.q.body))
	a := e.Next("P")
	limit, _ := strconv.Atoi(e.last.set[names.HeaderPerTry])
	switch {
	case a.Role == 0 && a.Wait >= time.Duration(limit)*time.Millisecond:
		return e.replans()
	case a.Role == 0:
		a = e.next("P")
	}
	switch a.How {
	case "leaves":
		return e.leaves()
	case "unreached":
		return e.replans()
	case "cut":
		e.q.prefillLeg(engineAnswer{status: 200, body: []byte(`{"id"`), piece: 2, cut: true})
		synctest.Wait()
		return e.replans()
	}
	v := e.q.prefillLeg(engineAnswer{status: a.Status, body: []byte(a.Body)})
	switch {
	case v.status() == http.StatusTemporaryRedirect:
		e.q.follow()
		return false
	case v.immediate != nil:
		e.ends(v.status(), string(v.immediate.GetBody()), v.immediate.GetDetails())
	default:
		e.ends(a.Status, string(v.body), "via_upstream")
	}
	return true
}

func (e *journeyer) encode() (over bool) {
	l, body := e.q.through(e.s, names.RoleEncodeLeg)
	e.Asked('E', e.last.set[names.HeaderEndpoint], body)
	a := e.next("E")
	switch a.How {
	case "leaves":
		l.cancel()
		return e.leaves()
	case "unreached":
		l.cancel()
		return e.replans()
	}
	l.answer(a.Status, a.Body)
	l.redirected(e.q)
	return false
}

// decode is D's answer, with no stream between that could hold it.
func (e *journeyer) decode(a script.Answer) (over bool) {
	v := e.last
	if took := time.Since(e.q.started); took >= time.Second { // else it is the stand-in's own
		e.q.firstByte = took
	}
	if a.Wait > 0 {
		a.Stand(e.s.state, v.set[names.HeaderEndpoint])
		e.q.firstByte = time.Since(e.q.started)
		if late, _ := strconv.Atoi(v.set[names.HeaderRule]); late > 0 && e.late() {
			return e.replans()
		}
	}
	switch {
	case a.How == "leaves":
		return e.leaves()
	case a.How == "breaks":
		e.ends(200, a.Body, "upstream_reset_after_response_started{connection_termination}")
		return true
	case a.How == "unreached":
		e.s.logAs(envoywire.LogNameFailed, e.q.entry(503, "upstream_reset_before_response_started{connection_failure}"))
		return e.replans()
	case faults.Failed(a.Status) && v.set[names.HeaderLeg] != plan.LegPass:
		e.s.logAs(envoywire.LogNameFailed, e.q.entry(a.Status, "via_upstream"))
		return e.replans()
	}
	body := a.Body
	if (v.set[names.HeaderLeg] == plan.LegAnswer || v.set[names.HeaderAnswer] != "") && a.Status == http.StatusOK {
		t := e.s.ticket(e.q.headers[names.HeaderTicket], "r-1")
		body = e.s.throughAnswerLeg(t, "200", "application/json", body, 40, false).body
	}
	e.ends(a.Status, body, "via_upstream")
	return true
}

// late is the question of Envoy's script about an answer that begins late. It reports whether the client must not get it.
func (e *journeyer) late() bool {
	r := httptest.NewRequest(http.MethodPost, "http://tandem/late", http.NoBody)
	r.Header.Set("x-request-id", e.q.headers[names.HeaderRequestID])
	r.Header.Set(names.HeaderTicket, e.q.headers[names.HeaderTicket])
	r.Header.Set(names.HeaderRule, "late")
	w := httptest.NewRecorder()
	e.s.server.Replan().ServeHTTP(w, r)
	return w.Code == http.StatusConflict
}

// replans is the second try of a hop, at the replan port.
func (e *journeyer) replans() (over bool) {
	w := e.q.replan()
	if w.Code == http.StatusTemporaryRedirect {
		e.q.follow()
		return false
	}
	e.ends(w.Code, w.Body.String(), "via_upstream")
	return true
}

// pair is a request both of whose legs are under way.
func (e *journeyer) pair() (over bool) {
	d, body := e.q.decode(e.s)
	p := e.q.mirror(e.s)
	e.Asked('P', e.last.set[names.HeaderPrefillEndpoint], string(e.q.body))
	e.Asked('D', e.last.set[names.HeaderEndpoint], body)
	said := make(chan *extprocv3.ProcessingResponse, 10)
	go func() {
		defer close(said)
		for {
			r, err := d.stream.Recv()
			if err != nil {
				return
			}
			said <- r
		}
	}()
	asked := "PD"
	var answer *script.Answer // D's, which its filter holds
	for {
		a := e.Next(asked)
		switch {
		case a.How == "drain":
			close(e.s.server.draining)
			e.stopped = true
		case a.How == "leaves":
			d.cancel()
			e.leaves()
			synctest.Wait()
			return true
		case a.Role == 'P':
			asked = strings.Trim(asked, "P")
			p.answer(a.Status, a.Body)
		case a.Role == 'D':
			asked, answer = strings.Trim(asked, "D"), &a
			synctest.Wait()
			if _, open := peek(said); !open { // nobody watches it any more
				return e.decode(a)
			}
			d.headers(false, ":status", strconv.Itoa(a.Status), "content-type", "text/event-stream")
		}
		synctest.Wait()
		for {
			r, open := peek(said)
			switch {
			case r == nil && open:
			case r.GetImmediateResponse() != nil:
				return e.cut(r.GetImmediateResponse())
			case r.GetResponseHeaders() != nil:
				return e.decode(*answer)
			case r.GetOverrideMessageTimeout() != nil:
				continue
			}
			break
		}
	}
}

// peek takes a message that is there.
func peek(said <-chan *extprocv3.ProcessingResponse) (r *extprocv3.ProcessingResponse, open bool) {
	select {
	case r, open = <-said:
		return r, open
	default:
		return nil, true
	}
}

// cut is the answer of the filter of D's leg, by which it ends D's work.
func (e *journeyer) cut(i *extprocv3.ImmediateResponse) (over bool) {
	if i.GetStatus().GetCode() != http.StatusTemporaryRedirect {
		e.ends(int(i.GetStatus().GetCode()), string(i.GetBody()), i.GetDetails())
		return true
	}
	for _, h := range i.GetHeaders().GetSetHeaders() {
		if h.GetHeader().GetKey() == names.HeaderTicket {
			e.q.taken = string(h.GetHeader().GetRawValue())
		}
	}
	e.q.follow()
	return false
}
