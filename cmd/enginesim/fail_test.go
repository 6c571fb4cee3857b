package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/jsontext"
)

func (e *simulator) failWith(t *testing.T, rule string) {
	t.Helper()
	require.Equal(t, 200, e.post(t, "/sim/fail", "", rule).status)
}

func h2cClient() *http.Client {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	return &http.Client{Timeout: time.Minute, Transport: &http.Transport{Protocols: &p}}
}

func TestFailRules(t *testing.T) {
	e := startEngine(t)
	e.failWith(t, `{"mode":"status","status":503,"retry_after":7,"leg":"prefill","count":2,"skip":1}`)
	leg := func() int { return e.post(t, chatPath, "r", chat("x", prefillMembers)).status }
	require.Equal(t, 200, e.post(t, chatPath, "r", chat("x")).status, "another leg")
	require.Equal(t, []int{200, 503, 503, 200}, []int{leg(), leg(), leg(), leg()})
	e.Ledger.ReleaseAll()

	e.failWith(t, `[{"mode":"status","status":429,"retry_after":7,"path":"/v1/completions"},{"mode":"slow","delay":"20ms"}]`)
	r := e.post(t, "/v1/completions", "r", `{"prompt":"x"}`)
	require.Equal(t, 429, r.status)
	require.Equal(t, "7", r.header.Get("Retry-After"))
	require.Equal(t, 429, r.num("error", "code"))
	started := time.Now()
	require.Equal(t, 200, e.post(t, chatPath, "r", chat("x")).status)
	require.GreaterOrEqual(t, time.Since(started), 20*time.Millisecond)
	require.Equal(t, 1, e.get(t, "/sim/fail").num("1", "hits"))
	_, err := e.do(http.MethodDelete, "/sim/fail", "", "")
	require.NoError(t, err)
	require.Equal(t, 200, e.post(t, "/v1/completions", "r", `{"prompt":"x"}`).status)

	for _, bad := range []string{`{"mode":"nonsense"}`, `{"mode":"status","leg":"left"}`, `{"mode":"slow","delay":"x"}`, `{"mode":"status","status":99}`, `{`} {
		require.Equal(t, 400, e.post(t, "/sim/fail", "", bad).status, bad)
	}
	e.quiet(t)
}

func TestFailParams(t *testing.T) {
	e := startEngine(t)
	for rule, want := range map[string]string{
		`{"mode":"null-params","count":1}`:  `null`,
		`{"mode":"empty-params","count":1}`: `{}`,
		`{"mode":"malformed-params","count":1,"params":{"do_remote_prefill":true,"remote_port":0}}`: `{"do_remote_prefill":true,"remote_port":0}`,
	} {
		e.failWith(t, rule)
		require.Equal(t, 200, e.post(t, chatPath, "r", chat("x")).status, "not for this one")
		r := e.post(t, chatPath, "r", chat("x", prefillMembers))
		require.Equal(t, 200, r.status)
		require.Equal(t, want, string(jsontext.Get(r.body, "kv_transfer_params")))
		e.quiet(t)
	}
	e.failWith(t, `{"mode":"malformed-params","count":1}`)
	require.NotEqual(t, "null", string(e.post(t, chatPath, "r", chat("x", prefillMembers)).params()))
	e.failWith(t, `{"mode":"garbage-body","count":1}`)
	r := e.post(t, chatPath, "r", chat("x"))
	require.Equal(t, 200, r.status)
	require.False(t, json.Valid(r.body))
	e.quiet(t)
}

