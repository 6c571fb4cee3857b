package connector

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

	"tandem/internal/enginesim/engine"
	"tandem/internal/enginesim/handover"
	"tandem/internal/enginesim/jsontext"
)

// LMCache's PD backend (enable_pd): a prefill engine allocates in the buffer of the decode engine that disagg_spec
// names, chunk by chunk, pushes the prompt's blocks there, and pushes a notification to the router, all of it once for
// each tensor-parallel rank and possibly while its own answer is being sent. A decode engine searches its buffer by
// the content of the prompt's blocks.
//
// The buffer is finite. Unfetched blocks in it are counted in enginesim_blocks_held, and dropped after the lease. An
// allocation that waits for longer than -pd-allocation-timeout is a violation: prompts that each got a part of the
// buffer waited for each other, which the router should prevent by pushing one prompt after the other.

// disaggSpec is a prefill engine's target.
type disaggSpec struct {
	reqID       string
	host        string
	init, alloc []int64
}

// parseDisaggSpec reads kv_transfer_params. P's scheduler reads the four members without a default: a missing one is a
// KeyError there.
func parseDisaggSpec(raw []byte) (kv Params) {
	if jsontext.IsNull(raw) {
		return kv
	}
	kv.Present, kv.CachedOnP = true, -1
	spec := jsontext.Get(raw, "disagg_spec")
	if spec == nil {
		return kv
	}
	kv.Spec = &disaggSpec{reqID: string(jsontext.Text(jsontext.Get(spec, "req_id"))),
		host: string(jsontext.Text(jsontext.Get(spec, "receiver_host")))}
	kv.Spec.init, kv.Spec.alloc = integers(jsontext.Get(spec, "receiver_init_port")),
		integers(jsontext.Get(spec, "receiver_alloc_port"))
	for name, missing := range map[string]bool{
		"req_id": kv.Spec.reqID == "", "receiver_host": kv.Spec.host == "",
		"receiver_init_port": kv.Spec.init == nil, "receiver_alloc_port": kv.Spec.alloc == nil,
	} {
		if missing {
			kv.Fatal = "KeyError: " + name + " (disagg_spec)"
		}
	}
	kv.firstToken = jsontext.Get(raw, "ret_first_tok") != nil // any value enables it, even false
	return kv
}

