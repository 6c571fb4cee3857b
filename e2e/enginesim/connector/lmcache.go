package connector

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/handover"
	"tandem/e2e/enginesim/jsontext"
	"tandem/e2e/enginesim/pdbuffer"
)

// LMCache's PD backend (enable_pd): a prefill engine allocates in the buffer of the decode engine that disagg_spec
// names, chunk by chunk, pushes the prompt's blocks there, and pushes a notification to the router, all of it once for
// each tensor-parallel rank and possibly while its own answer is being sent. A decode engine searches its buffer by
// the content of the prompt's chunks, and takes those that its own cache lacks (package pdbuffer).

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

// listenLMCache opens the receiver's ports: one to initialise and one to allocate for each rank.
func (s *Node) listenLMCache() error {
	s.buffer = pdbuffer.New(pdbuffer.Options{Ranks: s.cfg.Tp, Tokens: s.cfg.Pd.Buffer, BlockSize: s.cfg.BlockSize,
		Chunk: s.cfg.Pd.Chunk, Timeout: s.cfg.Pd.Timeout, Lease: s.cfg.Lease,
		Faithful: s.cfg.Faithful, Violate: s.Violate})
	host, _, _ := net.SplitHostPort(s.cfg.Listen)
	for rank := range s.cfg.Tp {
		for _, first := range []int{s.cfg.Pd.InitPort, s.cfg.Pd.AllocPort} {
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
			handover.Serve(conn, bufio.NewReader(conn), func(q *handover.Question) *handover.Answer {
				if conn.SetDeadline(time.Now().Add(time.Minute)) != nil {
					return nil
				}
				return s.answerPush(q, rank)
			})
		}()
	}
}

// answerPush answers an allocation or takes a push; nil: it is neither.
func (s *Node) answerPush(q *handover.Question, rank int) *handover.Answer {
	switch {
	case q.Op == handover.OpAlloc && len(q.Want) == 1:
		if rank == 0 && s.buffer.Alloc(q.RequestID, q.Xid, q.Want[0], q.Blocks) != nil {
			return &handover.Answer{Refused: "no room"}
		}
	case q.Op == handover.OpPush:
		p := pdbuffer.Pushed{N: q.Tokens, First: q.First, Has: q.HasFirst}
		s.buffer.Push(q.RequestID, q.Xid, q.Want, p)
	default:
		return nil
	}
	return &handover.Answer{}
}

// pushKV sends a finished prompt to the receiver and notifies the router, while the answer is being sent (or before
// it, with -kv-delay below zero).
func (l *Leg) pushKV() {
	s, spec := l.Node, l.Kv.Spec
	q := l.Job.Seqs[0]
	pushed := pdbuffer.Pushed{N: q.P.N}
	if l.Kv.firstToken {
		pushed.First, pushed.Has = engine.TokenID([]byte(q.Out.Token(0))), true
		q.HandOver = strconv.AppendUint([]byte(`{"first_tok":`), uint64(pushed.First), 10)
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
		time.Sleep(-s.cfg.KvDelay)
		return
	}
	go func() {
		time.Sleep(s.cfg.KvDelay)
		push()
	}()
}

// pushRank pushes one rank's part. It keeps no connections: a receiver may be gone at any time.
func (s *Node) pushRank(spec *disaggSpec, rank int, xid string, blocks []uint64, p pdbuffer.Pushed) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.Pd.Timeout+s.cfg.LoadTimeout)
	defer cancel()
	at := func(ports []int64) string { return net.JoinHostPort(spec.host, strconv.FormatInt(ports[rank], 10)) }
	ask := func(addr string, q *handover.Question) error {
		q.RequestID, q.Xid = spec.reqID, xid
		answer, err := s.peers.Ask(ctx, addr, q)
		if err == nil && answer.Refused != "" {
			err = errors.New("refused")
		}
		return err
	}
	var err error
	pdbuffer.Chunks(blocks, s.cfg.BlockSize, s.cfg.Pd.Chunk, p.N, func(key uint64, n int) bool {
		err = ask(at(spec.alloc), &handover.Question{Op: handover.OpAlloc, Want: []uint64{key}, Blocks: n})
		return err == nil
	})
	if err != nil {
		return err
	}
	return ask(at(spec.init), &handover.Question{Op: handover.OpPush, Want: blocks, Tokens: p.N, First: p.First,
		HasFirst: p.Has})
}

// TakesFirstTokens reports whether a completion of token ids may end with the first token of an answer, which P has
// already given. The text that follows is the one that P's prompt alone would have produced, so a token that is lost or
// doubled between the engines is visible.
func (s *Node) TakesFirstTokens() bool {
	return s.cfg.Connector == LMCache && s.cfg.Role != engine.RolePrefill
}

// ReceiverPort returns port i of the receiver: to initialise and to allocate of rank 0, and so on.
func (s *Node) ReceiverPort(i int) int { return s.receivers[i].Addr().(*net.TCPAddr).Port }
