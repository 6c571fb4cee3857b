package notices

import (
	"context"
	"fmt"
	"log/slog"
	"net"

	"tandem/internal/zmtp"
)

// Serve receives notices on l, a PULL socket that engines push at, until ctx ends. tell is called with each, for other
// replicas of Tandem, where the leg may be that waits for it; nil: there are none.
func Serve(ctx context.Context, l net.Listener, b *Board, tell func(id string), log *slog.Logger) error {
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
		if tell != nil {
			tell(id)
		}
	})}
	if err := s.Serve(ctx, l); err != nil {
		return fmt.Errorf("receiving notices: %w", err)
	}
	return nil
}
