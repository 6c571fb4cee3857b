package extproc

import (
	"time"

	"tandem/extproc/openai"
)

// hold counts the memory of the body, and of what else the exchange keeps, against what all streams together may hold.
func (x *exchange) hold() error {
	n := int64(x.body.len()) + x.beside
	if x.s.held.Add(n-x.held) > int64(x.s.HeldBytes) {
		x.held = n
		return serverBusy()
	}
	x.held = n
	return nil
}

// holdBeside counts so many bytes beside the body from now on; false where there is no memory for them.
func (x *exchange) holdBeside(n int) bool {
	x.beside = int64(n)
	return x.hold() == nil
}

func serverBusy() *openai.Error {
	return openai.Unavailable("server_busy", "too many large requests are under way; try again", time.Second)
}

// shortOfMemory reports whether so much of what bodies may take is taken that none should be kept waiting.
func (s *Server) shortOfMemory() bool { return s.held.Load() > int64(s.HeldBytes)/4*3 }
