package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// cleaning returns options of a fleet whose engines keep blocks for minutes, as vLLM before 0.22 does, and whose pool
// cleans up.
func cleaning(o options) options {
	o.engineArgs = append([]string{"--lease", "480s", "--record-count", "20000", "--record-body", "0"}, o.engineArgs...)
	o.pool += "  strandedBlocks: cleanupDecode\n"
	o.serveArgs = []string{"-log", "debug"}
	return o
}

// held returns the x-request-ids of the hand-overs that prefill engines hold, and the number of all hand-overs.
func (f *fleet) held() (ids []string, given int) {
	for _, e := range f.prefills {
		var state struct {
			HeldFor []string `json:"held_for"`
			Given   int
		}
		require.NoError(f.t, getJSON("http://"+e.addr+"/sim/state", &state))
		ids, given = append(ids, state.HeldFor...), given+state.Given
	}
	return ids, given
}

// sum returns a metric of all replicas.
func (f *fleet) sum(name string, labels ...string) (n float64) {
	for _, admin := range f.admins {
		n += metric(f.t, admin, name, labels...)
	}
	return n
}

// cleanedUp waits until every orphaned hand-over with known parameters was cleaned up, and returns the number of
// cleanups.
func (f *fleet) cleanedUp() int {
	soon(f.t, "nothing is under way", func() bool {
		for _, e := range f.engines() {
			if metric(f.t, "http://"+e.addr, "vllm:num_requests_running")+metric(f.t, "http://"+e.addr, "vllm:num_requests_waiting") > 0 {
				return false
			}
		}
		return f.sum("tandem_reservations") == 0
	})
	n := 0.0
	soon(f.t, "everything stranded is cleaned up", func() bool {
		stranded := f.sum("tandem_handovers_orphaned_total")
		for _, reason := range []string{"answer_cut", "decode_failed"} { // about which nothing is known, or nothing for certain
			stranded -= f.sum("tandem_handovers_orphaned_total", `reason="`+reason+`"`)
		}
		n = f.sum("tandem_cleanup_decodes_total")
		return n >= stranded
	})
	require.InDelta(f.t, n, f.sum("tandem_cleanup_decodes_total", `result="ok"`), 0)
	return int(n)
}

// decodeLegs returns the decode legs of each request, its cleanup among them, and the number of cleanups.
func (f *fleet) decodeLegs() (legs map[string][]seen, cleanups int) {
	legs = map[string][]seen{}
	for _, e := range f.decodes {
		var list []seen
		require.NoError(f.t, getJSON("http://"+e.addr+"/sim/requests", &list))
		for _, l := range list {
			if l.Leg == "decode" {
				legs[l.RequestID] = append(legs[l.RequestID], l)
			}
			if l.Path == "/v1/completions" {
				cleanups++
			}
		}
		require.Zero(f.t, metric(f.t, "http://"+e.addr, "enginesim_violations_total"), "violations on %s", e.addr)
	}
	return legs, cleanups
}

// Clients leave at any moment. The only unfetched blocks that stay held are those that Tandem could not know of
// (docs/operations.md, TandemHandoversOrphaned): P's answer never reached Tandem completely, because Envoy had cut the
// leg; or D had the request, and gave it up before its scheduler saw it.
func TestNoBlocksStayOrphaned(t *testing.T) {
	t.Parallel()
	for _, replicas := range []int{1, 2} { // two that share nothing: one of them acts
		t.Run(fmt.Sprintf("replicas %d", replicas), func(t *testing.T) {
			t.Parallel()
			leaveAtAnyMoment(t, replicas)
		})
	}
}

