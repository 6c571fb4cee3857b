package picker

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// TestFleetScaling prints what grows with the number of endpoints in a decision, as the least time of many, which means
// something on a busy machine, too: TANDEM_SCALING=1 go test ./picker -run FleetScaling -v
func TestFleetScaling(t *testing.T) {
	if os.Getenv("TANDEM_SCALING") == "" {
		t.Skip("set TANDEM_SCALING")
	}
	t.Logf("| endpoints | view | view and pick | a reservation | a scrape |")
	for _, endpoints := range []int{10, 100, 1000, 10_000} {
		s, random := kvstate.New(kvstate.Options{}), rand.New(rand.NewPCG(1, 1))
		var eps []kvstate.EndpointSpec
		for i := range endpoints {
			role := kvstate.RolePrefill
			if i%2 == 1 {
				role = kvstate.RoleDecode
			}
			eps = append(eps, kvstate.EndpointSpec{Addr: fmt.Sprintf("10.0.%d.%d:8000", i/256, i%256), Role: role})
		}
		s.SetPool(kvstate.PoolSpec{Name: "p", Models: []string{"*"}}, eps)
		p := s.Pool("p")
		prompt := make([]uint64, 800) // 400 KB
		for k := range prompt {
			prompt[k] = uint64(k+1) * 0x9e3779b97f4a7c15
		}
		booking := func(e *kvstate.Endpoint) kvstate.Booking {
			work := time.Duration(random.IntN(3000)) * time.Millisecond
			return kvstate.Booking{For: e.Role, PromptTokens: 5000, Uncached: 5000, Work: work}
		}
		for i, e := range p.Endpoints() {
			s.Bookings.Reserve(e, booking(e))
			report(s, e)
			s.Routed(p, e, prompt[:100*(1+i%8)])
		}
		var v kvstate.View
		k := &Picker{Policy: DefaultPolicy()}
		r := &Request{Model: "m", PromptTokens: 100_000, Blocks: len(prompt), Split: true}
		view := func() { s.View(p, prompt, &v) }
		e := p.Endpoints()[0]
		t.Logf("| %d | %v | %v | %v | %v |", endpoints, least(view), least(func() {
			view()
			r.Rand += 0x9e3779b97f4a7c15
			_, err := k.Pick(r, &v)
			require.NoError(t, err)
		}), least(func() { s.Bookings.Release(s.Bookings.Reserve(e, booking(e))) }), least(func() { report(s, e) }))
	}
}

// least returns the least of many runs, within two seconds at most.
func least(f func()) time.Duration {
	best, until := time.Hour, time.Now().Add(2*time.Second)
	for n := 0; n < 2000 && time.Now().Before(until); n++ {
		began := time.Now()
		f()
		best = min(best, time.Since(began))
	}
	return best
}
