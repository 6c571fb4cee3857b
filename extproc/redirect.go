package extproc

import (
	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
)

// If Envoy did not follow a redirect, the client would get it as its answer. A script in the bootstrap replaces it
// by a 503 (attempts_exhausted) and tags the access log entry. Envoy reports the reason only in its stats; here it
// is derived from the entry.

// notFollowedReason returns the reason for the metric: one of those that Envoy (1.40, Filter::setupRedirect of its
// router) can have on the routes of our bootstrap. t is the ticket of the pass that the answer ended.
func (s *Server) notFollowedReason(t *kvtransfer.Ticket, e *envoywire.LogEntry) string {
	body := int64(e.Sent) - int64(e.SentHeaders) // frames included
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

// notFollowed logs and counts such an end. Every replica receives the entry; mine reports whether this one made the
// reservation, and counts it.
func (s *Server) notFollowed(t *kvtransfer.Ticket, e *envoywire.LogEntry, mine bool) {
	why := s.notFollowedReason(t, e)
	s.Log.Warn("Envoy did not follow a redirect", "request_id", string(e.RequestID), "reason", why, "stage", t.Stage.String(), "prefill", t.Prefill,
		"decode", t.Decode, "redirects", t.Redirects, "body_bytes", t.BodyBytes, "sent_bytes", e.Sent, "sent_header_bytes", e.SentHeaders, "duration", e.Duration)
	if mine {
		s.metrics.NotFollowed(why)
	}
}
