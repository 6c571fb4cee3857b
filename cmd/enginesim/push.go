package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// The dialects of vLLM in which P sends and D waits: NIXL push (0.24 and later), Mooncake (0.16 and later), MoRIIO. P computes,
// answers, and keeps the blocks until D has taken them or their time is up; D waits for them, and its blocks are taken
// until they come or its time is up, also where its client has left: vLLM frees an aborted request that waits for KV only
// when its receive ends.

// parsePush reads kv_transfer_params as these connectors do, with what they die of or hang on.
func (c *config) parsePush(raw []byte) (kv kvParams) {
	if isNull(raw) {
		return kv
	}
	kv.present, kv.cachedOnP = true, -1
	kv.remoteDecode, kv.remotePrefill = truthy(get(raw, "do_remote_decode")), truthy(get(raw, "do_remote_prefill"))
	kv.engineID, kv.requestID = string(text(get(raw, "remote_engine_id"))), string(text(get(raw, "remote_request_id")))
	kv.host, kv.transfer = string(text(get(raw, "remote_host"))), string(text(get(raw, "transfer_id")))
	kv.bootstrap = string(text(get(raw, "remote_bootstrap_addr")))
	port, isPort := integer(get(raw, "remote_port"))
	kv.port = int(port)
	switch c.connector {
	case connectorMoRIIO:
		kv.parseMoRIIO(raw)
		return kv
	case connectorMoRIIORead:
		kv.parseMoRIIORead(raw)
		return kv
	case connectorMooncake013:
		if kv.remotePrefill && (kv.host == "" || !isPort) {
			kv.parked = "remote_host and remote_port are needed"
		}
		return kv
	}
	if c.connector == connectorMooncake {
		switch {
		case kv.remotePrefill && c.role == rolePrefill:
			kv.fatal = "AssertionError: a kv_producer got do_remote_prefill"
		case kv.remoteDecode && c.role == roleDecode:
			kv.fatal = "AssertionError: a kv_consumer got do_remote_decode"
		case kv.remotePrefill && (kv.engineID == "" || kv.bootstrap == "" || kv.transfer == ""):
			kv.parked = "remote_engine_id, remote_bootstrap_addr and transfer_id are needed"
		}
		return kv
	}
	if !kv.remotePrefill {
		return kv
	}
	for name, missing := range map[string]bool{"remote_engine_id": kv.engineID == "", "remote_host": kv.host == "", "remote_port": !isPort,
		"tp_size": isNull(get(raw, "tp_size")), "remote_request_id": kv.requestID == ""} {
		if missing {
			kv.fatal = "KeyError: " + name
		}
	}
	return kv
}

// parseMoRIIO reads what MoRIIO's mode WRITE needs on both legs: an id that begins with tx, where the other leg is, and
// how many ranks it has.
func (kv *kvParams) parseMoRIIO(raw []byte) {
	notify, isPort := integer(get(raw, "remote_notify_port"))
	_, isHandshake := integer(get(raw, "remote_handshake_port"))
	_, tp := integer(get(raw, "remote_tp_size"))
	_, dp := integer(get(raw, "remote_dp_size"))
	kv.port = int(notify)
	switch {
	case !kv.remoteDecode && !kv.remotePrefill:
	case !strings.HasPrefix(kv.transfer, "tx"):
		kv.fatal = "AssertionError: transfer_id"
	case kv.host == "" || !isPort || !isHandshake:
		kv.fatal = "KeyError: remote_host, remote_handshake_port or remote_notify_port"
	case !tp || !dp:
		kv.fatal = "enginesim: without remote_tp_size and remote_dp_size every writer takes rank 0"
	case kv.remotePrefill && (!isArray(get(raw, "remote_block_ids")) || kv.engineID == ""):
		kv.fatal = "KeyError: remote_block_ids, remote_engine_id"
	}
}

