package envoywire

import (
	"fmt"
	"sync"
)

// Risk returns what an Envoy of a release risks, in words; "": nothing that is known. 1.37.5, 1.38.3 and 1.39.0 are the
// first that survive several unexpected answers of an external processor in one gRPC message (CVE-2026-47207). Envoy's
// patch releases of 2026-10-12 (1.37.9, 1.38.7, 1.39.4) are no floor: nobody could run them here, 1.40.0 is what is
// tested.
func Risk(major, minor, patch uint32) string {
	at := func(m, p uint32) bool { return major == 1 && minor == m && patch < p }
	switch {
	case major == 1 && minor < 37:
		return fmt.Sprintf("Envoy %d.%d.%d is older than what Tandem is tested with, and can crash (CVE-2026-47207): "+
			"take 1.37.5, 1.38.3, 1.39 or newer", major, minor, patch)
	case at(37, 5), at(38, 3):
		return fmt.Sprintf("Envoy %d.%d.%d can crash if an external processor's answers come in one message "+
			"(CVE-2026-47207): take 1.37.5, 1.38.3, 1.39 or newer", major, minor, patch)
	}
	return ""
}

// Risky counts the streams of Envoys whose release has a [Risk]. The zero value is ready to use; it is safe for
// concurrent use.
type Risky struct {
	mu      sync.Mutex
	streams int
	risk    string // of the latest
}

// Opened records a stream. The returned function records its end.
func (r *Risky) Opened(risk string) (closed func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.streams, r.risk = r.streams+1, risk
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.streams--
	}
}

// Risk is what an Envoy with an open stream risks; "": none risks anything that is known.
func (r *Risky) Risk() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.streams == 0 {
		return ""
	}
	return r.risk
}
