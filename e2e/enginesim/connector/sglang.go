package connector

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
)

// SGLang's disaggregation of 0.5.23. Both legs get the same room. P's bootstrap server tells D the addresses of P's
// ranks; D connects there and waits; P waits for D before it computes anything, sends, and answers when D has
// everything. Each waits for the other for at most the transfer timeout (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT and
// _WAITING_TIMEOUT, 300 s), and keeps its blocks meanwhile: neither notices that the other one's client leaves.

// roomParams are bootstrap_host, bootstrap_port and bootstrap_room of one sequence.
type roomParams struct {
	host string
	port int // 0: null, the server's own
	room uint64
}

func (r roomParams) key() string { return strconv.FormatUint(r.room, 10) }

// RoomMembers are the members of a body that name its rooms, unparsed.
type RoomMembers struct{ Hosts, Ports, Rooms []byte }

// read reads the rooms, one for each prompt (srt/managers/io_struct.py, _normalize_bootstrap_params).
func (m RoomMembers) read(prompts int) ([]roomParams, *engine.Error) {
	hosts, ports, rooms := m.Hosts, m.Ports, m.Rooms
	if jsontext.IsNull(rooms) {
		return nil, engine.BadRequest("Disaggregated request received without bootstrap room id. Disaggregated " +
			"Server requires bootstrap room.")
	}
	out := make([]roomParams, prompts)
	for i := range out {
		r := &out[i]
		host, err := element(hosts, i, "bootstrap_host")
		if err != nil {
			return nil, err
		}
		if r.host = string(jsontext.Text(host)); r.host == "" {
			return nil, engine.BadRequest("bootstrap_host must be a string, not %s", engine.PyRepr(host))
		}
		port, err := element(ports, i, "bootstrap_port")
		if err != nil {
			return nil, err
		}
		if !jsontext.IsNull(port) {
			p, ok := jsontext.Integer(port)
			if !ok || p < 1 || p > 65535 {
				return nil, engine.BadRequest("bootstrap_port must be a port, not %s", engine.PyRepr(port))
			}
			r.port = int(p)
		}
		room, err := element(rooms, i, "bootstrap_room")
		if err != nil {
			return nil, err
		}
		number, perr := strconv.ParseInt(string(room), 10, 64)
		if perr != nil || number < 0 {
			return nil, engine.BadRequest("bootstrap_room must be an integer of 63 bits, not %s", engine.PyRepr(room))
		}
		r.room = uint64(number)
		if !jsontext.IsArray(rooms) {
			r.room += uint64(i)
		}
	}
	return out, nil
}

// element returns a scalar, or element i of a list.
func element(raw []byte, i int, name string) ([]byte, *engine.Error) {
	if !jsontext.IsArray(raw) {
		return raw, nil
	}
	var list [][]byte
	jsontext.EachElement(raw, func(e []byte) bool { list = append(list, e); return true })
	if i >= len(list) {
		return nil, engine.BadRequest("%s has %d elements, too few", name, len(list))
	}
	return list[i], nil
}

// Roomed reports whether this engine does only one leg.
func (c *Config) Roomed() bool { return c.Connector == SGLang && c.Role != engine.RoleBoth }

// TakeRooms reads the rooms of a request.
func (l *Leg) TakeRooms(m RoomMembers, prompts int) *engine.Error {
	rooms, bad := m.read(prompts)
	if bad != nil {
		return bad
	}
	seen := map[uint64]bool{}
	for _, r := range rooms {
		if seen[r.room] {
			return engine.BadRequest("enginesim: the room %d is there twice in one batch", r.room)
		}
		seen[r.room] = true
	}
	l.rooms = rooms
	return nil
}

// shareRoom serves several choices of a prompt, which all have the room of the first (srt/managers/
// tokenizer_manager.py, _handle_batch_request): P computes and answers, D waits for KV that never comes (run on
// 0.5.23).
func (l *Leg) shareRoom(ctx context.Context) error {
	if l.Node.cfg.Role == engine.RolePrefill {
		return l.Job.Prefill(ctx)
	}
	held := l.hold()
	defer l.Node.Rooms.Held.Add(-held)
	defer aside(l.Job.E)()
	timeout := time.NewTimer(l.Node.cfg.TransferTimeout)
	defer timeout.Stop()
	select {
	case <-timeout.C:
		return errTransferTimeout
	case <-ctx.Done():
		return ctx.Err()
	}
}

// receiveRooms is D's part of a call: it gets the KV of all its sequences.
func (l *Leg) receiveRooms(ctx context.Context) error {
	held := l.hold()
	defer l.Node.Rooms.Held.Add(-held)
	defer aside(l.Job.E)() // the queues of preallocation and transfer
	group, ctx := errgroup.WithContext(ctx)
	var booking sync.Mutex
	for _, q := range l.Job.Seqs {
		group.Go(func() error {
			addr, err := l.Node.findRank(ctx, l.rooms[q.Index])
			if err != nil {
				return err
			}
			actual, err := l.Node.join(ctx, addr, l.rooms[q.Index].key(), q.P)
			if err != nil {
				return err
			}
			booking.Lock()
			defer booking.Unlock()
			l.took(q, actual)
			return nil
		})
	}
	return group.Wait()
}

func (l *Leg) hold() (blocks int64) {
	for _, q := range l.Job.Seqs {
		blocks += int64(len(q.Grant.Blocks))
	}
	l.Node.Rooms.Held.Add(blocks)
	return blocks
}

