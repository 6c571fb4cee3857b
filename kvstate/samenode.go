package kvstate

import "net"

// maxPerNode is the largest number of endpoints on one node. A name with more of them is not the name of a node.
const maxPerNode = 64

// node returns the node that an endpoint runs on: the configured one, or its IP address, which two machines never
// share. "" means unknown.
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

// sameNodePairs returns, for each prefill endpoint, the positions of the decode endpoints on its node. It is nil if
// there are none, or if all run on one node, where it makes no difference.
func sameNodePairs(all []*Endpoint) [][]int32 {
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
		if len(members) > maxPerNode {
			continue
		}
		for _, p := range members {
			for _, d := range members {
				pairs := all[p].Role&RolePrefill != 0 && all[d].Role&RoleDecode != 0 && all[p].Group == all[d].Group
				if p == d || !pairs {
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

// DecodesOnNode returns the positions of the decode endpoints on the node of the prefill endpoint at p; none if the
// view lacks some of its pool's endpoints.
func (v *View) DecodesOnNode(p int) []int32 {
	if len(v.SameNode) != len(v.Endpoints) {
		return nil
	}
	return v.SameNode[p]
}
