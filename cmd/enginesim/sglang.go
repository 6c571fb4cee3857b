package main

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
)

// SGLang's disaggregation, as 0.5.23 has it. Both legs are sent the same room. P's bootstrap server tells D where P's
// ranks are; D goes there and waits; P waits for D before it computes anything, sends, and answers when D has all. Each
// waits for the other as long as the transfer timeout says (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT and _WAITING_TIMEOUT,
// 300 s), holding its blocks meanwhile: neither hears of it when the other one's client leaves.

// roomParams are bootstrap_host, bootstrap_port and bootstrap_room of one sequence.
type roomParams struct {
	host string
	port int // 0: null, the server's own
	room uint64
}

func (r roomParams) key() string { return strconv.FormatUint(r.room, 10) }

// readRooms reads a request's rooms, one for each prompt (srt/managers/io_struct.py, _normalize_bootstrap_params).
func (q *request) readRooms(prompts int) ([]roomParams, *apiError) {
	hosts, ports, rooms := q.raw("bootstrap_host"), q.raw("bootstrap_port"), q.raw("bootstrap_room")
	if isNull(rooms) {
		return nil, badRequest("Disaggregated request received without bootstrap room id. Disaggregated Server requires bootstrap room.")
	}
	out := make([]roomParams, prompts)
	for i := range out {
		r := &out[i]
		host, err := element(hosts, i, "bootstrap_host")
		if err != nil {
			return nil, err
		}
		if r.host = string(text(host)); r.host == "" {
			return nil, badRequest("bootstrap_host must be a string, not %s", pyRepr(host))
		}
		port, err := element(ports, i, "bootstrap_port")
		if err != nil {
			return nil, err
		}
		if !isNull(port) {
			p, ok := integer(port)
			if !ok || p < 1 || p > 65535 {
				return nil, badRequest("bootstrap_port must be a port, not %s", pyRepr(port))
			}
			r.port = int(p)
		}
		room, err := element(rooms, i, "bootstrap_room")
		if err != nil {
			return nil, err
		}
		number, perr := strconv.ParseInt(string(room), 10, 64)
		if perr != nil || number < 0 {
			return nil, badRequest("bootstrap_room must be an integer of 63 bits, not %s", pyRepr(room))
		}
		r.room = uint64(number)
		if !isArray(rooms) {
			r.room += uint64(i)
		}
	}
	return out, nil
}

// element is a scalar, or what a list has at i.
func element(raw []byte, i int, name string) ([]byte, *apiError) {
	if !isArray(raw) {
		return raw, nil
	}
	var list [][]byte
	eachElement(raw, func(e []byte) bool { list = append(list, e); return true })
	if i >= len(list) {
		return nil, badRequest("%s has %d elements, too few", name, len(list))
	}
	return list[i], nil
}

// roomed reports whether this engine does one leg of two.
func (s *sim) roomed() bool { return s.cfg.connector == connectorSGLang && s.cfg.role != roleBoth }

// checkRooms reads the rooms of a call that was prepared, and makes a prefill leg one of one token, as P does of its own
// accord (srt/disaggregation/prefill.py).
func (c *call) checkRooms(prompts int) *apiError {
	rooms, bad := c.req.readRooms(prompts)
	if bad != nil {
		return bad
	}
	seen := map[uint64]bool{}
	for _, r := range rooms {
		if seen[r.room] {
			return badRequest("enginesim: the room %d is there twice in one batch", r.room)
		}
		seen[r.room] = true
	}
	for _, q := range c.seqs {
		q.room = rooms[q.index]
	}
	return nil
}

// shareRoom is what becomes of several choices of a prompt, which all have the room of the first (srt/managers/
// tokenizer_manager.py, _handle_batch_request): P computes and answers, D waits for KV that nobody sends (run on 0.5.23).
func (c *call) shareRoom(ctx context.Context) error {
	if c.s.cfg.role == rolePrefill {
		return c.prefill(ctx)
	}
	held := c.hold()
	defer c.s.rooms.held.Add(-held)
	timeout := time.NewTimer(c.s.cfg.transferTimeout)
	defer timeout.Stop()
	select {
	case <-timeout.C:
		return errTransferTimeout
	case <-ctx.Done():
		return ctx.Err()
	}
}

// receiveRooms is D's part of a call: all of its sequences get their KV.
func (c *call) receiveRooms(ctx context.Context) error {
	held := c.hold()
	defer c.s.rooms.held.Add(-held)
	group, ctx := errgroup.WithContext(ctx)
	var booking sync.Mutex
	for _, q := range c.seqs {
		group.Go(func() error {
			addr, err := c.s.findRank(ctx, q.room)
			if err != nil {
				return err
			}
			actual, err := c.s.join(ctx, addr, q.room.key(), q.p)
			if err != nil {
				return err
			}
			booking.Lock()
			defer booking.Unlock()
			c.took(q, actual)
			return nil
		})
	}
	return group.Wait()
}