// parseMoRIIORead reads what the mode READ needs: P an id and D's ranks, D what P answered.
func (kv *kvParams) parseMoRIIORead(raw []byte) {
	notify, isPort := integer(get(raw, "remote_notify_port"))
	_, tp := integer(get(raw, "remote_tp_size"))
	kv.port = int(notify)
	switch {
	case kv.remoteDecode && (!strings.HasPrefix(kv.transfer, "tx") || !tp):
		kv.fatal = "KeyError: transfer_id, remote_tp_size"
	case kv.remotePrefill && (kv.transfer == "" || kv.host == "" || !isPort || !truthy(get(raw, "remote_block_ids")) || kv.engineID == ""):
		kv.fatal = "KeyError: transfer_id, remote_host, remote_notify_port, remote_block_ids, remote_engine_id"
	}
}

// pushes reports whether this engine speaks one of these dialects.
func (c *config) pushes() bool {
	switch c.connector {
	case connectorMooncake, connectorMooncake013, connectorPush, connectorMoRIIO, connectorMoRIIORead:
		return true
	}
	return false
}

// key is the name under which both legs of a sequence meet. NIXL push finds D's registration by the engine's own request
// id without its random tail, so both legs need the same x-request-id and the same path.
func (c *call) key(q *sequence) string {
	if c.s.cfg.connector == connectorPush || c.s.cfg.connector == connectorMooncake013 {
		return c.internalID(q)
	}
	return c.req.kv.transfer
}

// park is a request that the scheduler waits with for KV that nobody will send.
func (c *call) park() {
	c.s.metrics.waitingDeferred.Add(1)
	<-c.r.Context().Done()
	c.s.metrics.waitingDeferred.Add(-1)
	c.rec.setAborted()
}

// await is D's part: its sequence's KV comes. Where the client leaves, the wait goes on without it, and so do its blocks.
func (c *call) await(ctx context.Context) error {
	for _, q := range c.seqs {
		held := int64(len(q.grant.blocks))
		c.s.rooms.held.Add(held)
		type received struct {
			actual []uint64
			err    error
		}
		got := make(chan received, 1)
		go func() {
			actual, err := c.s.awaitKV(&c.req.kv, c.key(q), q.p)
			got <- received{actual, err}
		}()
		select {
		case r := <-got:
			c.s.rooms.held.Add(-held)
			if r.err != nil {
				return r.err
			}
			c.took(q, r.actual)
		case <-ctx.Done():
			blocks := q.grant.blocks
			q.grant.blocks = nil
			go func() {
				<-got
				c.s.pool.free(blocks)
				c.s.rooms.held.Add(-held)
			}()
			return ctx.Err()
		}
	}
	return nil
}

// awaitKV goes to P and waits, whatever becomes of the client.
func (s *sim) awaitKV(kv *kvParams, key string, p *prompt) ([]uint64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.transferTimeout)
	defer cancel()
	addr, err := s.findWorker(ctx, kv)
	if err != nil {
		return nil, err
	}
	if addr == "" { // the registration goes to an engine that does not know of it; a watchdog logs, and that is all
		<-ctx.Done()
		return nil, fmt.Errorf("%w: nobody answered the registration", errLoadFailed)
	}
	return s.join(ctx, addr, key, p)
}

// findWorker is where P's worker listens: Mooncake asks P's bootstrap server, NIXL push is told. "": nowhere.
func (s *sim) findWorker(ctx context.Context, kv *kvParams) (string, error) {
	switch s.cfg.connector {
	case connectorMoRIIO, connectorMoRIIORead, connectorMooncake013:
		return net.JoinHostPort(kv.host, strconv.Itoa(kv.port)), nil
	}
	if s.cfg.connector == connectorPush {
		addr := net.JoinHostPort(kv.host, strconv.Itoa(kv.port))
		if s.peers.engineID(ctx, addr) != kv.engineID {
			return "", nil
		}
		return addr, nil
	}
	if !strings.HasPrefix(kv.bootstrap, "http://") {
		return "", fmt.Errorf("%w: remote_bootstrap_addr %q has no scheme", errLoadFailed, kv.bootstrap)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, kv.bootstrap+"/query", nil)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errLoadFailed, err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errLoadFailed, err)
	}
	defer resp.Body.Close()
	var engines map[string]bootstrapEngine
	if err := json.NewDecoder(resp.Body).Decode(&engines); err != nil {
		return "", fmt.Errorf("%w: %w", errLoadFailed, err)
	}
	for _, e := range engines {
		if e.EngineID == kv.engineID {
			u, err := url.Parse(e.Workers["0"]["0"])
			if err != nil {
				return "", fmt.Errorf("%w: %w", errLoadFailed, err)
			}
			return u.Host, nil
		}
	}
	return "", fmt.Errorf("%w: the bootstrap server knows no engine %s", errLoadFailed, kv.engineID)
}

