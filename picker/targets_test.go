package picker

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// allowed returns all choices that a request may get, by brute force.
func (w *twin) allowed() (out []Choice) {
	pairs := w.pairs()
	out = pairs.choices
	if len(out) > 0 && w.p.Split == SplitAlways {
		return out
	}
	paired := len(out) > 0
	for d := range w.v.Endpoints {
		if _, ok := w.alone(d, paired); ok && w.ok(d, kvstate.RoleDecode, asUsed) && w.takes(d) {
			out = append(out, Choice{Prefill: -1, Decode: d})
		}
	}
	return out
}

// Whatever the fleet: if any choice meets the time to the first token, such a choice is taken, and if none does the
// request's OnMiss decides; one without targets is placed as before.
func TestTargetsAgainstTwin(t *testing.T) {
	met, missed := 0, 0
	for seed := range uint64(3000) {
		random := rand.New(rand.NewPCG(seed, 11))
		r, v, policy := randomCase(random)
		policy.MinPrefillTokens, policy.Promise = 0, Targets{}
		k := &Picker{Policy: policy}
		if _, err := k.Pick(r, v); err != nil {
			continue
		}
		choices := (&twin{r: r, v: v, p: policy}).allowed()
		if len(choices) == 0 { // only those that failed the request, or have no room, are left
			continue
		}
		r.TTFT, r.Waited, r.OnMiss = .02+random.Float64()*2, float64(random.IntN(2))*.1, MissShed
		meets, nearly := false, false
		for _, c := range choices {
			k.estimate(r, v, &c)
			meets = meets || r.Waited+c.FirstToken <= r.TTFT-sameTime
			nearly = nearly || r.Waited+c.FirstToken <= r.TTFT
		}
		c, err := k.Pick(r, v)
		switch {
		case meets:
			met++
			require.NoError(t, err, "seed %d", seed)
			require.LessOrEqual(t, r.Waited+c.FirstToken, r.TTFT, "seed %d", seed)
		case !nearly:
			missed++
			require.ErrorIs(t, err, ErrMissed, "seed %d", seed)
			r.OnMiss = MissGoOn
			_, err = k.Pick(r, v)
			require.NoError(t, err)
		}
	}
	require.Greater(t, met, 500)
	require.Greater(t, missed, 500)
}
