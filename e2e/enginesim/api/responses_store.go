package api

import (
	"net/http"
	"sync"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
	"tandem/e2e/enginesim/request"
)

// responseStore stores the answers of /v1/responses with store or background true, so that a later request can
// continue one of them by previous_response_id. It is this engine's alone: any other engine answers 404, which is why
// such requests stick to an endpoint.
//
// A background request is answered when it is done, like any other: nothing here depends on it being queued.
type responseStore struct {
	mu    sync.Mutex
	byID  map[string]storedResponse
	order []string // oldest first
}

type storedResponse struct {
	body       []byte // the response object
	transcript []byte // the beginning of a continuation's prompt
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

func responseNotFound(id string) *engine.Error {
	return &engine.Error{
		Status: http.StatusNotFound, Typ: "invalid_request_error", Param: "response_id",
		Message: "Response with id '" + id + "' not found.",
	}
}

// load loads the response that the request continues.
func (s *responseStore) load(q *request.Request) *engine.Error {
	id := string(jsontext.Text(q.Raw("previous_response_id")))
	if q.API != request.Responses || id == "" {
		return nil
	}
	r, ok := s.get(id)
	if !ok {
		return responseNotFound(id)
	}
	q.Transcript = r.transcript
	return nil
}

// keepResponse stores a finished answer if the client asked for it.
func (c *call) keepResponse(body []byte) {
	q := c.req
	if q.API != request.Responses || !q.Flag("store") && !q.Flag("background") {
		return
	}
	transcript := append([]byte(nil), q.Transcript...)
	transcript = append(transcript, q.Raw("input")...)
	transcript = append(transcript, c.Seqs[0].Out.Whole()...)
	c.s.responses.put(c.id, storedResponse{append([]byte(nil), body...), transcript})
}

// serveStored is GET /v1/responses/{id}.
func (s *Server) serveStored(w http.ResponseWriter, r *http.Request, _ []byte) {
	id := r.PathValue("id")
	stored, ok := s.responses.get(id)
	if !ok {
		e := responseNotFound(id)
		writeRaw(w, e.Status, errorBody(e, request.Responses))
		return
	}
	writeRaw(w, http.StatusOK, stored.body)
}
