package kvtransfer

import "errors"

// ErrUnknownPeer means that the legs cannot be planned because P's engine is not known yet: D is told by which name to
// find it, and only P can say that.
var ErrUnknownPeer = errors.New("the prefill engine is not known yet")

// Peer is what was learnt of a prefill engine by asking it. The zero value: nothing.
type Peer struct {
	EngineIDs []string // by data-parallel rank
	Host      string   // of the side channel
	Port      uint16
	TP, PP    int
}