// findRank asks P's bootstrap server for the number of ranks, and then for the address of the rank that has the room.
func (s *Node) findRank(ctx context.Context, r roomParams) (string, error) {
	var all struct {
		Ranks uint64 `json:"dp_size"`
	}
	if err := s.askRoute(ctx, r, -1, &all); err != nil {
		return "", err
	}
	var rank struct {
		IP   string `json:"rank_ip"`
		Port int    `json:"rank_port"`
	}
	if err := s.askRoute(ctx, r, int(r.room%max(all.Ranks, 1)), &rank); err != nil {
		return "", err
	}
	return net.JoinHostPort(rank.IP, strconv.Itoa(rank.Port)), nil
}

// askRoute asks P's bootstrap server about a rank; -1: about all.
func (s *Node) askRoute(ctx context.Context, r roomParams, rank int, into any) error {
	port := r.port
	if port == 0 {
		_, own, _ := net.SplitHostPort(s.cfg.Bootstrap)
		port, _ = strconv.Atoi(own)
	}
	others := 0
	if rank < 0 {
		others = -1
	}
	host := net.JoinHostPort(strings.Trim(r.host, "[]"), strconv.Itoa(port))
	url := fmt.Sprintf("http://%s/route?prefill_dp_rank=%d&prefill_cp_rank=%[3]d&target_tp_rank=%[3]d"+
		"&target_pp_rank=%[3]d",
		host, rank, others)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return fmt.Errorf("%w: %w", engine.ErrLoadFailed, err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("%w: could not fetch prefill parallel info from bootstrap server: %w", engine.ErrLoadFailed,
			err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%w: the bootstrap server answered %d", engine.ErrLoadFailed, resp.StatusCode)
	}
	return nil
}

// sendRooms is P's part of a call: it waits until D is there in every room, computes the prompts, and sends.
func (l *Leg) sendRooms(ctx context.Context) error {
	s := l.Node
	held := l.hold()
	defer s.Rooms.Held.Add(-held)
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.TransferTimeout, errTransferTimeout)
	defer cancel()
	rooms := make([]*room, len(l.Job.Seqs))
	for i, q := range l.Job.Seqs {
		r, err := s.Rooms.enter(l.rooms[q.Index].key())
		if err != nil {
			return err
		}
		defer s.Rooms.close(l.rooms[q.Index].key())
		rooms[i] = r
	}
	if err := l.metRooms(ctx, rooms); err != nil {
		return err
	}
	if err := l.Job.Prefill(ctx); err != nil {
		return err
	}
	for i, r := range rooms {
		select {
		case <-r.gone: // D has left; P does not learn it, and its transfer never ends
			<-ctx.Done()
			return context.Cause(ctx)
		default:
			r.answer <- s.send(l.Job.Seqs[i].P, r.want)
		}
	}
	return nil
}

// aside counts a running request as waiting for another engine, until back is called.
func aside(e *engine.Engine) (back func()) {
	e.Metrics.Running.Add(-1)
	e.Metrics.WaitingDeferred.Add(1)
	return func() {
		e.Core.Step()
		e.Metrics.WaitingDeferred.Add(-1)
		e.Metrics.Running.Add(1)
	}
}

// metRooms waits in P's bootstrap queue until D is there in every room.
func (l *Leg) metRooms(ctx context.Context, rooms []*room) error {
	defer aside(l.Job.E)()
	for _, r := range rooms {
		select {
		case <-r.join:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

var errTransferTimeout = errors.New("the decode engine did not come in time")

// bootstrapServer is that of P. Ranks register there, and others look them up (srt/disaggregation/common/conn.py).
func (s *Node) bootstrapServer() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("OK")) })
	mux.HandleFunc("GET /route", func(w http.ResponseWriter, r *http.Request) {
		get := func(name string) int {
			n, err := strconv.Atoi(r.URL.Query().Get(name))
			if err != nil {
				return -2
			}
			return n
		}
		rank := get("prefill_dp_rank")
		switch {
		case rank == -2 || get("target_tp_rank") == -2 || get("target_pp_rank") == -2 || get("prefill_cp_rank") == -2:
			http.Error(w, "Missing inputs for bootstrap server.", http.StatusBadRequest)
		case rank == -1:
			answerJSON(w, map[string]any{"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": s.cfg.DpSize, "pp_size": 1,
				"page_size":      s.cfg.BlockSize,
				"kv_cache_dtype": "auto", "follow_bootstrap_room": true})
		case rank >= len(s.ranks()):
			http.Error(w, "Bootstrap info not Found", http.StatusNotFound)
		default:
			answerJSON(w, map[string]any{"rank_ip": s.SideHost, "rank_port": s.ranks()[rank].SidePort})
		}
	})
	return mux
}

// DisaggregationMode returns the value of --disaggregation-mode.
func (s *Node) DisaggregationMode() string {
	if s.cfg.Role == engine.RoleBoth {
		return "null"
	}
	return string(s.cfg.Role)
}

// openBootstrap opens P's bootstrap port.
func (s *Node) openBootstrap() error {
	l, err := net.Listen("tcp", s.cfg.Bootstrap)
	if err != nil {
		return fmt.Errorf("opening the bootstrap port: %w", err)
	}
	handler := s.bootstrapServer()
	if s.cfg.Connector == Mooncake {
		handler = s.mooncakeBootstrap()
	}
	s.bootstrap = &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
	s.BootstrapAddr = l.Addr().String()
	go func() { _ = s.bootstrap.Serve(l) }()
	return nil
}
