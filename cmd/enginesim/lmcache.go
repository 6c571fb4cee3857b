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
	kv.firstToken = get(raw, "ret_first_tok") != nil // its presence counts, false is no less
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
	prompt pushedPrompt
	ranks  int
	room   int // blocks allocated, of one rank
	timer  *time.Timer
}

// pushedPrompt is what a receiver is told of a prompt beside its blocks, so that it can say what is wrong with a request for
// them: its length, and the token that P has answered to be put behind it.
type pushedPrompt struct {
	n     int
	first uint32
	has   bool // there is such a token
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

func (b *buffer) push(reqID, xid string, blocks []uint64, p pushedPrompt) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.arrival(reqID, xid)
	a.blocks, a.prompt = blocks, p
	a.ranks++
}

// take hands a prompt's blocks over, if they are all there. What arrived under the request's own id and is of another
// prompt is a violation: P and D tokenised differently.
//
// A prompt with one token more must be that prompt with the token that P answered. (LMCache's proxy sends D so.)
func (b *buffer) take(xid string, p *prompt) (bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for reqID, a := range b.arrived {
		if a.ranks != b.ranks || a.xid != xid {
			continue
		}
		b.remove(reqID, a)
		want := p.full
		if a.prompt.has && p.n == a.prompt.n+1 {
			if p.ids[len(p.ids)-1] != a.prompt.first {
				return false, &violation{"other_first_token", "the token behind the prompt is not the one that P answered"}
			}
			want = want[:min(len(want), len(a.blocks))]
		}
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
		p := pushedPrompt{n: int(r.uint()), first: uint32(r.uint()), has: r.uint() == 1}
		if r.err != nil {
			return false
		}
		s.buffer.push(reqID, xid, blocks, p)
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
	q := c.seqs[0]
	pushed := pushedPrompt{n: q.p.n}
	if c.req.kv.firstToken {
		pushed.first, pushed.has = tokenID([]byte(q.out.token(0))), true
		q.handOver = strconv.AppendUint([]byte(`{"first_tok":`), uint64(pushed.first), 10)
		q.handOver = append(q.handOver, '}')
	}
	push := func() {
		var ranks sync.WaitGroup
		for rank := range s.cfg.tp {
			ranks.Go(func() {
				if err := s.pushRank(spec, rank, c.xid, q.p.full, pushed); err != nil {
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
func (s *sim) pushRank(spec *disaggSpec, rank int, xid string, blocks []uint64, p pushedPrompt) error {
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
	return ask(at(spec.init), opPush, func(w *wireWriter) {
		w.words(blocks)
		w.uint(uint64(p.n))
		w.uint(uint64(p.first))
		if p.has {
			w.uint(1)
		} else {
			w.uint(0)
		}
	})
}

// continues is the digest of the prompt whose answer a completion of token ids goes on with, where the last of them is the
// first token of that answer: P has answered that one already. The text that follows is then the one that P's prompt alone
// would have led to, so that a token lost or doubled between the engines shows.
func (c *call) continues(p *prompt) (digest uint64, ok bool) {
	if c.s.cfg.connector != connectorLMCache || c.s.cfg.role == rolePrefill || c.req.api != apiCompletions || len(p.ids) < 2 {
		return 0, false
	}
	t := newTokenizer(c.s.cfg.blockSize, false)
	t.tokens(p.ids[:len(p.ids)-1])
	before := output{digest: t.finish("").digest}
	return before.digest, tokenID([]byte(before.token(0))) == p.ids[len(p.ids)-1]
}
