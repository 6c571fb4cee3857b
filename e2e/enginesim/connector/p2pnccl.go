package connector

import (
	"context"
	"fmt"
	"net"
	"regexp"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/handover"
)

// P2P-NCCL of vLLM 0.9.2 to 0.23. Both engines read each other's address from the request id; P sends its KV to D when
// it has it, and D buffers it until the request comes. D waits for KV inside a step of its engine, which blocks all
// its requests: here that is a violation, because a router can avoid it. The side channel is the KV socket.

var (
	decodeAddr  = regexp.MustCompile(`___decode_addr_(.*):(\d+)`)     // on P (p2p_nccl_connector.py, parse_request_id)
	prefillAddr = regexp.MustCompile(`___prefill_addr_(.*):(\d+)___`) // on D
)

// inbox is D's buffer: received KV by request.
type inbox struct {
	mu   sync.Mutex
	held map[string]*handover.Question
}

const maxInbox = 4096

func (b *inbox) put(key string, kv *handover.Question) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.held) >= maxInbox {
		return false
	}
	b.held[key] = kv
	return true
}

func (b *inbox) take(key string) (kv *handover.Question, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	kv, ok = b.held[key]
	delete(b.held, key)
	return kv, ok
}

// putKV sends P's KV to D's socket. The client learns nothing of it.
func (l *Leg) putKV(ctx context.Context) error {
	m := decodeAddr.FindStringSubmatch(l.Xid)
	for _, q := range l.Job.Seqs {
		kv := l.Node.joinOf(q.P)
		kv.Op, kv.RequestID = handover.OpPut, l.Name(q)
		if _, err := l.Node.peers.Ask(ctx, net.JoinHostPort(m[1], m[2]), kv); err != nil {
			l.Node.Logf("sending KV to %s:%s: %v", m[1], m[2], err) // logged only
		}
	}
	return nil
}

// takeKV takes D's KV from the inbox: it must be there.
func (l *Leg) takeKV() error {
	for _, q := range l.Job.Seqs {
		kv, ok := l.Node.inbox.take(l.Name(q))
		if !ok {
			return &engine.Violation{Kind: "decode_before_kv",
				Message: "the engine stands still until " + l.Xid + "'s KV comes"}
		}
		own := l.Node.joinOf(q.P)
		if a := l.Node.send(q.P, kv); a.Refused != "" || a.Violation.Kind != "" {
			return &engine.Violation{Kind: "other_prompt",
				Message: fmt.Sprintf("the KV is of another prompt: %d tokens, %d here", kv.Tokens, own.Tokens)}
		}
		l.took(q, nil)
	}
	return nil
}

// beats are the heartbeats to P2P NCCL's proxy; none without one.
type beats struct {
	stop context.CancelFunc
	done sync.WaitGroup
}

func (b *beats) end() {
	if b.stop != nil {
		b.stop()
		b.done.Wait()
	}
}

// Register starts to send heartbeats to P2P NCCL's proxy, if one is configured, until the node closes. web is the
// engine's HTTP address, host:port.
func (s *Node) Register(web string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cfg.Connector != P2PNCCL || s.cfg.Proxy == "" || s.closed {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.beats.stop = cancel
	s.beats.done.Go(func() { s.beat(ctx, web) })
}

func (s *Node) beat(ctx context.Context, web string) {
	kv := net.JoinHostPort(s.SideHost, fmt.Sprint(s.SidePort))
	kind := "P"
	if s.cfg.Role == engine.RoleDecode {
		kind = "D"
	}
	beat, err := msgpack.Marshal(map[string]string{"type": kind, "http_address": web, "zmq_address": kv})
	if err != nil {
		return
	}
	socket := zmq4.NewDealer(ctx, zmq4.WithID(zmq4.SocketIdentity(kv)), zmq4.WithDialerMaxRetries(-1),
		zmq4.WithAutomaticReconnect(true))
	defer socket.Close()
	if err := socket.Dial("tcp://" + s.cfg.Proxy); err != nil {
		s.Logf("registering at %s: %v", s.cfg.Proxy, err)
		return
	}
	for {
		if err := socket.Send(zmq4.NewMsg(beat)); err != nil && ctx.Err() == nil {
			s.Logf("a beat to %s: %v", s.cfg.Proxy, err)
		}
		if engine.Sleep(ctx, s.cfg.Heartbeat) != nil {
			return
		}
	}
}

// newInbox returns an empty buffer.
func newInbox() *inbox { return &inbox{held: map[string]*handover.Question{}} }

// DefaultHeartbeat is the interval of an engine's registrations in p2p_nccl_connector.py.
const DefaultHeartbeat = 3 * time.Second

// CheckAddresses fails a request id without addresses, for which the engine raises.
func (l *Leg) CheckAddresses() {
	pattern := decodeAddr
	if l.Node.cfg.Role == engine.RoleDecode {
		pattern = prefillAddr
	}
	if pattern.FindStringSubmatch(l.Xid) == nil {
		l.Kv.Fatal = fmt.Sprintf("ValueError: Request id %s does not contain hostname and port", l.Xid)
	}
}
