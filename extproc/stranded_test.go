package extproc

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
)

// A client that leaves between the hops strands P's blocks. Where the pool wants it, a decode endpoint is told to fetch them:
// once, with parameters that nothing else can use after, and a prompt of which nobody sees the answer.
func TestCleanupDecode(t *testing.T) {
	for _, c := range []struct {
		name    string
		cleanup bool
		blocks  int // of the hand-over: many go by reference
		status  int
		result  string
	}{
		{"off", false, 2, 200, ""},
		{"on", true, 2, 200, "ok"},
		{"by reference", true, 200_000, 200, "ok"},
		{"the engine refuses", true, 2, 400, "failed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			type call struct{ path, id, body string }
			calls := make(chan call, 4)
			engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				calls <- call{r.URL.Path, r.Header.Get(headerRequestID), string(body)}
				w.WriteHeader(c.status)
			}))
			defer engine.Close()

			s := newStand(t, Options{})
			policy := splitting()
			policy.CleanupDecode = c.cleanup
			s.pool("chat", policy)
			s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
				{Name: "p1", Addr: addressOf("p1"), Role: kvstate.RolePrefill},
				{Name: "d1", Addr: engine.Listener.Addr().String(), Role: kvstate.RoleDecode},
			})
			q := s.newRequest("/v1/chat/completions", "r1", `{"model":"m","messages":[{"role":"user","content":"hi"}]}`)
			q.goOn(q.pass())
			given := randomParams(c.blocks)
			q.prefillLeg(answer{status: 200, body: prefilled(given)})
			q.follow()
			hanging := s.ticket(q.headers[headerTicket], "r1")
			require.Equal(t, kvtransfer.HandOver, hanging.Stage)
			s.log(q.entry(0, "downstream_remote_disconnect"))

			require.Eventually(t, func() bool {
				return testutil.ToFloat64(s.server.metrics.stranded.WithLabelValues("chat", addressOf("p1"), "client_gone")) == 1
			}, 30*time.Second, time.Millisecond)
			if !c.cleanup {
				require.Empty(t, calls)
				require.True(t, s.state.Spend(hanging.ID), "left as it was")
				return
			}
			require.Eventually(t, func() bool {
				return testutil.ToFloat64(s.server.metrics.cleanups.WithLabelValues("chat", c.result)) == 1
			}, 30*time.Second, time.Millisecond)
			got := <-calls
			require.Equal(t, "/v1/completions", got.path)
			require.Equal(t, "r1", got.id)
			require.Regexp(t, `^\{"prompt":"a","max_tokens":1,"cache_salt":"[A-Z2-7]{26}","kv_transfer_params":`, got.body)
			require.Contains(t, got.body, given)
			require.False(t, s.state.Spend(hanging.ID), "nothing else may use the parameters")
			require.Empty(t, calls)
		})
	}
}
