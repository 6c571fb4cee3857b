package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
)

// LMCache's PD backend (enable_pd): a prefill engine allocates in the buffer of the decode engine that disagg_spec names,
// chunk by chunk, pushes the prompt's blocks there, and pushes a notice at the router, all of it once for each
// tensor-parallel rank and while its own answer may already be on its way. A decode engine looks into its buffer by the
// content of the prompt's blocks.
//
// The buffer is finite. What waits in it unfetched is counted in enginesim_blocks_held, and dropped after the lease. An
// allocation that waits for longer than -pd-allocation-timeout is a violation: prompts that each got a part of the buffer
// waited for each other, which the router's turns should prevent.

// disaggSpec is what a prefill engine is told.
type disaggSpec struct {
	reqID       string
	host        string
	init, alloc []int64
}

// parseDisaggSpec reads kv_transfer_params. The four members are read without a default in P's scheduler: one that is
// missing is a KeyError there.
func parseDisaggSpec(raw []byte) (kv kvParams) {
	if isNull(raw) {
		return kv
	}
	kv.present, kv.cachedOnP = true, -1
	spec := get(raw, "disagg_spec")
	if spec == nil {
		return kv
	}
	kv.spec = &disaggSpec{reqID: string(text(get(spec, "req_id"))), host: string(text(get(spec, "receiver_host")))}
	kv.spec.init, kv.spec.alloc = integers(get(spec, "receiver_init_port")), integers(get(spec, "receiver_alloc_port"))
	for name, missing := range map[string]bool{
		"req_id": kv.spec.reqID == "", "receiver_host": kv.spec.host == "",
		"receiver_init_port": kv.spec.init == nil, "receiver_alloc_port": kv.spec.alloc == nil,
	} {
		if missing {
			kv.fatal = "KeyError: " + name + " (disagg_spec)"
		}
	}
	if get(raw, "ret_first_tok") != nil {
		kv.broken = &violation{"first_token_asked", "ret_first_tok is there, and nobody delivers the token"}
	}
	return kv
}

func integers(raw []byte) (out []int64) {
	if !isArray(raw) {
		return nil
	}
	ok := true
	eachElement(raw, func(e []byte) bool {
		var n int64
		n, ok = integer(e)
		out = append(out, n)
		return ok
	})
	if !ok {
		return nil
	}
	return out
}

const chunkTokens = 256 // LMCache's chunk_size

// buffer is a decode engine's PD buffer.
type buffer struct {
	s       *sim
	ranks   int
	limit   int // blocks; 0: endless
	timeout time.Duration

	mu      sync.Mutex
	used    int
	arrived map[string]*arrival
	wake    chan struct{} // closed, and made anew, when room came free
}

// arrival is one prompt's blocks, complete when every rank has pushed them.
type arrival struct {
	xid    string
	blocks []uint64
	ranks  int
	room   int // blocks allocated, of one rank
	timer  *time.Timer
}

func newBuffer(s *sim) *buffer {
	return &buffer{
		s: s, ranks: s.cfg.tp, limit: s.cfg.pdBuffer / s.cfg.blockSize, timeout: s.cfg.pdTimeout,
		arrived: map[string]*arrival{}, wake: make(chan struct{}),
	}
}

func (b *buffer) held() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// arrival finds or makes the entry of a request. The lease starts with its first chunk.
func (b *buffer) arrival(reqID, xid string) *arrival {
	a := b.arrived[reqID]
	if a == nil {
		a = &arrival{xid: xid}
		a.timer = time.AfterFunc(b.s.cfg.lease, func() { b.drop(reqID, a) })
		b.arrived[reqID] = a
	}
	return a
}

func (b *buffer) drop(reqID string, a *arrival) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.remove(reqID, a)
}

func (b *buffer) remove(reqID string, a *arrival) {
	if b.arrived[reqID] != a {
		return
	}
	a.timer.Stop()
	delete(b.arrived, reqID)
	b.used -= a.room
	close(b.wake)
	b.wake = make(chan struct{})
}

// alloc gets room for n blocks, waiting for it. Only rank 0's room is counted: the others' buffers fill alike.
func (b *buffer) alloc(reqID, xid string, n int) error {
	deadline := time.NewTimer(b.timeout)
	defer deadline.Stop()
	for {
		b.mu.Lock()
		if b.limit == 0 || b.used+n <= b.limit {
			b.used += n
			b.arrival(reqID, xid).room += n
			b.mu.Unlock()
			return nil
		}
		wake := b.wake
		b.mu.Unlock()
		select {
		case <-wake:
		case <-deadline.C:
			b.s.violate(&violation{"buffer_exhausted", fmt.Sprintf("no room for %d more blocks in %s", n, b.timeout)}, xid)
			return errors.New("no room")
		}
	}
}

func (b *buffer) push(reqID, xid string, blocks []uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.arrival(reqID, xid)
	a.blocks = blocks
	a.ranks++
}

// take hands a prompt's blocks over, if they are all there. What arrived under the request's own id and is of another
// prompt is a violation: P and D tokenised differently.
func (b *buffer) take(xid string, want []uint64) (bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for reqID, a := range b.arrived {
		if a.ranks != b.ranks || a.xid != xid {
			continue
		}
		b.remove(reqID, a)
		if slices.Equal(a.blocks, want) {
			return true, nil
		}
		if !b.s.cfg.faithful {
			return false, &violation{"other_prompt", "what P pushed for this request is the KV of another prompt"}
		}
		return false, nil
	}
	return false, nil
}

func (b *buffer) reset() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id, a := range b.arrived {
		b.remove(id, a)
	}
}