func integers(raw []byte) (out []int64) {
	if !jsontext.IsArray(raw) {
		return nil
	}
	ok := true
	jsontext.EachElement(raw, func(e []byte) bool {
		var n int64
		n, ok = jsontext.Integer(e)
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
	s       *Node
	ranks   int
	limit   int // blocks; 0: endless
	timeout time.Duration

	mu      sync.Mutex
	used    int
	arrived map[string]*arrival
	wake    chan struct{} // closed and replaced when space becomes free
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

// pushedPrompt is what a receiver knows of a prompt besides its blocks, to diagnose a wrong request for them: its
// length, and P's token that D must append.
type pushedPrompt struct {
	n     int
	first uint32
	has   bool // there is such a token
}

func newBuffer(s *Node) *buffer {
	return &buffer{
		s: s, ranks: s.cfg.Tp, limit: s.cfg.PdBuffer / s.cfg.BlockSize, timeout: s.cfg.PdTimeout,
		arrived: map[string]*arrival{}, wake: make(chan struct{}),
	}
}

func (b *buffer) held() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// arrival returns the entry of a request, new if there is none. The lease starts with its first chunk.
func (b *buffer) arrival(reqID, xid string) *arrival {
	a := b.arrived[reqID]
	if a == nil {
		a = &arrival{xid: xid}
		a.timer = time.AfterFunc(b.s.cfg.Lease, func() { b.drop(reqID, a) })
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

// alloc reserves space for n blocks, and waits for it. Only rank 0's space is counted: the others' buffers fill alike.
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
			b.s.Violate(&engine.Violation{Kind: "buffer_exhausted",
				Message: fmt.Sprintf("no room for %d more blocks in %s", n, b.timeout)}, xid)
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

// take removes and returns a prompt's blocks, if they are all there. If blocks under the request's own id belong to
// another prompt, that is a violation: P and D tokenised differently.
//
// A prompt with one more token must be that prompt with P's token appended. (LMCache's proxy sends D so.)
func (b *buffer) take(xid string, p *engine.Prompt) (bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for reqID, a := range b.arrived {
		if a.ranks != b.ranks || a.xid != xid {
			continue
		}
		b.remove(reqID, a)
		want := p.Full
		if a.prompt.has && p.N == a.prompt.n+1 {
			if p.Ids[len(p.Ids)-1] != a.prompt.first {
				return false, &engine.Violation{Kind: "other_first_token",
					Message: "the token behind the prompt is not the one that P answered"}
			}
			want = want[:min(len(want), len(a.blocks))]
		}
		if slices.Equal(a.blocks, want) {
			return true, nil
		}
		if !b.s.cfg.Faithful {
			return false, &engine.Violation{Kind: "other_prompt",
				Message: "what P pushed for this request is the KV of another prompt"}
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
func (s *Node) listenLMCache() error {
	s.buffer = newBuffer(s)
	host, _, _ := net.SplitHostPort(s.cfg.Listen)
	for rank := range s.cfg.Tp {
		for _, first := range []int{s.cfg.InitPort, s.cfg.AllocPort} {
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

func (s *Node) acceptReceiver(l net.Listener, rank int) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			in := bufio.NewReader(conn)
			for {
				frame, err := handover.ReadFrame(in)
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
func (s *Node) serveReceiver(conn net.Conn, frame []byte, rank int) bool {
	r := handover.WireReader{B: frame[1:]}
	reqID, xid := r.String(), r.String()
	out := handover.NewFrame()
	switch frame[0] {
	case handover.OpAlloc:
		n := int(r.Uint())
		if r.Err != nil {
			return false
		}
		if rank == 0 && s.buffer.alloc(reqID, xid, n) != nil {
			out.String("no room")
		}
	case handover.OpPush:
		blocks := r.Words()
		p := pushedPrompt{n: int(r.Uint()), first: uint32(r.Uint()), has: r.Uint() == 1}
		if r.Err != nil {
			return false
		}
		s.buffer.push(reqID, xid, blocks, p)
	default:
		return false
	}
	_, err := conn.Write(out.SealFrame())
	return err == nil
}

// pushKV sends a finished prompt to the receiver and notifies the router, while the answer is being sent (or before
// it, with -kv-delay below zero).
func (l *Leg) pushKV() {
	s, spec := l.Node, l.Kv.Spec
	q := l.Job.Seqs[0]
	pushed := pushedPrompt{n: q.P.N}
	if l.Kv.firstToken {
		pushed.first, pushed.has = engine.TokenID([]byte(q.Out.Token(0))), true
		q.HandOver = strconv.AppendUint([]byte(`{"first_tok":`), uint64(pushed.first), 10)
		q.HandOver = append(q.HandOver, '}')
	}
	push := func() {
		var ranks sync.WaitGroup
		for rank := range s.cfg.Tp {
			ranks.Go(func() {
				if err := s.pushRank(spec, rank, l.Xid, q.P.Full, pushed); err != nil {
					s.Metrics.FailedTransfers.Add(1)
					s.Logf("pushing KV of %q to rank %d: %v", spec.reqID, rank, err) // logged only, as LMCache does
					return
				}
				s.notifier.Notify(spec.reqID)
			})
		}
		ranks.Wait()
	}
	if s.cfg.KvDelay < 0 {
		push()
		return
	}
	go func() {
		time.Sleep(s.cfg.KvDelay)
		push()
	}()
}

// pushRank pushes one rank's part. It keeps no connections: a receiver may be gone at any time.
func (s *Node) pushRank(spec *disaggSpec, rank int, xid string, blocks []uint64, p pushedPrompt) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.PdTimeout+s.cfg.LoadTimeout)
	defer cancel()
	at := func(ports []int64) string { return net.JoinHostPort(spec.host, strconv.FormatInt(ports[rank], 10)) }
	ask := func(addr string, op byte, fill func(w *handover.WireWriter)) error {
		w := handover.NewFrame()
		w.B = append(w.B, op)
		w.String(spec.reqID)
		w.String(xid)
		fill(&w)
		answer, err := s.peers.Call(ctx, addr, w.SealFrame())
		if err == nil && len(answer) > 0 {
			err = errors.New("refused")
		}
		return err
	}
	perChunk := max(chunkTokens/s.cfg.BlockSize, 1)
	for left := len(blocks); left > 0; left -= perChunk {
		n := min(left, perChunk)
		if err := ask(at(spec.alloc), handover.OpAlloc,
			func(w *handover.WireWriter) { w.Uint(uint64(n)) }); err != nil {
			return err
		}
	}
	return ask(at(spec.init), handover.OpPush, func(w *handover.WireWriter) {
		w.Words(blocks)
		w.Uint(uint64(p.n))
		w.Uint(uint64(p.first))
		if p.has {
			w.Uint(1)
		} else {
			w.Uint(0)
		}
	})
}

// Continues returns the digest of the prompt whose answer a completion of token ids continues, if its last token is
// the first one of that answer, which P has already given. The text that follows is the one that P's prompt alone
// would have produced, so a token that is lost or doubled between the engines is visible.
func (s *Node) Continues(p *engine.Prompt) (digest uint64, ok bool) {
	if s.cfg.Connector != LMCache || s.cfg.Role == engine.RolePrefill || len(p.Ids) < 2 {
		return 0, false
	}
	t := engine.NewTokenizer(s.cfg.BlockSize, false)
	t.Tokens(p.Ids[:len(p.Ids)-1])
	before := engine.Output{Digest: t.Finish("").Digest}
	return before.Digest, engine.TokenID([]byte(before.Token(0))) == p.Ids[len(p.Ids)-1]
}

// ReceiverPort returns port i of the receiver: to initialise and to allocate of rank 0, and so on.
func (s *Node) ReceiverPort(i int) int { return s.receivers[i].Addr().(*net.TCPAddr).Port }
