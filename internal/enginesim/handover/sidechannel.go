package handover

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"tandem/internal/enginesim/engine"
)

// The side channel stands in for NIXL's handshake, RDMA read and notifications: length-prefixed frames over TCP
// between simulators, on the port that kv_transfer_params name. One request, one answer; connections are kept.
//
//	frame   uint32 little-endian length, payload
//	request opcode, engine id, request id; for a pull also the fields of pullRequest
//	answer  for a pull the fields of pullAnswer, else empty
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
	OpPut

	maxFrame  = 64 << 20
	idlePeers = 64 // connections kept for each remote engine
)

// WireWriter writes a frame.
type WireWriter struct{ B []byte }

// Uint writes a number.
func (w *WireWriter) Uint(n uint64) { w.B = binary.AppendUvarint(w.B, n) }

// String writes text, its length first.
func (w *WireWriter) String(s string) { w.Uint(uint64(len(s))); w.B = append(w.B, s...) }

// Words writes the count of v and its numbers of 64 bits.
func (w *WireWriter) Words(v []uint64) {
	w.Uint(uint64(len(v)))
	for _, x := range v {
		w.B = binary.LittleEndian.AppendUint64(w.B, x)
	}
}

var errWire = errors.New("malformed side-channel frame")

// WireReader reads a frame. Err stays once it is set, and all further reads return empty values.
type WireReader struct {
	B   []byte
	Err error
}

// Uint reads a number.
func (r *WireReader) Uint() uint64 {
	n, size := binary.Uvarint(r.B)
	if size <= 0 {
		r.Err, r.B = errWire, nil
		return 0
	}
	r.B = r.B[size:]
	return n
}

func (r *WireReader) take(n, unit uint64) []byte {
	if n > uint64(len(r.B))/unit {
		r.Err, r.B = errWire, nil
		return nil
	}
	out := r.B[:n*unit]
	r.B = r.B[n*unit:]
	return out
}

// String reads text.
func (r *WireReader) String() string { return string(r.take(r.Uint(), 1)) }

// Words reads numbers of 64 bits.
func (r *WireReader) Words() []uint64 {
	b := r.take(r.Uint(), 8)
	out := make([]uint64, len(b)/8)
	for i := range out {
		out[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	return out
}

func (req *PullRequest) encode(w *WireWriter) {
	w.B = append(w.B, OpPull)
	w.String(req.EngineID)
	w.String(req.RequestID)
	w.String(req.Xid)
	w.Uint(uint64(req.BlockSize))
	w.Uint(uint64(req.Tokens))
	turn := uint64(0)
	if req.Turn {
		turn = 1
	}
	w.Uint(turn)
	w.Uint(uint64(len(req.Ids)))
	for _, id := range req.Ids {
		w.Uint(uint64(uint32(id)))
	}
	w.Words(req.Want)
}

// Decode reads all but the opcode, the engine id and the request id.
func (req *PullRequest) Decode(r *WireReader) {
	req.Xid = r.String()
	req.BlockSize = int(r.Uint())
	req.Tokens = int(r.Uint())
	req.Turn = r.Uint() == 1
	n := r.Uint()
	if n > uint64(len(r.B)) {
		r.Err = errWire
		return
	}
	req.Ids = make([]int32, n)
	for i := range req.Ids {
		req.Ids[i] = int32(uint32(r.Uint()))
	}
	req.Want = r.Words()
}

// Encode writes the answer.
func (a *PullAnswer) Encode(w *WireWriter) {
	w.String(a.Refused)
	w.String(a.Violation.Kind)
	w.String(a.Violation.Message)
	w.Words(a.Actual)
}

// Decode reads the answer.
func (a *PullAnswer) Decode(r *WireReader) {
	a.Refused = r.String()
	a.Violation = engine.Violation{Kind: r.String(), Message: r.String()}
	if a.Actual = r.Words(); len(a.Actual) == 0 {
		a.Actual = nil
	}
}

// ReadFrame reads a frame without its length.
func ReadFrame(r io.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > maxFrame {
		return nil, errWire
	}
	b := make([]byte, n)
	_, err := io.ReadFull(r, b)
	return b, err
}

// NewFrame reserves space for the length, which SealFrame fills in.
func NewFrame() WireWriter { return WireWriter{make([]byte, 4, 512)} }

// SealFrame fills in the length and returns the frame.
func (w *WireWriter) SealFrame() []byte {
	binary.LittleEndian.PutUint32(w.B, uint32(len(w.B)-4))
	return w.B
}

// Peers are a decode engine's connections to prefill engines.
type Peers struct {
	mu   sync.Mutex
	idle map[string][]net.Conn
}

// NewPeers returns a Peers without connections.
func NewPeers() *Peers { return &Peers{idle: make(map[string][]net.Conn)} }

// Pull asks the side channel at addr for blocks.
func (p *Peers) Pull(ctx context.Context, addr string, req *PullRequest) (PullAnswer, error) {
	w := NewFrame()
	req.encode(&w)
	frame, err := p.Call(ctx, addr, w.SealFrame())
	if err != nil {
		return PullAnswer{}, err
	}
	r := WireReader{B: frame}
	var a PullAnswer
	a.Decode(&r)
	return a, r.Err
}

// Notify sends a heartbeat or a release. Errors are ignored, as with NIXL's notifications.
func (p *Peers) Notify(op byte, addr, engineID, requestID string) {
	w := NewFrame()
	w.B = append(w.B, op)
	w.String(engineID)
	w.String(requestID)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, _ = p.Call(ctx, addr, w.SealFrame())
}

// Call sends a frame and returns the answer, over a kept connection if there is one.
func (p *Peers) Call(ctx context.Context, addr string, frame []byte) ([]byte, error) {
	for {
		conn, kept, err := p.get(ctx, addr)
		if err != nil {
			return nil, fmt.Errorf("reaching side channel %s: %w", addr, err)
		}
		stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
		answer, err := roundTrip(conn, frame)
		if !stop() || err != nil {
			_ = conn.Close()
			if err == nil {
				return answer, nil
			}
			if kept && ctx.Err() == nil { // the peer closed it while it was idle: nothing was read
				continue
			}
			return nil, fmt.Errorf("asking side channel %s: %w", addr, err)
		}
		p.put(addr, conn)
		return answer, nil
	}
}

func roundTrip(conn net.Conn, frame []byte) ([]byte, error) {
	if _, err := conn.Write(frame); err != nil {
		return nil, err
	}
	return ReadFrame(conn)
}

func (p *Peers) get(ctx context.Context, addr string) (conn net.Conn, kept bool, err error) {
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
	conn, err = d.DialContext(ctx, "tcp", addr)
	return conn, false, err
}

func (p *Peers) put(addr string, conn net.Conn) {
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
	w := NewFrame()
	w.B = append(w.B, OpWho)
	w.String("")
	w.String("")
	frame, err := p.Call(ctx, addr, w.SealFrame())
	if err != nil {
		return "", 0
	}
	r := WireReader{B: frame}
	return r.String(), time.Duration(r.Uint())
}
