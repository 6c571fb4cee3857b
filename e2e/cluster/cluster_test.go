//go:build cluster

package cluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	page     = "../../docs/kubernetes.md"
	patience = 4 * time.Minute
	upgrade  = "helm upgrade eg oci://docker.io/envoyproxy/gateway-helm --version v1.9.1 -n envoy-gateway-system " +
		"--reuse-values "
	owner = "-l gateway.envoyproxy.io/owning-gateway-name="
	ofWeb = owner + "web"
)

// cluster is one of node.sh, with Envoy Gateway in it and what a user has before Tandem.
type cluster struct {
	t    *testing.T
	dir  string   // holds the folder deploy, as in the repository
	env  []string // of commands
	gate string   // address of the Gateway

	client *http.Client
}

// The commands of docs/kubernetes.md, run as written one after the other, lead from an existing Envoy Gateway to a
// request that two engines answered.
func TestFiveCommands(t *testing.T) {
	c := start(t)
	commands := c.documented()
	for _, command := range commands[:4] {
		c.show(command)
	}
	c.split(commands[4])
	t.Run("global rate limit", func(t *testing.T) { c.under(t).globalRateLimit() })
	t.Run("OIDC", func(t *testing.T) { c.under(t).oidc() })
	t.Run("TLS on port 9004", func(t *testing.T) { c.under(t).tlsForEnvoyGateway() })
}

// under returns c for a subtest.
func (c *cluster) under(t *testing.T) *cluster {
	sub := *c
	sub.t = t
	return &sub
}

// globalRateLimit: Envoy's rate limit service counts a request once, although it has two hops.
func (c *cluster) globalRateLimit() {
	c.must("kubectl apply -f " + c.file("limit.yaml"))
	c.must("kubectl wait --timeout=2m deployment/redis --for=condition=Available")
	c.must(upgrade + "--set config.envoyGateway.rateLimit.backend.type=Redis," +
		"config.envoyGateway.rateLimit.backend.redis.url=redis.default.svc.cluster.local:6379," +
		"global.images.ratelimit.image=tandem.test/ratelimit:1")
	c.await("there is a rate limit service", func() bool {
		return c.must("kubectl get deployment -n envoy-gateway-system envoy-ratelimit --ignore-not-found") != ""
	})
	c.must("kubectl rollout status --timeout=4m -n envoy-gateway-system deployment/envoy-ratelimit")
	n := 0
	var statuses []string
	c.await("a user's fourth request is refused", func() bool { // the service learns of limits after it has started
		n++
		statuses = nil
		for range 4 {
			status, _ := c.chat("llm.test", fmt.Sprintf("user-%d", n))
			statuses = append(statuses, status)
		}
		return statuses[3] == "429"
	})
	require.Equal(c.t, []string{"200", "200", "200", "429"}, statuses, "each counts once")
	before := len(c.requests("prefill"))
	for range 3 {
		status, _ := c.chat("llm.test", "another")
		require.Equal(c.t, "200", status)
	}
	require.Len(c.t, c.requests("prefill"), before+3, "all three were split")
	status, body := c.chat("llm.test", "another")
	require.Equal(c.t, "429", status)
	require.Contains(c.t, body, `"code":"rate_limit_exceeded","message":"the rate limit of this gateway is exceeded"`)
	c.t.Logf("the fourth: %s %s", status, body)
	c.must("kubectl delete -f " + c.file("limit.yaml"))
}

