package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
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

// spent is what a stack has used up to a moment, or in a part of the time.
type spent struct {
	envoy, tandem, redis  float64 // CPU, ms
	wakeups               float64 // of the replicas' threads
	extProc, extProcBytes float64 // streams of Envoy to replicas, and bytes both ways
	logs, logBytes        float64 // entries of the access log, once for each replica that gets them, and bytes
	commands              float64 // of Redis
	redisIn, redisOut     float64 // bytes to and from it
	reads                 float64 // XREAD
	writes                float64 // XADD
}

// figures are pointers to all fields, for arithmetic.
func (s *spent) figures() []*float64 {
	return []*float64{
		&s.envoy, &s.tandem, &s.redis, &s.wakeups, &s.extProc, &s.extProcBytes, &s.logs, &s.logBytes, &s.commands,
		&s.redisIn, &s.redisOut, &s.reads, &s.writes,
	}
}

func (s *spent) cpu() float64 { return s.envoy + s.tandem + s.redis }

// fleetRow is one round of one size: what a request cost, and a second without requests.
type fleetRow struct{ request, idle spent }

// fleet measures each number of replicas in o.mode.fleet, o.rounds times, and prints the table.
func (l *lab) fleet(ctx context.Context, o options, stdout io.Writer) error {
	rows := map[int][]fleetRow{}
	for round := range o.rounds {
		for _, n := range o.mode.fleet {
			row, err := l.fleetRound(ctx, o, n)
			if err != nil {
				return fmt.Errorf("%d replicas: %w", n, err)
			}
			rows[n] = append(rows[n], row)
			fmt.Fprintf(l.log, "%d replicas: round %d of %d\n", n, round+1, o.rounds)
		}
	}
	if err := writeFleet(stdout, o, rows); err != nil || o.last == "" {
		return err
	}
	return publish(stdout, o.last, l.origin(ctx, o), fleetFigures(o, rows))
}

// fleetFigures returns medians over rounds.
func fleetFigures(o options, rows map[int][]fleetRow) (out []figures) {
	one := 0.0
	for i, n := range o.mode.fleet {
		u := medians(rows[n], func(r *fleetRow) *spent { return &r.request })
		idle := medians(rows[n], func(r *fleetRow) *spent { return &r.idle })
		if i == 0 {
			one = u.cpu()
		}
		out = append(out, figures{
			key: key{Shape: o.shapes[0].name, Replicas: n, Rate: o.rate, Clients: fleetClients, Pinned: o.mode.pin},
			Fleet: &fleetCost{
				Envoy: round3(u.envoy), Tandem: round3(u.tandem), Redis: round3(u.redis), One: round3(u.cpu() / one),
				Logs: round3(u.logs), Commands: round3(u.commands), Wakeups: round3(u.wakeups),
				Idle: round3(idle.cpu()),
			},
		})
	}
	return out
}

