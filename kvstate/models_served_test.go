package kvstate

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// What a pool may serve, as far as its endpoints have said.
func TestWhoMayServeAModel(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p", Models: []string{"*", "base"}}, []EndpointSpec{
		{Addr: "10.0.0.1:1", Role: RolePrefill}, {Addr: "10.0.0.2:1", Role: RoleDecode, LoRAs: "configured"}})
	p := s.Pool("p")
	ask := func(model string) [3]bool { return [3]bool{p.Unlisted(model), p.MayServe(model), p.Serves(model)} }
	require.Equal(t, [3]bool{false, true, false}, ask("x"), "nobody has said anything")
	s.SetModels(p.Endpoints()[0], []Model{{ID: "base"}, {ID: "sql", Parent: "base"}})
	require.Equal(t, [3]bool{true, true, false}, ask("x"), "the other one may serve it")
	s.SetModels(p.Endpoints()[1], []Model{{ID: "base"}})
	require.Equal(t, [3]bool{true, false, false}, ask("x"), "nobody has it")
	require.Equal(t, [3]bool{false, true, true}, ask("sql"))
	require.Equal(t, [3]bool{false, true, true}, ask("configured"))
	require.Equal(t, [3]bool{false, true, true}, ask("base"))
}

// KV that an engine frees because nobody came for it is what it kept for decode, unless it keeps answers' KV, too.
func TestWhoseKVExpires(t *testing.T) {
	for _, tt := range []struct {
		role  Role
		keeps bool
		want  bool
	}{
		{RolePrefill, false, true}, {RolePrefill, true, true}, {RoleDecode, true, false}, {RoleDecode, false, false},
		{RoleBoth, true, false}, {RoleBoth, false, true},
	} {
		s := New(Options{})
		spec := PoolSpec{Name: "p", Models: []string{"*"}}
		spec.HandOver.KeepsAnswers = tt.keeps
		s.SetPool(spec, []EndpointSpec{{Addr: "10.0.0.1:1", Role: tt.role}})
		require.Equal(t, tt.want, s.Pool("p").Endpoints()[0].expiresForOthers(), tt)
	}
}
