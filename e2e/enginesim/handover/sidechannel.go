package handover

import (
	"bufio"
	"context"
	"encoding/gob"
	"fmt"
	"net"
	"sync"
	"time"

	"tandem/e2e/enginesim/engine"
)

// The side channel stands in for NIXL's handshake, RDMA read and notifications: gobs over TCP between simulators, on
// the port that kv_transfer_params name. One [Question], one [Answer]; connections are kept.
const (
	OpPull byte = iota + 1
	OpHeartbeat
	OpRelease
	OpJoin
	OpWho
	OpStorePut // store.go
	OpStoreHas
	OpPrefix // offload.go
	OpAlloc  // lmcache.go, on ports of its own
	OpPush

	idlePeers = 64 // connections kept for each remote engine
)

// Question is what an engine asks another one, or reports to it. Fields that its Op does not need are empty.
type Question struct {
	Op        byte
	EngineID  string // that of the engine that is meant; "": any
	RequestID string // or the name under which two legs meet
	Xid       string // x-request-id of the leg
	BlockSize int
	KVDtype   string   // of its KV cache
	Revision  string   // of its model; "": not told
	Tokens    int      // of its prompt, or of its beginning that was kept of an earlier answer
	Turn      bool     // the latter
	Ids       []int32  // blocks to read, in order
	Want      []uint64 // content of each block of its prompt; OpAlloc: a chunk's key
	Blocks    int      // of that chunk
	First     uint32   // OpPush: the answer's first token, if HasFirst
	HasFirst  bool
}

// Answer is the result. If Refused is set, nothing was read: the transfer failed. Otherwise Actual is the content
// of the blocks, nil if it is the expected one; Violation is set if vLLM would not have noticed.
type Answer struct {
	Refused   string
	Violation engine.Violation
	Actual    []uint64
	EngineID  string        // OpWho
	Clock     time.Duration // OpWho
	Blocks    int           // OpPrefix: how many of the beginning are there; OpStoreHas: 1 if all are
}

// Serve answers the questions of a connection until it closes, or answer returns nil. OpJoin is the last one: its
// answer leaves a goroutine that reads the connection.
func Serve(conn net.Conn, in *bufio.Reader, answer func(*Question) *Answer) {
	asked, out := gob.NewDecoder(in), gob.NewEncoder(conn)
	for {
		var q Question
		if asked.Decode(&q) != nil {
			return
		}
		if a := answer(&q); a == nil || out.Encode(a) != nil || q.Op == OpJoin {
			return
		}
	}
}

// peer is a connection to another engine.
type peer struct {
	net.Conn
	questions *gob.Encoder
	answers   *gob.Decoder
}

func (p *peer) ask(q *Question) (a Answer, err error) {
	if err = p.questions.Encode(q); err == nil {
		err = p.answers.Decode(&a)
	}
	return a, err
}

// Peers are a decode engine's connections to prefill engines.
type Peers struct {
	mu   sync.Mutex
	idle map[string][]*peer
}

// NewPeers returns a Peers without connections.
func NewPeers() *Peers { return &Peers{idle: make(map[string][]*peer)} }

// Notify sends a heartbeat or a release. Errors are ignored, as with NIXL's notifications.
func (p *Peers) Notify(op byte, addr, engineID, requestID string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, _ = p.Ask(ctx, addr, &Question{Op: op, EngineID: engineID, RequestID: requestID})
}

// Ask asks the engine whose side channel is at addr, over a kept connection if there is one.
func (p *Peers) Ask(ctx context.Context, addr string, q *Question) (Answer, error) {
	for {
		conn, kept, err := p.get(ctx, addr)
		if err != nil {
			return Answer{}, fmt.Errorf("reaching side channel %s: %w", addr, err)
		}
		stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
		answer, err := conn.ask(q)
		if !stop() || err != nil {
			_ = conn.Close()
			if err == nil {
				return answer, nil
			}
			if kept && ctx.Err() == nil { // the peer closed it while it was idle: nothing was read
				continue
			}
			return Answer{}, fmt.Errorf("asking side channel %s: %w", addr, err)
		}
		p.put(addr, conn)
		return answer, nil
	}
}

func (p *Peers) get(ctx context.Context, addr string) (conn *peer, kept bool, err error) {
	p.mu.Lock()
	if list := p.idle[addr]; len(list) > 0 {
		conn = list[len(list)-1]
		p.idle[addr] = list[:len(list)-1]
	}
	p.mu.Unlock()
	if conn != nil {
		return conn, true, nil
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, false, err
	}
	return &peer{c, gob.NewEncoder(c), gob.NewDecoder(bufio.NewReader(c))}, false, nil
}

func (p *Peers) put(addr string, conn *peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.idle[addr]) >= idlePeers {
		_ = conn.Close()
		return
	}
	p.idle[addr] = append(p.idle[addr], conn)
}

// Close closes idle connections.
func (p *Peers) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, list := range p.idle {
		for _, conn := range list {
			_ = conn.Close()
		}
	}
	clear(p.idle)
}

// Who asks a side channel for its engine's id and the time of its clock; "" and 0 if it does not answer.
func (p *Peers) Who(ctx context.Context, addr string) (engineID string, clock time.Duration) {
	a, _ := p.Ask(ctx, addr, &Question{Op: OpWho})
	return a.EngineID, a.Clock
}
