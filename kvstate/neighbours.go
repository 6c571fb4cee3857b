package kvstate

import "net"

// maxNeighbours bounds how many endpoints of one machine are taken for neighbours: a name that more of them have is not a
// machine's.
const maxNeighbours = 64

// node is the machine that an endpoint runs on, "" if that is not known: the one it is said to run on, or its IP address, which
// no two machines share.
func (e *EndpointSpec) node() string {
	if e.Node != "" {
		return e.Node
	}
	host, _, err := net.SplitHostPort(e.Addr)
	if err != nil {
		return ""
	}
	return host
}

// neighbours gives for each endpoint that prefills the positions of those that decode on the same machine. nil where there are
// none, and where all run on one, so that it makes no difference.
func neighbours(all []*Endpoint) [][]int32 {
	nodes := map[string][]int32{}
	for i, e := range all {
		if n := e.node(); n != "" {
			nodes[n] = append(nodes[n], int32(i))
		}
	}
	if len(nodes) < 2 {
		return nil
	}
	var out [][]int32
	for _, members := range nodes {
		if len(members) > maxNeighbours {
			continue
		}
		for _, p := range members {
			for _, d := range members {
				if p == d || all[p].Role&RolePrefill == 0 || all[d].Role&RoleDecode == 0 || all[p].Group != all[d].Group {
					continue
				}
				if out == nil {
					out = make([][]int32, len(all))
				}
				out[p] = append(out[p], d)
			}
		}
	}
	return out
}

// Beside are the positions of the endpoints that decode on the machine of the one at p, which prefills. A view that lacks some
// of its pool's endpoints knows none.
func (v *View) Beside(p int) []int32 {
	if len(v.Neighbours) != len(v.Endpoints) {
		return nil
	}
	return v.Neighbours[p]
}
