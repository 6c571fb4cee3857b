package e2e

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// attack is an attack by a peer of Tandem's gRPC port.
type attack struct {
	name        string
	connections [2]int         // in make test, and in make attack
	mute        bool           // the peer never reads
	window      uint32         // that the peer gives each stream, less 1; 0: the usual one
	do          func(a *rogue) // runs on each connection, and again on a new one when it was closed, while there is time
}

const (
	processStreams   = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
	accessLogStreams = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
)

// until repeats do until the connection or the time ends.
func (a *rogue) until(do func() error) {
	for a.time() && do() == nil {
		a.tried.Add(1)
	}
}

// hold calls do n times and keeps the connection open while there is time.
func (a *rogue) hold(n int, do func() error) {
	for range n {
		if !a.time() || do() != nil {
			return
		}
		a.tried.Add(1)
	}
	select {
	case <-a.closed:
	case <-time.After(time.Until(a.end)):
	}
}

var attacks = []attack{
	{name: "rapid reset: streams opened and reset", connections: [2]int{2, 4}, do: func(a *rogue) {
		a.until(func() error { return a.framer.WriteRSTStream(a.open(processStreams), http2.ErrCodeCancel) })
	}},
	{name: "the same, and nothing read", connections: [2]int{2, 4}, mute: true, do: func(a *rogue) {
		a.until(func() error { return a.framer.WriteRSTStream(a.open(processStreams), http2.ErrCodeCancel) })
	}},
	{name: "CONTINUATION without end, 1 KiB each", connections: [2]int{2, 4}, do: func(a *rogue) {
		block := a.block(nil, slices.Repeat([]hpack.HeaderField{{Name: "x-much", Value: strings.Repeat("v", 100), Sensitive: true}}, 8)...)
		_ = a.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block})
		a.until(func() error { return a.framer.WriteContinuation(1, false, block) })
	}},
	{name: "HPACK bombs: 3 MB of headers in 4 KB", connections: [2]int{2, 4}, do: func(a *rogue) {
		a.until(func() error {
			a.open(processStreams, slices.Repeat([]hpack.HeaderField{{Name: "x-bomb", Value: strings.Repeat("v", 3000)}}, 1000)...)
			return a.err
		})
	}},
	{name: "SETTINGS flood, beside 1,000 streams", connections: [2]int{2, 4}, do: func(a *rogue) {
		for range 1000 {
			a.open(processStreams)
		}
		a.until(func() error {
			return a.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<16 + uint32(a.tried.Load()%2)})
		})
	}},
	{name: "PING flood", connections: [2]int{2, 4}, do: func(a *rogue) {
		a.until(func() error { return a.framer.WritePing(false, [8]byte{1}) })
	}},
	{name: "WINDOW_UPDATE flood, nothing read", connections: [2]int{2, 4}, mute: true, do: func(a *rogue) {
		a.open(processStreams)
		a.until(func() error { return a.framer.WriteWindowUpdate(1, 1) })
	}},
	{name: "windows of zero: answers that are not taken", connections: [2]int{1, 4}, window: 1, do: func(a *rogue) {
		a.hold(4000, func() error { return a.ask(a.open(processStreams)) })
	}},
	{name: "slow readers: answers that are not read", connections: [2]int{1, 4}, mute: true, do: func(a *rogue) {
		a.until(func() error { return a.ask(a.open(processStreams)) })
	}},
	{name: "unfinished messages: 64 of 16 MiB on each connection", connections: [2]int{1, 8}, do: func(a *rogue) {
		a.hold(64, func() error { return a.unfinished(a.open(processStreams), 17<<20, 16<<20) })
	}},
	{name: "unfinished messages, a byte in each frame", connections: [2]int{1, 4}, do: func(a *rogue) {
		id := a.open(processStreams)
		_ = a.framer.WriteData(id, false, []byte{0, 1, 0, 0, 0})
		a.until(func() error { return a.framer.WriteData(id, false, []byte{0}) })
	}},
	{name: "gzip bombs: 64 MiB in 64 KiB", connections: [2]int{1, 4}, do: func(a *rogue) {
		var one bytes.Buffer
		w := gzip.NewWriter(&one)
		_, _ = w.Write(make([]byte, 1<<20))
		_ = w.Close()
		zipped := bytes.Repeat(one.Bytes(), 64) // members follow one another
		message := append([]byte{1, 0, byte(len(zipped) >> 16), byte(len(zipped) >> 8), byte(len(zipped))}, zipped...)
		a.until(func() error {
			id := a.open(processStreams, hpack.HeaderField{Name: "grpc-encoding", Value: "gzip"})
			for piece := range slices.Chunk(message, 16<<10) {
				if err := a.framer.WriteData(id, false, piece); err != nil {
					return err
				}
			}
			return nil
		})
	}},
	{name: "idle access log streams, 4,000 on each connection", connections: [2]int{3, 15}, do: func(a *rogue) {
		a.hold(4000, func() error { a.open(accessLogStreams); return a.err })
	}},
	{name: "idle ext_proc streams, 4,000 on each connection", connections: [2]int{1, 10}, do: func(a *rogue) {
		a.hold(4000, func() error { a.open(processStreams); return a.err })
	}},
	{name: "connections that say nothing", connections: [2]int{300, 10_000}, do: func(a *rogue) { a.hold(1, func() error { return nil }) }},
	{name: "TLS handshakes that stall", connections: [2]int{300, 2000}, do: nil},
}