func TestFailConnections(t *testing.T) {
	e := startEngine(t, "-decode-step", "1ms")
	body := chat("x", `"max_tokens":20`)
	for name, c := range map[string]*http.Client{"HTTP/1.1": client, "h2c": h2cClient()} {
		t.Run(name, func(t *testing.T) {
			ask := func(body string) (reply, error) {
				req, err := http.NewRequest(http.MethodPost, e.url+chatPath, strings.NewReader(body))
				require.NoError(t, err)
				req.Header.Set("Content-Type", "application/json")
				resp, err := c.Do(req)
				if err != nil {
					return reply{}, err
				}
				defer resp.Body.Close()
				b, err := io.ReadAll(resp.Body)
				return reply{resp.StatusCode, resp.Header, b}, err
			}
			e.failWith(t, `{"mode":"reset-before-headers","count":1,"leg":"plain","path":"`+chatPath+`"}`)
			r, err := ask(body)
			require.Error(t, err)
			require.Zero(t, r.status)

			e.failWith(t, `{"mode":"reset-mid-body","count":1}`)
			r, err = ask(body)
			require.Error(t, err)
			require.Equal(t, 200, r.status)
			require.NotEmpty(t, r.body)

			e.failWith(t, `{"mode":"stream-reset-after","events":3,"count":1}`)
			r, err = ask(chat("x", `"max_tokens":20,"stream":true`))
			require.Error(t, err)
			require.Equal(t, 200, r.status)
			require.Equal(t, 3, strings.Count(r.String(), "\n\n"), "three whole events and a half: %s", r)
			require.False(t, strings.HasSuffix(r.String(), "\n\n"))
			e.quiet(t)
		})
	}
	outcomes := map[string]int{}
	for _, r := range e.Records.Last(0, "") {
		outcomes[r.Outcome+" "+r.Injected]++
	}
	require.Equal(t, 2, outcomes["reset reset-before-headers"], outcomes)
}

func TestFailHang(t *testing.T) {
	e := startEngine(t)
	e.failWith(t, `{"mode":"hang","path":"`+chatPath+`"}`)
	ctx, leave := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, e.url+chatPath, strings.NewReader(chat("x")))
	req.Header.Set("Content-Type", "application/json")
	failed := make(chan error, 1)
	go func() { _, err := client.Do(req); failed <- err }()
	require.Eventually(t, func() bool { return e.Metrics.Injected.Total() == 1 }, patience, time.Millisecond)
	leave()
	require.ErrorIs(t, <-failed, context.Canceled)

	go func() {
		_, err := e.do(http.MethodPost, chatPath, "second", chat("x"))
		failed <- err
	}()
	require.Eventually(t, func() bool { return e.Metrics.Injected.Total() == 2 }, patience, time.Millisecond)
	e.Faults.Clear()
	require.Error(t, <-failed)
}

func TestFailRefuse(t *testing.T) {
	e := startEngine(t)
	require.Eventually(t, func() bool { // a slow machine misses it, and tries again
		_, err := e.do(http.MethodPost, "/sim/fail", "", `{"mode":"refuse","delay":"1s"}`)
		return err != nil && strings.Contains(err.Error(), "refused")
	}, patience, 50*time.Millisecond)
	require.Eventually(t, func() bool {
		r, err := e.do(http.MethodGet, "/health", "", "")
		return err == nil && r.status == 200
	}, patience, 5*time.Millisecond)
}

func TestFailDie(t *testing.T) {
	e := startEngine(t)
	e.failWith(t, `{"mode":"die"}`)
	<-e.Died
	_, err := e.do(http.MethodGet, "/health", "", "")
	require.Error(t, err)
}

// TestPrefillEngineGone: if the prefill engine is gone, a decode engine fails as with a dead port, after the timeout.
func TestPrefillEngineGone(t *testing.T) {
	p, d := startEngine(t, "-role", "prefill"), startEngine(t, "-role", "decode", "-load-timeout", "5s")
	for i := range 2 { // the second finds a closed connection of the first
		params := p.prefill(t, fmt.Sprint(i), longPrompt)
		if i == 1 {
			p.Close()
		}
		r := d.post(t, chatPath, fmt.Sprint(i), chat(longPrompt, `"max_tokens":2`, decodeMembers(params)))
		require.Equal(t, []int{200, 500}[i], r.status)
	}
	d.quiet(t)
}
