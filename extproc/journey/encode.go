package journey

import (
	"log/slog"
	"net/http"

	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
)

// SettleEncode settles an encode leg by its answer, and returns the next ticket: with the parameters for prefill, or
// without, so that prefill encodes by itself.
func (x *Legs) SettleEncode(t *kvtransfer.Ticket, a *pass.Answer) *kvtransfer.Ticket {
	next, s := *t, x.shared.Passes
	next.Redirects++
	took, result := s.Since(t), "failed"
	if params, ok := x.encoded(t, a); ok {
		next.ID, next.Stage, next.Params, result = plan.NewID(), kvtransfer.Encoded, params, "ok"
		next.Expires = s.Now().Add(s.HandOverTTL)
		if pool := s.State.Pool(t.Pool); pool != nil {
			s.MarkGood(pool, t.Decode)
		}
	} else {
		if plan.ClientsFault(a.Code) { // prefill will report the client's mistake, in terms of the client's own body
			result = "refused"
		}
		f := failureOf(a)
		m := faults.Means(faults.Encode, &f, faults.Facts{Code: a.Code})
		x.shared.planAgain(&next, x.learner.ID, t.Decode, &f, &m)
	}
	x.learner.Meter.LegEnded(t.Pool, "encode", t.Decode, result, a.Code, took)
	return &next
}

// encoded returns the parameters for prefill from the answer to an encode leg; nil: it has none.
func (x *Legs) encoded(t *kvtransfer.Ticket, a *pass.Answer) (params []byte, ok bool) {
	if a.Code != http.StatusOK || a.Over || a.Cut {
		return nil, false
	}
	params, err := kvtransfer.ReadEncoded(a.Body)
	if err != nil {
		x.log(slog.LevelWarn, "an encode endpoint's answer is of no use: prefill encodes",
			"endpoint", t.Decode, "err", err)
	}
	return params, err == nil
}
