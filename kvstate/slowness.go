package kvstate

import "slices"

// Slowness is how slow an endpoint's engine is, compared with its peers, the other endpoints of its pool: learned times
// over the median of theirs for the same work. 2: twice as slow; 0: not known, or there is no peer of which it is
// known.
type Slowness struct {
	Endpoint        *Endpoint
	Prefill, Decode float64
}

// SlowFrom is the slowness from which on operators are warned. Engines of one pool on different GPUs differ by less.
const SlowFrom = 3

// SlownessIn returns the slowness of each endpoint of a pool.
func (s *State) SlownessIn(p *Pool) []Slowness {
	var v View
	s.View(p, nil, &v)
	out := make([]Slowness, len(v.Endpoints))
	speeds, steps := make([]float64, len(out)), make([]float64, len(out))
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if c.Endpoint.Role&RolePrefill != 0 && c.Endpoint.state.pace.Load() != nil { // else it has the fleet's
			speeds[i] = c.Speed
		}
		if c.Endpoint.Role&RoleDecode != 0 && c.Endpoint.state.steps.Load() != nil {
			steps[i] = c.Step
		}
	}
	for i := range out {
		out[i] = Slowness{v.Endpoints[i].Endpoint, besidePeers(speeds, i), besidePeers(steps, i)}
	}
	return out
}

// besidePeers returns a factor over the median of the other known ones.
func besidePeers(factors []float64, i int) float64 {
	var peers []float64
	for j, f := range factors {
		if j != i && f > 0 {
			peers = append(peers, f)
		}
	}
	if factors[i] <= 0 || len(peers) == 0 {
		return 0
	}
	slices.Sort(peers)
	return factors[i] / ((peers[(len(peers)-1)/2] + peers[len(peers)/2]) / 2)
}
