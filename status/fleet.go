package status

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/kvstate/operator"
)

// The status is the sum of replicas' reports. Each reports its part ([Feed.report]) when one of them is asked, and
// nothing otherwise; the asked one merges them ([merge]). With one replica, and without Redis, there is one report.

// aboutStatus is the question for a report.
const aboutStatus = "status"

// question is a request for a report.
type question struct {
	Since  int64 `json:"since"`  // points after this second; < 0: none
	Status bool  `json:"status"` // everything; otherwise only traces
	Traces int   `json:"traces"` // maximum number

	ID string `json:"id,omitempty"` // only traces of requests with this id
	// steps of the hour after this second; nil: none
	Hour *int64 `json:"hour,omitempty"`
	mine bool   // and endpoints' parts of them, which the asked replica does not ask the others for
}

// report is one replica's part.
type report struct {
	Name         string            `json:"name"`
	Version      string            `json:"version"`
	Started      time.Time         `json:"started"`
	Ready        bool              `json:"ready"`
	Config       string            `json:"config,omitempty"` // a fingerprint of the pools' configuration
	File         File              `json:"file,omitzero"`
	Sharing      Sharing           `json:"sharing"`
	Reservations int               `json:"reservations"`
	Envoys       []Envoy           `json:"envoys,omitempty"`
	Logs         int               `json:"access_logs"`
	Logged       time.Time         `json:"access_logs_last,omitzero"`
	Risk         string            `json:"envoy_risk,omitempty"`
	Pools        []Pool            `json:"pools,omitempty"`
	Minute       telemetry.Totals  `json:"minute"`  // counts of the last minute
	Seconds      float64           `json:"seconds"` // duration of these counts
	Last         int64             `json:"last"`    // second of the last point
	Points       []Point           `json:"points,omitempty"`
	Hour         []Point           `json:"hour,omitempty"`
	LastStep     int64             `json:"last_step,omitempty"` // second at which it ended
	Hours        []Hour            `json:"endpoint_hours,omitempty"`
	Traces       []telemetry.Trace `json:"traces,omitempty"` // newest first
	Ends         []telemetry.Trace `json:"ends,omitempty"`   // of these, as a replica that is gone reported them
}

// weighedTraces is the number of latest traces that include their prices: those are large, and the others are only
// counted.
const weighedTraces = shownRecent

// maxReport bounds an unpacked report.
const maxReport = 32 << 20

// report returns this replica's part.
func (f *Feed) report(q question) report {
	out := report{Name: f.source.Name, Traces: f.source.Recent(q.Traces)}
	if q.ID != "" {
		out.Traces = withID(out.Traces, q.ID)
	}
	if !q.Status {
		return out
	}
	for i := range out.Traces {
		if i >= weighedTraces {
			out.Traces[i].Weighed = nil
		}
	}
	out.Version, out.Started, out.Ready = f.source.Version, f.started, f.source.Ready()
	if f.source.Config != nil {
		out.File = f.source.Config()
		out.Config = out.File.Fingerprint
	}
	out.Sharing, out.Envoys, out.Reservations = f.source.Sharing(), f.source.envoys(), f.source.State.Bookings.Reservations()
	if f.source.Logs != nil {
		out.Logs, out.Logged, out.Risk = f.source.Logs()
	}
	for _, p := range f.source.State.Pools() {
		out.Pools = append(out.Pools, f.pool(p))
	}
	now := f.source.Totals()
	f.mu.Lock()
	defer f.mu.Unlock()
	out.Minute, out.Seconds, out.Last = now.Since(&f.totals[0]), max(float64(len(f.totals)-1), 1), f.n
	out.Points = after(f.points, q.Since)
	if q.Hour != nil {
		if out.Hour, out.LastStep = after(f.hour.steps, *q.Hour), f.hour.last(); q.mine {
			out.Hours = f.hour.hours(*q.Hour)
		}
	}
	return out
}

