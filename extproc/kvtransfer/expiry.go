package kvtransfer

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"time"
)

// Clocks are the clocks of prefill engines, in seconds.
type Clocks interface {
	// Now returns the earliest that the clock of an engine may show now, at its side channel; false: it is not known.
	Now(ctx context.Context, engine, host string, port int) (seconds float64, ok bool)
}

// Expiry has D decline blocks whose lease is over. From 0.26 on a vLLM with bidirectional_kv_xfer compares
// remote_blocks_expiry_time of the object, which is a time of P's clock, with what P's clock shows by then, 5 s early
// (0.32.0, nixl/pull_worker.py:126-161). P itself does not say it on the way to D (pull_scheduler.py:250).
type Expiry struct {
	Clocks Clocks
	Lease  time.Duration
}

// skew is an allowance for the difference between replicas' clocks, and for P's clock since it was read.
const skew = time.Second

// Errors of [Expiry.Write].
var (
	errNoClock = errors.New("the clock of prefill's engine is not known: its NIXL side channel did not answer")
	errNoLease = errors.New("prefill took so long that the lease may be over")
)

// Write returns the object with the time at which the lease ends. age is how long ago the prefill leg was sent: P began
// the lease when it had computed the prompt. That moment is not known, so the lease counts from the request.
func (x *Expiry) Write(ctx context.Context, params []byte, age time.Duration) ([]byte, error) {
	left := x.Lease - max(age, 0) - skew
	if left <= 0 {
		return nil, errNoLease
	}
	p, err := readPull(params)
	if err != nil {
		return nil, err
	}
	var host, engine string
	if json.Unmarshal(p.host, &host) != nil || json.Unmarshal(p.engine, &engine) != nil {
		return nil, errNotJSON
	}
	now, ok := x.Clocks.Now(ctx, engine, host, p.port)
	if !ok {
		return nil, errNoClock
	}
	out := make([]byte, 0, len(params)+64)
	if p.expiry != nil {
		out = append(out, params[:p.expiryAt]...)
	} else {
		out = append(append(out, params[:len(params)-1]...), `,"remote_blocks_expiry_time":`...)
	}
	out = strconv.AppendFloat(out, now+left.Seconds(), 'f', 3, 64)
	if p.expiry != nil {
		return append(out, params[p.expiryAt+len(p.expiry):]...), nil
	}
	return append(out, '}'), nil
}
