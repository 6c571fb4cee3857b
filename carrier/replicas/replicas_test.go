package replicas

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/carrier/filter"
	"tandem/replica"
)

// process has the replicas of a test, whose operator allows engines on loopbacks, and files of a folder.
func process(t *testing.T) (*All, string) {
	dir := t.TempDir()
	operator := filepath.Join(dir, "operator.yaml")
	require.NoError(t, os.WriteFile(operator, fmt.Appendf(nil,
		"admin: 127.0.0.1:0\nfiles: %s\nengines: [127.0.0.0/8]\n", dir), 0o600))
	return New(replica.Settings{Release: "test"}, operator), dir
}

// pool is a configuration in a policy, of a pool with engines that nobody runs.
func pool(name string, more ...string) json.RawMessage {
	return json.RawMessage(`{"pools":[{"name":"` + name + `","kvTransfer":"nixl",` + strings.Join(append(more,
		`"endpoints":[{"address":"127.0.0.77:1","role":"prefill"},{"address":"127.0.0.78:1","role":"decode"}]}]}`), ""))
}

func policy(name string, tandem json.RawMessage) []byte {
	text, _ := json.Marshal(map[string]any{"name": name, "tandem": tandem, "route": map[string]any{"rule": 1}})
	return text
}

// asked is what Envoy does for a request that is refused at once.
type asked struct {
	filter.Envoy
	status int
	reply  string
}

func (*asked) EachHeader(do func(name, value []byte)) { do([]byte(":path"), []byte("/v1/messages")) }

func (e *asked) Respond(status int, _ []filter.Header, body []byte, _ string) {
	e.status, e.reply = status, string(body)
}

// refusal returns how a configuration refuses a request; "": it does not.
func refusal(c *Configured) string {
	if c.refused.Load() == nil {
		return ""
	}
	e := &asked{}
	f := c.NewFilter(e)
	if f.RequestHeaders(false) != filter.Stop || e.status != http.StatusServiceUnavailable {
		return "not refused"
	}
	f.Complete()
	f.Destroy()
	return e.reply
}

func get(a *All, path string) (int, string) {
	w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, path, nil)
	r.Host = "127.0.0.1"
	a.admin.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

