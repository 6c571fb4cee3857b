package notices

import (
	"context"
	"fmt"
	"log/slog"
	"net"

	"tandem/internal/zmtp"
)

// Serve receives notifications on l, a PULL socket that engines send to, until ctx ends. It calls relay with each, to
// forward it to other replicas, where the waiting leg may be; nil: there are none.
func Serve(ctx context.Context, l net.Listener, b *Waiters, relay func(id string), log *slog.Logger) error {
	s := zmtp.Server{Kind: zmtp.Pull, Log: log, Handle: zmtp.Receive(func(frames [][]byte) {
		if len(frames) != 1 {
			b.Ignored()
			return
		}
		id, err := Parse(frames[0])
		if err != nil {
			b.Ignored()
			log.Debug("message that is no notice", "err", err)
			return
		}
		b.Arrived(id)
		if relay != nil {
			relay(id)
		}
	})}
	if err := s.Serve(ctx, l); err != nil {
		return fmt.Errorf("receiving notices: %w", err)
	}
	return nil
}
