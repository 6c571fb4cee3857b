package replica

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/redisstore"
)

// Readiness reports that ticket keys differ, ready or not.
func TestReadinessTellsOfKeys(t *testing.T) {
	for name, c := range map[string]struct {
		ready bool
		check redisstore.KeyCheck
		code  int
		body  string
	}{
		"the same":         {true, redisstore.KeyCheck{}, 200, "ok\n"},
		"not ready":        {false, redisstore.KeyCheck{}, 503, "not ready\n\n"},
		"differ, serves":   {true, redisstore.KeyCheck{Differ: []uint64{1}}, 200, "ok\ntickets: the keys are not those of 1 other replicas: give all of them the same tickets.keyFile\n"},
		"differ, does not": {false, redisstore.KeyCheck{Differ: []uint64{1, 2}, Yields: true}, 503, "not ready\ntickets: the keys are not those of 2 other replicas: give all of them the same tickets.keyFile\n\n"},
	} {
		w := httptest.NewRecorder()
		ready(func() bool { return c.ready }, nil, func() redisstore.KeyCheck { return c.check })(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		require.Equal(t, c.code, w.Code, name)
		require.Equal(t, c.body, w.Body.String(), name)
	}
}
