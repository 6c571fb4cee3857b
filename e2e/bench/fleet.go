package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"tandem/e2e/process"
)

// The fleet mode (-fleet 1,4,16) measures what a request costs with several replicas that share a Redis, at one and the
// same rate. It counts instead of timing: CPU time, wake-ups, messages and bytes per request, of Envoy, of all replicas
// together and of Redis. These hardly depend on what else the machine does. Each round starts every size anew, because
// idle replicas of other sizes would wake up beside the measured ones.

const (
	fleetSettle  = 8 * time.Second // after the start: replicas that start request snapshots until two leases later
	fleetIdle    = 4 * time.Second
	fleetLoad    = 10 * time.Second
	fleetClients = 16
)

// spent is what a stack has used up to a moment.
type spent struct {
	envoy, tandem, redis  time.Duration // CPU
	wakeups               float64       // of the replicas' threads
	extProc, extProcBytes float64       // streams of Envoy to replicas, and bytes both ways
	logs, logBytes        float64       // access log entries times replicas that they were sent to, and bytes
	commands              float64       // of Redis
	redisIn, redisOut     float64       // bytes to and from it
	reads                 float64       // XREAD
	writes                float64       // XADD
}

// figures are the fields of spent, for arithmetic.
func (s *spent) figures() []float64 {
	return []float64{
		s.envoy.Seconds() * 1e3, s.tandem.Seconds() * 1e3, s.redis.Seconds() * 1e3, s.wakeups, s.extProc,
		s.extProcBytes, s.logs, s.logBytes, s.commands, s.redisIn, s.redisOut, s.reads, s.writes,
	}
}

// fleetRow is one round of one size: what a request cost, and a second without requests.
type fleetRow struct{ request, idle []float64 }

// fleet measures each number of replicas in o.fleet, o.rounds times, and prints the table.
func (l *lab) fleet(ctx context.Context, o options, stdout io.Writer) error {
	rows := map[int][]fleetRow{}
	for round := range o.rounds {
		for _, n := range o.fleet {
			row, err := l.fleetRound(ctx, o, n, o.profiles != "" && round == o.rounds-1)
			if err != nil {
				return fmt.Errorf("%d replicas: %w", n, err)
			}
			rows[n] = append(rows[n], row)
			fmt.Fprintf(l.log, "%d replicas: round %d of %d\n", n, round+1, o.rounds)
		}
	}
	return writeFleet(stdout, o, rows)
}

