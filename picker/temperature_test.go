package picker

import (
	"fmt"
	"math"
	"testing"
	"time"

	"tandem/internal/budget"
	"tandem/kvstate"

	"github.com/stretchr/testify/require"
)

// With a temperature endpoints are chosen as a softmax over prices has it, and without one the cheapest alone.
func TestTemperature(t *testing.T) {
	const n = 20_000
	v := &kvstate.View{}
	for i, role := range []kvstate.Role{kvstate.RolePrefill, kvstate.RolePrefill, kvstate.RolePrefill, kvstate.RoleDecode, kvstate.RoleDecode} {
		c := kvstate.Candidate{Usable: true, Endpoint: &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: fmt.Sprint("e", i), Role: role}}}
		if role == kvstate.RolePrefill {
			c.Queue = time.Duration(i) * 100 * time.Millisecond
		}
		v.Endpoints = append(v.Endpoints, c)
	}
	shares := func(temperature float64) (p [5]float64) {
		k := always()
		k.Temperature = temperature
		for i := range uint64(n) {
			c, err := k.Pick(&Request{PromptTokens: 1000, Split: true, Rand: i * 0x9e3779b97f4a7c15}, v)
			require.NoError(t, err)
			p[c.Prefill] += 1. / n
			p[c.Decode] += 1. / n
		}
		return p
	}
	cold := shares(0)
	require.InDelta(t, 1, cold[0], 1e-9)
	require.InDelta(t, .5, cold[3], .02)
	warm, sum := shares(.1), 1+math.Exp(-1)+math.Exp(-2)
	for i := range 3 {
		require.InDelta(t, math.Exp(-float64(i))/sum, warm[i], .02, "each tenth of a second is a factor of e")
	}
	require.InDelta(t, .5, warm[3], .02)

	out := *v // who cannot be chosen stays so
	out.Endpoints = append([]kvstate.Candidate(nil), v.Endpoints...)
	out.Endpoints[0].Usable = false
	k := always()
	k.Temperature = 10
	for i := range uint64(1000) {
		c, err := k.Pick(&Request{PromptTokens: 1000, Split: true, Rand: i}, &out)
		require.NoError(t, err)
		require.NotZero(t, c.Prefill)
	}
}

func TestTemperatureAllocs(t *testing.T) {
	v, k, r := loadedFleet(64, 1), always(), &Request{PromptTokens: 1000, Split: true}
	k.Temperature = .05
	budget.Allocs(t, 100, 0, func() {
		r.Rand++
		if _, err := k.Pick(r, v); err != nil {
			t.Error(err)
		}
	})
}
