package connector

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/fault"
	"tandem/e2e/enginesim/handover"
	"tandem/e2e/enginesim/pdbuffer"
)

// Node is an engine with its connector: the KV that it keeps for other engines, and the ports for them.
type Node struct {
	*engine.Engine
	sideChannel

	cfg      *Config
	EngineID string

	Ledger    *handover.Ledger
	Rooms     *rendezvous
	store     *store
	buffer    *pdbuffer.Buffer // nil but on decode engines with the connector lmcache
	receivers []net.Listener
	notifier  handover.Notifier
	peers     *handover.Peers
	mates     []*Node // all data-parallel ranks, this one included
	Faults    *fault.Rules

	bootstrap     *http.Server // of a prefill engine whose dialect has one
	BootstrapAddr string

	mu       sync.Mutex
	sideConn map[net.Conn]struct{}
	closed   bool
}

// sideChannel is the port at which other engines ask for KV, and its address in hand-overs.
type sideChannel struct {
	Side     net.Listener
	SidePort int
	SideHost string
}

// New creates an engine with its connector and opens the ports for other engines. faults can make those unreachable.
func New(cfg *Config, faults *fault.Rules, log io.Writer) (*Node, error) {
	e, err := engine.New(&cfg.Config, log)
	if err != nil {
		return nil, err
	}
	e.External = cfg.Connector != None
	s := &Node{
		Engine: e, cfg: cfg, EngineID: cfg.EngineID, Faults: faults,
		Ledger: handover.NewLedger(e.Pool, &e.Core, cfg.Lease), Rooms: newRendezvous(),
		peers: cmp.Or(cfg.Peers, handover.NewPeers()), sideConn: make(map[net.Conn]struct{}),
	}
	s.notifier.Proxy, s.notifier.Notices, s.notifier.Logf = cfg.Proxy, cfg.Notices, e.Logf
	if s.EngineID == "" {
		s.EngineID = engine.NewUUID()
	}
	s.store = newStore(s, cfg.Store)
	if err := s.open(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// NewRanks creates the data-parallel ranks of an engine: each has its own KV, side channel and KV events, at
// consecutive ports from rank 0's on (0 stays 0).
func NewRanks(cfg *Config, faults *fault.Rules, log io.Writer) (ranks []*Node, err error) {
	id := cfg.EngineID
	for rank := range max(cfg.DpSize, 1) {
		own := *cfg
		own.Rank = rank
		if cfg.DpSize > 1 { // vllm/v1/engine/core.py
			if id == "" {
				id = engine.NewUUID()
			}
			own.EngineID = fmt.Sprintf("%s_dp%d", id, rank)
		}
		if own.SideChannel, err = portAbove(cfg.SideChannel, rank); err != nil {
			return nil, err
		}
		n, err := New(&own, faults, log)
		if err != nil {
			for _, n := range ranks {
				n.Close()
			}
			return nil, err
		}
		ranks = append(ranks, n)
	}
	for _, n := range ranks {
		n.mu.Lock()
		n.mates = ranks
		n.mu.Unlock()
	}
	return ranks, nil
}

func portAbove(addr string, n int) (string, error) {
	host, text, err := net.SplitHostPort(addr)
	if err != nil {
		return "", err
	}
	port, err := strconv.Atoi(text)
	if port == 0 { // the kernel chooses
		return addr, err
	}
	return net.JoinHostPort(host, strconv.Itoa(port+n)), nil
}

// Rank returns the data-parallel rank.
func (s *Node) Rank() int { return s.cfg.Rank }

// ranks returns all data-parallel ranks of the engine, as far as they have started.
func (s *Node) ranks() []*Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mates
}

// open opens the ports for other engines.
func (s *Node) open() error {
	var err error
	if s.Side, err = net.Listen("tcp", s.cfg.SideChannel); err != nil {
		return fmt.Errorf("opening the side channel: %w", err)
	}
	s.SideHost, s.SidePort = s.cfg.AdvertiseHost, s.Side.Addr().(*net.TCPAddr).Port
	bootstraps := s.cfg.Roomed() && s.cfg.Role == engine.RolePrefill ||
		s.cfg.Connector == Mooncake && s.cfg.Role != engine.RoleDecode
	if bootstraps && s.cfg.Rank == 0 {
		if err := s.openBootstrap(); err != nil {
			return err
		}
	}
	go s.acceptSide()
	if s.cfg.Connector == LMCache && s.cfg.Role != engine.RolePrefill {
		return s.listenLMCache()
	}
	return nil
}

func (s *Node) acceptSide() {
	for {
		conn, err := s.Side.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			_ = conn.Close()
			continue
		}
		s.sideConn[conn] = struct{}{}
		s.mu.Unlock()
		go func() {
			defer conn.Close()
			if in := bufio.NewReaderSize(conn, 64<<10); s.cfg.Connector == NIXL && isZeroMQ(in) {
				_ = (handshakes{s.EngineID, s.Clock, s.Faults.Unreachable}).answer(conn, in)
			} else {
				handover.Serve(conn, in, func(q *handover.Question) *handover.Answer { return s.answerSide(q, in) })
			}
			s.mu.Lock()
			delete(s.sideConn, conn)
			s.mu.Unlock()
		}()
	}
}

