package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// cluster is a real kube-apiserver with its etcd, and nothing else of Kubernetes: tests play the kubelet and the
// controllers. They talk plain HTTP to it, as kubectl does.
type cluster struct {
	t      *testing.T
	dir    string
	url    string
	args   []string // of kube-apiserver
	server *process
	client *http.Client
}

// Accounts of the API server: one may do everything, the other is the service account of the manifests.
const (
	adminToken  = "admin-token"
	tandemToken = "tandem-token"
	namespace   = "llm"
)

// kubeTool returns a program that scripts/kube-tools.sh built.
func kubeTool(t testing.TB, name string) string {
	t.Helper()
	if os.Getenv("TANDEM_KUBE") == "" {
		t.Skip("takes a real kube-apiserver: make e2e-kube")
	}
	return builtTool(t, name)
}

// builtTool is kubeTool for tests that need no API server.
func builtTool(t testing.TB, name string) string {
	t.Helper()
	dir := os.Getenv("TANDEM_KUBE_BIN")
	if dir == "" {
		home, err := os.UserHomeDir()
		require.NoError(t, err)
		dir = filepath.Join(home, ".cache/tandem/bin")
	}
	path := filepath.Join(dir, name)
	require.FileExists(t, path, "scripts/kube-tools.sh %s builds it", name)
	return path
}

// startCluster starts a cluster, with a namespace, the manifests' service account and its role, and a kubeconfig of
// that account in $KUBECONFIG: here Tandem has exactly the permissions of the manifests.
func startCluster(t *testing.T) *cluster {
	t.Helper()
	etcd, server := kubeTool(t, "etcd"), kubeTool(t, "kube-apiserver")
	p := ports(t, 3)
	c := &cluster{t: t, dir: t.TempDir(), url: "https://" + p[0]}
	startProcess(t, c.dir, "etcd", etcd, "--data-dir", filepath.Join(c.dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", "http://"+p[1], "--advertise-client-urls", "http://"+p[1],
		"--listen-peer-urls", "http://"+p[2], "--initial-advertise-peer-urls", "http://"+p[2], "--initial-cluster", "default=http://"+p[2])
	key, tokens := filepath.Join(c.dir, "account.key"), filepath.Join(c.dir, "tokens.csv")
	writeAccountKey(t, key)
	require.NoError(t, os.WriteFile(tokens, fmt.Appendf(nil, "%s,admin,1,system:masters\n%s,system:serviceaccount:%s:tandem,2,\"system:serviceaccounts,system:serviceaccounts:%s\"\n",
		adminToken, tandemToken, namespace, namespace), 0o600))
	c.args = []string{server, "--etcd-servers=http://" + p[1], "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--secure-port=" + portOf(p[0]),
		"--cert-dir=" + filepath.Join(c.dir, "certs"), "--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + key,
		"--service-account-signing-key-file=" + key, "--service-cluster-ip-range=10.96.0.0/16", "--token-auth-file=" + tokens, "--authorization-mode=RBAC",
		"--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none"}
	c.startServer()
	c.mustApply(fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: %s}\n", namespace))
	c.mustApply(c.file("../deploy/kustomize/base/serviceaccount.yaml"))
	c.mustApply(strings.ReplaceAll(c.file("../deploy/kustomize/base/role.yaml"), "kind: ServiceAccount, name: tandem", "kind: ServiceAccount, name: tandem, namespace: "+namespace))
	t.Setenv("KUBECONFIG", c.kubeconfig(tandemToken))
	t.Setenv("POD_NAMESPACE", namespace)
	return c
}

func writeAccountKey(t *testing.T, file string) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}), 0o600))
}

// startServer starts the API server, also after a stop: its state is in etcd.
func (c *cluster) startServer() {
	c.t.Helper()
	began := time.Now()
	c.server = startProcess(c.t, c.dir, "kube-apiserver", c.args[0], c.args[1:]...)
	require.Eventually(c.t, func() bool {
		if c.client == nil && !c.trust() {
			return false
		}
		status, text, err := c.ask(adminToken, http.MethodGet, "/readyz", "", "")
		return err == nil && status == http.StatusOK && text == "ok" || !c.server.running()
	}, 3*time.Minute, 50*time.Millisecond, "the API server is not ready")
	require.True(c.t, c.server.running(), "kube-apiserver ended")
	c.t.Logf("kube-apiserver is ready after %v", time.Since(began).Round(time.Millisecond))
}

// trust reads the certificate that the API server made for itself, once it exists.
func (c *cluster) trust() bool {
	text, err := os.ReadFile(filepath.Join(c.dir, "certs/apiserver.crt"))
	roots := x509.NewCertPool()
	if err != nil || !roots.AppendCertsFromPEM(text) {
		return false
	}
	c.client = &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}}
	return true
}

