package api

import (
	"net"
	"net/http"
	"strconv"

	"tandem/e2e/enginesim/jsontext"
	"tandem/e2e/enginesim/request"
)

// serveContextInfo is GET /server_info.
func (s *Server) serveContextInfo(w http.ResponseWriter) {
	writeJSONValue(w, map[string]any{"disaggregated_params": map[string]any{
		"ctx_dp_rank": 0, "ctx_info_endpoint": []string{"tcp://" +
			net.JoinHostPort(s.SideHost, strconv.Itoa(s.SidePort))},
	}})
}

// serveRender is POST /v1/.../render (vLLM 0.24; messages 0.29, responses 0.30; --enable-scale-out): it returns the
// token ids of a request.
func (s *Server) serveRender(w http.ResponseWriter, body []byte, api request.API) {
	q, ok := s.small(w, body)
	if !ok {
		return
	}
	q.API, q.ReturnIDs = api, true
	prompts, bad := q.Render(s.cfg.BlockSize)
	if bad != nil {
		writeRaw(w, bad.Status, errorBody(bad, request.None))
		return
	}
	dst := jsontext.AppendIDs([]byte(`{"request_id":"chatcmpl-render","token_ids":`), prompts[0].Ids)
	writeRaw(w, http.StatusOK, append(dst, `,"sampling_params":{}}`...))
}
