package envoywire

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/metadata"

	"tandem/extproc/names"
)

// A replica knows its number at an Envoy as long as a log of an Envoy with the same list comes in; lists of other Envoys number it
// otherwise.
func TestLoggers(t *testing.T) {
	with := func(name, value string) context.Context {
		return metadata.NewIncomingContext(t.Context(), metadata.Pairs(name, value))
	}
	of := func(l *Loggers, fleet string) string {
		number, several := l.Number(with(names.MetadataFleet, fleet))
		require.True(t, several)
		return string(number)
	}
	var l Loggers
	_, several := l.Number(t.Context())
	require.False(t, several, "an Envoy that knows one replica")
	require.Empty(t, of(&l, "aa"), "no log of it comes in")
	l.Opened(t.Context())()

	first, second := l.Opened(with(names.MetadataReplica, "aa/3")), l.Opened(with(names.MetadataReplica, "aa/3")) // two workers
	other := l.Opened(with(names.MetadataReplica, "bb/0"))
	require.Equal(t, "3", of(&l, "aa"))
	require.Equal(t, "0", of(&l, "bb"))
	var one, all, lonely HeaderEdits
	l.Address(with(names.MetadataFleet, "aa"), &one, true)
	l.Address(with(names.MetadataFleet, "aa"), &all, false)
	l.Address(t.Context(), &lonely, true)
	require.Equal(t, HeaderEdits{set: []headerSet{{names.HeaderReplica, []byte("3")}}}, one)
	require.Equal(t, HeaderEdits{remove: []string{names.HeaderReplica}}, all, "an earlier pass may have set it")
	require.Equal(t, HeaderEdits{}, lonely)
	first()
	require.Equal(t, "3", of(&l, "aa"))
	second()
	require.Empty(t, of(&l, "aa"))
	require.Equal(t, "0", of(&l, "bb"))
	other()
	require.Empty(t, l.open)
}