// answer answers another replica's question, packed.
func (f *Feed) answer(text []byte) []byte {
	var q question
	if json.Unmarshal(text, &q) != nil {
		return nil
	}
	q.Traces = min(q.Traces, allRecent)
	var out bytes.Buffer
	packed, _ := gzip.NewWriterLevel(&out, gzip.BestSpeed) // the level is valid
	r := f.report(q)
	r.Ends = f.ends.of(r.Traces)
	if json.NewEncoder(packed).Encode(r) != nil || packed.Close() != nil {
		return nil
	}
	return out.Bytes()
}

func unpack(body []byte) (r report, err error) {
	packed, err := gzip.NewReader(bytes.NewReader(body))
	if err != nil {
		return r, err
	}
	err = json.NewDecoder(io.LimitReader(packed, maxReport)).Decode(&r)
	return r, err
}

// answers are the reports of the replicas that answer, the asked one's first, and the names of the others.
type answers struct {
	reports   []report
	silent    []string
	gone      []operator.Gone
	restarted []operator.Gone // gone, too, but their names run again
	ends      *ends           // that were found out before; nil: only this replica is asked
	noRedis   bool            // the silent ones could not be asked, or their answers not be read
}

// gather asks all replicas. Concurrent calls share the answers.
func (f *Feed) gather(ctx context.Context, q question, alone bool) answers {
	own := q
	own.mine = true
	mine := answers{reports: []report{f.report(own)}}
	if alone || f.source.Replicas == nil {
		return mine
	}
	text, err := json.Marshal(q)
	if err != nil {
		return mine
	}
	found, _, _ := f.asking.Do(string(text), func() (any, error) {
		got, err := f.source.Replicas.Ask(context.WithoutCancel(ctx), aboutStatus, text)
		out := answers{silent: got.Silent, gone: got.Gone, restarted: got.Restarted,
			noRedis: err != nil && !errors.Is(err, operator.ErrBusy)}
		for _, a := range got.Of {
			r, err := unpack(a.Body)
			if err != nil {
				out.silent = append(out.silent, a.Name)
				continue
			}
			r.Name = a.Name
			out.reports = append(out.reports, r)
		}
		return out, nil
	})
	others := found.(answers)
	if !f.source.Sharing().Up { // this replica does not know who lives
		others.gone, others.restarted = nil, nil
	}
	others.reports, others.ends = append(mine.reports, others.reports...), &f.ends
	return others
}

// View is what of the status is wanted.
type View struct {
	Since    int64  // points after this second
	Hour     *int64 // steps of the hour after this one; nil: none
	Requests Wanted
}

// Status returns the current state of all replicas, or of this one alone. It takes a second at most.
func (f *Feed) Status(ctx context.Context, v View) Status {
	got := f.gather(ctx, question{Since: v.Since, Hour: v.Hour, Status: true, Traces: allRecent}, v.Requests.Alone)
	v.Requests.N = shownRecent
	return merge(got, time.Now(), &v.Requests)
}

// traces merges the traces of all reports.
func (a *answers) traces(now time.Time) []telemetry.Trace {
	parts := make(map[string][]telemetry.Trace, len(a.reports))
	for i := range a.reports {
		name := a.reports[i].Name
		if _, known := parts[name]; known { // one host with two replicas behind the same port number
			name = fmt.Sprintf("%s (%d)", name, i+1)
		}
		parts[name] = a.reports[i].Traces
	}
	all := telemetry.Merge(parts)
	reported := map[endKey]telemetry.Trace{}
	for i := range a.reports {
		for _, end := range a.reports[i].Ends {
			reported[keyOf(&end)] = end
		}
	}
	for i := range all {
		t := &all[i]
		if end, found := reported[keyOf(t)]; found && !ended(t) {
			take(t, end)
		}
		t.GoneWith = a.goneWith(t, now)
		sharing := &a.reports[0].Sharing
		t.EndElsewhere = len(a.reports) == 1 && max(sharing.Replicas, sharing.Configured) > 1 && !ended(t) && passedOn(t)
	}
	if a.ends != nil {
		a.ends.fill(all, a.reports[0].Traces)
	}
	return all
}