// Close cuts everything at once.
func (s *Node) Close() {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.closed = true
	conns := make([]net.Conn, 0, len(s.sideConn))
	for c := range s.sideConn {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	s.Core.Resume()
	if s.Side != nil {
		_ = s.Side.Close()
	}
	for _, l := range s.receivers {
		_ = l.Close()
	}
	if s.buffer != nil {
		s.buffer.Reset()
	}
	s.notifier.Close()
	s.CloseEvents()
	if s.bootstrap != nil {
		_ = s.bootstrap.Close()
	}
	for _, c := range conns {
		_ = c.Close()
	}
	s.peers.Close()
	s.Ledger.ReleaseAll()
}

// HeldBlocks returns the number of blocks that wait for the other leg, here or in this engine's buffer.
func (s *Node) HeldBlocks() int64 {
	n := s.Ledger.Held.Load() + s.Rooms.Held.Load()
	if s.buffer != nil {
		n += int64(s.buffer.Held())
	}
	return n
}

// Forget frees all held blocks, and clears the memory of past ones.
func (s *Node) Forget() {
	s.Ledger.ReleaseAll()
	s.Ledger.Forget()
	if s.buffer != nil {
		s.buffer.Reset()
	}
}

// Collect sends the engine's series and the connector's.
func (s *Node) Collect(c *engine.Collector) {
	s.Engine.Collect(c)
	s.collectNIXL(c)
}

// answerJSON answers a request to a bootstrap server.
func answerJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

// answerSide answers a question of another engine; in is the rest of its connection. nil: the connection cannot be used
// any more.
func (s *Node) answerSide(q *handover.Question, in *bufio.Reader) *handover.Answer {
	if s.Faults.Unreachable() {
		return nil
	}
	out := &handover.Answer{}
	mine := q.EngineID == s.EngineID
	switch q.Op {
	case handover.OpPull:
		*out = s.pulled(q)
	case handover.OpJoin:
		hungUp := make(chan struct{})
		go func() { // nothing more may arrive before the answer, so a byte or an error means the end
			_, _ = in.Peek(1)
			close(hungUp)
		}()
		return s.answerJoin(q.RequestID, q, hungUp)
	case handover.OpWho:
		out.EngineID, out.Clock = s.EngineID, s.Clock()
	case handover.OpHeartbeat:
		if mine {
			s.Ledger.Extend(q.RequestID)
		}
	case handover.OpRelease:
		if mine || q.EngineID == "" {
			s.Ledger.Release(q.RequestID)
		}
	case handover.OpPrefix:
		out.Blocks = s.Pool.Prefix(q.Want)
	case handover.OpStorePut:
		s.store.put(q.Want)
	case handover.OpStoreHas:
		if s.store.has(q.Want) {
			out.Blocks = 1
		}
	}
	return out
}