func leaveAtAnyMoment(t *testing.T, replicas int) {
	const clients, each = 16, 60
	f := start(t, cleaning(options{replicas: replicas, prefills: 2, decodes: 2, engineArgs: []string{"--prefill-speed", "20000", "--decode-step", "2ms"}}))
	f.lenient = true // this test checks the engines itself
	var all sync.WaitGroup
	for c := range clients {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(c), 1))
			for i := range each {
				ctx, leave := context.WithTimeout(context.Background(), time.Duration(1+r.IntN(119))*time.Millisecond)
				<-send(ctx, f.url, fmt.Sprintf("leave-%d-%d", c, i), question(fmt.Sprintf("%d-%d", c, i), 200)).done
				leave()
			}
		})
	}
	all.Wait()
	n := f.cleanedUp()

	cut := map[string]bool{} // left while Envoy waited for P, or for the reply to P's answer
	for _, tandem := range f.tandems {
		log, err := os.ReadFile(tandem.log)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(`msg="pass ended" request_id=(\S+) stage=prefill_leg .*client_gone=true`).FindAllStringSubmatch(string(log), -1) {
			cut[m[1]] = true
		}
	}
	legs, cleanups := f.decodeLegs()
	require.Equal(t, n, cleanups, "what is counted is what engines saw")
	held, given := f.held()
	unknown, dropped := 0, 0
	for _, id := range held {
		switch {
		case len(legs[id]) == 0:
			unknown++
			require.True(t, cut[id], "the blocks of %s are held: its hand-over was known, and nobody was asked", id)
		default:
			dropped++
			require.Equal(t, "aborted", legs[id][0].Outcome, "the blocks of %s are held", id)
		}
	}
	for id, l := range legs {
		require.Len(t, l, 1, "%s: parameters went out more than once", id)
	}
	require.LessOrEqual(t, float64(unknown), f.sum("tandem_hop_duration_seconds_count", `hop="prefill"`, `result="client_gone"`))
	t.Logf("%d requests, %d hand-overs: %d cleaned up; held: %d whose parameters nobody knows, %d that D dropped", clients*each, given, n, unknown, dropped)
}

// D hangs before there is a connection, and the client leaves: pass 2 has consumed the ticket, but D has received
// nothing, so another engine fetches the blocks.
func TestBlocksOfADecodeNotReached(t *testing.T) {
	// not beside others: where all is slow, health checks find that the endpoint hangs before a request comes to it
	hangs := deaf(t)
	f := start(t, cleaning(options{prefills: 1, decodes: 1, bootstrap: func(f *fleet) string {
		bin, err := binaries()
		require.NoError(t, err)
		text, err := exec.Command(filepath.Join(bin, "tandem"), "envoy", "-f", f.config).Output()
		require.NoError(t, err)
		return strings.ReplaceAll(string(text), "connect_timeout: 1s", "connect_timeout: 300s")
	}, pools: fmt.Sprintf(`pools:
- {name: chat, models: ["*"], kvTransfer: nixl, split: always, decodeAlone: fallback, strandedBlocks: cleanupDecode, endpoints: [{address: %%P, role: prefill}, {address: %%D, role: decode}, {address: %q, role: decode}]}
`, hangs)}))
	began := time.Now() // an endpoint that says nothing of itself is paired after some seconds
	for i := 0; ; i++ {
		require.Less(t, time.Since(began), time.Minute, "no request came to the endpoint that hangs")
		ctx, leave := context.WithCancel(t.Context())
		a := send(ctx, f.url, fmt.Sprintf("hang-%d", i), question(fmt.Sprintf("hang-%d", i), 200))
		waits := false
		soon(t, "an answer, or a request that waits for its connection", func() bool {
			select {
			case <-a.done:
				return true
			default:
				waits = f.connects(hangs)
				return waits
			}
		})
		leave()
		<-a.done
		if waits {
			break
		}
		require.Equal(t, 200, a.status)
	}
	soon(t, "the end is told", func() bool {
		return f.sum("tandem_handovers_orphaned_total", `reason="client_gone"`) == 1
	})
	require.Equal(t, 1, f.cleanedUp())
	_, cleanups := f.decodeLegs()
	require.Equal(t, 1, cleanups)
	held, _ := f.held()
	require.Empty(t, held)
}

// connects reports whether Envoy has or opens a connection to an endpoint.
func (f *fleet) connects(addr string) bool {
	text, err := readURL(f.envoyURL + "/clusters")
	require.NoError(f.t, err)
	return regexp.MustCompile(`::` + regexp.QuoteMeta(addr) + `::cx_active::[1-9]`).MatchString(text)
}

// deaf returns an address at which connections hang: its accept queue is full.
func deaf(t *testing.T) string {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = syscall.Close(fd) })
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(t, syscall.Listen(fd, 0))
	name, err := syscall.Getsockname(fd)
	require.NoError(t, err)
	addr := fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
	for range 16 {
		conn, err := (&net.Dialer{Timeout: 300 * time.Millisecond}).Dial("tcp", addr)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	t.Fatal("the queue of connections has no end")
	return ""
}
