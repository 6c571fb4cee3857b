package picker

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// A model that all endpoints report is not selective; one that some of them lack is.
func TestChoosy(t *testing.T) {
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Addr: "p", Role: kvstate.RolePrefill}, {Addr: "d1", Role: kvstate.RoleDecode}, {Addr: "d2", Role: kvstate.RoleDecode},
	})
	p := s.Pool("chat")
	pick := func() Choice {
		var v kvstate.View
		s.View(p, nil, &v)
		k := Picker{Policy: DefaultPolicy()}
		c, err := k.Pick(&Request{PromptTokens: 1000, Model: "tiny", Split: true}, &v)
		require.NoError(t, err)
		return c
	}
	c := pick()
	require.False(t, c.Selective || c.Named, "nobody was asked yet")
	for _, e := range p.Endpoints() {
		s.SetModels(e, []string{"tiny"})
		c = pick()
		require.False(t, c.Selective, e.Addr)
		require.True(t, c.Named, "of one that comes it is not known")
	}
	s.SetModels(p.Endpoint("d2"), []string{"other"})
	require.True(t, pick().Selective)
}
