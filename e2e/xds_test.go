package e2e

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
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
	f := start(t, options{xds: true, replicas: 2, top: startRedis(t).yaml(), engineArgs: []string{"--decode-step", "1ms", "--lease", "10s"},
		envoyFields: ", bodyMode: auto, decodeIdleTimeout: 30m"})
	both := regexp.MustCompile(`extProcs: \[([^,]*), ([^]]*)\], replans: \[([^,]*), ([^]]*)\]`)
	text, err := os.ReadFile(f.config)
	require.NoError(t, err)
	list := both.FindStringSubmatch(string(text))
	require.NotNil(t, list)
	one := fmt.Sprintf("extProcs: [%s], replans: [%s]", list[1], list[3])
	began := time.Now()
	var changes, outlasted atomic.Int64
	long := make(chan string, 1) // an answer that outlasts many listeners
	go func() {
		got, err := f.try(t.Context(), http.MethodPost, "/v1/chat/completions", `{"model":"tiny","stream":true,"ignore_eos":true,`+
			`"min_tokens":30000,"max_tokens":30000,"messages":[{"role":"user","content":"Tell me all."}]}`)
		outlasted.Store(changes.Load())
		long <- fmt.Sprint(got.status, err, got.body[max(0, len(got.body)-16):])
	}()
	load := f.wholeTraffic(8)
	n := 1
	for ; load.asked.Load() < 1000; n++ {
		changes.Store(int64(n))
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
	took := time.Since(began)
	load.end(t)
	require.Equal(t, "200 <nil>\n\ndata: [DONE]\n\n", <-long)
	require.Greater(t, outlasted.Load(), int64(6), "the long answer was under way while all kinds of changes were made")
	t.Logf("%d changes in %v, of which Envoy took %d of routes, %d of listeners, %d of clusters", n,
		took.Round(100*time.Millisecond),
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

// A replica that joins decides requests of connections from before, too, and their listener tells only the others how
// they ended: these tell it, through Redis. A connection outlives a change of listeners for as long as Envoy drains.
func TestAReplicaJoinsOldConnections(t *testing.T) {
	t.Parallel()
	redis := startRedis(t)
	f := start(t, options{xds: true, replicas: 2, top: redis.yaml()})
	text, err := os.ReadFile(f.config)
	require.NoError(t, err)
	list := regexp.MustCompile(`extProcs: \[([^,]*), [^]]*\], replans: \[([^,]*), [^]]*\]`).FindStringSubmatch(string(text))
	require.NotNil(t, list)
	one := fmt.Sprintf("extProcs: [%s], replans: [%s]", list[1], list[2])
	listeners := func() int { return f.envoyStat("listener_manager.lds.update_success") }
	change := func(from, to string) {
		before := listeners()
		f.reloadAll(func(text string) string { return strings.Replace(text, from, to, 1) })
		soon(t, "Envoy has new listeners", func() bool { return listeners() > before })
	}
	change(list[0], one)
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 1}, Timeout: patience}
	ask := func() {
		resp, err := client.Post(f.url+"/v1/chat/completions", "application/json",
			strings.NewReader(`{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"Tell me all."}]}`))
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, 200, resp.StatusCode)
	}
	ask() // the connection
	change(one, list[0])
	decided := func() float64 { return metric(t, f.admins[1], "tandem_decisions_total") }
	soon(t, "Envoy asks the replica that joined", func() bool {
		f.post("/v1/chat/completions", `{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"A new connection."}]}`)
		return decided() > 0
	})
	before := decided()
	for range 40 {
		ask()
	}
	require.Greater(t, decided(), before+5, "the replica that joined has decided some of them")
	f.account()
}

// With client certificates strangers cannot read the configuration, and Envoy loads a changed certificate while clients
// send requests.
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
	load := f.wholeTraffic(4)
	load.more(t, 50)
	put("2222")
	soon(t, "Envoy has the new certificate", func() bool { return used() > before })
	load.more(t, 100)
	load.end(t) // no request is lost
}

