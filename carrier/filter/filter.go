package filter

import (
	"cmp"
	"context"
	"sync/atomic"
	"time"

	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/latebinding"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/internal/guard"
)

// Filter is one request. Its methods run on Envoy's worker; see worker.go.
type Filter struct {
	Called time.Time // when Envoy called the hook; zero: just now

	s       *Shared
	envoy   Envoy
	route   *Route
	cluster string // of the request's route, if that is another's
	sent    int    // bytes of the body that has gone on to an endpoint
	state   journey.State
	head    head
	began   time.Time // when the client's request came
	id      string    // of the request

	reservedAs string // name of its reservations

	m       *scratch // nil: the request is on its way to D, or has been answered
	resumed *attempt // the attempt that this request continues; nil: this is its first pass
	hop     hop      // in progress, or the last
	insured atomic.Pointer[Insured]
	got     got
	worker  worker
}

// hop is the current hop of a request.
type hop struct {
	ticket  kvtransfer.Ticket // of the last pass that was committed, and what it holds; zero: none was
	pair    *pair             // both legs at once; nil: one leg
	rewrite *rewrite          // of D's answer; nil: the client gets it as it is
	trace   traceContext
	// runs after a call whose only purpose is that Envoy looks an endpoint up; nil: the call is another one
	first  func()
	encode *encode // the call is to an endpoint that encodes media; nil: to P
	other  bool    // the request is never split, but planned again if its endpoint has done nothing for it
}

// NewFilter returns the filter of a request. route is nil where routes are Tandem's own.
func (s *Shared) NewFilter(e Envoy, route *Route) *Filter {
	return &Filter{s: s, envoy: e, route: route, began: time.Now()}
}

// guarded runs a hook. A panic costs the request.
func (f *Filter) guarded(hook string, do func() Status) (status Status) {
	if f.s.refusal != nil {
		return Stop
	}
	began := cmp.Or(f.Called, time.Now())
	f.Called = time.Time{}
	defer func() {
		defer func() { f.s.Passes.Observer.Took.Hook.WithLabelValues(hook).Observe(time.Since(began).Seconds()) }()
		if v := recover(); v != nil {
			_ = f.s.Passes.Guard.Caught("envoy filter "+hook, v)
			if f.m != nil {
				f.m.spoiled = true
			}
			status = Stop
			f.fail(openai.Internal())
		}
	}()
	return do()
}

// fail answers after a panic. If that panics too, the client waits until its own time is up.
func (f *Filter) fail(e *openai.Error) {
	defer guard.Recover(guard.With(context.Background(), f.s.Passes.Guard), "envoy filter answer")
	f.takeBack()
	f.refuse(e)
}

// RequestHeaders is called once, first. end: there is no body.
func (f *Filter) RequestHeaders(end bool) Status {
	if e := f.s.refusal; e != nil {
		f.head.read(f.envoy)
		f.respond(e)
		return Stop
	}
	return f.guarded("request headers", func() Status {
		f.head.read(f.envoy)
		if f.route != nil {
			f.arrives()
		}
		f.m = f.s.scratch.Get().(*scratch)
		f.m.meter.Begin("", f.s.Tracer)
		if f.s.Tracer != nil {
			f.hop.trace = traceContext{f.head.get(names.HeaderTraceparent), f.head.get(names.HeaderTracestate)}
		}
		if key := f.head.get(headerAttempt); key != "" {
			f.envoy.RemoveHeader(headerAttempt)
			f.envoy.RemoveHeader(headerPair) // of a D that was not reached
			if f.resumed = f.s.takeRestart(key); f.resumed != nil {
				f.began, f.hop.trace = f.resumed.began, f.resumed.trace
				f.got.explained = f.resumed.explained
			}
		}
		f.identify()
		reads, err := f.admit(end)
		switch {
		case err != nil:
			passing{f}.refusal(err)()
		case reads:
			return Stop
		default:
			f.state = journey.Waiting
			f.offWorker("decide", false, passing.decide)
			if !end {
				return Pause
			}
		}
		return Stop
	})
}

// RequestBody is called for each piece of the body of a request that is read. end: it is the last.
func (f *Filter) RequestBody(end bool) Status {
	if f.state.IsSent() {
		return Continue
	}
	return f.guarded("request body", func() Status {
		switch {
		case f.state != journey.Reading:
		case f.envoy.BodySize() > f.limit():
			f.refuse(openai.TooLarge(f.limit()))
		case end:
			f.take()
		}
		return Stop
	})
}

// RequestTrailers is called if the body has trailers.
func (f *Filter) RequestTrailers() Status {
	if f.state.IsSent() {
		return Continue
	}
	return f.guarded("request trailers", func() Status {
		if !f.state.IsAnswered() {
			f.refuse(openai.Trailers())
		}
		return Stop
	})
}

// take takes the whole body, and decides.
func (f *Filter) take() {
	f.state = journey.Waiting
	n := f.envoy.BodySize()
	if !f.s.hold(f.m, n) {
		f.refuse(openai.ServerBusy())
		return
	}
	b := &f.m.body
	if cap(b.data) < n {
		b.data = make([]byte, 0, n+n/8)
	}
	b.data, b.changed = f.envoy.AppendBody(b.data[:0]), false
	f.offWorker("decide", false, passing.decide)
}

// Woken is called after the filter was woken.
func (f *Filter) Woken() {
	f.guarded("woken", func() Status {
		for do := f.worker.next(); do != nil; do = f.worker.next() {
			do()
		}
		return Continue
	})
}

// maxOnWorker bounds the bodies of requests that are decided on Envoy's worker, in bytes: that takes a fraction of a
// millisecond.
const maxOnWorker = 128 << 10

// offWorker runs work in a goroutine, and what it returns on the worker, unless the request has ended by then. Short
// work that need not wait runs on the worker itself: handing it to another thread would take longer.
func (f *Filter) offWorker(what string, waits bool, work func(p passing, ctx context.Context) onWorker) {
	w := &f.worker
	if w.waker == nil {
		w.waker = f.envoy.Waker()
	}
	base := guard.With(context.Background(), f.s.Passes.Guard)
	run := func(ctx context.Context) onWorker {
		then, err := guard.Try(ctx, "envoy filter "+what,
			func() (onWorker, error) { return work(passing{f}, ctx), nil })
		if err == nil {
			return then
		}
		if f.m != nil {
			f.m.spoiled = true
		}
		return func() { f.fail(openai.Internal()) }
	}
	if !waits && f.resumed == nil && len(f.m.body.data) <= maxOnWorker && !f.s.Passes.Asks() {
		// a hook must not call Envoy's functions that go on with a request
		w.wake(run(latebinding.AtOnce(base)))
		return
	}
	ctx, cancel := context.WithCancel(base)
	w.begins(cancel)
	go func() {
		then := run(ctx)
		cancel()
		if !w.ends(then) {
			f.finish()
		}
	}()
}

// Complete is called when the request has ended, before Envoy's access log and [Filter.Destroy].
func (f *Filter) Complete() {
	f.guarded("complete", func() Status {
		f.leave(f.envoy.Outcome())
		return Continue
	})
}

// Destroy is called last.
func (f *Filter) Destroy() {
	f.guarded("destroy", func() Status {
		f.leave(Outcome{})
		return Continue
	})
	if f.worker.waker != nil {
		f.worker.waker.Close()
	}
}

// leave ends the request here. If a goroutine still runs for the request, it records the end.
func (f *Filter) leave(o Outcome) {
	InsuredOf(f).close()
	if first, busy := f.worker.leave(o); first && !busy {
		f.finish()
	}
}
