package main

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate/notices"
	configv1 "tandem/protos/config/v1"
)

// Every dialect there is can be configured, with nothing but addresses and roles (and multi's members).
func TestEveryDialectCanBeConfigured(t *testing.T) {
	for _, name := range kvtransfer.Names() {
		more := ""
		if name == "multi" {
			more = "members: [nixl, offload], "
		}
		c, _, err := configv1.Parse(fmt.Appendf(nil, `pools: [{name: a, kvTransfer: %s, %sendpoints: [{address: "127.0.0.1:1", role: prefill}, {address: "127.0.0.1:2", role: decode}]}]`, name, more))
		require.NoError(t, err, name)
		d, err := dialect(c.GetPools()[0], notices.NewBoard(0, 0))
		require.NoError(t, err, name)
		require.Equal(t, name, d.Name())
		_, pushes := d.(kvtransfer.Pusher)
		require.Equal(t, name == "lmcache", pushes)
	}
}