func (l *lab) fleetRound(ctx context.Context, o options, n int) (row fleetRow, err error) {
	v := o.variants[0]
	v.binary = cmp.Or(v.binary, filepath.Join(l.bin, "tandem"))
	v.name, v.replicas, v.redis = fmt.Sprintf("fleet%d", n), n, true
	g := &lab{log: l.log, envoyPath: l.envoyPath, pairs: l.pairs, bin: l.bin, pin: o.mode.pin}
	g.Dir = l.Dir
	defer g.Stop()
	if err := g.startTandem(ctx, o, v); err != nil {
		return row, err
	}
	s, sh := g.stacks[0], o.shapes[0]
	b := newBody(sh, o.documents)
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

// between returns what do used, divided by n.
func (s *stack) between(ctx context.Context, n float64, do func() error) (used spent, err error) {
	before, err := s.spent(ctx)
	if err != nil {
		return used, err
	}
	if err := do(); err != nil {
		return used, err
	}
	if used, err = s.spent(ctx); err != nil {
		return used, err
	}
	was := before.figures()
	for i, v := range used.figures() {
		*v = (*v - *was[i]) / n
	}
	return used, nil
}

func (s *stack) spent(ctx context.Context) (u spent, err error) {
	if u.envoy, err = cpuMillis(s.envoy); err != nil {
		return u, err
	}
	if u.tandem, err = cpuMillis(s.tandems...); err != nil {
		return u, err
	}
	for _, t := range s.tandems {
		u.wakeups += float64(t.Wakeups())
	}
	if u.redis, err = cpuMillis(s.routers...); err != nil {
		return u, err
	}
	if err := s.envoyCounts(ctx, &u); err != nil {
		return u, err
	}
	return u, s.redisCounts(&u)
}

func cpuMillis(processes ...*process.Process) (float64, error) {
	used, err := cpuOf(processes...)
	return used.Seconds() * 1e3, err
}

// envoyCounts reads Envoy's own counts of its connections to replicas.
func (s *stack) envoyCounts(ctx context.Context, u *spent) error {
	text, err := process.Get(ctx, "http://"+s.envoyAdmin+"/stats?filter=tandem-(extproc|accesslog)|grpc_access_log")
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

// column is one of the fleet's table.
type column struct {
	name, format string
	of           func(request, idle *spent) float64
}

func columns(one float64) []column {
	return []column{
		{"Envoy", "%.3f", func(r, _ *spent) float64 { return r.envoy }},
		{"Tandem", "%.3f", func(r, _ *spent) float64 { return r.tandem }},
		{"Redis", "%.3f", func(r, _ *spent) float64 { return r.redis }},
		{"sum", "%.3f", func(r, _ *spent) float64 { return r.cpu() }},
		{"x one", "%.2f", func(r, _ *spent) float64 { return r.cpu() / one }},
		{"idle Envoy, ms/s", "%.1f", func(_, i *spent) float64 { return i.envoy }},
		{"idle Tandem", "%.1f", func(_, i *spent) float64 { return i.tandem }},
		{"idle Redis", "%.1f", func(_, i *spent) float64 { return i.redis }},
		{"idle wake-ups/s", "%.0f", func(_, i *spent) float64 { return i.wakeups }},
		{"idle commands/s", "%.1f", func(_, i *spent) float64 { return i.commands }},
		{"wake-ups", "%.1f", func(r, _ *spent) float64 { return r.wakeups }},
		{"ext_proc", "%.2f", func(r, _ *spent) float64 { return r.extProc }},
		{"its bytes", "%.0f", func(r, _ *spent) float64 { return r.extProcBytes }},
		{"log entries", "%.2f", func(r, _ *spent) float64 { return r.logs }},
		{"its bytes", "%.0f", func(r, _ *spent) float64 { return r.logBytes }},
		{"XADD", "%.2f", func(r, _ *spent) float64 { return r.writes }},
		{"XREAD", "%.2f", func(r, _ *spent) float64 { return r.reads }},
		{"commands", "%.2f", func(r, _ *spent) float64 { return r.commands }},
		{"bytes in", "%.0f", func(r, _ *spent) float64 { return r.redisIn }},
		{"bytes out", "%.0f", func(r, _ *spent) float64 { return r.redisOut }},
	}
}

// writeFleet prints medians over rounds.
func writeFleet(stdout io.Writer, o options, rows map[int][]fleetRow) error {
	fmt.Fprintf(stdout, "%v requests a second in all, %s, %d clients. CPU in ms, everything per request; idle: all "+
		"processes together, per second without requests.\n\n", o.rate, o.shapes[0].title, fleetClients)
	w := tabwriter.NewWriter(stdout, 0, 0, 1, ' ', 0)
	var table []column
	for i, n := range o.mode.fleet {
		request := medians(rows[n], func(r *fleetRow) *spent { return &r.request })
		idle := medians(rows[n], func(r *fleetRow) *spent { return &r.idle })
		if i == 0 {
			table = columns(request.cpu())
			fmt.Fprint(w, "| replicas\t")
			for _, c := range table {
				fmt.Fprintf(w, "| %s\t", c.name)
			}
			fmt.Fprintln(w, "|\n"+strings.Repeat("|---\t", len(table)+1)+"|")
		}
		fmt.Fprintf(w, "| %d\t", n)
		for _, c := range table {
			fmt.Fprintf(w, "| "+c.format+"\t", c.of(&request, &idle))
		}
		fmt.Fprintln(w, "|")
	}
	return w.Flush()
}

// medians returns the median of each figure.
func medians(rows []fleetRow, of func(*fleetRow) *spent) (out spent) {
	for i, v := range out.figures() {
		var all []float64
		for k := range rows {
			all = append(all, *of(&rows[k]).figures()[i])
		}
		*v = median(all)
	}
	return out
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