// launchMore starts a replica in addition to replica 0; no other file names it.
func (f *fleet) launchMore() (extProc string) {
	f.t.Helper()
	text, err := os.ReadFile(filepath.Join(f.dir, "tandem-0.yaml"))
	require.NoError(f.t, err)
	a := ports(f.t, 3)
	for i, key := range []string{"extProc", "replan", "admin"} {
		listen := regexp.MustCompile(`(?m)^` + key + `: \{listen: "[^"]+"`)
		require.True(f.t, listen.Match(text), key)
		text = listen.ReplaceAll(text, fmt.Appendf(nil, "%s: {listen: %q", key, a[i]))
	}
	i := len(f.tandems)
	file := filepath.Join(f.dir, fmt.Sprintf("tandem-%d.yaml", i))
	require.NoError(f.t, os.WriteFile(file, text, 0o600))
	f.startTandem(i, file, "http://"+a[2])
	return a[0]
}

// has reports whether Envoy has the replica at an address: it asks it, and sends it the access log.
func (f *fleet) has(extProc string) (asked, logged bool) {
	f.t.Helper()
	resp, err := http.Get(f.envoyURL + "/clusters")
	require.NoError(f.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(f.t, err)
	return strings.Contains(string(text), "tandem-extproc::"+extProc+"::"),
		regexp.MustCompile(`(?m)^tandem-accesslog-[^:]+::` + regexp.QuoteMeta(extProc) + `::`).Match(text)
}

// Replicas come and go while clients send requests and the configuration changes ten times a second: Envoy follows
// without anything being edited, and no request is lost.
func TestXDSChangesFollowReplicas(t *testing.T) {
	t.Parallel()
	r := startRedis(t)
	f := start(t, options{xds: true, replicas: 2, engineArgs: []string{"--decode-step", "1ms", "--lease", "10s"},
		envoyFields: ", replicas: redis, decodeIdleTimeout: 30m", serveArgs: []string{"--linger", "2s"},
		top: fmt.Sprintf("state: {redis: {url: \"redis://%s\", lease: 1s}}\n", r.addr)})
	text, err := os.ReadFile(f.config)
	require.NoError(t, err)
	first := regexp.MustCompile(`extProcs: \["([^"]*)"`).FindSubmatch(text)
	require.NotNil(t, first)

	soon(t, "Envoy has both replicas", func() bool { return f.envoyStat("cluster.tandem-extproc.membership_total") == 2 })
	listeners := f.envoyStat("listener_manager.listener_modified")
	load := f.wholeTraffic(8)
	stop, stopped := make(chan struct{}), make(chan int)
	changed := slices.Clone(f.tandems) // which grows meanwhile
	go func() {                        // ten changes a second, also while replicas start and stop
		for n := 1; ; n++ {
			select {
			case <-stop:
				stopped <- n
				return
			case <-time.After(100 * time.Millisecond):
			}
			for i, p := range changed {
				file := filepath.Join(f.dir, fmt.Sprintf("tandem-%d.yaml", i))
				text, err := os.ReadFile(file)
				if err == nil {
					text = regexp.MustCompile(`decodeIdleTimeout: [0-9a-z]+`).ReplaceAll(text,
						fmt.Appendf(nil, "decodeIdleTimeout: %ds", 1800+n))
					_ = os.WriteFile(file+".new", text, 0o600)
					_ = os.Rename(file+".new", file)
				}
				_ = p.cmd.Process.Signal(syscall.SIGHUP)
			}
		}
	}()
	third := f.launchMore()
	soon(t, "Envoy has the third replica", func() bool { asked, logged := f.has(third); return asked && logged })
	load.turn(t)
	soon(t, "the third replica decides", func() bool { return metric(t, f.admins[2], "tandem_decisions_total") > 0 })
	load.more(t, 200)

	go f.tandems[0].stop(syscall.SIGTERM) // drains; nobody's file changes
	soon(t, "the first replica is gone", func() bool { return !f.tandems[0].running() })
	soon(t, "Envoy does not know it any more", func() bool {
		asked, logged := f.has(string(first[1]))
		return !asked && !logged
	})
	load.more(t, max(1000-load.asked.Load(), 200))
	close(stop)
	t.Logf("%d changes, of which Envoy took %d of routes", <-stopped, f.envoyStat("http.openai.rds.openai.config_reload"))
	load.end(t)
	require.Zero(t, f.envoyStat("listener_manager.lds.update_rejected")+
		f.envoyStat("cluster_manager.cds.update_rejected")+f.envoyStat("runtime.load_error"))
	require.Equal(t, listeners, f.envoyStat("listener_manager.listener_modified"), "no connection has to end")
}

// When all replicas die, a running Envoy keeps its configuration: answers go on, and new requests get an error that
// says to try again. When a replica is back, it serves, and Envoy is sent nothing.
func TestXDSWithoutReplicas(t *testing.T) {
	t.Parallel()
	stats := ports(t, 1)[0]
	f := start(t, options{xds: true, replicas: 2, engineArgs: []string{"--decode-step", "10ms", "--lease", "10s"},
		envoyFields: fmt.Sprintf(", stats: %q", stats)})
	version := ""
	soon(t, "Envoy has its configuration", func() bool {
		for i := range f.tandems {
			for _, e := range f.envoys(i) {
				if !e.Pending {
					version = e.Version
				}
			}
		}
		return version != ""
	})
	listeners := f.envoyStat("listener_manager.listener_modified")
	began, long := make(chan struct{}), make(chan string, 1)
	go func() { // an answer of ten seconds
		resp, err := http.Post(f.url+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"tiny",`+
			`"stream":true,"ignore_eos":true,"min_tokens":1000,"max_tokens":1000,"messages":[{"role":"user","content":"All."}]}`))
		close(began)
		if err != nil {
			long <- err.Error()
			return
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		long <- fmt.Sprint(resp.StatusCode, err, string(text[max(0, len(text)-16):]))
	}()
	<-began
	for _, p := range f.tandems {
		p.stop(syscall.SIGKILL)
	}
	soon(t, "clients are told to try again", func() bool {
		got := f.post(apis[0].path, apis[0].body)
		return got.status == 503 && strings.Contains(got.body, "router_unavailable") && got.header.Get("Retry-After") == "1"
	})
	require.Equal(t, 200, f.statusOf("http://"+stats+"/ready"), "it keeps its configuration")
	require.Equal(t, 200, f.statusOf("http://"+stats+"/stats/prometheus"))
	for _, path := range []string{"/", "/config_dump", "/quitquitquit", "/ready/../stats", "/stats"} {
		require.Equal(t, 404, f.statusOf("http://"+stats+path), "%s of the admin port is not shown", path)
	}
	for _, path := range []string{"/v1/models", "/v1/completions", "/any/other"} {
		require.Equal(t, 503, f.statusOf(f.url+path), "%s: never a 404, which would be final", path)
	}
	require.Equal(t, "200 <nil>\n\ndata: [DONE]\n\n", <-long)

	f.startTandem(0, filepath.Join(f.dir, "tandem-0.yaml"), f.admins[0])
	soon(t, "requests are served again", func() bool { return f.post(apis[0].path, apis[0].body).status == 200 })
	soon(t, "Envoy gets its configuration from the replica that is back", func() bool {
		e := f.envoys(0)
		return len(e) == 1 && !e[0].Pending && e[0].Version == version
	})
	require.Equal(t, listeners, f.envoyStat("listener_manager.listener_modified"), "nothing has changed")
}

// statusOf returns the status of an answer to GET.
func (f *fleet) statusOf(url string) int {
	f.t.Helper()
	resp, err := http.Get(url)
	require.NoError(f.t, err)
	defer resp.Body.Close()
	return resp.StatusCode
}
