package e2e

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// shownEnvoy is a replica's status of an Envoy that it serves.
type shownEnvoy struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Pending bool   `json:"pending"`
	Refused string `json:"refused"`
}

// envoys returns the Envoys that replica i serves.
func (f *fleet) envoys(i int) []shownEnvoy {
	f.t.Helper()
	var s struct {
		Envoys []shownEnvoy `json:"envoys"`
	}
	require.NoError(f.t, getJSON(f.admins[i]+"/status.json", &s))
	return s.Envoys
}

// envoyStat returns one of Envoy's counters.
func (f *fleet) envoyStat(name string) int {
	f.t.Helper()
	resp, err := http.Get(f.envoyURL + "/stats?filter=^" + name + "$")
	require.NoError(f.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(f.t, err)
	_, value, _ := strings.Cut(strings.TrimSpace(string(text)), ": ")
	n, err := strconv.Atoi(value)
	require.NoError(f.t, err, "%s: %s", name, text)
	return n
}

// reloadAll writes the configuration of every replica and makes it reload.
func (f *fleet) reloadAll(change func(text string) string) {
	f.t.Helper()
	for i, p := range f.tandems {
		file := filepath.Join(f.dir, fmt.Sprintf("tandem-%d.yaml", i))
		text, err := os.ReadFile(file)
		require.NoError(f.t, err)
		require.NoError(f.t, os.WriteFile(file+".new", []byte(change(string(text))), 0o600))
		require.NoError(f.t, os.Rename(file+".new", file))
		require.NoError(f.t, p.cmd.Process.Signal(syscall.SIGHUP))
	}
}

// An Envoy that gets its configuration from Tandem is changed ten times a second while clients send a thousand
// requests, and none is lost: limits and body modes, replicas that come and go, pools.
func TestXDSChangesUnderLoad(t *testing.T) {
	t.Parallel()
	f := start(t, options{xds: true, replicas: 2, engineArgs: []string{"--decode-step", "1ms", "--lease", "10s"},
		envoyFields: ", bodyMode: auto, decodeIdleTimeout: 30m"})
	both := regexp.MustCompile(`extProcs: \[([^,]*), ([^]]*)\], replans: \[([^,]*), ([^]]*)\]`)
	text, err := os.ReadFile(f.config)
	require.NoError(t, err)
	list := both.FindStringSubmatch(string(text))
	require.NotNil(t, list)
	one := fmt.Sprintf("extProcs: [%s], replans: [%s]", list[1], list[3])
	began := time.Now()
	long := make(chan string, 1) // an answer that outlasts many listeners
	go func() {
		got, err := f.try(t.Context(), http.MethodPost, "/v1/chat/completions", `{"model":"tiny","stream":true,"ignore_eos":true,`+
			`"min_tokens":10000,"max_tokens":10000,"messages":[{"role":"user","content":"Tell me all."}]}`)
		long <- fmt.Sprint(got.status, err, got.body[max(0, len(got.body)-16):])
	}()
	load := f.wholeTraffic(8)
	n := 1
	for ; load.asked.Load() < 1000; n++ {
		f.reloadAll(func(text string) string {
			text = regexp.MustCompile(`decodeIdleTimeout: [0-9a-z]+`).ReplaceAllString(text,
				fmt.Sprintf("decodeIdleTimeout: %ds", 1800+n))
			switch n % 6 {
			case 1:
				text = strings.Replace(text, "bodyMode: auto", "bodyMode: duplex", 1)
			case 2:
				text = strings.Replace(text, list[0], one, 1)
			case 3:
				text = strings.Replace(text, "bodyMode: duplex", "bodyMode: auto", 1)
			case 4:
				text = strings.Replace(text, one, list[0], 1)
			case 5:
				text += "- name: other\n  models: [other]\n  kvTransfer: none\n  endpoints: [{address: " +
					"\"127.0.0.1:1\", scheme: https}]\n"
			case 0:
				text, _, _ = strings.Cut(text, "- name: other")
			}
			return text
		})
		time.Sleep(100 * time.Millisecond) // ten changes a second
	}
	load.end(t)
	require.Empty(t, long, "the long answer is under way all the time")
	require.Equal(t, "200 <nil>\n\ndata: [DONE]\n\n", <-long)
	t.Logf("%d changes in %v, of which Envoy took %d of routes, %d of listeners, %d of clusters", n,
		time.Since(began).Round(time.Second),
		f.envoyStat("http.openai.rds.openai.config_reload"), f.envoyStat("listener_manager.lds.update_success"),
		f.envoyStat("cluster_manager.cds.update_success"))
	require.Greater(t, f.envoyStat("http.openai.rds.openai.config_reload"), n/2, "Envoy was changed")
	require.Greater(t, f.envoyStat("listener_manager.lds.update_success"), 2)
	require.Zero(t, f.envoyStat("listener_manager.lds.update_rejected")+f.envoyStat("cluster_manager.cds.update_rejected"))
	soon(t, "Envoy has answered to the last", func() bool {
		for i := range f.tandems {
			for _, e := range f.envoys(i) {
				if !e.Pending && e.Refused == "" && e.Version != "" {
					return true
				}
			}
		}
		return false
	})
}

// With client certificates strangers cannot read the configuration, and Envoy loads a changed certificate.
func TestXDSOverMutualTLS(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cert, key, ca := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"), filepath.Join(t.TempDir(), "ca.pem")
	var authorities []byte // both are trusted from the start, as a new certificate of the same authority would be
	for _, serial := range []int64{0x1111, 0x2222} {
		file := filepath.Join(dir, fmt.Sprintf("%x", serial))
		selfSigned(t, file, file+".key", serial)
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		authorities = append(authorities, text...)
	}
	require.NoError(t, os.WriteFile(ca, authorities, 0o600))
	put := func(serial string) {
		require.NoError(t, os.Rename(filepath.Join(dir, serial+".key"), key))
		require.NoError(t, os.Rename(filepath.Join(dir, serial), cert))
	}
	put("1111")
	f := start(t, options{xds: true,
		extProcFields: fmt.Sprintf(", tls: {certFile: %q, keyFile: %q, clientCaFile: %q}", cert, key, ca),
		envoyFields:   fmt.Sprintf(", extProcTls: {caFile: %q, serverName: tandem.test, certFile: %q, keyFile: %q}", ca, cert, key),
	})
	require.Equal(t, 200, f.post(apis[0].path, apis[0].body).status)
	require.Len(t, f.envoys(0), 1)
	require.Equal(t, "edge-1", f.envoys(0)[0].Name)

	text, err := os.ReadFile(f.config)
	require.NoError(t, err)
	address := string(regexp.MustCompile(`extProc: \{listen: "([^"]+)"`).FindSubmatch(text)[1])
	stranger, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	require.NoError(t, err)
	defer stranger.Close()
	_, err = stranger.Read(make([]byte, 1))
	require.ErrorContains(t, err, "certificate required")

	certificates := func() string {
		resp, err := http.Get(f.envoyURL + "/certs")
		require.NoError(t, err)
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return string(text)
	}
	used := func() int { return strings.Count(certificates(), `"serial_number": "2222"`) } // counts authorities too
	before := used()
	put("2222")
	soon(t, "Envoy has the new certificate", func() bool { return used() > before })
	require.Equal(t, 200, f.post(apis[0].path, apis[0].body).status)
}