// kill ends the API server at once.
func (c *cluster) kill() { c.server.stop(syscall.SIGKILL) }

func (c *cluster) kubeconfig(token string) string {
	file := filepath.Join(c.dir, "kubeconfig-"+token)
	require.NoError(c.t, os.WriteFile(file, fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: u, user: {token: %s}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, c.url, filepath.Join(c.dir, "certs/apiserver.crt"), token), 0o600))
	return file
}

// ask makes one call.
func (c *cluster) ask(token, method, path, contentType, body string) (status int, text string, err error) {
	req, err := http.NewRequestWithContext(context.Background(), method, c.url+path, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(got), err
}

// must makes one call that has to succeed.
func (c *cluster) must(method, path, contentType, body string) string {
	c.t.Helper()
	status, text, err := c.ask(adminToken, method, path, contentType, body)
	require.NoError(c.t, err)
	require.Less(c.t, status, 300, "%s %s: %.600s", method, path, text)
	return text
}

func (c *cluster) file(path string) string {
	c.t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(c.t, err)
	return string(text)
}

// documents returns the non-empty documents of a YAML text.
func documents(text string) (out []string) {
	for doc := range strings.SplitSeq("\n"+text, "\n---") {
		if strings.Contains(doc, "\nkind:") {
			out = append(out, doc)
		}
	}
	return out
}

// create posts one document, strictly: unknown fields are errors. With query "&dryRun=All" it changes nothing.
func (c *cluster) create(doc, query string) (status int, text string) {
	c.t.Helper()
	field := func(name string) string {
		for line := range strings.Lines(doc) {
			if value, ok := strings.CutPrefix(line, name+":"); ok {
				return strings.TrimSpace(value)
			}
		}
		return ""
	}
	version, kind := field("apiVersion"), field("kind")
	if kind == "" {
		return http.StatusBadRequest, "a document without a kind"
	}
	path := "/apis/" + version
	if !strings.Contains(version, "/") {
		path = "/api/" + version
	}
	resource, namespaced, err := c.resource(path, kind)
	if err != nil {
		return http.StatusNotFound, err.Error()
	}
	if namespaced {
		path += "/namespaces/" + namespaceOf(doc)
	}
	status, text, err = c.ask(adminToken, http.MethodPost, path+"/"+resource+"?fieldValidation=Strict"+query, "application/yaml", doc)
	require.NoError(c.t, err)
	return status, text
}

var hasNamespace = regexp.MustCompile(`(?m)^(?:metadata: \{.*|  )namespace: "?([a-z0-9-]+)`)

// namespaceOf returns a document's namespace.
func namespaceOf(doc string) string {
	if m := hasNamespace.FindStringSubmatch(doc); m != nil {
		return m[1]
	}
	return namespace
}

// resource returns a kind's resource name in a group's version.
func (c *cluster) resource(path, kind string) (name string, namespaced bool, err error) {
	status, text, err := c.ask(adminToken, http.MethodGet, path, "", "")
	if err != nil {
		return "", false, err
	}
	var list struct {
		Resources []struct {
			Name, Kind string
			Namespaced bool
		}
	}
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return "", false, fmt.Errorf("status %d: %w", status, err)
	}
	for _, r := range list.Resources {
		if r.Kind == kind && !strings.Contains(r.Name, "/") {
			return r.Name, r.Namespaced, nil
		}
	}
	return "", false, fmt.Errorf("no kind %q in %s", kind, path)
}

// mustApply creates all documents of a text.
func (c *cluster) mustApply(text string) {
	c.t.Helper()
	for _, doc := range documents(text) {
		status, answer := c.create(doc, "")
		require.Less(c.t, status, 300, "%s\n%.600s", doc, answer)
	}
}

// install installs the CRDs of files, and waits until the API server serves them.
func (c *cluster) install(files ...string) {
	c.t.Helper()
	require.NotEmpty(c.t, files)
	for _, file := range files {
		for _, doc := range documents(c.file(file)) {
			if strings.Contains(doc, "\nkind: CustomResourceDefinition") {
				status, answer := c.create(doc, "")
				require.Less(c.t, status, 300, "%s: %.600s", file, answer)
			}
		}
	}
	require.Eventually(c.t, func() bool {
		var list struct {
			Items []struct {
				Status struct {
					Conditions []struct{ Type, Status string }
				}
			}
		}
		text := c.must(http.MethodGet, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "", "")
		if json.NewDecoder(bytes.NewReader([]byte(text))).Decode(&list) != nil {
			return false
		}
		for _, crd := range list.Items {
			served := false
			for _, condition := range crd.Status.Conditions {
				served = served || condition.Type == "Established" && condition.Status == "True"
			}
			if !served {
				return false
			}
		}
		return true
	}, time.Minute, 50*time.Millisecond, "CRDs are not established")
}
