package extproc

import (
	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
)

// A redirect that Envoy does not follow is the client's answer, were it not for a script in the bootstrap, which makes a 503 of it
// (attempts_exhausted) and tags the access log's entry. Envoy itself tells only its stats why; here it is worked out from what
// the entry has.

// whyUnfollowed is the reason of the metric, of all that Envoy (1.40, Filter::setupRedirect of its router) can have on the routes of
// our bootstrap. t is the ticket of the pass that the answer ended.
func (s *Server) whyUnfollowed(t *kvtransfer.Ticket, e *envoywire.LogEntry) string {
	body := int64(e.Sent) - int64(e.SentHeaders) // what frames it included
	switch {
	case string(e.Unfollowed) == envoywire.UnfollowedLocation:
		return "no_location"
	case t.Redirects >= s.MaxRedirects:
		return "too_many"
	case body < int64(t.BodyBytes):
		return "incomplete"
	}
	return "not_kept"
}

// unfollowed logs and counts such an end. Every replica sees it; mine is whether this one booked the pass, and counts.
func (s *Server) unfollowed(t *kvtransfer.Ticket, e *envoywire.LogEntry, mine bool) {
	why := s.whyUnfollowed(t, e)
	s.Log.Warn("Envoy did not follow a redirect", "request_id", string(e.RequestID), "reason", why, "stage", t.Stage.String(), "prefill", t.Prefill,
		"decode", t.Decode, "redirects", t.Redirects, "body_bytes", t.BodyBytes, "sent_bytes", e.Sent, "sent_header_bytes", e.SentHeaders, "duration", e.Duration)
	if mine {
		s.metrics.NotFollowed(why)
	}
}
