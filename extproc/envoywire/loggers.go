package envoywire

import (
	"context"
	"strings"
	"sync"

	"google.golang.org/grpc/metadata"

	"tandem/extproc/names"
)

// Loggers are the access log streams that Envoys have open to this replica. An Envoy that knows several replicas
// numbers them: its access log streams carry a fingerprint of its list and the replica's number in it
// (names.MetadataReplica), its ext_proc streams the fingerprint (names.MetadataFleet). So a replica knows the number by
// which the Envoy of a request logs to it alone (names.HeaderReplica). Zero values are ready to use; they are safe for
// concurrent use.
type Loggers struct {
	mu   sync.RWMutex
	open map[string]*logger // by fingerprint
}

// logger is a replica's number in a list, and how many streams are open under it.
type logger struct {
	number  []byte
	streams int
}

// Opened records an access log stream. The returned function records its end.
func (l *Loggers) Opened(ctx context.Context) (closed func()) {
	values := metadata.ValueFromIncomingContext(ctx, names.MetadataReplica)
	if len(values) == 0 {
		return func() {}
	}
	fleet, number, _ := strings.Cut(values[0], "/")
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		l.open = map[string]*logger{}
	}
	of := l.open[fleet]
	if of == nil {
		of = &logger{}
		l.open[fleet] = of
	}
	of.number = []byte(number) // the latest: a list of slots may give a replica another one
	of.streams++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if of.streams--; of.streams == 0 {
			delete(l.open, fleet)
		}
	}
}

// Number returns this replica's number at the Envoy of an ext_proc stream; nil: that Envoy has no access log stream
// here now. several reports whether that Envoy knows several replicas.
func (l *Loggers) Number(ctx context.Context) (number []byte, several bool) {
	values := metadata.ValueFromIncomingContext(ctx, names.MetadataFleet)
	if len(values) == 0 {
		return nil, false
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	if of := l.open[values[0]]; of != nil {
		number = of.number
	}
	return number, true
}

// Address makes Envoy log the end of a request's pass to this replica alone, if alone is true and Envoy's log comes
// here, and else to all replicas.
func (l *Loggers) Address(ctx context.Context, h *HeaderEdits, one bool) {
	if number, several := l.Number(ctx); number != nil && one {
		h.Set(names.HeaderReplica, number)
	} else if several {
		h.Remove(names.HeaderReplica)
	}
}
