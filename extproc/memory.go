package extproc

import (
	"time"

	"tandem/extproc/openai"
)

func serverBusy() *openai.Error {
	return openai.Unavailable("server_busy", "too many large requests are under way; try again", time.Second)
}

// shortOfMemory reports whether so much of the memory for bodies is in use that no request should wait with its
// body.
func (s *Server) shortOfMemory() bool { return s.Memory.Load() > s.Memory.Limit()/4*3 }
