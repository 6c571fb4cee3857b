package main

import (
	"net/http"
	"sync"
)

// responseStore holds the answers of /v1/responses that asked to be kept (store or background true), so that a later
// request can go on from one of them by previous_response_id. It is this engine's alone: any other engine answers 404,
// which is what makes such requests stick to an endpoint.
//
// A background request is answered when it is done, like any other: nothing here depends on it being queued.
type responseStore struct {
	mu    sync.Mutex
	byID  map[string]storedResponse
	order []string // oldest first
}

type storedResponse struct {
	body       []byte // the response object
	transcript []byte // what a continuation's prompt begins with
}

const maxStoredResponses = 1000

func newResponseStore() *responseStore {
	return &responseStore{byID: make(map[string]storedResponse)}
}

func (s *responseStore) get(id string) (storedResponse, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.byID[id]
	return r, ok
}

func (s *responseStore) put(id string, r storedResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.order) == maxStoredResponses {
		delete(s.byID, s.order[0])
		s.order = s.order[1:]
	}
	s.byID[id] = r
	s.order = append(s.order, id)
}

func responseNotFound(id string) *apiError {
	return &apiError{
		status: http.StatusNotFound, typ: "invalid_request_error", param: "response_id",
		message: "Response with id '" + id + "' not found.",
	}
}

// continued loads the response that the request goes on from.
func (q *request) continued(s *responseStore) *apiError {
	id := string(text(q.raw("previous_response_id")))
	if q.api != apiResponses || id == "" {
		return nil
	}
	r, ok := s.get(id)
	if !ok {
		return responseNotFound(id)
	}
	q.transcript = r.transcript
	return nil
}

// keepResponse stores a finished answer where the client asked for it.
func (c *call) keepResponse(body []byte) {
	q := c.req
	if q.api != apiResponses || !isTrue(q.raw("store")) && !isTrue(q.raw("background")) {
		return
	}
	transcript := append([]byte(nil), q.transcript...)
	transcript = append(transcript, q.raw("input")...)
	transcript = append(transcript, c.seqs[0].out.whole()...)
	c.s.responses.put(c.id, storedResponse{append([]byte(nil), body...), transcript})
}

// serveStored is GET /v1/responses/{id}.
func (s *sim) serveStored(w http.ResponseWriter, r *http.Request, _ []byte) {
	id := r.PathValue("id")
	stored, ok := s.responses.get(id)
	if !ok {
		e := responseNotFound(id)
		writeRaw(w, e.status, e.json(apiResponses))
		return
	}
	writeRaw(w, http.StatusOK, stored.body)
}
