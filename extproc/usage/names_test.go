package usage

import (
	"strconv"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
)

// Names of requests that nobody answered take no place, and known models need none.
func TestPlacesAreForAnswers(t *testing.T) {
	r, err := New(Options{Tenants: 2}, prometheus.NewRegistry(), nil)
	require.NoError(t, err)
	r.Serves = func(_, model string) bool { return model == "configured" }
	one := int64(1)
	count := func(model, tenant, ended string) {
		r.count(&kvtransfer.Ticket{Pool: "p"}, &Used{Model: model, Tenant: tenant, Answer: &one}, ended, "d")
	}
	of := func(model, tenant string) int {
		return int(testutil.ToFloat64(r.tokens.WithLabelValues("p", model, tenant, kindAnswer)))
	}
	for i := range 2 * maxModels {
		count("guess-"+strconv.Itoa(i), "stranger-"+strconv.Itoa(i), "refused")
	}
	count("real", "team", "ok")
	require.Equal(t, 1, of("real", "team"), "there is room for who is answered")
	for i := range 2 * maxModels {
		count("accepted-"+strconv.Itoa(i), "", "ok")
	}
	count("configured", "team", "ok")
	require.Equal(t, 1, of("configured", "team"), "and for what the pool serves when there is none")
	require.Positive(t, of("other", ""))
}
