package orders

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/operator"
	"tandem/replica/config/diff"
)

const goodToken = "a-token-of-some-length"

// ordersOn returns orders over one pool with one endpoint.
func ordersOn(tokenFile string, log io.Writer) (*Orders, http.Handler) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}},
		[]kvstate.EndpointSpec{{Name: "d1:80", Addr: "10.0.0.1:80", Role: kvstate.RoleBoth}})
	o := &Orders{TokenFile: tokenFile, State: state, Log: slog.New(slog.NewTextHandler(log, nil)),
		Reload: func(context.Context) ([]diff.Change, error) { return nil, errors.New("pools: is missing") }}
	mux := http.NewServeMux()
	o.Register(mux)
	return o, mux
}

func tokenFile(t *testing.T, text string) string {
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

func tell(h http.Handler, method, path, token, body string) (int, string) {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	if token != "" {
		r.Header.Set("Authorization", token)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Code, strings.Join(strings.Fields(w.Body.String()), " ")
}

func TestOrdersNeedAToken(t *testing.T) {
	for _, c := range []struct {
		name, file, header string
		want               int
	}{
		{"right", goodToken + "\n", "Bearer " + goodToken, 200},
		{"scheme in another case", goodToken, "bearer " + goodToken, 200},
		{"none", goodToken, "", 401},
		{"wrong", goodToken, "Bearer " + goodToken + "x", 401},
		{"cut", goodToken, "Bearer " + goodToken[:len(goodToken)-1], 401},
		{"no scheme", goodToken, goodToken, 401},
		{"another scheme", goodToken, "Basic " + goodToken, 401},
		{"no file", "", "Bearer " + goodToken, 403},
		{"an empty file", "\n", "Bearer ", 403},
		{"a short token", "short", "Bearer short", 403},
		{"two lines", goodToken + "\n" + goodToken, "Bearer " + goodToken + "\n" + goodToken, 403},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := ""
			if c.file != "" {
				file = tokenFile(t, c.file)
			}
			var log bytes.Buffer
			o, h := ordersOn(file, &log)
			got, _ := tell(h, "POST", "/api/pools/chat/pause", c.header, "")
			require.Equal(t, c.want, got)
			require.Equal(t, c.want == 200, o.State.Pool("chat").Paused())
			require.NotContains(t, log.String(), goodToken[:len(goodToken)-1], "a token in the log")
		})
	}
}

func TestOrders(t *testing.T) {
	var log bytes.Buffer
	o, h := ordersOn(tokenFile(t, goodToken), &log)
	const d1 = "/api/pools/chat/endpoints/10.0.0.1:80/"
	booked := o.State.Bookings.Reserve(o.State.Pool("chat").Endpoints()[0], kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 1})
	for _, c := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"POST", d1 + "pause", "", 200, `[ { "address": "10.0.0.1:80", "paused": true, "weight": 100, "requests": 1 } ]`},
		{"POST", d1 + "resume", "", 200, `[ { "address": "10.0.0.1:80", "paused": false, "weight": 100, "requests": 1 } ]`},
		{"PUT", d1 + "weight", `{"weight": 50}`, 200, `[ { "address": "10.0.0.1:80", "paused": false, "weight": 50, "requests": 1 } ]`},
		{"POST", "/api/pools/chat/endpoints/d1:80/pause", "", 200, `[ { "address": "10.0.0.1:80", "paused": true, "weight": 50, "requests": 1 } ]`},
		{"DELETE", d1 + "weight", "", 200, `[ { "address": "10.0.0.1:80", "paused": true, "weight": 100, "requests": 1 } ]`},
		{"POST", d1 + "drain?timeout=1ms", "", 202, `[ { "address": "10.0.0.1:80", "paused": true, "weight": 100, "requests": 1 } ]`},
		{"PUT", d1 + "weight", `{"weight": 0}`, 400, `per cent`},
		{"PUT", d1 + "weight", `{`, 400, `per cent`},
		{"POST", d1 + "drain?timeout=1d", "", 400, `duration`},
		{"POST", "/api/pools/chat/endpoints/10.0.0.9:80/pause", "", 404, `endpoint \"10.0.0.9:80\" of pool \"chat\": not known here; there are: `},
		{"POST", "/api/pools/other/pause", "", 404, `pool \"other\": not known here; there are: chat`},
		{"POST", "/api/pools/chat/resume", "", 200, `{ "paused": false, "pool": "chat" }`},
		{"POST", "/api/reload", "", 422, `pools: is missing`},
		{"GET", "/api/reload", "", 405, ``},
	} {
		log.Reset()
		path, _, _ := strings.Cut(c.path, "?")
		status, body := tell(h, c.method, c.path, "Bearer "+goodToken, c.body)
		require.Equal(t, c.status, status, "%s %s: %s", c.method, c.path, body)
		require.Contains(t, body, c.want)
		switch {
		case status < 300:
			require.Contains(t, log.String(), "level=INFO msg=order method="+c.method+" path="+path)
			require.Equal(t, c.method == "PUT", strings.HasSuffix(log.String(), " weight=50\n"), log.String())
		case status != http.StatusMethodNotAllowed:
			require.Contains(t, log.String(), `level=WARN msg="order refused" method=`+c.method+" path="+path)
		}
	}
	require.True(t, o.State.Bookings.Release(booked))
}