// rogue is one connection of an attacker.
type rogue struct {
	conn   net.Conn
	framer *http2.Framer
	err    error // of the last open
	next   uint32
	end    time.Time
	closed chan struct{}
	tried  *atomic.Int64
}

func (a *rogue) time() bool { return time.Now().Before(a.end) }

func (at *attack) connect(address string, end time.Time, tried *atomic.Int64) (*rogue, error) {
	conn, err := net.DialTimeout("tcp", address, 10*time.Second)
	if err != nil {
		return nil, err
	}
	a := &rogue{conn: conn, framer: http2.NewFramer(conn, conn), next: 1, end: end, closed: make(chan struct{}), tried: tried}
	_ = conn.SetWriteDeadline(end)
	if at.do == nil { // the first bytes of a ClientHello
		_, err = conn.Write([]byte{22, 3, 1, 2, 0, 1, 0, 1, 252})
	} else if !strings.HasPrefix(at.name, "connections") {
		_, _ = io.WriteString(conn, http2.ClientPreface)
		var settings []http2.Setting
		if at.window > 0 {
			settings = []http2.Setting{{ID: http2.SettingInitialWindowSize, Val: at.window - 1}}
		}
		err = a.framer.WriteSettings(settings...)
	}
	if !at.mute {
		go func() { _, _ = io.Copy(io.Discard, conn); close(a.closed) }()
	}
	return a, err
}

func (a *rogue) block(first []hpack.HeaderField, more ...hpack.HeaderField) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for _, f := range append(first, more...) {
		_ = e.WriteField(f)
	}
	return b.Bytes()
}