// Limits of time of goneWith.
const (
	heardLate = 5 * time.Second // a replica may have lived that much longer than others know
	nextPass  = 5 * time.Second // after a prefill leg the next pass has begun, and its replica has reported it
)

// goneWith returns the replicas that ended without a shutdown and may have known the end of a request that the others
// do not know. Envoy reports a good end only to the replica that served the last pass.
func (a *answers) goneWith(t *telemetry.Trace, now time.Time) (names []string) {
	if ended(t) || a.noRedis {
		return nil
	}
	if !passedOn(t) || t.Next > t.Pass && now.Sub(t.Started) <= t.Waited+t.PrefillTime+nextPass {
		return nil
	}
	for _, g := range slices.Concat(a.gone, a.restarted) {
		if t.Started.Before(g.Heard.Add(heardLate)) && !slices.Contains(names, g.Name) {
			names = append(names, g.Name)
		}
	}
	return names
}

// passedOn reports whether a replica that is not among those asked may have served the last pass of a request: none of
// these has the pass that follows the end of a prefill leg, or none saw the leg end.
func passedOn(t *telemetry.Trace) bool {
	return t.Next > t.Pass || t.Prefill != "" && t.PrefillTime == 0 && t.Next == 0 && t.Pass == 0
}

// merge merges reports into a status; the first report is the asked replica's.
func merge(got answers, now time.Time, w *Wanted) Status {
	reports := got.reports
	asked := &reports[0]
	s := Status{
		Replica: asked.Name, Version: asked.Version, Started: asked.Started, Now: now, Ready: asked.Ready,
		Sharing: asked.Sharing, Silent: got.silent, Gone: got.gone, Pools: []Pool{},
	}
	s.Sharing.NoAnswer = got.noRedis
	if !asked.Sharing.Up || got.noRedis { // it does not know who lives
		s.Gone = nil
	}
	recent := got.traces(now)
	minute, last, lastStep := telemetry.Totals{}, asked.Last, asked.LastStep
	lost := uint64(0)
	for i := range reports {
		r := &reports[i]
		s.Replicas = append(s.Replicas, Replica{
			Name: r.Name, Version: r.Version, Started: r.Started, Ready: r.Ready,
			Redis: r.Sharing.Up, NoSlot: r.Sharing.NoSlot, Reservations: r.Reservations, Config: r.Config, File: r.File,
			Logs: r.Logs, Logged: r.Logged, Risk: r.Risk,
		})
		s.Reservations += r.Reservations
		for j := range r.Pools {
			s.addPool(&r.Pools[j])
		}
		for _, e := range r.Envoys {
			s.addEnvoy(e)
		}
		of := rates(&r.Minute, max(r.Seconds, 1))
		s.Minute.addRates(&of)
		s.Failures += r.Minute.Failed - min(r.Minute.TicketFailures, r.Minute.Failed)
		s.TicketsRefused, lost = s.TicketsRefused+r.Minute.TicketsRefused, lost+r.Minute.TicketFailures
		minute.FirstByte.Add(&r.Minute.FirstByte)
		minute.Prefill.Add(&r.Minute.Prefill)
		minute.Decisions.Add(&r.Minute.Decisions)
		minute.Usage.FirstToken.Add(&r.Minute.Usage.FirstToken)
		minute.Usage.PerToken.Add(&r.Minute.Usage.PerToken)
		last = min(last, max(r.Last, asked.Last-behind))
		lastStep = min(lastStep, max(r.LastStep, asked.LastStep-stepSeconds))
	}
	s.TicketsRefused = max(s.TicketsRefused, lost) // one replica refuses, and another may know whose request it was
	if slices.ContainsFunc(s.Envoys, func(e Envoy) bool { return e.Left.IsZero() }) {
		s.Envoys = slices.DeleteFunc(s.Envoys, func(e Envoy) bool { return !e.Left.IsZero() })
	}
	s.Scope = scopeOf(&s)
	s.Minute.percentiles(&minute)
	s.Minute.N = last
	s.Points = points(reports, last, func(r *report) []Point { return r.Points })
	s.Hour, s.Hours = points(reports, lastStep, func(r *report) []Point { return r.Hour }), asked.Hours
	for i := range s.Pools {
		s.Pools[i].Wanted, s.Pools[i].Short = s.Pools[i].Advice.Sentence()
		for j := range s.Pools[i].Endpoints {
			s.Pools[i].Endpoints[j].seenIn(recent)
		}
	}
	s.Flow = flow(recent, now.Add(-time.Minute))
	s.failedHops(recent, now.Add(-time.Minute))
	s.Attention = attention(&s, recent)
	w.names = namesOf(s.Pools)
	s.Recent = inWords(w.of(recent))
	return s
}