// oidc: a request without a session is sent to the provider, and to no engine. One with a session has both hops.
func (c *cluster) oidc() {
	tokens := 0
	mux := http.NewServeMux()
	mux.HandleFunc("POST /token", func(w http.ResponseWriter, _ *http.Request) {
		tokens++
		part := base64.RawURLEncoding.EncodeToString
		id := part([]byte(`{"alg":"none"}`)) + "." + part([]byte(`{"sub":"user"}`)) + "." + part([]byte("none"))
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"access_token":"access","id_token":%q,"token_type":"Bearer","expires_in":3600}`, id)
	})
	l, err := new(net.ListenConfig).Listen(c.t.Context(), "tcp", "10.200.0.1:18999")
	require.NoError(c.t, err)
	provider := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() { _ = provider.Serve(l) }()
	defer provider.Close()

	c.must("kubectl apply -f " + c.file("oidc.yaml"))
	before := len(c.requests("prefill")) + len(c.requests("decode"))
	var login *http.Response
	c.await("there is a redirect to the provider", func() bool {
		login = c.get("/v1/models", nil)
		return login.StatusCode == http.StatusFound
	})
	to, err := login.Location()
	require.NoError(c.t, err)
	require.Equal(c.t, "/authorize", to.Path)
	require.Equal(c.t, "tandem", to.Query().Get("client_id"))
	status, _ := c.chat("llm.test", "")
	require.Equal(c.t, "302", status)
	require.Equal(c.t, before, len(c.requests("prefill"))+len(c.requests("decode")), "no engine is asked")

	session := c.get("/oauth2/callback?code=code&state="+url.QueryEscape(to.Query().Get("state")), login.Cookies())
	require.Equal(c.t, http.StatusFound, session.StatusCode)
	require.Equal(c.t, 1, tokens)
	before = len(c.requests("prefill"))
	status, body := c.chat("llm.test", "", append(login.Cookies(), session.Cookies()...)...)
	require.Equal(c.t, "200", status, body)
	require.Len(c.t, c.requests("prefill"), before+1)
	require.Equal(c.t, 1, tokens)
	c.must("kubectl delete -f " + c.file("oidc.yaml"))
	c.await("the route takes requests without a session", func() bool { return c.status() == "200" })
}

// get asks the host llm.test for a page, with cookies.
func (c *cluster) get(path string, cookies []*http.Cookie) *http.Response {
	c.t.Helper()
	req, err := http.NewRequestWithContext(c.t.Context(), http.MethodGet, "http://"+c.gate+path, nil)
	require.NoError(c.t, err)
	req.Host = "llm.test"
	for _, cookie := range cookies {
		req.AddCookie(cookie)
	}
	resp, err := c.client.Do(req)
	require.NoError(c.t, err)
	require.NoError(c.t, resp.Body.Close())
	return resp
}

// tlsForEnvoyGateway encrypts Tandem's gRPC ports with a certificate that Envoy Gateway verifies. A route that comes
// after that is extended.
func (c *cluster) tlsForEnvoyGateway() {
	c.must("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -keyout tls.key " +
		"-out tls.crt -subj /CN=tandem -addext subjectAltName=DNS:tandem.default.svc.cluster.local")
	c.must("kubectl create secret tls tandem-tls --cert tls.crt --key tls.key")
	c.edit("deploy/kustomize/base/tandem.yaml", "extProc: {listen: 0.0.0.0:9002}",
		"extProc: {listen: 0.0.0.0:9002, tls: {certFile: /etc/tandem-tls/tls.crt, keyFile: /etc/tandem-tls/tls.key}}")
	c.edit("deploy/kustomize/base/deployment.yaml", "        volumeMounts:\n",
		"        volumeMounts:\n        - {name: tls, mountPath: /etc/tandem-tls, readOnly: true}\n")
	c.edit("deploy/kustomize/base/deployment.yaml", "      volumes:\n",
		"      volumes:\n      - {name: tls, secret: {secretName: tandem-tls}}\n")
	c.edit("deploy/kustomize/base/deployment.yaml", "replicas: 2", "replicas: 1") // there are two cores
	c.edit("deploy/kustomize/base/deployment.yaml", "maxUnavailable: 0, maxSurge: 1", "maxUnavailable: 1, maxSurge: 0")
	c.must("kubectl apply -k deploy/kustomize/base")
	c.must("kubectl rollout status --timeout=4m deployment/tandem")
	ip := c.must("kubectl get pods -l app.kubernetes.io/name=tandem -o jsonpath='{.items[0].status.podIP}'")
	conn, err := tls.Dial("tcp", ip+":9004", &tls.Config{InsecureSkipVerify: true}) // Envoy Gateway verifies it
	require.NoError(c.t, err, "Tandem takes no plaintext there")
	require.NoError(c.t, conn.Close())
	ref := "config.envoyGateway.extensionManager.service.tls.certificateRef."
	c.configure(ref + "name=tandem-tls," + ref + "namespace=default")
	c.must("kubectl apply -f " + c.file("second.yaml"))
	before := len(c.requests("prefill"))
	c.await("a request of the new route is split", func() bool {
		status, _ := c.chat("second.test", "")
		return status == "200" && len(c.requests("prefill")) > before
	})
}

// chat sends a long chat, with a prompt of its own, to a host, and returns the answer's status and body.
func (c *cluster) chat(host, user string, cookies ...*http.Cookie) (status, body string) {
	c.t.Helper()
	return c.ask(c.gate, host, user, rand.Text()+strings.Repeat(" word", 10_000), cookies...)
}

// ask is chat with a prompt, to an address.
func (c *cluster) ask(address, host, user, prompt string, cookies ...*http.Cookie) (status, body string) {
	c.t.Helper()
	req, err := http.NewRequestWithContext(c.t.Context(), http.MethodPost, "http://"+address+"/v1/chat/completions",
		strings.NewReader(fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":%q}]}`, prompt)))
	require.NoError(c.t, err)
	req.Host = host
	req.Header.Set("x-user", user)
	req.Header.Set("content-type", "application/json")
	for _, cookie := range cookies {
		req.AddCookie(cookie)
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return err.Error(), ""
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err.Error(), ""
	}
	return strconv.Itoa(resp.StatusCode), string(text)
}

