package api

import (
	"io"
	"net/http"
	"slices"
	"sync"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
	"tandem/e2e/enginesim/request"
)

// adapters are the LoRA adapters that a running engine was given, as vLLM takes them with
// VLLM_ALLOW_RUNTIME_LORA_UPDATING (0.32.0, entrypoints/openai/models/serving.py). One is another name of the model
// here: its text is the same.
type adapters struct {
	mu    sync.Mutex
	names []string
}

// limits are the configuration's, with the adapters that are loaded.
func (s *Server) limits() *request.Limits {
	l := s.cfg.limits()
	s.adapters.mu.Lock()
	defer s.adapters.mu.Unlock()
	l.Models = slices.Concat(l.Models, s.adapters.names)
	return l
}

// changeAdapters is POST /v1/load_lora_adapter and, with load false, /v1/unload_lora_adapter.
func (s *Server) changeAdapters(w http.ResponseWriter, body []byte, load bool) {
	var room [8]jsontext.Member
	members, _ := jsontext.ScanObject(room[:0], body)
	name, path := "", ""
	for _, m := range members {
		switch string(m.Key) {
		case "lora_name":
			name = string(jsontext.Text(m.Raw))
		case "lora_path":
			path = string(jsontext.Text(m.Raw))
		}
	}
	a := &s.adapters
	a.mu.Lock()
	defer a.mu.Unlock()
	at := slices.Index(a.names, name)
	refuse := func(status int, kind, message string) {
		writeRaw(w, status, errorBody(&engine.Error{Status: status, Typ: kind, Message: message}, request.None))
	}
	switch {
	case load && (name == "" || path == ""):
		refuse(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
	case name == "":
		refuse(400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.")
	case load && slices.Contains(s.cfg.Models, name):
		refuse(400, "InvalidUserInput", "The lora adapter '"+name+"' conflicts with a served base model.")
	case load && at >= 0:
		refuse(400, "InvalidUserInput", "The lora adapter '"+name+"' has already been loaded. If you want to load the "+
			"adapter in place, set 'load_inplace' to True.")
	case load:
		a.names = append(a.names, name)
		_, _ = io.WriteString(w, "Success: LoRA adapter '"+name+"' added successfully.")
	case at < 0:
		refuse(404, "NotFoundError", "The lora adapter '"+name+"' cannot be found.")
	default:
		a.names = slices.Delete(a.names, at, at+1)
		_, _ = io.WriteString(w, "Success: LoRA adapter '"+name+"' removed successfully.")
	}
}