type bootstrapEngine struct {
	EngineID string                       `json:"engine_id"`
	Workers  map[string]map[string]string `json:"worker_addr"`
}

// mooncakeBootstrap is P's HTTP server (mooncake_utils.py).
func (s *sim) mooncakeBootstrap() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /query", func(w http.ResponseWriter, _ *http.Request) {
		worker := "tcp://" + net.JoinHostPort(s.sideHost, strconv.Itoa(s.sidePort))
		writeJSONValue(w, map[string]bootstrapEngine{"0": {s.engineID, map[string]map[string]string{"0": {"0": worker}}}})
	})
	mux.HandleFunc("GET /health", s.serveHealth)
	return mux
}

// offer is P's part: the blocks of a finished prefill leg are D's to take, for so long. A leg that was sent a second time
// offers what nobody may come for.
func (c *call) offer(q *sequence, blocks []int32) {
	s, key := c.s, c.key(q)
	if s.cfg.connector != connectorPush && s.cfg.connector != connectorMooncake013 && (key == "" || q.out.finish != "length") {
		s.logf("the transfer %q is cancelled: finish reason %s", key, q.out.finish)
		s.pool.free(blocks)
		return
	}
	limit := s.cfg.transferTimeout
	switch s.cfg.connector {
	case connectorPush:
		limit = s.cfg.lease
		id := fmt.Sprintf("%s-%08x", key, s.random.Uint32())
		q.handOver = c.rule.pushed(s.appendHandOver(nil, id, blocks, q.computed(), q.local(s.cfg.blockSize)))
	case connectorMooncake013:
		q.handOver = fmt.Appendf(nil, `{"do_remote_prefill":true,"do_remote_decode":false,"remote_host":%q,"remote_port":%d}`, s.sideHost, s.sidePort)
	case connectorMoRIIORead:
		ids := strings.ReplaceAll(strings.Trim(fmt.Sprint(blocks), "[]"), " ", ",")
		q.handOver = fmt.Appendf(nil, `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[%s],"remote_engine_id":"%s:%d","remote_host":%q,`+
			`"remote_handshake_port":%d,"remote_notify_port":%d,"remote_dp_rank":0,"remote_dp_size":1,"tp_size":1,"transfer_id":%q}`,
			ids, s.sideHost, s.sidePort, s.sideHost, s.sidePort, s.sidePort, key)
	}
	s.rooms.held.Add(int64(len(blocks)))
	s.ledger.given.Add(1)
	go func() {
		defer s.rooms.held.Add(-int64(len(blocks)))
		defer s.pool.free(blocks)
		over := time.NewTimer(limit)
		defer over.Stop()
		r, err := s.rooms.enter(key)
		if err != nil {
			<-over.C
			s.ledger.expired.Add(1)
			return
		}
		defer s.rooms.close(key)
		select {
		case <-r.join:
			r.answer <- s.send(q.p, &r.want)
			s.ledger.fetched.Add(1)
		case <-over.C:
			s.ledger.expired.Add(1)
		}
	}()
}

// pushed is a hand-over of NIXL push, which has no expiry time.
func (r *failRule) pushed(pull []byte) []byte {
	s := strings.Replace(string(pull), `,"remote_blocks_expiry_time":null,"transfer_mode":"pull"`, `,"transfer_mode":"push"`, 1)
	params, _ := r.spoilParams([]byte(s))
	return params
}

// engineID asks a side channel who it is; "" if it does not say.
func (p *peers) engineID(ctx context.Context, addr string) string {
	w := newFrame()
	w.b = append(w.b, opWho)
	w.string("")
	w.string("")
	frame, err := p.call(ctx, addr, w.sealFrame())
	if err != nil {
		return ""
	}
	r := wireReader{b: frame}
	return r.string()
}