// file returns the path of a file in this one's folder.
func (c *cluster) file(name string) string {
	path, err := filepath.Abs(name)
	require.NoError(c.t, err)
	return path
}

// The same on a route that serves requests meanwhile. After the wait that the page asks for, until Envoys without the
// bootstrap extension are gone, requests fail only while Envoy looks up Tandem's address.
func TestFiveCommandsOnALiveRoute(t *testing.T) {
	c := start(t)
	commands := c.documented()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var phase atomic.Int32 // 1: since the policy
	var statuses [2]map[string]int
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range statuses {
			statuses[i] = map[string]int{}
			for ctx.Err() == nil && phase.Load() == int32(i) {
				statuses[i][c.status()]++
			}
		}
	}()
	for _, command := range commands[:3] {
		c.show(command)
	}
	began := time.Now()
	envoys := "deployment -n envoy-gateway-system " + ofWeb
	c.await("Envoys have the bootstrap extension", func() bool {
		return strings.Contains(c.must("kubectl get "+envoys+" -o yaml"), "internal_listener")
	})
	c.must("kubectl rollout status --timeout=4m " + envoys)
	t.Logf("the new Envoy is ready after %.0f s", time.Since(began).Seconds())
	c.await("the old Envoy is gone", func() bool {
		return len(strings.Fields(c.must("kubectl get pods -o name -n envoy-gateway-system "+ofWeb))) == 1
	})
	t.Logf("the old one is gone after %.0f s", time.Since(began).Seconds())
	phase.Store(1)
	c.show(commands[3])
	c.split(commands[4])
	time.Sleep(5 * time.Second) // of requests over two engines
	stop()
	<-done
	t.Logf("answers before the policy: %v, and since: %v", statuses[0], statuses[1])
	const looksUp = `503 "code":"router_unavailable"`
	require.Greater(t, statuses[1]["200"], 500)
	require.Less(t, statuses[1][looksUp], statuses[1]["200"]/100)
	delete(statuses[1], looksUp)
	require.Len(t, statuses[1], 1, "nothing else fails")
}

// documented returns the five commands.
func (c *cluster) documented() (commands []string) {
	c.t.Helper()
	text, err := os.ReadFile(page)
	require.NoError(c.t, err)
	_, section, _ := strings.Cut(string(text), "\n## Envoy Gateway\n")
	block := regexp.MustCompile(`(?m)(?:^    .+\n)+`).FindString(section)
	for _, m := range regexp.MustCompile(`(?m)^    (.+)$`).FindAllStringSubmatch(block, -1) {
		commands = append(commands, m[1])
	}
	require.Len(c.t, commands, 5, "%s", block)
	require.Equal(c.t, "200", c.status(), "before Tandem an engine answers alone")
	require.Empty(c.t, c.requests("prefill"), "before Tandem nothing is split")
	return commands
}

// show runs a command and logs what it prints.
func (c *cluster) show(command string) {
	c.t.Helper()
	began := time.Now()
	out := c.must(command)
	if len(out) > 1000 {
		out = out[:1000] + "...\n"
	}
	c.t.Logf("$ %s\n%s(%.1f s)", command, out, time.Since(began).Seconds())
}

