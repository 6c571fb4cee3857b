package filter

import (
	"flag"
	"net/http"
	"strconv"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"tandem/extproc/journey/script"
	"tandem/extproc/pass"
	"tandem/kvstate"
)

var update = flag.Bool("update", false, "rewrite the scripts of journeys")

// TestJourneys plays the scripts of package journey over the filter, as Envoy would. The gRPC streams play the same ones
// (extproc).
func TestJourneys(t *testing.T) {
	script.Run(t, "../../extproc/journey/testdata", "inside", *update, func(t *testing.T, s *script.Script) {
		f := newFleet(t, func(p *pass.Policy) { *p = s.Policy })
		f.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}, Facts: s.Facts}, s.Endpoints)
		s.State = f.state
		j := &journeyer{Script: s, f: f}
		j.c = newClient(t, f, j.engines, s.Body)
		j.c.SetHeader(":path", s.Path)
		j.c.asked = j.asked
		j.c.play = func(u *startedLeg) {
			j.asked(u.at, u.body)
			u.pieces, u.stays = writes(t, len(j.c.legs), u.body), true
		}
		j.play()
		synctest.Wait()
		require.Zero(t, f.reserved(), "something stays booked")
		require.Zero(t, f.Memory.Load())
		s.Counted(f.metrics)
	})
}

// journeyer is Envoy's worker, with the engines of a script behind it.
type journeyer struct {
	*script.Script
	f      *fleet
	c      *client
	answer script.Answer // that comes next
	at     string        // D's address
}

// asked writes which engine is asked. D's answer waits for its turn.
func (j *journeyer) asked(at string, body []byte) {
	role := map[string]byte{"10.0.1": 'P', "10.0.2": 'D', "10.0.3": 'E'}[at[:6]]
	if role == 'D' {
		j.at = at
	}
	j.Asked(role, at, string(body))
}

// engines are asked when it is their turn, and D when the request goes on to it, which is before.
func (j *journeyer) engines(at string, _ []byte) engineAnswer {
	a := &j.answer
	if at == j.at {
		return engineAnswer{never: true}
	}
	switch a.How {
	case "unreached":
		return engineAnswer{status: http.StatusServiceUnavailable, body: "reset reason: connection failure", local: "reset"}
	case "overdue":
		return engineAnswer{status: http.StatusGatewayTimeout, local: "response_timeout"}
	case "cut":
		return engineAnswer{breaks: true}
	}
	return engineAnswer{status: a.Status, body: a.Body}
}

// play plays the request to its end.
func (j *journeyer) play() {
	c := j.c
	if j.Leaves() {
		c.filter = j.f.NewFilter(c, nil)
		c.filter.RequestHeaders(false)
		j.leaves()
		return
	}
	c.begin()
	for c.settle(); !j.over(); c.settle() {
		asked := ""
		if c.answer.never || len(c.legs) > 0 {
			asked = "D"
		}
		if len(c.calls) > 0 || len(c.outside) > 0 {
			asked += "PE"
		}
		a := j.Next(asked)
		j.answer = a
		switch {
		case a.How == "leaves":
			j.leaves()
			return
		case a.Role == 0:
			j.f.lookAfter()
			if len(c.calls) > 0 && a.Wait >= c.calls[0].Timeout {
				j.answer = script.Answer{How: "overdue"}
				c.finishOne()
			}
		case a.Role == 'D' && len(c.legs) > 0:
			j.streams(&a)
		case a.Role == 'D':
			a.Stand(j.f.state, j.at)
			j.decode(&a)
		default:
			c.finishOne()
		}
	}
	if len(c.legs) > 0 {
		j.Client(c.status, c.gets.String())
		return // Envoy has ended the filter
	}
	j.Client(c.status, c.reply)
	if j.answer.How == "breaks" {
		c.answer.local = "upstream_reset_after_response_started{connection_termination}"
	}
	c.end()
}

// over reports whether the client has the end of its answer.
func (j *journeyer) over() bool {
	if len(j.c.legs) > 0 {
		return j.c.done || j.c.broken
	}
	return j.c.status != 0
}

// streams is what D sends of an insured stream. An engine that was asked before it, and is still there, sends nothing.
func (j *journeyer) streams(a *script.Answer) {
	u := j.c.legs[len(j.c.legs)-1]
	rest := u.pieces
	switch n, _ := strconv.Atoi(a.Body); a.How {
	case "writes":
		u.pieces = rest[:n]
		rest = rest[n:]
	case "dies":
		u.pieces, u.cut, u.stays = nil, true, false
	default:
		u.stays = false
	}
	for !j.over() && j.c.deliver() {
		continue
	}
	if u.stays {
		u.pieces = rest
	}
}

func (j *journeyer) leaves() {
	j.Client(0, "")
	j.c.gone = true
	j.c.end()
}

// decode is D's answer.
func (j *journeyer) decode(a *script.Answer) {
	answer := engineAnswer{status: a.Status, body: a.Body}
	if a.How == "unreached" {
		answer = engineAnswer{status: http.StatusServiceUnavailable, local: "upstream_reset_before_response_started{connection_failure}"}
	}
	j.c.arrives(answer)
}

// settle does all that Envoy's worker has to do until somebody answers.
func (c *client) settle() {
	for {
		synctest.Wait()
		select {
		case <-c.woken:
			if len(c.outside) == 0 {
				c.filter.Woken()
			}
		default:
			return
		}
	}
}

// finishOne answers one call.
func (c *client) finishOne() {
	if len(c.calls) > 0 {
		call := c.calls[0]
		c.calls = c.calls[1:]
		c.finishCall(&call, c.filter.CallDone)
		return
	}
	next := c.outside[0]
	c.outside = c.outside[1:]
	c.finishCall(next.call, next.done)
}
