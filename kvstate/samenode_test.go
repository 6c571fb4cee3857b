package kvstate

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// Which P and D run on one machine: by configuration, else by their addresses, and only if it makes a difference.
func TestSameNode(t *testing.T) {
	p := func(addr, node string) EndpointSpec { return EndpointSpec{Addr: addr, Role: RolePrefill, Node: node} }
	d := func(addr, node string) EndpointSpec { return EndpointSpec{Addr: addr, Role: RoleDecode, Node: node} }
	both := EndpointSpec{Addr: "10.0.0.1:3", Role: RoleBoth}
	grouped := func(e EndpointSpec, group string) EndpointSpec { e.Group = group; return e }
	crowd := []EndpointSpec{p("10.0.0.9:1", "")}
	for i := range 100 {
		crowd = append(crowd, d(fmt.Sprintf("10.0.0.1:%d", 1000+i), ""), p(fmt.Sprintf("10.0.0.1:%d", 2000+i), ""))
	}
	for name, tt := range map[string]struct {
		all  []EndpointSpec
		want [][]int32
	}{
		"each by itself":          {[]EndpointSpec{p("10.0.0.1:1", ""), d("10.0.0.2:1", "")}, nil},
		"by address":              {[]EndpointSpec{p("10.0.0.1:1", ""), d("10.0.0.1:2", ""), d("10.0.0.2:1", "")}, [][]int32{{1}, nil, nil}},
		"IPv6":                    {[]EndpointSpec{p("[fd00::1]:1", ""), d("[fd00::1]:2", ""), d("[fd00::2]:1", "")}, [][]int32{{1}, nil, nil}},
		"by name":                 {[]EndpointSpec{p("10.0.0.1:1", "a"), d("10.0.0.2:1", "a"), d("10.0.0.1:2", "b")}, [][]int32{{1}, nil, nil}},
		"those that do both":      {[]EndpointSpec{p("10.0.0.1:1", ""), d("10.0.0.1:2", ""), both, d("10.0.0.2:1", "")}, [][]int32{{1, 2}, nil, {1}, nil}},
		"all on one":              {[]EndpointSpec{p("127.0.0.1:1", ""), d("127.0.0.1:2", "")}, nil},
		"of different groups":     {[]EndpointSpec{grouped(p("10.0.0.1:1", ""), "a"), grouped(d("10.0.0.1:2", ""), "b"), grouped(d("10.0.0.2:1", ""), "b")}, nil},
		"more than a machine has": {crowd, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := New(Options{})
			s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, tt.all)
			var v, copied View
			s.View(s.Pool("chat"), nil, &v)
			require.Equal(t, tt.want, v.SameNode)
			copied.Copy(&v)
			for i := range v.Endpoints {
				require.Equal(t, v.DecodesOnNode(i), copied.DecodesOnNode(i))
			}
			v.Endpoints = v.Endpoints[1:]
			require.Nil(t, v.DecodesOnNode(0), "positions are others now")
		})
	}
}