// split repeats the fifth command until two engines answer it: Envoy Gateway and its Envoys take up what the others
// have changed.
func (c *cluster) split(command string) {
	c.t.Helper()
	began, before := time.Now(), map[string]int{}
	var got string
	var prefill, decode []seen
	c.await("a request is split", func() bool {
		got = c.must(strings.NewReplacer("GATEWAY", c.gate, "MODEL", "tiny").Replace(command))
		if m := regexp.MustCompile(`"id":"chatcmpl-([^"]+)"`).FindStringSubmatch(got); m != nil {
			others := func(s seen) bool { return s.ID != m[1] }
			prefill = slices.DeleteFunc(c.requests("prefill"), others)
			decode = slices.DeleteFunc(c.requests("decode"), others)
		}
		if len(prefill) > 0 {
			return true
		}
		before[regexp.MustCompile(`"code":"\w+"|"finish_reason":"\w+"`).FindString(got)]++
		return false
	})
	c.t.Logf("$ %s\n%s\n(split after %.1f s; answers before: %v)", command, got, time.Since(began).Seconds(), before)
	c.t.Logf("at the engines: %+v, then %+v", prefill, decode)
	require.Contains(c.t, got, `"finish_reason"`)
	require.Len(c.t, prefill, 1)
	require.Len(c.t, decode, 1)
	require.Equal(c.t, "prefill", prefill[0].Leg)
	require.Equal(c.t, "decode", decode[0].Leg)
	// Of the prompt decode fetches what it has not computed before, when it answered alone.
	require.Positive(c.t, decode[0].ExternalTokens, "decode fetched KV from prefill")
}

// status sends a short chat, on a connection of its own, and returns the answer's status, and the code of an error.
func (c *cluster) status() string {
	resp, err := c.client.Post("http://"+c.gate+"/v1/chat/completions", "application/json",
		strings.NewReader(`{"model":"tiny","messages":[{"role":"user","content":"Hello"}]}`))
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	code := regexp.MustCompile(`"code":"\w+"`).FindString(string(text))
	return strings.TrimSpace(strconv.Itoa(resp.StatusCode) + " " + code)
}

// await waits for a condition, which is asked five times a second.
func (c *cluster) await(what string, holds func() bool) {
	c.t.Helper()
	for began := time.Now(); !holds(); time.Sleep(200 * time.Millisecond) {
		require.Less(c.t, time.Since(began), patience, what)
	}
}

// seen is a request as an engine has recorded it.
type seen struct {
	ID             string `json:"request_id"`
	Path           string `json:"path"`
	Leg            string `json:"leg"`
	ExternalTokens int    `json:"external_tokens"`
}

// requests returns the chats that the engines of a role got.
func (c *cluster) requests(role string) (out []seen) {
	c.t.Helper()
	pods := "kubectl get pods -l app=llm,llm-d.ai/role=" + role + " -o jsonpath='{.items[*].status.podIP}'"
	for ip := range strings.FieldsSeq(c.must(pods)) {
		resp, err := c.client.Get("http://" + ip + ":8000/sim/requests")
		require.NoError(c.t, err)
		var list []seen
		require.NoError(c.t, json.NewDecoder(resp.Body).Decode(&list))
		resp.Body.Close()
		for _, s := range list {
			if s.Path == "/v1/chat/completions" {
				out = append(out, s)
			}
		}
	}
	return out
}

// must runs a command and returns what it printed.
func (c *cluster) must(command string) string {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/bash", "-c", command)
	cmd.Dir, cmd.Env = c.dir, c.env
	out, err := cmd.CombinedOutput()
	require.NoError(c.t, err, "%s\n%s", command, out)
	return string(out)
}

// start installs Envoy Gateway, and existing.yaml.
func start(t *testing.T) *cluster {
	t.Helper()
	c := startGateway(t)
	c.must("kubectl apply -f " + c.file("existing.yaml"))
	c.must("kubectl wait --timeout=2m deployment/prefill deployment/decode --for=condition=Available")
	c.balance()
	return c
}

