package main

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"tandem/extproc"
	"tandem/extproc/telemetry"
	"tandem/internal/orders"
	"tandem/kvstate"
	"tandem/kvstate/redisstore"
)

// A number of requests that is none is a bad request, not a panic.
func TestHowManyRecentRequests(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	registry := prometheus.NewRegistry()
	server := extproc.New(extproc.Options{State: state}, telemetry.NewMetrics(registry, state))
	admin := newAdmin(registry, extproc.NewHealth(), server, &fleet{state: state}, &orders.Orders{}, http.NotFoundHandler())
	for query, want := range map[string]int{"": 200, "?n=": 200, "?n=5": 200, "?n=0": 400, "?n=-1": 400, "?n=x": 400, "?n=99999999999999999999": 400} {
		w := httptest.NewRecorder()
		admin.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/debug/requests"+query, nil))
		require.Equal(t, want, w.Code, query)
	}
	require.Empty(t, server.Recent(-1))
}

// Readiness says that ticket keys differ, ready or not.
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
		health := extproc.NewHealth()
		health.SetReady(c.ready)
		w := httptest.NewRecorder()
		ready(health, nil, func() redisstore.KeyCheck { return c.check })(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		require.Equal(t, c.code, w.Code, name)
		require.Equal(t, c.body, w.Body.String(), name)
	}
}
