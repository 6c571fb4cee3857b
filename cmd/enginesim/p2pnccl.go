package main

import (
	"context"
	"fmt"
	"net"
	"regexp"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"
)

// P2P-NCCL as vLLM 0.9.2 to 0.23 have it. Both engines read each other's address out of the request id; P sends its KV to
// D when it has it, and D keeps it in a buffer until the request comes. D waits for KV inside a step of its engine, which
// stands still meanwhile: here that is a violation, for a router can do better. The side channel is the KV socket.

var (
	decodeAddr  = regexp.MustCompile(`___decode_addr_(.*):(\d+)`)     // on P (p2p_nccl_connector.py, parse_request_id)
	prefillAddr = regexp.MustCompile(`___prefill_addr_(.*):(\d+)___`) // on D
)

// inbox is D's buffer: what P's have sent, by request.
type inbox struct {
	mu   sync.Mutex
	held map[string]joinRequest
}

const maxInbox = 4096

func (b *inbox) put(key string, kv joinRequest) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.held) >= maxInbox {
		return false
	}
	b.held[key] = kv
	return true
}

func (b *inbox) take(key string) (kv joinRequest, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	kv, ok = b.held[key]
	delete(b.held, key)
	return kv, ok
}

// checkAddresses is what the engine raises for: a request id without addresses.
func (c *call) checkAddresses() *apiError {
	pattern := decodeAddr
	if c.s.cfg.role == roleDecode {
		pattern = prefillAddr
	}
	if pattern.FindStringSubmatch(c.xid) == nil {
		c.req.kv.fatal = fmt.Sprintf("ValueError: Request id %s does not contain hostname and port", c.xid)
	}
	return nil
}

// putKV is P's part: its prompt's KV goes to D's socket. Nothing of it is told to the client.
func (c *call) putKV(ctx context.Context) error {
	m := decodeAddr.FindStringSubmatch(c.xid)
	for _, q := range c.seqs {
		kv := c.s.joinOf(q.p)
		w := newFrame()
		w.b = append(w.b, opPut)
		w.string("")
		w.string(c.internalID(q))
		kv.encode(&w)
		if _, err := c.s.peers.call(ctx, net.JoinHostPort(m[1], m[2]), w.sealFrame()); err != nil {
			c.s.logf("sending KV to %s:%s: %v", m[1], m[2], err) // logged, and that is all
		}
	}
	return nil
}

// takeKV is D's: the KV has to be there.
func (c *call) takeKV() error {
	for _, q := range c.seqs {
		kv, ok := c.s.inbox.take(c.internalID(q))
		if !ok {
			return &violation{"decode_before_kv", "the engine stands still until " + c.xid + "'s KV comes"}
		}
		mine := c.s.joinOf(q.p)
		if a := c.s.send(q.p, &kv); a.refused != "" || a.violation.kind != "" {
			return &violation{"other_prompt", fmt.Sprintf("the KV is of another prompt: %d tokens, %d here", kv.tokens, mine.tokens)}
		}
		c.took(q, nil)
	}
	return nil
}

// register beats to the proxy until the simulator closes.
func (s *sim) register() {
	ctx, cancel := context.WithCancel(context.Background())
	go func() { <-s.stopped; cancel() }()
	kv := net.JoinHostPort(s.sideHost, fmt.Sprint(s.sidePort))
	kind := "P"
	if s.cfg.role == roleDecode {
		kind = "D"
	}
	beat, err := msgpack.Marshal(map[string]string{"type": kind, "http_address": s.addr(), "zmq_address": kv})
	if err != nil {
		return
	}
	socket := zmq4.NewDealer(ctx, zmq4.WithID(zmq4.SocketIdentity(kv)), zmq4.WithDialerMaxRetries(-1), zmq4.WithAutomaticReconnect(true))
	defer socket.Close()
	if err := socket.Dial("tcp://" + s.cfg.proxy); err != nil {
		s.logf("registering at %s: %v", s.cfg.proxy, err)
		return
	}
	for {
		if err := socket.Send(zmq4.NewMsg(beat)); err != nil {
			s.logf("a beat to %s: %v", s.cfg.proxy, err)
		}
		if sleep(ctx, s.cfg.heartbeat) != nil {
			return
		}
	}
}

// newInbox is an empty buffer.
func newInbox() *inbox { return &inbox{held: map[string]joinRequest{}} }

const defaultHeartbeat = 3 * time.Second