func (l *lab) fleetRound(ctx context.Context, o options, n int, profile bool) (row fleetRow, err error) {
	v := o.variants[0]
	v.binary = cmp.Or(v.binary, filepath.Join(l.bin, "tandem"))
	v.name, v.replicas, v.redis = fmt.Sprintf("fleet%d", n), n, true
	g := &lab{log: l.log, envoyPath: l.envoyPath, pairs: l.pairs, bin: l.bin}
	g.Dir = l.Dir
	defer g.Stop()
	if err := g.startTandem(ctx, o, v); err != nil {
		return row, err
	}
	s, sh := g.stacks[0], o.shapes[0]
	b := newBody(sh, o.fresh)
	if _, err := g.load(ctx, s, sh, b, fleetClients, 20*n+200); err != nil { // warm
		return row, err
	}
	g.rate = o.rate
	if err := pause(ctx, fleetSettle); err != nil {
		return row, err
	}
	row.idle, err = s.between(ctx, fleetIdle.Seconds(), func() error { return pause(ctx, fleetIdle) })
	if err != nil {
		return row, err
	}
	requests := int(o.rate * fleetLoad.Seconds())
	row.request, err = s.between(ctx, float64(requests), func() error {
		_, err := g.load(ctx, s, sh, b, fleetClients, requests)
		time.Sleep(2 * settleTime) // for the access log
		return err
	})
	if err == nil && profile {
		err = g.fleetProfile(ctx, o, s, b)
	}
	return row, err
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// between returns what do used, in n parts.
func (s *stack) between(ctx context.Context, n float64, do func() error) ([]float64, error) {
	before, err := s.spent(ctx)
	if err != nil {
		return nil, err
	}
	if err := do(); err != nil {
		return nil, err
	}
	after, err := s.spent(ctx)
	if err != nil {
		return nil, err
	}
	was, out := before.figures(), after.figures()
	for i := range out {
		out[i] = (out[i] - was[i]) / n
	}
	return out, nil
}

func (s *stack) spent(ctx context.Context) (u spent, err error) {
	if u.envoy, err = s.envoy.CPU(); err != nil {
		return u, err
	}
	if u.tandem, err = cpuOf(s.tandems...); err != nil {
		return u, err
	}
	for _, t := range s.tandems {
		u.wakeups += float64(t.Wakeups())
	}
	if u.redis, err = cpuOf(s.routers...); err != nil {
		return u, err
	}
	if err := s.envoyCounts(ctx, &u); err != nil {
		return u, err
	}
	return u, s.redisCounts(&u)
}

// envoyCounts reads Envoy's own counts of its connections to replicas.
func (s *stack) envoyCounts(ctx context.Context, u *spent) error {
	text, err := read(ctx, "http://"+s.envoyAdmin+"/stats?filter=tandem-(extproc|accesslog)|grpc_access_log")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		v, _ := strconv.ParseFloat(value, 64)
		bytesMoved := strings.HasSuffix(name, ".upstream_cx_tx_bytes_total") ||
			strings.HasSuffix(name, ".upstream_cx_rx_bytes_total")
		switch {
		case name == "cluster.tandem-extproc.upstream_rq_total":
			u.extProc = v
		case strings.HasPrefix(name, "cluster.tandem-extproc.") && bytesMoved:
			u.extProcBytes += v
		case strings.HasPrefix(name, "cluster.tandem-accesslog-") && bytesMoved:
			u.logBytes += v
		case strings.HasSuffix(name, "grpc_access_log.logs_written"):
			u.logs += v
		}
	}
	return nil
}

// redisCounts reads what Redis counts, over a connection of its own.
func (s *stack) redisCounts(u *spent) error {
	conn, err := net.Dial("tcp", s.redis)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(conn, "INFO everything\r\nQUIT\r\n"); err != nil {
		return err
	}
	text, err := io.ReadAll(conn)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		v, _ := strconv.ParseFloat(value, 64)
		switch name {
		case "total_commands_processed":
			u.commands = v
		case "total_net_input_bytes":
			u.redisIn = v
		case "total_net_output_bytes":
			u.redisOut = v
		case "cmdstat_xread":
			u.reads = calls(value)
		case "cmdstat_xadd":
			u.writes = calls(value)
		}
	}
	return nil
}

// calls reads the first number of `calls=12,usec=34,...`.
func calls(stat string) float64 {
	first, _, _ := strings.Cut(strings.TrimPrefix(stat, "calls="), ",")
	v, _ := strconv.ParseFloat(first, 64)
	return v
}

