package kvstate

// The word of an endpoint that may serve both legs is its assigned role: the leg for which it is used now
// (picker/roles). Only the router knows it: the engine does not, and requests that run there go on.

// SetWord sets what an endpoint of [RoleBoth] is used for: [RolePrefill], [RoleDecode], or RoleBoth for either. It is
// ignored for other endpoints. It reports whether the word changed.
func (s *State) SetWord(e *Endpoint, word Role) bool {
	if e.Role != RoleBoth || word&RoleBoth == 0 || Role(e.state.instructions.word.Swap(uint32(word))) == word {
		return false
	}
	e.state.load.signalFreed() // what waits may go there now
	return true
}

// Word returns the endpoint's word; 0 if it has none.
func (e *Endpoint) Word() Role { return Role(e.state.instructions.word.Load()) & e.Role }

// Used returns the legs that the endpoint is used for now: its word's, or all that it may serve.
func (c *Candidate) Used() Role {
	if c.Word != 0 {
		return c.Word
	}
	return c.Endpoint.Role
}