func (c *call) hold() (blocks int64) {
	for _, q := range c.seqs {
		blocks += int64(len(q.grant.blocks))
	}
	c.s.rooms.held.Add(blocks)
	return blocks
}

// findRank asks P's bootstrap server where the rank that has the room is.
func (s *sim) findRank(ctx context.Context, r roomParams) (string, error) {
	port := r.port
	if port == 0 {
		_, own, _ := net.SplitHostPort(s.cfg.bootstrap)
		port, _ = strconv.Atoi(own)
	}
	url := fmt.Sprintf("http://%s/route?prefill_dp_rank=%d&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0",
		net.JoinHostPort(strings.Trim(r.host, "[]"), strconv.Itoa(port)), r.room%uint64(s.cfg.dpSize))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errLoadFailed, err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		return "", fmt.Errorf("%w: could not fetch prefill parallel info from bootstrap server: %w", errLoadFailed, err)
	}
	defer resp.Body.Close()
	var rank struct {
		IP   string `json:"rank_ip"`
		Port int    `json:"rank_port"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&rank); err != nil || resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%w: the bootstrap server answered %d", errLoadFailed, resp.StatusCode)
	}
	return net.JoinHostPort(rank.IP, strconv.Itoa(rank.Port)), nil
}

// sendRooms is P's part of a call: it waits until D is there in every room, computes the prompts, and sends.
func (c *call) sendRooms(ctx context.Context) error {
	s := c.s
	held := c.hold()
	defer s.rooms.held.Add(-held)
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.transferTimeout, errTransferTimeout)
	defer cancel()
	rooms := make([]*room, len(c.seqs))
	for i, q := range c.seqs {
		r, err := s.rooms.enter(q.room.key())
		if err != nil {
			return err
		}
		defer s.rooms.close(q.room.key())
		rooms[i] = r
	}
	for _, r := range rooms {
		select {
		case <-r.join:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if err := c.prefill(ctx); err != nil {
		return err
	}
	for i, r := range rooms {
		select {
		case <-r.gone: // D has left; nobody tells P, whose transfer never ends
			<-ctx.Done()
			return context.Cause(ctx)
		default:
			r.answer <- s.send(c.seqs[i].p, &r.want)
		}
	}
	return nil
}

var errTransferTimeout = errors.New("the decode engine did not come in time")

// bootstrapServer is P's: ranks register, decode engines and routers ask (srt/disaggregation/common/conn.py).
func (s *sim) bootstrapServer() http.Handler {
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
			writeJSONValue(w, map[string]any{"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": s.cfg.dpSize, "pp_size": 1, "page_size": s.cfg.blockSize,
				"kv_cache_dtype": "auto", "follow_bootstrap_room": true})
		case rank >= s.cfg.dpSize:
			http.Error(w, "Bootstrap info not Found", http.StatusNotFound)
		default:
			writeJSONValue(w, map[string]any{"rank_ip": s.sideHost, "rank_port": s.sidePort})
		}
	})
	return mux
}

// serveLoads is GET /v1/loads, which has taken the place of /get_load (srt/entrypoints/v1_loads.py, 0.5.23).
func (s *sim) serveLoads(w http.ResponseWriter, _ *http.Request, _ []byte) {
	m := s.metrics
	writeJSONValue(w, map[string]any{"version": "0.5.23", "loads": []any{map[string]any{
		"dp_rank": 0, "num_running_reqs": m.running.Load(), "num_waiting_reqs": m.waitingCapacity.Load() + m.waitingDeferred.Load(),
		"token_usage": s.pool.usage(), "disaggregation": map[string]any{"mode": s.disaggregationMode()},
	}}})
}

// disaggregationMode is --disaggregation-mode.
func (s *sim) disaggregationMode() string {
	if s.cfg.role == roleBoth {
		return "null"
	}
	return string(s.cfg.role)
}

// openBootstrap opens P's bootstrap port.
func (s *sim) openBootstrap() error {
	l, err := net.Listen("tcp", s.cfg.bootstrap)
	if err != nil {
		return fmt.Errorf("opening the bootstrap port: %w", err)
	}
	handler := s.bootstrapServer()
	if s.cfg.connector == connectorMooncake {
		handler = s.mooncakeBootstrap()
	}
	s.bootstrap = &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
	s.bootstrapAddr = l.Addr().String()
	go func() { _ = s.bootstrap.Serve(l) }()
	return nil
}