// An order to drain is answered when the last request has ended.
func TestDrainWaits(t *testing.T) {
	file := tokenFile(t, goodToken)
	synctest.Test(t, func(t *testing.T) {
		o, h := ordersOn(file, io.Discard)
		booked := o.State.Bookings.Reserve(o.State.Pool("chat").Endpoints()[0], kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 1})
		go func() {
			<-time.After(3 * time.Second)
			o.State.Bookings.Release(booked)
		}()
		began := time.Now()
		status, _ := tell(h, "POST", "/api/pools/chat/endpoints/10.0.0.1:80/drain", "Bearer "+goodToken, "")
		require.Equal(t, 200, status)
		require.InDelta(t, 4, time.Since(began).Seconds(), 0.1, "a second for decode to fetch KV from it")
	})
}

// The command says which replicas an order holds for, and never that there are no others when one may only hang.
func TestHolds(t *testing.T) {
	gone := []operator.Gone{{Name: "b:9090"}}
	for want, h := range map[string]Holds{
		"this replica only, until it ends: without state.redis give the order to each":                   {Replicas: 1},
		"this replica only, as Redis does not answer; the others follow when it does":                    {Redis: true, Replicas: 1},
		"all replicas; this is the only one now":                                                         {Redis: true, Fleet: true, Replicas: 1},
		"all 2 replicas":                                                                                 {Redis: true, Fleet: true, Replicas: 2},
		"this replica; no answer yet from b:9090":                                                        {Redis: true, Fleet: true, Replicas: 1, Silent: []string{"b:9090"}},
		"2 replicas; b:9090 died or hangs, and applies the order if it comes back":                       {Redis: true, Fleet: true, Replicas: 2, Gone: gone},
		"this replica; b:9090 died or hangs, and applies the order if it comes back":                     {Redis: true, Fleet: true, Replicas: 1, Gone: gone},
		"2 replicas; no answer yet from c; b:9090 died or hangs, and applies the order if it comes back": {Redis: true, Fleet: true, Replicas: 2, Silent: []string{"c"}, Gone: gone},
	} {
		require.Equal(t, want, h.String())
	}
}

// An endpoint may be stopped if no replica can send requests there any more.
func TestDrained(t *testing.T) {
	for want, h := range map[string]Holds{
		"drained: it may be stopped now":                                                           {Redis: true, Fleet: true, Replicas: 2},
		"drained: nothing that this replica sent runs there":                                       {Replicas: 1},
		"drained of what living replicas sent; answers to requests that b:9090 sent may still run": {Redis: true, Fleet: true, Replicas: 1, Gone: []operator.Gone{{Name: "b:9090"}}},
	} {
		got, err := h.Drained()
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, err := (&Holds{Redis: true, Replicas: 1}).Drained()
	require.ErrorContains(t, err, "others may still send requests")
}

// An order that leaves a pool without an endpoint of a role warns.
func TestWarning(t *testing.T) {
	_, h := ordersOn(tokenFile(t, goodToken), io.Discard)
	warning := func(method, path string) string {
		r := httptest.NewRequest(method, "/api/pools/chat"+path, nil)
		r.Header.Set("Authorization", "Bearer "+goodToken)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Header().Get(Warning)
	}
	const d1 = "/endpoints/10.0.0.1:80/"
	const nothing = "no decode endpoint of pool chat takes requests now: no request can be served"
	require.Equal(t, nothing, warning("POST", d1+"pause"))
	require.Equal(t, nothing, warning("POST", d1+"drain"))
	require.Equal(t, nothing, warning("DELETE", d1+"weight"), "it is still paused")
	require.Empty(t, warning("POST", d1+"resume"))
	require.Equal(t, "pool chat takes no requests now: clients get 503", warning("POST", "/pause"))
	require.Empty(t, warning("POST", "/resume"))
	warning("POST", d1+"pause")
	require.Equal(t, "these endpoints of pool chat stay paused: d1:80", warning("POST", "/resume"))
}

// A weight of 0 in the configuration is shown, and no order gives such an endpoint work.
func TestWeightOfTheConfiguration(t *testing.T) {
	o, h := ordersOn(tokenFile(t, goodToken), io.Discard)
	o.State.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Addr: "10.0.0.1:80", Role: kvstate.RoleBoth}, {Addr: "10.0.0.2:80", Role: kvstate.RoleBoth, Drained: true}})
	for method, order := range map[string]string{"POST": "resume", "PUT": "weight"} {
		r := httptest.NewRequest(method, "/api/pools/chat/endpoints/10.0.0.2:80/"+order, strings.NewReader(`{"weight": 50}`))
		r.Header.Set("Authorization", "Bearer "+goodToken)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		require.Contains(t, w.Body.String(), `"weight": 0`)
		require.Equal(t, "10.0.0.2:80 has weight 0 in the configuration, and gets no requests until that is changed there",
			w.Header().Get(Warning))
	}
}

// Orders and weights name states as `tandem status` does, and say that an endpoint with no order against it has failed.
func TestStatesOfEndpoints(t *testing.T) {
	o, h := ordersOn(tokenFile(t, goodToken), io.Discard)
	o.StateOf = func(e *kvstate.Endpoint) string { return map[bool]string{true: "out", false: "up"}[e.Failed()] }
	order := func(what string) *httptest.ResponseRecorder {
		r := httptest.NewRequest("POST", "/api/pools/chat/endpoints/10.0.0.1:80/"+what, nil)
		r.Header.Set("Authorization", "Bearer "+goodToken)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	require.Empty(t, order("resume").Header().Get(Warning))
	o.State.Health.MarkFailed(o.State.Pool("chat").Endpoints()[0])
	w := order("resume")
	require.Equal(t, "d1:80 failed, and gets no requests until it answers Tandem's probes: look whether its engine runs", w.Header().Get(Warning))
	var found []Ordered
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &found))
	var text strings.Builder
	Print(&text, found)
	require.Contains(t, text.String(), "10.0.0.1:80  OUT    100 %")
	require.Contains(t, order("pause").Header().Get(Warning), "no decode endpoint of pool chat takes requests now")
}
