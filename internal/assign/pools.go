package assign

import (
	"math"

	"tandem/extproc"
)

// PoolsOf returns the pools of a server's current settings.
func PoolsOf(server *extproc.Server) func() []Pool {
	return func() (out []Pool) {
		for name, p := range server.Settings().Pools {
			out = append(out, Pool{
				Name: name, Auto: p.AutoRoles, Whole: p.NotSplit(math.MaxInt64) != "", Policy: p.Placement(),
			})
		}
		return out
	}
}
