package discovery

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"tandem/kvstate"
)

func TestEndpointsFile(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"endpoints: [{address: 10.0.0.1:80, role: prefill, group: a}, {address: 'x:1'}]", ""},
		{`{"endpoints": [{"address": "[2001:db8::1]:80", "role": "decode"}]}`, ""},
		{"", "it names no endpoints"},
		{"endpoints: []", "it names no endpoints"},
		{"endpoint: []", `unknown field "endpoint"`},
		{"endpoints: [{address: 10.0.0.1}]", `endpoints[0].address: "10.0.0.1" is not ip:port`},
		{"endpoints: [{address: ':80'}]", `endpoints[0].address: ":80" is not ip:port`},
		{"endpoints: [{address: 'a:1', role: encoder}]", `endpoints[0].role: "encoder" is not a role`},
		{"endpoints: [{address: 'a:1', rank: 1}]", `unknown field "rank"`},
		{"endpoints: [{address: 'a:1', dataParallelRanks: 8}]", ""},
		{"endpoints: [{address: 'a:1', dataParallelRanks: 9}]", "endpoints[0].dataParallelRanks: 9 is not between 0 and 8"},
		{"endpoints: [{address: 'a:1', dataParallelRanks: -1}]", "endpoints[0].dataParallelRanks: -1"},
	} {
		eps, err := ParseEndpoints([]byte(c.text), "h2c", 8)
		if c.want != "" {
			require.ErrorContains(t, err, c.want, c.text)
			continue
		}
		require.NoError(t, err, c.text)
		require.Equal(t, "h2c", eps[0].Scheme)
	}
}

func FuzzParseEndpoints(f *testing.F) {
	f.Add([]byte("endpoints: [{address: 10.0.0.1:80, role: prefill}]"))
	f.Fuzz(func(t *testing.T, text []byte) {
		eps, err := ParseEndpoints(text, "http", 8)
		require.Equal(t, err != nil, len(eps) == 0)
		for _, e := range eps {
			_, _, err := net.SplitHostPort(e.Name)
			require.NoError(t, err)
			require.NotZero(t, e.Role)
		}
	})
}

// A file is replaced as Kubernetes does it with a ConfigMap, broken, and removed.
func TestFileIsWatched(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "endpoints.yaml")
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
		require.NoError(t, os.Symlink(name, link+".new"))
		require.NoError(t, os.Rename(link+".new", link))
	}
	write("1", "endpoints: [{address: 10.0.0.1:80, role: prefill}, {address: 10.0.0.2:80, role: decode}]")
	synctest.Test(t, func(t *testing.T) {
		s := kvstate.New(kvstate.Options{})
		source := NewFile(s, kvstate.PoolSpec{Name: "p"}, link, "http", 2, quiet())
		source.Resolve(t.Context())
		require.Equal(t, []string{"10.0.0.1:80", "10.0.0.2:80"}, addrs(s, "p"))
		ctx, stop := context.WithCancel(t.Context())
		go source.Run(ctx)
		later := func() { time.Sleep(fileCheckEvery + time.Millisecond); synctest.Wait() }

		write("ranks", "endpoints: [{address: 10.0.0.1:80, dataParallelRanks: 2}]")
		later()
		require.Equal(t, []string{"10.0.0.1:80#0", "10.0.0.1:80#1"}, addrs(s, "p"))
		write("2", "endpoints: [{address: 10.0.0.3:80}]")
		later()
		require.Equal(t, []string{"10.0.0.3:80"}, addrs(s, "p"))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "2"), []byte("endpoi"), 0o600))
		later()
		require.Equal(t, []string{"10.0.0.3:80"}, addrs(s, "p"), "half a file changes nothing")
		require.NoError(t, os.Remove(link))
		later()
		require.Equal(t, []string{"10.0.0.3:80"}, addrs(s, "p"), "no file changes nothing")
		write("3", "endpoints: [{address: 10.0.0.4:80}]")
		later()
		require.Equal(t, []string{"10.0.0.4:80"}, addrs(s, "p"))
		stop()
	})
}

func TestFileThatIsTooLong(t *testing.T) {
	file := filepath.Join(t.TempDir(), "endpoints.yaml")
	require.NoError(t, os.WriteFile(file, []byte(strings.Repeat("#", maxEndpointsFile+1)), 0o600))
	_, err := readAtMost(file, maxEndpointsFile)
	require.ErrorContains(t, err, "more than")
}

