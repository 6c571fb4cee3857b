package filter

import (
	"context"
	"slices"
	"time"

	"tandem/carrier/tokens"
	"tandem/extproc/ended"
	"tandem/extproc/names"
	"tandem/internal/guard"
)

// got is what the client gets.
type got struct {
	first     time.Duration // when it began; 0: it has not
	explained string        // the decision, for an operator; "": none asked
	tokens    tokens.Counter
}

// begins is called when an answer with these headers begins. It reports whether its tokens are counted.
func (g *got) begins(f *Filter, header func(name string) string) bool {
	if f.route != nil { // no header mutation makes a header of the metadata, or removes the engine's own
		f.envoy.SetResponseHeader(names.HeaderExplanation, g.explained)
		f.envoy.SetResponseHeader(names.HeaderRequestID, f.id)
	}
	return g.counts(f, header)
}

// sends is begins for an answer that the filter sends by itself: Envoy shows it to no hook. It returns the headers that
// the client gets.
func (g *got) sends(f *Filter, headers []Header) []Header {
	g.counts(f, func(name string) string {
		if i := slices.IndexFunc(headers, func(h Header) bool { return h.Name == name }); i >= 0 {
			return headers[i].Value
		}
		return ""
	})
	if f.route != nil && g.explained != "" {
		headers = append(headers, Header{names.HeaderExplanation, g.explained})
	}
	return f.withID(headers)
}

// withID returns headers of an answer that the filter sends by itself with the request's id, which Tandem's own
// listener sets by itself, and another's may not.
func (f *Filter) withID(headers []Header) []Header {
	if f.route == nil || f.id == "" {
		return headers
	}
	headers = slices.DeleteFunc(headers, func(h Header) bool { return h.Name == names.HeaderRequestID })
	return append(headers, Header{names.HeaderRequestID, f.id})
}

// counts gives an operator the decision where Tandem's own listener makes a header of it, and reports whether the
// tokens of an answer with these headers are counted.
func (g *got) counts(f *Filter, header func(name string) string) bool {
	if f.route == nil && g.explained != "" {
		f.envoy.SetMetadata(names.Decisions, explanation, g.explained)
	}
	return f.s.Passes.Observer.Usage != nil && g.tokens.Begin(header(":status"), header("content-type"))
}

// Counted is called for a piece of an answer that is counted and goes to the client. It reports whether the next piece
// begins within a line. A panic costs the count.
func Counted(f *Filter) (within bool) {
	count := &f.got.tokens
	_, err := guard.Try(guard.With(context.Background(), f.s.Passes.Guard), "envoy filter count",
		func() (struct{}, error) {
			f.envoy.EachPiece(func(part []byte) { count.Read(part, f.envoy.SetMetadataNumber) })
			return struct{}{}, nil
		})
	if err != nil {
		count.Stop()
	}
	return count.Within()
}

// used returns what is known of what the request used, when it has ended.
func (g *got) used(f *Filter, o *Outcome) ended.Usage {
	u := g.tokens.Used(f.began, o.FirstBody, o.LastBody)
	if header := f.s.Passes.Observer.Usage.Header(); header != "" {
		u.Tenant = f.head.Extra(header)
	}
	return u
}