// open begins a stream.
func (a *rogue) open(method string, more ...hpack.HeaderField) uint32 {
	id := a.next
	a.next += 2
	block := a.block([]hpack.HeaderField{{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: method},
		{Name: ":authority", Value: "x"}, {Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"}}, more...)
	a.err = a.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block, EndHeaders: true})
	return id
}

// ask sends the headers of GET /v1/models: ProcessingRequest{2: HttpHeaders{1: HeaderMap{1: HeaderValue{1: key, 3: raw_value}}, 3: true}}.
func (a *rogue) ask(id uint32) error {
	field := func(tag byte, content ...byte) []byte { return append([]byte{tag, byte(len(content))}, content...) }
	var headers []byte
	for _, h := range [][2]string{{":method", "GET"}, {":path", "/v1/models"}, {":authority", "x"}} {
		headers = append(headers, field(1<<3|2, append(field(1<<3|2, []byte(h[0])...), field(3<<3|2, []byte(h[1])...)...)...)...)
	}
	m := field(2<<3|2, append(field(1<<3|2, headers...), 3<<3, 1)...)
	return a.framer.WriteData(id, false, append([]byte{0, 0, 0, 0, byte(len(m))}, m...))
}

// unfinished sends n bytes of a message of size bytes.
func (a *rogue) unfinished(id uint32, size, n int) error {
	piece := make([]byte, 16<<10)
	copy(piece, []byte{0, byte(size >> 24), byte(size >> 16), byte(size >> 8), byte(size)})
	for ; n > 0; n -= len(piece) {
		if err := a.framer.WriteData(id, false, piece); err != nil {
			return err
		}
		clear(piece[:5])
	}
	return nil
}

// Tandem is attacked at its gRPC port while clients come through Envoy: they are served, the cost is bounded, and
// nothing is left at the end. make attack does it with more connections, and for longer; its table is in
// docs/figures/attacks.csv.
func TestAttacks(t *testing.T) {
	long(t)
	beside(t, "there is no gRPC port")
	full := os.Getenv("TANDEM_ATTACK") != ""
	length, size := 800*time.Millisecond, 0
	if full {
		length, size = 6*time.Second, 1
	}
	recordings := filepath.Join(t.TempDir(), "recordings")
	f := start(t, options{top: fmt.Sprintf("usage: {}\nrecord: {folder: %q}\n", recordings)})
	config, err := os.ReadFile(f.config)
	require.NoError(t, err)
	address := string(regexp.MustCompile(`extProc: \{listen: "([^"]+)"`).FindSubmatch(config)[1])
	encrypted := start(t, options{prefills: 1, decodes: 1, extProcFields: ", tls: {mode: selfSigned}", envoyFields: ", extProcTls: {}"})
	config, err = os.ReadFile(encrypted.config)
	require.NoError(t, err)
	encryptedAddress := string(regexp.MustCompile(`extProc: \{listen: "([^"]+)"`).FindSubmatch(config)[1])

	rows := []string{fmt.Sprintf("| no attack, %s | | | %s |", length, f.beside(t, f, length, nil))}
	for _, at := range attacks {
		under, where := f, address
		if at.do == nil {
			under, where = encrypted, encryptedAddress
		}
		var tried, lost atomic.Int64
		cost := under.beside(t, under, length, func(end time.Time) {
			var all sync.WaitGroup
			for range at.connections[size] {
				all.Go(func() { at.run(where, end, &tried, &lost) })
			}
			all.Wait()
		})
		t.Logf("%s: %s", at.name, cost)
		rows = append(rows, fmt.Sprintf("| %s | %d by %d connections | %d | %s |", at.name, tried.Load(), at.connections[size], lost.Load(), cost))
	}
	recorded := map[string]int{} // by how they ended: what attacks begin is not recorded as answered
	require.Eventually(t, func() bool {
		clear(recorded)
		lines, _ := readRecording(t, recordings)
		for _, l := range lines {
			if l.N > 0 {
				recorded[l.Ended]++
			}
		}
		return recorded["ok"] > 0
	}, time.Minute, time.Second)
	t.Logf("recorded: %v", recorded)
	t.Logf("%d s each.\n\n| attack | tried | disconnected | peak RSS, MiB | peak held, MiB | goroutines | CPU, s | served beside | p50, ms | slowest, ms |\n|---|---|---|---|---|---|---|---|---|---|\n%s\n",
		int(length.Seconds()), strings.Join(rows, "\n"))
}

// beside skips a test of what there is not inside Envoy.
func beside(t *testing.T, why string) {
	t.Helper()
	if runsInside() {
		t.Skip("inside Envoy: " + why)
	}
}

// run attacks on one connection after the other.
func (at *attack) run(address string, end time.Time, tried, lost *atomic.Int64) {
	for time.Now().Before(end) {
		a, err := at.connect(address, end, tried)
		if err != nil {
			lost.Add(1)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if at.do != nil {
			at.do(a)
		} else {
			a.hold(1, func() error { return nil })
		}
		_ = a.conn.Close()
		if time.Now().Before(end) {
			lost.Add(1)
		}
	}
}

// beside measures what an attack costs Tandem, and checks that clients of Envoy are served meanwhile.
func (f *fleet) beside(t *testing.T, good *fleet, length time.Duration, attack func(end time.Time)) string {
	t.Helper()
	pid, admin := f.tandems[0].cmd.Process.Pid, f.admins[0]
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0) // resets the peak
	cpu, before := metric(t, admin, "process_cpu_seconds_total"), metric(t, admin, "go_goroutines")
	end := time.Now().Add(length)
	var all sync.WaitGroup
	if attack != nil {
		all.Go(func() { attack(end) })
	}
	var goroutines, held float64
	all.Go(func() {
		sample := time.NewTicker(50 * time.Millisecond)
		defer sample.Stop()
		for now := range sample.C {
			goroutines = max(goroutines, metric(t, admin, "go_goroutines"))
			held = max(held, metric(t, admin, "tandem_held_bytes"))
			if now.After(end) {
				return
			}
		}
	})
	var took []time.Duration
	served := 0
	for i := 0; time.Now().Before(end); i++ {
		got := good.post(apis[i%4].path, apis[i%4].body)
		took = append(took, got.took)
		if got.status == 200 {
			served++
		} else {
			t.Logf("beside an attack: %d %s", got.status, got.body)
		}
	}
	all.Wait()
	cpu = metric(t, admin, "process_cpu_seconds_total") - cpu
	soon(t, "nothing is left", func() bool {
		return metric(t, admin, "tandem_held_bytes") == 0 && metric(t, admin, "go_goroutines") < before+200
	})
	if os.Getenv("TANDEM_ATTACK") == "" {
		require.Len(t, took, served, "requests that were served") // the table of make attack has the unserved ones
	}
	rss := peak(pid)
	require.Less(t, rss, 3.0*1024, "MiB: 1 GiB may be held, and garbage may be half of what is in use")
	require.Less(t, goroutines, 60_000.0)
	slices.Sort(took)
	ms := func(d time.Duration) string { return strconv.FormatFloat(float64(d.Microseconds())/1000, 'f', 1, 64) }
	return fmt.Sprintf("%.0f | %.1f | %.0f | %.1f | %d of %d | %s | %s", rss, held/(1<<20), goroutines, cpu, served, len(took), ms(took[len(took)/2]), ms(took[len(took)-1]))
}

// peak returns the most memory that a process had, in MiB.
func peak(pid int) float64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	m := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(text)
	if m == nil {
		return 0
	}
	kb, _ := strconv.ParseFloat(string(m[1]), 64)
	return kb / 1024
}
