package discovery

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

func addrs(s *kvstate.State, pool string) []string {
	var out []string
	for _, e := range s.Pool(pool).Endpoints() {
		out = append(out, e.Addr)
	}
	return out
}

func ips(all ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range all {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// names makes a source whose look-ups are answered from a map; no entry is an error.
func names(s *kvstate.State, answers map[string][]netip.Addr, configured ...string) *Static {
	return asking(s, func(host string) []netip.Addr { return answers[host] }, configured...)
}

// asking makes a source whose look-ups are answered by a function; nil is an error.
func asking(s *kvstate.State, answer func(host string) []netip.Addr, configured ...string) *Static {
	var eps []kvstate.EndpointSpec
	for _, c := range configured {
		eps = append(eps, kvstate.EndpointSpec{Name: c, Role: kvstate.RoleBoth})
	}
	source := NewStatic(s, kvstate.PoolSpec{Name: "p"}, eps, slog.New(slog.DiscardHandler))
	source.lookup = func(_ context.Context, host string) ([]netip.Addr, error) {
		if a := answer(host); a != nil {
			return a, nil
		}
		return nil, errors.New("no such host")
	}
	return source
}

func TestResolve(t *testing.T) {
	for _, c := range []struct {
		name       string
		configured []string
		answers    map[string][]netip.Addr
		want       []string
	}{
		{"addresses", []string{"10.0.0.1:80", "[2001:db8::1]:81", "[::ffff:10.0.0.2]:82"}, nil,
			[]string{"10.0.0.1:80", "[2001:db8::1]:81", "10.0.0.2:82"}},
		{"several addresses, in order", []string{"pods:80"}, map[string][]netip.Addr{"pods": ips("10.0.0.2", "10.0.0.1", "::ffff:10.0.0.2")},
			[]string{"10.0.0.1:80", "10.0.0.2:80"}},
		{"both families", []string{"localhost:80"}, map[string][]netip.Addr{"localhost": ips("::1", "127.0.0.1")}, []string{"127.0.0.1:80"}},
		{"IPv6 alone", []string{"six:80"}, map[string][]netip.Addr{"six": ips("2001:db8::2", "2001:db8::1")},
			[]string{"[2001:db8::1]:80", "[2001:db8::2]:80"}},
		{"two names of one endpoint", []string{"a:80", "b:80", "a:81"}, map[string][]netip.Addr{"a": ips("10.0.0.1"), "b": ips("10.0.0.1")},
			[]string{"10.0.0.1:80", "10.0.0.1:81"}},
		{"a name nobody knows", []string{"gone:80", "10.0.0.1:80"}, nil, []string{"10.0.0.1:80"}},
		{"an empty answer", []string{"empty:80"}, map[string][]netip.Addr{"empty": {}}, nil},
		{"not an address", []string{"nonsense", "10.0.0.1:80"}, nil, []string{"10.0.0.1:80"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := kvstate.New(kvstate.Options{})
			names(s, c.answers, c.configured...).Resolve(t.Context())
			require.Equal(t, c.want, addrs(s, "p"))
		})
	}
}

// An endpoint has a name of its own for people: a name of several is shown by none.
func TestNamesTellEndpointsApart(t *testing.T) {
	s := kvstate.New(kvstate.Options{})
	answers := map[string][]netip.Addr{"pods": ips("10.0.0.1", "10.0.0.2"), "one": ips("10.0.0.3")}
	shown := func() (out []string) {
		for _, e := range s.Pool("p").Endpoints() {
			out = append(out, e.DisplayName())
		}
		return out
	}
	source := names(s, answers, "pods:80", "one:80")
	source.Resolve(t.Context())
	require.Equal(t, []string{"10.0.0.1:80", "10.0.0.2:80", "one:80"}, shown())
	require.Len(t, s.Pool("p").Find("pods:80"), 2, "an order by the name is for all of its endpoints")
	answers["pods"] = ips("10.0.0.2")
	source.Resolve(t.Context())
	require.Equal(t, []string{"pods:80", "one:80"}, shown())
}

func TestStaticWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := kvstate.New(kvstate.Options{})
		var dns atomic.Pointer[[]netip.Addr]
		set := func(all []netip.Addr) { dns.Store(&all) }
		set(ips("10.0.0.1", "10.0.0.2"))
		source := asking(s, func(string) []netip.Addr { return *dns.Load() }, "pods:80")
		source.Resolve(t.Context())
		stays, goes := s.Pool("p").Endpoints()[0], s.Pool("p").Endpoints()[1]
		booked := s.Bookings.Reserve(goes, kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 10})
		ctx, stop := context.WithCancel(t.Context())
		go source.Run(ctx)
		later := func(now []netip.Addr) {
			set(now)
			<-time.After(resolveEvery + time.Millisecond)
			synctest.Wait()
		}
		later(ips("10.0.0.3", "10.0.0.1"))
		require.Equal(t, []string{"10.0.0.1:80", "10.0.0.3:80"}, addrs(s, "p"))
		require.Same(t, stays, s.Pool("p").Endpoints()[0])
		require.True(t, s.Bookings.Release(booked), "what runs on an endpoint that left ends as usual")
		requests, _ := goes.Load()
		require.Zero(t, requests)

		pool := s.Pool("p")
		later(nil) // DNS is gone
		require.Same(t, pool, s.Pool("p"), "nothing changed, nothing written")
		later(ips("10.0.0.4"))
		require.Equal(t, []string{"10.0.0.4:80"}, addrs(s, "p"))
		stop()
	})
}

