package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// anothersRoute is the bootstrap of an Envoy whose routes and clusters are as Envoy Gateway 1.9 makes them of the resources
// that `tandem envoy --for envoy-gateway` prints: P's leg is a call to a dynamic forward proxy, D's leg stays on its route.
// Without Envoy Gateway the tests of every way of running Tandem go through it, too: TANDEM_RUN=inside TANDEM_ROUTE=another.
func anothersRoute(f *fleet, listen, admin, policy string, retries bool) string {
	retry := ""
	if retries {
		retry = ", retry_policy: {retry_on: retriable-status-codes, retriable_status_codes: [599], num_retries: 1}"
	}
	var hosts []string
	for _, e := range f.decodes {
		hosts = append(hosts, fmt.Sprintf("{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: %s}}}}", portOf(e.addr)))
	}
	text, err := os.ReadFile("testdata/gateway/route.yaml")
	require.NoError(f.t, err)
	quoted, err := json.Marshal(policy)
	require.NoError(f.t, err)
	return strings.NewReplacer("LISTEN", portOf(listen), "ADMIN", portOf(admin), "POLICY", string(quoted), "RETRY", retry,
		"HOSTS", strings.Join(hosts, ", ")).Replace(string(text))
}

// policyName is the path of routed's replica at the operator's port, which is that of all policies.
const policyName = "/chat"

// routed has a fleet's Envoy load Tandem on another's route, with the configuration in its file. admin is the address of
// the operator's port.
func routed(o *options, admin func() string) {
	operator := ""
	o.envoyEnv = func(f *fleet) []string {
		operator = filepath.Join(f.dir, "operator.yaml")
		text := fmt.Sprintf("admin: %q\nfiles: %q\nengines: [127.0.0.0/8]\n", admin(), f.dir)
		require.NoError(f.t, os.WriteFile(operator, []byte(text), 0o600))
		return []string{"TANDEM_OPERATOR=" + operator}
	}
	if o.bootstrap == nil {
		o.bootstrap = func(f *fleet) string {
			policy := fmt.Sprintf(`{"name":%q,"file":%q,"route":{"rule":1,"strict":true}}`, policyName[1:], f.config)
			return anothersRoute(f, strings.TrimPrefix(f.url, "http://"), strings.TrimPrefix(f.envoyURL, "http://"), policy, true)
		}
	}
}

// Tandem on a route that is another's: both hops, bodies of every size, and engines that die.
func TestInsideAnothersRoute(t *testing.T) {
	onlyInside(t)
	f := start(t, options{routed: true, prefills: 2, decodes: 2, engineArgs: []string{"--decode-step", "1ms"}})
	chat := apis[0]
	for size, words := range map[string]int{"short": 1, "40-KB": 8_000, "4-MB": 800_000} {
		body := strings.Replace(chat.body, "Two hops", strings.Repeat("word ", words)+"Two hops", 1)
		got := f.post(chat.path, body, "x-request-id", size, "x-gateway-destination-endpoint", "127.0.0.1:1", "x-tandem-leg", "pass")
		require.Equal(t, 200, got.status, got.body)
		require.Equal(t, size, got.header.Get("x-request-id"))
		p, d := f.hops(size)
		require.Equal(t, "prefill", p.Leg)
		require.Equal(t, "decode", d.Leg)
		require.Positive(t, d.ExternalTokens)
	}
	f.lenient = true // engines are killed
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			for j := range 50 {
				got, err := f.try(t.Context(), http.MethodPost, chat.path, strings.Replace(chat.body, "Two hops", fmt.Sprintf("load %d %d", i, j), 1))
				if err != nil || got.status != 200 || !strings.Contains(got.body, "finish_reason") {
					t.Errorf("request %d %d: %v, %d %s", i, j, err, got.status, got.body)
				}
				if i == 0 && j == 10 {
					f.decodes[0].stop(os.Kill)
				}
				if i == 0 && j == 25 {
					f.prefills[0].stop(os.Kill)
				}
			}
		})
	}
	group.Wait()
}

// A stream whose D dies between the answer's head and its first event, which the filter waits for: Envoy answers 502 by
// itself and asks no filter (1.40, FilterManager::sendLocalReply), whoever's the route is. Another engine answers in place
// of one whose stream is insured.
func TestInsideDecodeDiesBeforeItsFirstEvent(t *testing.T) {
	onlyInside(t)
	for name, o := range map[string]options{
		"a route of Tandem's": {}, "another's": {routed: true}, "insured": {routed: true, pool: insurance},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.inside, o.prefills, o.decodes = true, 1, 2
			f := start(t, o)
			f.lenient = true
			for _, d := range f.decodes {
				f.inject(d, `{"mode":"stall","delay":"5m"}`)
			}
			answers := make(chan answer, 1)
			go func() {
				a, err := f.try(t.Context(), http.MethodPost, apis[0].path, streamed(apis[0].body), "x-request-id", "dies")
				if err != nil {
					a.body = err.Error()
				}
				answers <- a
			}()
			var got []seen
			soon(t, "D has sent its head", func() bool {
				got = f.requests("dies", f.decodes...)
				return len(got) == 1 && got[0].Status == 200
			})
			for _, d := range f.decodes {
				if d.addr == got[0].Engine {
					d.stop(os.Kill)
				} else {
					f.clear(d)
				}
			}
			a := <-answers
			if o.pool == insurance {
				require.Equal(t, 200, a.status, a.body)
				require.True(t, strings.HasSuffix(a.body, "data: [DONE]\n\n"), a.body)
				return
			}
			require.Equal(t, http.StatusBadGateway, a.status, a.body)
		})
	}
}