// listenLMCache opens the receiver's ports: one to initialise and one to allocate for each rank.
func (s *sim) listenLMCache() error {
	s.buffer = newBuffer(s)
	host, _, _ := net.SplitHostPort(s.cfg.listen)
	for rank := range s.cfg.tp {
		for _, first := range []int{s.cfg.initPort, s.cfg.allocPort} {
			l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(first+rank)))
			if err != nil {
				return fmt.Errorf("opening the receiver's ports: %w", err)
			}
			s.receivers = append(s.receivers, l)
			go s.acceptReceiver(l, rank)
		}
	}
	return nil
}

func (s *sim) acceptReceiver(l net.Listener, rank int) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			in := bufio.NewReader(conn)
			for {
				frame, err := readFrame(in)
				if err != nil || len(frame) == 0 {
					return
				}
				if conn.SetDeadline(time.Now().Add(time.Minute)) != nil || !s.serveReceiver(conn, frame, rank) {
					return
				}
			}
		}()
	}
}

// serveReceiver answers an allocation or takes a push.
func (s *sim) serveReceiver(conn net.Conn, frame []byte, rank int) bool {
	r := wireReader{b: frame[1:]}
	reqID, xid := r.string(), r.string()
	out := newFrame()
	switch frame[0] {
	case opAlloc:
		n := int(r.uint())
		if r.err != nil {
			return false
		}
		if rank == 0 && s.buffer.alloc(reqID, xid, n) != nil {
			out.string("no room")
		}
	case opPush:
		blocks := r.words()
		if r.err != nil {
			return false
		}
		s.buffer.push(reqID, xid, blocks)
	default:
		return false
	}
	_, err := conn.Write(out.sealFrame())
	return err == nil
}

// pushKV sends a finished prompt to the receiver and tells the router, while the answer is on its way (or before it, with
// -kv-delay below zero).
func (c *call) pushKV() {
	s, spec := c.s, c.req.kv.spec
	blocks := c.seqs[0].p.full
	push := func() {
		var ranks sync.WaitGroup
		for rank := range s.cfg.tp {
			ranks.Go(func() {
				if err := s.pushRank(spec, rank, c.xid, blocks); err != nil {
					s.metrics.failedTransfers.Add(1)
					s.logf("pushing KV of %q to rank %d: %v", spec.reqID, rank, err) // logged only, as LMCache does
					return
				}
				s.notify(spec.reqID)
			})
		}
		ranks.Wait()
	}
	if s.cfg.kvDelay < 0 {
		push()
		return
	}
	go func() {
		time.Sleep(s.cfg.kvDelay)
		push()
	}()
}

// pushRank is one rank's part. Peers keep no connections here: a receiver may be gone at any time.
func (s *sim) pushRank(spec *disaggSpec, rank int, xid string, blocks []uint64) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.pdTimeout+s.cfg.loadTimeout)
	defer cancel()
	at := func(ports []int64) string { return net.JoinHostPort(spec.host, strconv.FormatInt(ports[rank], 10)) }
	ask := func(addr string, op byte, fill func(w *wireWriter)) error {
		w := newFrame()
		w.b = append(w.b, op)
		w.string(spec.reqID)
		w.string(xid)
		fill(&w)
		answer, err := s.peers.call(ctx, addr, w.sealFrame())
		if err == nil && len(answer) > 0 {
			err = errors.New("refused")
		}
		return err
	}
	perChunk := max(chunkTokens/s.cfg.blockSize, 1)
	for left := len(blocks); left > 0; left -= perChunk {
		n := min(left, perChunk)
		if err := ask(at(spec.alloc), opAlloc, func(w *wireWriter) { w.uint(uint64(n)) }); err != nil {
			return err
		}
	}
	return ask(at(spec.init), opPush, func(w *wireWriter) { w.words(blocks) })
}

// notifier is the PUSH socket of LMCache's proxy notices.
type notifier struct {
	mu     sync.Mutex
	socket zmq4.Socket
}

// notify tells the router, as -notices says.
func (s *sim) notify(reqID string) {
	if s.cfg.proxy == "" || s.cfg.notices == "never" {
		return
	}
	messages := [][]byte{notice("ProxyNotif", reqID)}
	switch s.cfg.notices {
	case "twice":
		messages = append(messages, messages[0])
	case "old": // LMCache 0.3.5
		messages[0] = notice("NixlProxyNotif", reqID)
	case "noisy":
		messages = append([][]byte{notice("AllocRequest", reqID), []byte("\xc1"), {}}, messages...)
	}
	n := &s.notifier
	n.mu.Lock()
	defer n.mu.Unlock()
	for attempt := range 2 { // the router may have been started anew
		if n.socket == nil {
			n.socket = zmq4.NewPush(context.Background(), zmq4.WithDialerMaxRetries(0), zmq4.WithTimeout(time.Second))
			if err := n.socket.Dial("tcp://" + s.cfg.proxy); err != nil {
				s.logf("the router takes no notices: %v", err)
				_ = n.socket.Close()
				n.socket = nil
				return
			}
		}
		err := error(nil)
		for _, m := range messages {
			err = errors.Join(err, n.socket.Send(zmq4.NewMsg(m)))
		}
		if err == nil {
			return
		}
		_ = n.socket.Close()
		n.socket = nil
		if attempt == 1 {
			s.logf("a notice was lost: %v", err)
		}
	}
}

// notice is msgspec's msgpack of a tagged struct with one field.
func notice(kind, reqID string) []byte {
	return packText([]byte{0x82}, "type", kind, "req_id", reqID)
}

func packText(b []byte, texts ...string) []byte {
	for _, t := range texts {
		if len(t) < 32 {
			b = append(b, 0xa0|byte(len(t)))
		} else {
			b = append(b, 0xd9, byte(len(t)))
		}
		b = append(b, t...)
	}
	return b
}