// A name server that does not answer costs one timeout, however many names there are.
func TestResolveWaitsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := kvstate.New(kvstate.Options{})
		source := names(s, nil, "a:1", "b:1", "c:1", "c:2", "10.0.0.1:1")
		asked := make(chan string, 10)
		source.lookup = func(ctx context.Context, host string) ([]netip.Addr, error) {
			asked <- host
			<-ctx.Done()
			return nil, ctx.Err()
		}
		begun := time.Now()
		source.Resolve(t.Context())
		require.Equal(t, resolveTimeout, time.Since(begun))
		require.Len(t, asked, 3)
		require.Equal(t, []string{"10.0.0.1:1"}, addrs(s, "p"))
	})
}

func TestStaticWithoutNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := names(kvstate.New(kvstate.Options{}), nil, "10.0.0.1:1")
		ctx, stop := context.WithCancel(t.Context())
		go source.Run(ctx)
		synctest.Wait()
		stop()
	})
}

// A replaced source writes the same endpoints again, as the pool has changed, and logs only other endpoints.
func TestStaticReplaced(t *testing.T) {
	s := kvstate.New(kvstate.Options{})
	var log strings.Builder
	of := func(addrs ...string) (out []kvstate.EndpointSpec) {
		for _, a := range addrs {
			out = append(out, kvstate.EndpointSpec{Name: a, Addr: a, Role: kvstate.RoleBoth})
		}
		return out
	}
	source := NewStatic(s, kvstate.PoolSpec{Name: "p", Models: []string{"a"}}, of("10.0.0.1:80", "10.0.0.2:80"),
		slog.New(slog.NewTextHandler(&log, nil)))
	source.Resolve(t.Context())
	source = source.Replace(kvstate.PoolSpec{Name: "p", Models: []string{"b"}}, of("10.0.0.1:80", "10.0.0.2:80"))
	source.Resolve(t.Context())
	require.Equal(t, []string{"b"}, s.Pool("p").Spec.Models)
	require.NotContains(t, log.String(), "endpoints changed")
	source.Replace(source.spec, of("10.0.0.1:80")).Resolve(t.Context())
	require.Contains(t, log.String(), `msg="endpoints changed" pool=p before=2 now=1`)
}