// addEnvoy adds an Envoy. If two replicas know it, the one to which it is connected counts, or was last.
func (s *Status) addEnvoy(e Envoy) {
	i := slices.IndexFunc(s.Envoys, func(known Envoy) bool { return known.Name == e.Name })
	switch {
	case i < 0:
		s.Envoys = append(s.Envoys, e)
	case e.lasts(&s.Envoys[i]):
		s.Envoys[i] = e
	}
}

// lasts reports whether e is a newer connection than another one of the same Envoy.
func (e *Envoy) lasts(o *Envoy) bool {
	if e.Left.IsZero() != o.Left.IsZero() {
		return e.Left.IsZero()
	}
	return e.Left.After(o.Left) || e.Left.Equal(o.Left) && e.Since.After(o.Since)
}

// behind is the number of seconds that a replica's clock may be behind before points of the others are shown without
// it.
const behind = 5

// points sums the points of all reports, second by second, up to the last that all have.
func points(reports []report, last int64, of func(*report) []Point) []Point {
	bySecond := map[int64]*Point{}
	for i := range reports {
		for j, all := 0, of(&reports[i]); j < len(all); j++ {
			p := &all[j]
			if p.N > last {
				break
			}
			if sum := bySecond[p.N]; sum != nil {
				sum.add(p)
			} else {
				one := *p
				bySecond[p.N] = &one
			}
		}
	}
	out := make([]Point, 0, len(bySecond))
	for _, p := range bySecond {
		out = append(out, *p)
	}
	slices.SortFunc(out, func(a, b Point) int { return cmp.Compare(a.N, b.N) })
	return out
}

// add adds another replica's point of the same second. For medians it takes the mean by requests, for p99 the highest.
func (p *Point) add(o *Point) {
	mean := func(a, b *float64, n, m float64) {
		switch {
		case *b == 0 || m == 0:
		case *a == 0 || n == 0:
			*a = *b
		default:
			*a = (*a*n + *b*m) / (n + m)
		}
	}
	mean(&p.FirstByte50, &o.FirstByte50, p.OK, o.OK)
	mean(&p.Prefill50, &o.Prefill50, p.Split, o.Split)
	mean(&p.Decide50, &o.Decide50, p.Split+p.Alone+p.Pass, o.Split+o.Alone+o.Pass)
	p.FirstByte99, p.Prefill99 = max(p.FirstByte99, o.FirstByte99), max(p.Prefill99, o.Prefill99)
	p.Decide99 = max(p.Decide99, o.Decide99)
	mean(&p.FirstToken50, &o.FirstToken50, p.OK, o.OK)
	mean(&p.PerToken50, &o.PerToken50, p.Tokens, o.Tokens)
	p.FirstToken99 = max(p.FirstToken99, o.FirstToken99)
	p.Running, p.Waiting = max(p.Running, o.Running), max(p.Waiting, o.Waiting) // all know the same of engines
	p.Written, p.Each = max(p.Written, o.Written), max(p.Each, o.Each)
	p.Queued += o.Queued
	p.addRates(o)
}

