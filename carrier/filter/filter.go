package filter

import (
	"cmp"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/latebinding"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/internal/guard"
)

// Filter is one request. Envoy calls its hooks on one worker, one after the other; Woken too.
type Filter struct {
	Called time.Time // when Envoy called the hook; zero: just now

	s     *Shared
	envoy Envoy
	waker Waker // nil: nothing had to wait yet
	head  head
	began time.Time // when the client's request came
	id    string    // of the request

	reservedAs string // name of its reservations

	body struct {
		none  bool // it has none
		whole bool // it is read, and has come
	}

	m       *scratch // nil: the request is on its way to D, or has been answered
	resumed *attempt // the attempt that this request continues; nil: this is its first pass
	hop     hop      // in progress, or the last
	insured atomic.Pointer[Insured]
	got     got
	ended   bool // its end has been recorded

	mu      sync.Mutex
	cancel  context.CancelFunc // of what runs; nil: nothing does
	todo    []func()           // what the worker does next
	gone    bool               // Envoy has ended the request
	outcome Outcome            // of a request that is gone
}

// hop is the current hop of a request.
type hop struct {
	ticket   kvtransfer.Ticket // of the last pass that was committed, and what it holds; zero: none was
	sent     bool              // to D: the answer is awaited, or has begun
	replan   bool              // a failure may still be planned again
	holding  bool              // the answer's headers wait for its first byte
	answered bool              // by Tandem, or from P's answer
	pair     *pair             // both legs at once; nil: one leg
	rewrite  *rewrite          // of D's answer; nil: the client gets it as it is
	trace    traceContext
	encode   *encode // the call is to an endpoint that encodes media; nil: to P
	handed   bool    // to another filter, which goes on with it
}

// NewFilter returns the filter of a request.
func (s *Shared) NewFilter(e Envoy) *Filter { return &Filter{s: s, envoy: e, began: time.Now()} }

// guarded runs a hook. A panic costs the request.
func (f *Filter) guarded(hook string, do func() Status) (status Status) {
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
	f.hop.sent, f.hop.replan = false, false
	f.refuse(e)
}

// RequestHeaders is called once, first. end: there is no body.
func (f *Filter) RequestHeaders(end bool) Status {
	return f.guarded("request headers", func() Status {
		f.body.none = end
		f.head.read(f.envoy)
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
		reads, err := f.admit()
		switch {
		case err != nil:
			f.refusal(err)()
		case reads:
			return Stop
		default:
			f.beside("decide", false, f.decide)
			if !end {
				return Pause
			}
		}
		return Stop
	})
}

// RequestBody is called for each piece of the body of a request that is read. end: it is the last.
func (f *Filter) RequestBody(end bool) Status {
	if f.hop.sent {
		return Continue
	}
	return f.guarded("request body", func() Status {
		switch {
		case f.hop.answered || f.body.whole:
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
	if f.hop.sent {
		return Continue
	}
	return f.guarded("request trailers", func() Status {
		if !f.hop.answered {
			f.refuse(openai.Trailers())
		}
		return Stop
	})
}

// take takes the whole body, and decides.
func (f *Filter) take() {
	f.body.whole = true
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
	f.beside("decide", false, f.decide)
}

// Woken is called after the filter was woken.
func (f *Filter) Woken() {
	f.guarded("woken", func() Status {
		for {
			f.mu.Lock()
			if f.gone || len(f.todo) == 0 {
				f.todo = nil
				f.mu.Unlock()
				return Continue
			}
			do := f.todo[0]
			f.todo = f.todo[1:]
			f.mu.Unlock()
			do()
		}
	})
}

// maxOnWorker bounds the bodies of requests that are decided on Envoy's worker, in bytes: that takes a fraction of a
// millisecond.
const maxOnWorker = 128 << 10

// beside runs work in a goroutine, and what it returns on the worker, unless the request has ended by then. Work that
// is short and need not wait runs on the worker, too: handing it to another thread takes longer.
func (f *Filter) beside(what string, waits bool, work func(ctx context.Context) func()) {
	if f.waker == nil {
		f.waker = f.envoy.Waker()
	}
	base := guard.With(context.Background(), f.s.Passes.Guard)
	run := func(ctx context.Context) func() {
		then, err := guard.Try(ctx, "envoy filter "+what, func() (func(), error) { return work(ctx), nil })
		if err == nil {
			return then
		}
		if f.m != nil {
			f.m.spoiled = true
		}
		return func() { f.fail(openai.Internal()) }
	}
	if !waits && f.resumed == nil && len(f.m.body.data) <= maxOnWorker && !f.s.Passes.Asks() {
		// Envoy's functions that go on with a request are not for its hooks.
		f.wake(run(latebinding.AtOnce(base)))
		return
	}
	ctx, cancel := context.WithCancel(base)
	f.mu.Lock()
	f.cancel = cancel
	f.mu.Unlock()
	go func() {
		then := run(ctx)
		cancel()
		f.mu.Lock()
		f.cancel = nil
		gone := f.gone
		if !gone {
			if then != nil {
				f.todo = append(f.todo, then)
			}
			f.waker.Wake()
		}
		f.mu.Unlock()
		if gone {
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
	if f.waker != nil {
		f.waker.Close()
	}
}

// leave ends the request here. If something still runs for the request, that records the end.
func (f *Filter) leave(o Outcome) {
	f.mu.Lock()
	if f.gone {
		f.mu.Unlock()
		return
	}
	f.gone, f.outcome = true, o
	cancel := f.cancel
	f.mu.Unlock()
	InsuredOf(f).close()
	if cancel != nil {
		cancel()
		return
	}
	f.finish()
}