// A route without a retry policy: Envoy keeps no body. It is said with the first request, and one that has to be planned
// again is refused, where it would hang.
func TestInsideARouteWithoutARetryPolicy(t *testing.T) {
	onlyInside(t)
	f := start(t, options{routed: true, prefills: 1, decodes: 2, bootstrap: func(f *fleet) string {
		policy := fmt.Sprintf(`{"file":%q,"route":{"rule":1,"strict":true}}`, f.config)
		return anothersRoute(f, strings.TrimPrefix(f.url, "http://"), strings.TrimPrefix(f.envoyURL, "http://"), policy, false)
	}})
	f.lenient = true
	got := f.post(apis[0].path, apis[0].body)
	require.Equal(t, 200, got.status, got.body)
	resp, err := http.Get(f.admins[0] + "/readyz")
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Contains(t, string(text), "retry policy", "it is said before a request needs it")
	for _, d := range f.decodes {
		d.stop(os.Kill)
	}
	got = f.post(apis[0].path, apis[0].body)
	require.Equal(t, http.StatusServiceUnavailable, got.status, got.body)
	require.Contains(t, got.body, "BackendTrafficPolicy")
}

// A filter behind Tandem's refuses requests whose prompts have been computed: it is said in the log and by /readyz. In
// front of Tandem's it costs no engine anything.
func TestInsideAFilterBehindRefuses(t *testing.T) {
	onlyInside(t)
	const deny = `          - name: envoy.filters.http.rbac
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC
              rules: {action: DENY, policies: {denied: {permissions: [{header: {name: x-denied, present_match: true}}], principals: [{any: true}]}}}
`
	for name, tt := range map[string]struct {
		before string // the filter that it stands before
		wrong  bool
	}{
		"behind":   {"          - name: envoy.filters.http.router\n", true},
		"in front": {"          - name: envoy.filters.http.dynamic_modules/tandem\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t, options{routed: true, prefills: 1, decodes: 1, bootstrap: func(f *fleet) string {
				policy := fmt.Sprintf(`{"file":%q,"route":{"rule":1,"strict":true}}`, f.config)
				text := anothersRoute(f, strings.TrimPrefix(f.url, "http://"), strings.TrimPrefix(f.envoyURL, "http://"), policy, true)
				require.Contains(t, text, tt.before)
				return strings.Replace(text, tt.before, deny+tt.before, 1)
			}})
			f.lenient = true // KV that nobody fetches
			got := f.post(apis[0].path, apis[0].body)
			require.Equal(t, 200, got.status, got.body)
			got = f.post(apis[0].path, apis[0].body, "x-request-id", "denied", "x-denied", "yes")
			require.Equal(t, http.StatusForbidden, got.status, got.body)
			require.Empty(t, f.requests("denied", f.decodes...))
			require.Equal(t, tt.wrong, len(f.requests("denied", f.prefills...)) > 0)
			resp, err := http.Get(f.admins[0] + "/readyz")
			require.NoError(t, err)
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			if !tt.wrong {
				require.NotContains(t, string(text), "a filter behind Tandem") // the second policy has no pool
				return
			}
			require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
			require.Contains(t, string(text), "(403, rbac_access_denied_matched_policy[denied])")
			require.Contains(t, string(text), "filterOrder")
		})
	}
}

// A configuration that is not valid costs the requests of its route alone, and the reason is in the answer.
func TestInsideAPolicyIsNotValid(t *testing.T) {
	onlyInside(t)
	begin := time.Now()
	f := start(t, options{routed: true, prefills: 1, decodes: 1, bootstrap: func(f *fleet) string {
		good := fmt.Sprintf(`{"file":%q,"route":{"rule":1,"strict":true}}`, f.config)
		return strings.Replace(anothersRoute(f, strings.TrimPrefix(f.url, "http://"), strings.TrimPrefix(f.envoyURL, "http://"), good, true),
			"value: "+mustQuote(`{"tandem":{"pools":[]},"name":"second"}`), "value: "+mustQuote(`{"tandem":{"pools":[{"name":"x","kvTransfer":"nixel"}]},"name":"second"}`), 1)
	}})
	require.Less(t, time.Since(begin), 2*patience)
	got := f.post(apis[0].path, apis[0].body)
	require.Equal(t, 200, got.status, got.body)
	got = f.post("/second"+apis[0].path, apis[0].body)
	require.Equal(t, http.StatusServiceUnavailable, got.status, got.body)
	require.Contains(t, got.body, "nixel")
	require.Contains(t, got.body, `"error"`)
}

func mustQuote(text string) string {
	quoted, _ := json.Marshal(text)
	return string(quoted)
}