// Headless services: addresses of a name, and SRV records whose targets are names themselves.
func TestDNS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := kvstate.New(kvstate.Options{})
		d := NewDNS(s, kvstate.PoolSpec{Name: "p"}, []Name{
			{Host: "prefill.svc", Port: 8000, Role: kvstate.RolePrefill, Group: "a"},
			{Host: "_http._tcp.decode.svc", Role: kvstate.RoleDecode, Scheme: "h2c"},
		}, quiet())
		var zone sync.Mutex // guards the names
		known := map[string][]netip.Addr{"prefill.svc": ips("10.0.0.1", "10.0.0.2"), "d-0.svc": ips("10.0.1.1"), "d-1.svc": ips("10.0.1.2")}
		records := []*net.SRV{{Target: "d-1.svc.", Port: 8200}, {Target: "d-0.svc.", Port: 8200}, {Target: "d-0.svc.", Port: 8201}}
		d.lookup = func(_ context.Context, host string) ([]netip.Addr, error) {
			zone.Lock()
			defer zone.Unlock()
			if a := known[host]; a != nil {
				return a, nil
			}
			return nil, errors.New("no such host")
		}
		d.srv = func(context.Context, string) ([]*net.SRV, error) {
			zone.Lock()
			defer zone.Unlock()
			if records == nil {
				return nil, errors.New("server misbehaving")
			}
			return records, nil
		}
		d.Resolve(t.Context())
		all := s.Pool("p").Endpoints()
		require.Equal(t, []string{"10.0.1.1:8200", "10.0.1.1:8201", "10.0.1.2:8200", "10.0.0.1:8000", "10.0.0.2:8000"}, addrs(s, "p"), "those of a group stand together")
		require.Equal(t, kvstate.RoleDecode, all[0].Role)
		require.Equal(t, "h2c", all[0].Scheme)
		require.Equal(t, kvstate.RolePrefill, all[3].Role)

		ctx, stop := context.WithCancel(t.Context())
		go d.Run(ctx)
		later := func() { time.Sleep(resolveEvery + time.Millisecond); synctest.Wait() }
		zone.Lock()
		records = nil
		zone.Unlock()
		later()
		require.Len(t, addrs(s, "p"), 5, "a name server that fails changes nothing")
		zone.Lock()
		records = []*net.SRV{{Target: "d-2.svc.", Port: 8200}}
		known["d-2.svc"] = ips("10.0.1.3")
		zone.Unlock()
		later()
		require.Equal(t, []string{"10.0.1.3:8200", "10.0.0.1:8000", "10.0.0.2:8000"}, addrs(s, "p"))
		require.NotContains(t, d.known, "d-0.svc", "pods' names are not kept for ever")
		stop()
	})
}

// Properties that distinguish endpoints besides their roles: zones, adapters, labels.
func TestWhereAndWhat(t *testing.T) {
	eps, err := ParseEndpoints([]byte(`endpoints: [{address: "10.0.0.1:1", role: decode, zone: eu-1a, loras: [sql, chat], labels: [gpu=h200, tier=gold], apiKeyFile: k}]`), "http", 0)
	require.NoError(t, err)
	require.Equal(t, []kvstate.EndpointSpec{{Name: "10.0.0.1:1", Scheme: "http", Role: kvstate.RoleDecode, Zone: "eu-1a", LoRAs: "sql,chat", Labels: "gpu=h200,tier=gold", Access: kvstate.Access{KeyFile: "k"}}}, eps)
	require.True(t, eps[0].HasLoRA("chat"))
	require.False(t, eps[0].HasLoRA("sq"))
	require.False(t, eps[0].HasLoRA(""))

	labels, err := Conventions("llm-d")
	require.NoError(t, err)
	labels.Zone, labels.Keep = "topology.kubernetes.io/zone", []string{"gpu", "tier"}
	p := podPool{ports: []int{8000}, labels: labels}
	pods := []*corev1.Pod{pod("a", "10.0.0.1", map[string]string{"topology.kubernetes.io/zone": "eu-1b", "gpu": "h100", "app": "vllm"}), pod("b", "10.0.0.2", nil)}
	found := p.endpoints(pods)
	require.Equal(t, "eu-1b", found[0].Zone)
	require.True(t, found[0].HasLabel("gpu=h100"))
	require.False(t, found[0].HasLabel("app=vllm"), "not one that was asked for")
	require.Empty(t, found[1].Zone+found[1].Labels)
}