// A configuration that is not valid costs the requests of its route and nothing else, and says why.
func TestConfigurationsThatAreNotValid(t *testing.T) {
	a, dir := process(t)
	good, err := a.Open(policy("good", pool("good")))
	require.NoError(t, err)
	defer good.Close()
	bad := filepath.Join(dir, "bad.yaml")
	require.NoError(t, os.WriteFile(bad, []byte("pools: ["), 0o600))
	file := func(path string) []byte { return fmt.Appendf(nil, `{"file":%q,"route":{}}`, path) }
	for name, tt := range map[string]struct {
		text []byte
		why  string
	}{
		"no JSON":                   {[]byte("pools: []"), "is not {file"},
		"nothing":                   {[]byte(`{}`), "neither tandem nor file"},
		"a member of another name":  {[]byte(`{"tandem":{},"rule":"1"}`), `unknown field \"rule\"`},
		"no pool":                   {policy("a", json.RawMessage(`{}`)), "at least one pool"},
		"a setting of another name": {policy("a", pool("a", `"kvTransport":"x",`)), "kvTransport"},
		"a dialect of another name": {policy("a", json.RawMessage(`{"pools":[{"name":"a","kvTransfer":"nixel"}]}`)), "nixel"},
		"a port":                    {policy("a", json.RawMessage(`{"admin":{"listen":"0.0.0.0:1"},"pools":[]}`)), "admin: is not for a policy"},
		"a Redis":                   {policy("a", json.RawMessage(`{"state":{"redis":{"url":"redis://x"}}}`)), "state: is not for a policy"},
		"a file with a key":         {policy("a", pool("a", `"apiKeyFile":"/etc/shadow",`)), "apiKeyFile: is not for a policy"},
		"pods by label":             {policy("a", json.RawMessage(`{"pools":[{"name":"a","kvTransfer":"nixl","discovery":{"kubernetes":{}}}]}`)), "kubernetes: is not for a policy"},
		"an engine elsewhere": {policy("a", json.RawMessage(strings.ReplaceAll(string(pool("a")), "127.0.0.78", "169.254.169.254"))),
			"169.254.169.254 is in none of the networks"},
		"a name that is none":        {policy("../x", pool("a")), "name: "},
		"a file that is not there":   {file(filepath.Join(dir, "none.yaml")), "no such file"},
		"a file that is not valid":   {file(bad), "bad.yaml"},
		"a file of somebody else's":  {file("/etc/passwd"), "where the gateway's owner"},
		"a way out of the folder":    {file(dir + "/../../etc/passwd"), "where the gateway's owner"},
		"the name of another's file": {fmt.Appendf(nil, `{"name":"good","file":%q,"route":{}}`, bad), "name: good is the name of another"},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := a.Open(tt.text)
			require.NoError(t, err, "the listener is not refused")
			defer c.Close()
			why := refusal(c)
			require.Contains(t, why, `"type":"error"`, "the shape of the API that was asked")
			require.Contains(t, why, "the configuration of this route is not valid")
			require.Contains(t, strings.ReplaceAll(why, `\\`, `\`), tt.why)
			status, text := get(a, "/readyz")
			require.Equal(t, http.StatusServiceUnavailable, status)
			require.NotEmpty(t, text)
			require.Empty(t, refusal(good))
			_, text = get(a, "/metrics")
			require.Contains(t, text, "tandem_configurations_refused 1")
		})
	}
	status, text := get(a, "/readyz")
	require.Equal(t, http.StatusOK, status, text)
}

// A printed bootstrap's filter is refused, as before: Envoy keeps the listener that it has.
func TestTandemsOwnRoutes(t *testing.T) {
	a, dir := process(t)
	_, err := a.Open(fmt.Appendf(nil, `{"file":%q}`, filepath.Join(dir, "none.yaml")))
	require.ErrorContains(t, err, "no such file")
	require.Empty(t, a.running)
	require.Empty(t, a.open)
}

// The same name is the same replica: for several listeners, and through changes of a policy.
func TestReplicasByName(t *testing.T) {
	a, _ := process(t)
	open := func(name string, tandem json.RawMessage) *Configured {
		c, err := a.Open(policy(name, tandem))
		require.NoError(t, err)
		require.Empty(t, refusal(c))
		return c
	}
	http1, https := open("chat", pool("chat")), open("chat", pool("chat"))
	require.Same(t, http1.uses, https.uses)
	other := open("code", pool("chat"))
	require.NotSame(t, http1.uses, other.uses)
	unnamed, same := open("", pool("x")), open("", pool("x"))
	require.Same(t, unnamed.uses, same.uses)

	changed := open("chat", pool("chat", `"split":"always",`)) // as Envoy does: the new one is there before the old one goes
	http1.Close()
	https.Close()
	require.Same(t, changed.uses, a.running["chat"])
	require.Equal(t, 1, changed.uses.users)
	policyOf, _ := changed.uses.replica.Core.Passes.Policy("chat")
	require.True(t, policyOf.Split)
	require.Same(t, changed.requests.Load(), changed.uses.requests)

	bad, err := a.Open(policy("chat", pool("chat", `"split":"perhaps",`)))
	require.NoError(t, err)
	require.Same(t, changed.uses, bad.uses, "what worked before a mistake goes on")
	require.Same(t, changed.requests.Load(), bad.requests.Load())
	_, text := get(a, "/readyz")
	require.Contains(t, text, "chat: pools[0].split")
	mended := open("chat", pool("chat", `"split":"always",`))
	_, text = get(a, "/readyz")
	require.Equal(t, "ok\n", text, "the one that is not valid is still there, until its connections have ended")
	bad.Close()
	mended.Close()

	status, page := get(a, "/")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, page, `href="chat/"`)
	require.Contains(t, page, `href="code/"`)
	status, text = get(a, "/chat/status.json")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, text, `"chat"`)
	_, text = get(a, "/metrics")
	require.Contains(t, text, `replica_name="chat"`)
	require.Contains(t, text, `replica_name="code"`)
	require.Equal(t, 1, strings.Count(text, "\ngo_goroutines "), "those of the process are there once")

	for _, c := range []*Configured{changed, other, unnamed, same} {
		c.Close()
	}
	require.Empty(t, a.running)
}

// A change that a running replica cannot take starts another one of the name; the one before ends with its users.
func TestAChangeThatTakesARestart(t *testing.T) {
	a, _ := process(t)
	before, err := a.Open(policy("chat", pool("chat")))
	require.NoError(t, err)
	dns := json.RawMessage(`{"pools":[{"name":"chat","kvTransfer":"nixl","discovery":{"dns":[{"name":"localhost","port":1,"role":"both"}]}}]}`)
	after, err := a.Open(policy("chat", dns))
	require.NoError(t, err)
	require.Empty(t, refusal(after))
	require.NotSame(t, before.uses, after.uses)
	require.Same(t, after.uses, a.running["chat"])
	before.Close()
	require.Same(t, after.uses, a.running["chat"])
	after.Close()
	require.Empty(t, a.running)
}

// A file that was not valid counts as soon as it is mended.
func TestAFileIsMended(t *testing.T) {
	a, dir := process(t)
	file := filepath.Join(dir, "tandem.yaml")
	require.NoError(t, os.WriteFile(file, []byte("pools: []"), 0o600))
	c, err := a.Open(fmt.Appendf(nil, `{"file":%q,"route":{}}`, file))
	require.NoError(t, err)
	defer c.Close()
	require.Contains(t, refusal(c), "pools")
	require.NoError(t, os.WriteFile(file, pool("chat"), 0o600))
	require.Eventually(t, func() bool { return refusal(c) == "" }, time.Minute, 10*time.Millisecond)
}
