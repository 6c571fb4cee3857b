package replay

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"tandem/replay/traces"
)

// Traces whose kind of requests changes, from generated ones at the same load of the fleet's best ratio:
//
//	seq:agent:reasoning     one after the other, five minutes each
//	wave:rag:reasoning      two at the same time, whose shares go up and down in opposite phase, ten minutes a wave
//	day:mixed               one whose rate follows a day, compressed to half an hour: from .2 to 1 of the load
const (
	phaseSeconds = 300.0
	waveSeconds  = 600.0
	daySeconds   = 1800.0
)

// shifts reports whether a trace's name is one of those.
func shifts(name string) bool {
	kind, rest, _ := strings.Cut(name, ":")
	return rest != "" && (kind == "seq" || kind == "wave" || kind == "day")
}

// BestRatio returns the trace at the highest rate at which its [Load] is load on a fleet of n endpoints of fixed roles,
// and how many of them prefill there.
func BestRatio(name string, requests, n int, load float64, c Config) (prefills int, t *traces.Trace, err error) {
	rate := 0.0
	for p := 1; p < n; p++ {
		c.Both, c.Prefill, c.Decode = 0, p, n-p
		at, err := traces.Open(name, requests, c.Seed)
		if err != nil {
			return 0, nil, err
		}
		if at, err = AtLoad(at, c, load); err != nil {
			return 0, nil, err
		}
		if r := float64(len(at.Requests)) / at.Duration(); r > rate {
			rate, prefills, t = r, p, at
		}
	}
	return prefills, t, nil
}

// shifting generates a trace that shifts.
func shifting(name string, requests int, load float64, c Config) (*traces.Trace, error) {
	kinds := strings.Split(name, ":")
	how, kinds := kinds[0], kinds[1:]
	if how == "wave" && len(kinds) != 2 || how == "day" && len(kinds) != 1 || !(load > 0) {
		return nil, fmt.Errorf("%s: a wave has two kinds of requests, a day has one, and each needs a load", name)
	}
	seconds := map[string]float64{"seq": phaseSeconds, "wave": 2 * waveSeconds, "day": daySeconds}[how]
	out := &traces.Trace{Name: name}
	random := rand.New(rand.NewPCG(c.Seed, 7))
	for i, kind := range kinds {
		_, like, err := BestRatio(kind, requests, c.endpoints(), load, c)
		if err != nil {
			return nil, err
		}
		rate := float64(len(like.Requests)) / like.Duration()
		t, err := traces.Generate(kind, int(rate*seconds)+1, rate, c.Seed)
		if err != nil {
			return nil, err
		}
		for _, q := range t.Requests {
			share, at := 1.0, q.Arrival
			switch how {
			case "seq":
				q.Arrival += float64(i) * seconds
			case "wave":
				if share = (1 + math.Cos(2*math.Pi*at/waveSeconds)) / 2; i == 1 {
					share = 1 - share
				}
			case "day":
				share = .6 - .4*math.Cos(2*math.Pi*at/daySeconds)
			}
			if at < seconds && random.Float64() < share {
				if q.Blocks = tagged(q.Blocks, i); q.Program > 0 {
					q.Program ^= uint64(i+1) << 56
				}
				out.Requests = append(out.Requests, q)
			}
		}
	}
	slices.SortStableFunc(out.Requests, traces.ByArrival)
	out.MarkLast()
	return out, nil
}

// tagged keeps the blocks of one part of a trace apart from those of others, except shared prefixes.
func tagged(blocks []uint64, part int) []uint64 {
	blocks = slices.Clone(blocks)
	for i, b := range blocks {
		if b >= 1<<32 {
			blocks[i] = b ^ uint64(part+1)<<56
		}
	}
	return blocks
}