// startGateway installs Envoy Gateway as its documentation says. The image of Tandem is pushed, and named in base.
func startGateway(t *testing.T) *cluster {
	t.Helper()
	tools := os.Getenv("TANDEM_KUBE_BIN")
	c := &cluster{t: t, dir: t.TempDir()}
	c.client = &http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	ca := filepath.Join(c.dir, "registry.pem")
	c.env = append(os.Environ(), "PATH="+tools+":"+c.file("../../bin")+":"+os.Getenv("PATH"), "HOME="+c.dir, "SSL_CERT_FILE="+ca)
	registry(t, os.Getenv("TANDEM_CHART"), ca)
	require.NoError(t, os.CopyFS(filepath.Join(c.dir, "deploy"), os.DirFS("../../deploy")))
	c.edit("deploy/kustomize/base/kustomization.yaml",
		"newName: tandem, newTag: latest", "newName: registry.test/tandem, newTag: v1")

	c.must("helm install eg oci://docker.io/envoyproxy/gateway-helm --version v1.9.1 -n envoy-gateway-system " +
		"--create-namespace --set global.images.envoyProxy.image=tandem.test/envoy:1.40.0")
	c.must("kubectl wait --timeout=5m -n envoy-gateway-system deployment/envoy-gateway --for=condition=Available")
	return c
}

// configure sets values of Envoy Gateway's chart, and has it start again with them.
func (c *cluster) configure(values string) {
	c.t.Helper()
	c.show(upgrade + "--set " + values)
	c.show("kubectl -n envoy-gateway-system rollout restart deployment envoy-gateway")
	c.must("kubectl rollout status --timeout=4m -n envoy-gateway-system deployment/envoy-gateway")
}

// balance plays the load balancer of a cloud: the Gateway's Service gets an address, which kube-proxy serves.
func (c *cluster) balance() {
	c.t.Helper()
	c.gate = "10.202.0.1"
	var service string
	c.await("the Gateway has a Service", func() bool {
		service = c.must("kubectl get service -n envoy-gateway-system " + ofWeb + " -o name")
		return service != ""
	})
	c.must("kubectl patch -n envoy-gateway-system " + strings.TrimSpace(service) +
		` --subresource=status --type=merge -p '{"status":{"loadBalancer":{"ingress":[{"ip":"` + c.gate + `"}]}}}'`)
	c.must("kubectl wait --timeout=4m gateway/web --for=condition=Programmed")
	c.await("the Gateway answers", func() bool { return c.status() == "200" })
}

// edit replaces a part of a file.
func (c *cluster) edit(file, from, to string) {
	c.t.Helper()
	file = filepath.Join(c.dir, file)
	text, err := os.ReadFile(file)
	require.NoError(c.t, err)
	require.Contains(c.t, string(text), from)
	require.NoError(c.t, os.WriteFile(file, []byte(strings.Replace(string(text), from, to, 1)), 0o600))
}

// registry stands in for Docker Hub, with one chart. Its authority's certificate is written to ca.
func registry(t *testing.T, chart, ca string) {
	t.Helper()
	archive, err := os.ReadFile(chart)
	require.NoError(t, err)
	config := []byte(`{"name":"gateway-helm","version":"v1.9.1","apiVersion":"v2"}`)
	blobs := map[string][]byte{}
	describe := func(kind string, content []byte) map[string]any {
		digest := fmt.Sprintf("sha256:%x", sha256.Sum256(content))
		blobs[digest] = content
		return map[string]any{"mediaType": kind, "digest": digest, "size": len(content)}
	}
	const manifestType = "application/vnd.oci.image.manifest.v1+json"
	manifest, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": manifestType,
		"config": describe("application/vnd.cncf.helm.config.v1+json", config),
		"layers": []any{describe("application/vnd.cncf.helm.chart.content.v1.tar+gzip", archive)}})
	require.NoError(t, err)
	tag := describe(manifestType, manifest)["digest"].(string)

	mux := http.NewServeMux()
	mux.HandleFunc("GET /v2/{$}", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v2/envoyproxy/gateway-helm/{kind}/{name}", func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("name")
		if name == "v1.9.1" {
			name = tag
		}
		content, ok := blobs[name]
		if !ok {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", manifestType) // of blobs nobody reads it
		w.Header().Set("Docker-Content-Digest", name)
		w.Header().Set("Content-Length", fmt.Sprint(len(content)))
		_, _ = w.Write(content)
	})
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	spec := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"registry-1.docker.io", "docker.io"},
		NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, spec, spec, &key.PublicKey, key)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:443")
	require.NoError(t, err)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() {
		own := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
		_ = server.Serve(tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{own}}))
	}()
	t.Cleanup(func() { _ = server.Close() })
}
