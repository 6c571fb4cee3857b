package redisstore

import (
	"context"
	"errors"
	"net"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
)

// Stats is what passed between this replica and Redis since its start.
type Stats struct {
	Commands     int64 // sent, those that open connections included
	BytesSent    int64 // as they are on the wire
	BytesRead    int64
	BatchesSent  int64
	BatchesRead  int64 // of other replicas
	Errors       int64 // commands that failed or came too late
	Dropped      int64 // routed prompts that were not told one by one, for want of room
	Gaps         int64 // times that batches of another replica were missed
	Unknown      int64 // parts of batches about endpoints that are not known here
	Snapshots    int64 // written
	SpendUnknown int64 // tickets that were spent without Redis
	LagMicros    int64 // that the last batch took from its sender's Redis time to here; microseconds, about
}

// counters are Stats while they are counted.
type counters struct {
	commands, bytesSent, bytesRead, batchesSent, batchesRead, errors atomic.Int64
	dropped, gaps, unknown, snapshots, spendUnknown, lagMicroseconds atomic.Int64
}

// Stats is what was counted so far.
func (s *Store) Stats() Stats {
	c := &s.counters
	return Stats{
		Commands: c.commands.Load(), BytesSent: c.bytesSent.Load(), BytesRead: c.bytesRead.Load(),
		BatchesSent: c.batchesSent.Load(), BatchesRead: c.batchesRead.Load(), Errors: c.errors.Load(),
		Dropped: c.dropped.Load(), Gaps: c.gaps.Load(), Unknown: c.unknown.Load(), Snapshots: c.snapshots.Load(),
		SpendUnknown: c.spendUnknown.Load(), LagMicros: c.lagMicroseconds.Load(),
	}
}

// countedConn counts the bytes of a connection.
type countedConn struct {
	net.Conn
	c *counters
}

func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.c.bytesRead.Add(int64(n))
	return n, err
}

func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.c.bytesSent.Add(int64(n))
	return n, err
}

// counting is the hook that counts commands.
type counting struct{ c *counters }

func (h counting) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h counting) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.c.commands.Add(1)
		err := next(ctx, cmd)
		h.failed(err)
		return err
	}
}

func (h counting) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		h.c.commands.Add(int64(len(cmds)))
		err := next(ctx, cmds)
		h.failed(err)
		return err
	}
}

func (h counting) failed(err error) {
	if err != nil && !errors.Is(err, redis.Nil) && !errors.Is(err, context.Canceled) {
		h.c.errors.Add(1)
	}
}
