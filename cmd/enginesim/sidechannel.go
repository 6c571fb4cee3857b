package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// The side channel stands in for NIXL's handshake, RDMA read and notifications: length-prefixed frames over TCP
// between simulators, on the port that kv_transfer_params name. One request, one answer, connections are kept.
//
//	frame   uint32 little-endian length, payload
//	request opcode, engine id, request id; for a pull also what pullRequest holds
//	answer  for a pull what pullAnswer holds, else empty
const (
	opPull byte = iota + 1
	opHeartbeat
	opRelease
	opJoin
	opWho
	opStorePut // store.go
	opStoreHas
	opPrefix // offload.go
	opAlloc  // lmcache.go, on ports of its own
	opPush
	opPut

	maxFrame  = 64 << 20
	idlePeers = 64 // connections kept for each remote engine
)

type wireWriter struct{ b []byte }

func (w *wireWriter) uint(n uint64)   { w.b = binary.AppendUvarint(w.b, n) }
func (w *wireWriter) string(s string) { w.uint(uint64(len(s))); w.b = append(w.b, s...) }
func (w *wireWriter) words(v []uint64) {
	w.uint(uint64(len(v)))
	for _, x := range v {
		w.b = binary.LittleEndian.AppendUint64(w.b, x)
	}
}

var errWire = errors.New("malformed side-channel frame")

type wireReader struct {
	b   []byte
	err error
}

func (r *wireReader) uint() uint64 {
	n, size := binary.Uvarint(r.b)
	if size <= 0 {
		r.err, r.b = errWire, nil
		return 0
	}
	r.b = r.b[size:]
	return n
}

func (r *wireReader) take(n, unit uint64) []byte {
	if n > uint64(len(r.b))/unit {
		r.err, r.b = errWire, nil
		return nil
	}
	out := r.b[:n*unit]
	r.b = r.b[n*unit:]
	return out
}

func (r *wireReader) string() string { return string(r.take(r.uint(), 1)) }

func (r *wireReader) words() []uint64 {
	b := r.take(r.uint(), 8)
	out := make([]uint64, len(b)/8)
	for i := range out {
		out[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	return out
}

func (req *pullRequest) encode(w *wireWriter) {
	w.b = append(w.b, opPull)
	w.string(req.engineID)
	w.string(req.requestID)
	w.string(req.xid)
	w.uint(uint64(req.blockSize))
	w.uint(uint64(req.tokens))
	turn := uint64(0)
	if req.turn {
		turn = 1
	}
	w.uint(turn)
	w.uint(uint64(len(req.ids)))
	for _, id := range req.ids {
		w.uint(uint64(uint32(id)))
	}
	w.words(req.want)
}

func (req *pullRequest) decode(r *wireReader) {
	req.xid = r.string()
	req.blockSize = int(r.uint())
	req.tokens = int(r.uint())
	req.turn = r.uint() == 1
	n := r.uint()
	if n > uint64(len(r.b)) {
		r.err = errWire
		return
	}
	req.ids = make([]int32, n)
	for i := range req.ids {
		req.ids[i] = int32(uint32(r.uint()))
	}
	req.want = r.words()
}

func (a *pullAnswer) encode(w *wireWriter) {
	w.string(a.refused)
	w.string(a.violation.kind)
	w.string(a.violation.message)
	w.words(a.actual)
}

func (a *pullAnswer) decode(r *wireReader) {
	a.refused = r.string()
	a.violation = violation{r.string(), r.string()}
	if a.actual = r.words(); len(a.actual) == 0 {
		a.actual = nil
	}
}

func readFrame(r io.Reader) ([]byte, error) {
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

// newFrame leaves room for the length, which sealFrame fills in.
func newFrame() wireWriter { return wireWriter{make([]byte, 4, 512)} }

func (w *wireWriter) sealFrame() []byte {
	binary.LittleEndian.PutUint32(w.b, uint32(len(w.b)-4))
	return w.b
}

// serveSide answers one decode engine's connection until it closes.
func (s *sim) serveSide(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReaderSize(conn, 64<<10)
	for {
		frame, err := readFrame(in)
		if err != nil || len(frame) == 0 || s.fail.unreachable() {
			return
		}
		r := wireReader{b: frame[1:]}
		engineID, requestID := r.string(), r.string()
		out := newFrame()
		switch frame[0] {
		case opPull:
			req := pullRequest{engineID: engineID, requestID: requestID}
			if req.decode(&r); r.err != nil {
				return
			}
			answer := s.ledger.pull(s.engineID, &req)
			answer.encode(&out)
		case opJoin:
			var want joinRequest
			if want.decode(&r); r.err != nil {
				return
			}
			hungUp := make(chan struct{})
			go func() { // nothing more comes before the answer, so a byte or an error is the end
				_, _ = in.Peek(1)
				close(hungUp)
			}()
			answer, ok := s.answerJoin(requestID, want, hungUp)
			if !ok {
				return
			}
			answer.encode(&out)
			_, _ = conn.Write(out.sealFrame())
			return // Peek is still reading
		case opPut:
			var kv joinRequest
			if kv.decode(&r); r.err != nil || !s.inbox.put(requestID, kv) {
				return
			}
		case opWho:
			out.string(s.engineID)
		case opHeartbeat:
			if engineID == s.engineID {
				s.ledger.extend(requestID)
			}
		case opRelease:
			if engineID == s.engineID || engineID == "" {
				s.ledger.release(requestID)
			}
		case opPrefix:
			if blocks := r.words(); r.err == nil {
				out.uint(uint64(s.pool.prefix(blocks)))
			}
		case opStorePut, opStoreHas:
			s.store.serve(frame[0], &r, &out)
		}
		if _, err := conn.Write(out.sealFrame()); err != nil {
			return
		}
	}
}

// peers are a decode engine's connections to prefill engines.
type peers struct {
	mu   sync.Mutex
	idle map[string][]net.Conn
}

func newPeers() *peers { return &peers{idle: make(map[string][]net.Conn)} }

func (p *peers) pull(ctx context.Context, addr string, req *pullRequest) (pullAnswer, error) {
	w := newFrame()
	req.encode(&w)
	frame, err := p.call(ctx, addr, w.sealFrame())
	if err != nil {
		return pullAnswer{}, err
	}
	r := wireReader{b: frame}
	var a pullAnswer
	a.decode(&r)
	return a, r.err
}

// notify sends a heartbeat or a release. What becomes of it is nobody's business, as with NIXL's notifications.
func (p *peers) notify(op byte, addr, engineID, requestID string) {
	w := newFrame()
	w.b = append(w.b, op)
	w.string(engineID)
	w.string(requestID)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, _ = p.call(ctx, addr, w.sealFrame())
}

func (p *peers) call(ctx context.Context, addr string, frame []byte) ([]byte, error) {
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
			if kept && ctx.Err() == nil { // the peer closed it while it lay idle: nothing was read
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
	return readFrame(conn)
}

func (p *peers) get(ctx context.Context, addr string) (conn net.Conn, kept bool, err error) {
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

func (p *peers) put(addr string, conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.idle[addr]) >= idlePeers {
		_ = conn.Close()
		return
	}
	p.idle[addr] = append(p.idle[addr], conn)
}

func (p *peers) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, list := range p.idle {
		for _, conn := range list {
			_ = conn.Close()
		}
	}
	clear(p.idle)
}
