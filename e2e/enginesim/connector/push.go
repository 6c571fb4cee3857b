package connector

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"time"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
)

// The dialects of vLLM in which P sends and D waits: NIXL push (0.24 and later), Mooncake (0.16 and later), MoRIIO. P
// computes, answers, and keeps the blocks until D has taken them or their time is up. D waits for them, and its blocks
// stay allocated until they come or its time is up, even if its client has left: vLLM frees an aborted request that
// waits for KV only when its receive ends.

// parsePush reads kv_transfer_params as these connectors do, including the values that kill or block them.
func (c *Config) parsePush(raw []byte) (kv Params) {
	if jsontext.IsNull(raw) {
		return kv
	}
	kv.Present, kv.CachedOnP = true, -1
	kv.RemoteDecode, kv.RemotePrefill = jsontext.Truthy(jsontext.Get(raw, "do_remote_decode")),
		jsontext.Truthy(jsontext.Get(raw, "do_remote_prefill"))
	kv.engineID, kv.requestID = string(jsontext.Text(jsontext.Get(raw, "remote_engine_id"))),
		string(jsontext.Text(jsontext.Get(raw, "remote_request_id")))
	kv.host, kv.transfer = string(jsontext.Text(jsontext.Get(raw, "remote_host"))),
		string(jsontext.Text(jsontext.Get(raw, "transfer_id")))
	kv.bootstrap = string(jsontext.Text(jsontext.Get(raw, "remote_bootstrap_addr")))
	port, isPort := jsontext.Integer(jsontext.Get(raw, "remote_port"))
	kv.port = int(port)
	switch c.Connector {
	case MoRIIO:
		kv.parseMoRIIO(raw)
		return kv
	case MoRIIORead:
		kv.parseMoRIIORead(raw)
		return kv
	case Mooncake:
		kv.parseMooncake(c.Role)
		return kv
	}
	kv.parseNIXLPush(isPort, raw)
	return kv
}

// pushes reports whether this engine speaks one of these dialects.
func (c *Config) pushes() bool {
	switch c.Connector {
	case Mooncake, NIXLPush, MoRIIO, MoRIIORead:
		return true
	}
	return false
}

// key returns the name under which both legs of a sequence meet. NIXL push finds D's registration by the engine's own
// request id without its random tail, so both legs need the same x-request-id and the same path.
func (l *Leg) key(q *engine.Sequence) string {
	if l.Node.cfg.Connector == NIXLPush {
		return l.Name(q)
	}
	return l.Kv.transfer
}

// await waits for the KV of D's sequence. If the client leaves, the wait continues, and the blocks stay allocated.
func (l *Leg) await(ctx context.Context) error {
	for _, q := range l.Job.Seqs {
		held := int64(len(q.Grant.Blocks))
		l.Node.Rooms.Held.Add(held)
		type received struct {
			actual []uint64
			err    error
		}
		got := make(chan received, 1)
		go func() {
			actual, err := l.Node.awaitKV(l.Kv, l.key(q), q.P)
			got <- received{actual, err}
		}()
		select {
		case r := <-got:
			l.Node.Rooms.Held.Add(-held)
			if r.err != nil {
				return r.err
			}
			l.took(q, r.actual)
		case <-ctx.Done():
			blocks := q.Grant.Blocks
			q.Grant.Blocks = nil
			go func() {
				<-got
				l.Node.Pool.Free(blocks)
				l.Node.Rooms.Held.Add(-held)
			}()
			return ctx.Err()
		}
	}
	return nil
}

// awaitKV registers at P and waits, even if the client leaves.
func (s *Node) awaitKV(kv *Params, key string, p *engine.Prompt) ([]uint64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.TransferTimeout)
	defer cancel()
	addr, err := s.findWorker(ctx, kv)
	if err != nil {
		return nil, err
	}
	if addr == "" { // the registration goes to an engine that does not know the key; a watchdog only logs that
		<-ctx.Done()
		return nil, fmt.Errorf("%w: nobody answered the registration", engine.ErrLoadFailed)
	}
	return s.join(ctx, addr, key, p)
}

// findWorker returns the address of P's worker: for Mooncake from P's bootstrap server, for NIXL push from the
// parameters. "": none.
func (s *Node) findWorker(ctx context.Context, kv *Params) (string, error) {
	switch s.cfg.Connector {
	case MoRIIO, MoRIIORead:
		return net.JoinHostPort(kv.host, strconv.Itoa(kv.port)), nil
	}
	if s.cfg.Connector == NIXLPush {
		addr := net.JoinHostPort(kv.host, strconv.Itoa(kv.port))
		if id, _ := s.peers.Who(ctx, addr); id != kv.engineID {
			return "", nil
		}
		return addr, nil
	}
	return findMooncake(ctx, kv)
}

// offer offers the blocks of a finished prefill leg to D, for a limited time. A leg that was sent a second time may
// offer blocks that no D takes.
func (l *Leg) offer(q *engine.Sequence, blocks []int32) {
	s, key := l.Node, l.key(q)
	if s.cfg.Connector != NIXLPush && (key == "" || q.Out.Finish != "length") {
		s.Logf("the transfer %q is cancelled: finish reason %s", key, q.Out.Finish)
		s.Pool.Free(blocks)
		return
	}
	limit := s.cfg.TransferTimeout
	switch s.cfg.Connector {
	case NIXLPush:
		limit = s.cfg.Lease
		id := fmt.Sprintf("%s-%08x", key, rand.Uint32())
		q.HandOver = pushed(l.Rule, s.appendHandOver(nil, id, blocks, q.Computed(), q.Local(s.cfg.BlockSize)))
	case MoRIIORead:
		q.HandOver = s.moriioHandOver(key, blocks)
	}
	s.Rooms.Held.Add(int64(len(blocks)))
	s.Ledger.Given.Add(1)
	go func() {
		defer s.Rooms.Held.Add(-int64(len(blocks)))
		defer s.Pool.Free(blocks)
		over := time.NewTimer(limit)
		defer over.Stop()
		r, err := s.Rooms.enter(key)
		if err != nil {
			<-over.C
			s.Ledger.Expired.Add(1)
			return
		}
		defer s.Rooms.close(key)
		select {
		case <-r.join:
			r.answer <- s.send(q.P, r.want)
			s.Ledger.Fetched.Add(1)
		case <-over.C:
			s.Ledger.Expired.Add(1)
		}
	}()
}