func (p *Point) addRates(o *Point) {
	p.Split, p.Alone, p.Pass = p.Split+o.Split, p.Alone+o.Alone, p.Pass+o.Pass
	p.OK, p.Rejected, p.Failed, p.Gone = p.OK+o.OK, p.Rejected+o.Rejected, p.Failed+o.Failed, p.Gone+o.Gone
	p.Refused, p.Replans = p.Refused+o.Refused, p.Replans+o.Replans
	p.Cached, p.Computed = p.Cached+o.Cached, p.Computed+o.Computed
	p.Tokens, p.Judged, p.Kept = p.Tokens+o.Tokens, p.Judged+o.Judged, p.Kept+o.Kept
}

// addPool adds a replica's part of a pool.
func (s *Status) addPool(of *Pool) {
	i := slices.IndexFunc(s.Pools, func(p Pool) bool { return p.Name == of.Name })
	if i < 0 {
		s.Pools = append(s.Pools, *of)
		s.Pools[len(s.Pools)-1].Endpoints = append([]Endpoint{}, of.Endpoints...)
		return
	}
	p := &s.Pools[i]
	p.IndexBlocks, p.TokenBytes = max(p.IndexBlocks, of.IndexBlocks), cmp.Or(p.TokenBytes, of.TokenBytes)
	if p.KnownBetter(&of.Output) {
		p.Output = of.Output
	}
	p.Memory.add(&of.Memory)
	p.Busy = max(p.Busy, of.Busy) // each counts the work of all
	if a, b := &p.Advice, &of.Advice; b.WantedPrefill+b.WantedDecode > a.WantedPrefill+a.WantedDecode {
		p.Advice = *b // one that has just started knows less
	}
	if of.Full.After(p.Full) {
		p.Full = of.Full
	}
	if len(p.Apart)+len(p.Allowed)+len(p.Unknown) == 0 { // all replicas ask the same engines
		p.Pairing = of.Pairing
	}
	for _, e := range of.Endpoints {
		j := slices.IndexFunc(p.Endpoints, func(known Endpoint) bool { return known.Address == e.Address })
		if j < 0 {
			p.Endpoints = append(p.Endpoints, e)
			continue
		}
		p.Endpoints[j].add(&e)
	}
}

// add adds another replica's part of an endpoint. All have the same report of its engine; the worst state counts.
func (e *Endpoint) add(o *Endpoint) {
	e.Requests, e.Tokens = e.Requests+o.Requests, e.Tokens+o.Tokens
	if e.FailedBy == "" || e.FailedBy == string(kvstate.CauseReplica) && o.FailedBy != "" { // rather who noticed
		e.FailedBy, e.FailedS = o.FailedBy, o.FailedS
	}
	if severity(o.State) > severity(e.State) {
		e.State, e.Up = o.State, o.Up
	}
	e.Unpaired = e.Unpaired || o.Unpaired
	e.Transfer = cmp.Or(e.Transfer, o.Transfer)
	if e.Running < 0 && e.Waiting < 0 && e.KVUsage < 0 {
		e.Running, e.Waiting, e.KVUsage = o.Running, o.Waiting, o.KVUsage
	}
	if e.KnownBetter(&o.Output) {
		e.Output = o.Output
	}
	e.PrefillSlowness = max(e.PrefillSlowness, o.PrefillSlowness) // each has learned of what it sent
	e.DecodeSlowness = max(e.DecodeSlowness, o.DecodeSlowness)
	e.NoPairs, e.BeginsAnew = cmp.Or(e.NoPairs, o.NoPairs), e.BeginsAnew || o.BeginsAnew
	if o.Now != nil && (e.Now == nil || o.Now.Since.After(e.Now.Since)) {
		e.Now = o.Now
	}
	for _, d := range o.UnloadableBy {
		if !slices.Contains(e.UnloadableBy, d) {
			e.UnloadableBy = append(slices.Clone(e.UnloadableBy), d)
		}
	}
}

// severity orders states of endpoints.
func severity(state string) int {
	return slices.Index([]string{"up", "stale", "paused", "draining", "out"}, state)
}