func read(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// writeFleet prints medians over rounds.
func writeFleet(stdout io.Writer, o options, rows map[int][]fleetRow) error {
	fmt.Fprintf(stdout, "%v requests a second in all, %s, %d clients. CPU in ms, everything per request.\n\n", o.rate,
		o.shapes[0].title, fleetClients)
	w := tabwriter.NewWriter(stdout, 0, 0, 1, ' ', 0)
	fmt.Fprintln(w, "| replicas\t| Envoy\t| Tandem\t| Redis\t| sum\t| x one\t| Envoy idle, ms/s\t| others\t| "+
		"wake-ups\t| ext_proc\t| its bytes\t| log entries\t| its bytes\t| XADD\t| XREAD\t| commands\t| bytes in\t| "+
		"bytes out\t|")
	fmt.Fprintln(w, strings.Repeat("|---\t", 18)+"|")
	one := 0.0
	for i, n := range o.fleet {
		m := medians(rows[n], func(r *fleetRow) []float64 { return r.request })
		idle := medians(rows[n], func(r *fleetRow) []float64 { return r.idle })
		sum := m[0] + m[1] + m[2]
		if i == 0 {
			one = sum
		}
		fmt.Fprintf(w, "| %d\t| %.3f\t| %.3f\t| %.3f\t| %.3f\t| %.2f\t| %.1f\t| %.1f\t| %.1f\t| %.2f\t| %.0f\t| "+
			"%.2f\t| %.0f\t| %.2f\t| %.2f\t| %.2f\t| %.0f\t| %.0f\t|\n",
			n, m[0], m[1], m[2], sum, sum/one, idle[0], idle[1]+idle[2], m[3], m[4], m[5], m[6], m[7], m[12],
			m[11], m[8], m[9], m[10])
	}
	return w.Flush()
}

// medians returns the median of each figure.
func medians(rows []fleetRow, of func(*fleetRow) []float64) (out []float64) {
	for i := range of(&rows[0]) {
		var all []float64
		for k := range rows {
			all = append(all, of(&rows[k])[i])
		}
		out = append(out, median(all))
	}
	return out
}

// purposes are the functions of Tandem below which CPU time belongs to one purpose.
func purposes() [][2]string {
	return [][2]string{
		{"ext_proc", "tandem/extproc.(*Server).process"},
		{"access log", "tandem/extproc.(*Server).readAccessLogs"},
		{"consume tickets", "tandem/kvstate/redisstore.(*Store).askAll"},
		{"publish", "tandem/kvstate/redisstore.(*Store).flush"},
		{"read", "tandem/kvstate/redisstore.(*poolReplica).receive"},
		{"of it apply", "tandem/kvstate/redisstore.(*poolReplica).takeIn"},
		{"scrapes", "tandem/kvstate/scrape.(*Scraper).ask"},
		{"gRPC reads", "google.golang.org/grpc/internal/transport.(*http2Server).HandleStreams"},
		{"gRPC writes", "google.golang.org/grpc/internal/transport.(*loopyWriter).run"},
		{"scheduler", "runtime.schedule"},
		{"garbage collection", "runtime.gcBgMarkWorker"},
	}
}

// fleetProfile profiles all replicas at once under load, and prints the share of CPU by purpose.
func (l *lab) fleetProfile(ctx context.Context, o options, s *stack, b *body) error {
	loaded, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = l.load(loaded, s, o.shapes[0], b, fleetClients, 1<<40)
	}()
	files := make([]string, len(s.admins))
	errs := make([]error, len(s.admins))
	var group sync.WaitGroup
	for i, admin := range s.admins {
		files[i] = filepath.Join(o.profiles, fmt.Sprintf("%s-%d.pprof", s.name, i))
		group.Go(func() {
			errs[i] = fetch(ctx, fmt.Sprintf("%s/debug/pprof/profile?seconds=%d", admin, int(profileTime.Seconds())),
				files[i])
		})
	}
	group.Wait()
	cancel()
	<-ended
	if i := slices.IndexFunc(errs, func(err error) bool { return err != nil }); i >= 0 {
		return errs[i]
	}
	args := append([]string{"tool", "pprof", "-top", "-cum", "-nodecount=100000", "-nodefraction=0"}, files...)
	text, err := exec.CommandContext(ctx, "go", args...).Output()
	if err != nil {
		return fmt.Errorf("go tool pprof: %w", err)
	}
	fmt.Fprintf(l.log, "%s:", s.name)
	for _, p := range purposes() {
		for line := range bytes.Lines(text) {
			if f := strings.Fields(string(line)); len(f) >= 6 && f[5] == p[1] {
				fmt.Fprintf(l.log, " %s %s;", p[0], f[4])
			}
		}
	}
	fmt.Fprintln(l.log)
	return nil
}

// tandemPorts are the addresses of one replica.
type tandemPorts struct{ extProc, replan, admin string }

// replicaPorts takes addresses for n replicas.
func replicaPorts(n int) (out []tandemPorts, err error) {
	ports, err := process.FreePorts(3 * n)
	if err != nil {
		return nil, err
	}
	for p := range slices.Chunk(ports, 3) {
		out = append(out, tandemPorts{p[0], p[1], p[2]})
	}
	return out, nil
}
