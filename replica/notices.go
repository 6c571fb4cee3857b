package replica

import (
	"context"
	"log/slog"
	"net"

	"golang.org/x/sync/errgroup"

	"tandem/kvstate/notices"
)

// takeNotices receives notices. With a Redis, every replica learns of those that any of them receives.
func (f *fleet) takeNotices(ctx context.Context, l net.Listener, log *slog.Logger) error {
	if f.store == nil {
		return notices.Serve(ctx, l, f.board, nil, log)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { f.store.ShareNotices(ctx, f.board.ArrivedAtReplica); return nil })
	group.Go(func() error { return notices.Serve(ctx, l, f.board, f.store.PublishNotice, log) })
	return group.Wait()
}
