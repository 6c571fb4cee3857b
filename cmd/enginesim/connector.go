package main

import "slices"

// connector is how an engine hands KV over, and which members of a body it reads for that.
type connector string

const (
	connectorNone    connector = "none"
	connectorNIXL    connector = "nixl"    // nixl.go: kv_transfer_params with block ids
	connectorNeuron  connector = "neuron"  // the same, but D finds P's whole answer under disagg_prefill_resp
	connectorOffload connector = "offload" // offload.go: the P2P tier, remote_decoder and remote_prefiller
	connectorTRTLLM  connector = "trtllm"  // trtllm.go: disaggregated_params
	connectorLMCache connector = "lmcache" // lmcache.go: P pushes into D's buffer and tells the router
	connectorShared  connector = "shared"  // store.go: a store that everybody looks into

	// Both legs at once.
	connectorPush     connector = "nixl-push" // push.go
	connectorMooncake connector = "mooncake"  // push.go, with a bootstrap server
	connectorSGLang   connector = "sglang"    // sglang.go: rooms
	connectorMoRIIO   connector = "moriio"
	connectorNCCL     connector = "p2p-nccl"

	// One leg after the other, as nixl.
	connectorMooncake013 connector = "mooncake-0.13"
	connectorMoRIIORead  connector = "moriio-read"
)

func connectors() []connector {
	return []connector{connectorNIXL, connectorNeuron, connectorOffload, connectorTRTLLM, connectorLMCache, connectorShared,
		connectorPush, connectorMooncake, connectorSGLang, connectorMoRIIO, connectorNCCL,
		connectorMooncake013, connectorMoRIIORead, connectorNone}
}

func (k connector) known() bool { return slices.Contains(connectors(), k) }

// readTransfer reads one member of a body, if it is one of the connector's.
func (q *request) readTransfer(k connector, m member) *apiError {
	switch string(m.key) {
	case "kv_transfer_params":
		if !isObject(m.raw) && !isNull(m.raw) {
			return pydantic("dict_type", "kv_transfer_params", "Input should be a valid dictionary", m.raw)
		}
		q.hasParams = !isNull(m.raw)
		switch k {
		case connectorNIXL, connectorNeuron:
			q.kv = parseKVParams(m.raw)
		case connectorOffload:
			q.kv = parseOffload(m.raw)
		case connectorLMCache:
			q.kv = parseDisaggSpec(m.raw)
		}
	case "disagg_prefill_resp":
		if k == connectorNeuron {
			q.kv = parseKVParams(get(m.raw, "kv_transfer_params"))
		}
	case "disaggregated_params":
		if k == connectorTRTLLM {
			ids := q.kv.promptIDs
			q.kv = parseDisaggregated(m.raw)
			q.kv.promptIDs = ids
		}
	case "prompt_token_ids":
		if k == connectorTRTLLM {
			q.kv.promptIDs, _ = tokenIDs(m.raw)
		}
	}
	return nil
}

// looksUp reports whether a decode engine looks for KV by what the prompt holds, without being told.
func (k connector) looksUp() bool { return k == connectorLMCache || k == connectorShared }

// lookUp finds a sequence's KV where others have put it. Half of a prompt counts as nothing.
func (c *call) lookUp(q *sequence) error {
	s := c.s
	if s.cfg.role == rolePrefill || len(q.p.full) <= q.grant.hits {
		return nil
	}
	found := false
	var err error
	switch s.cfg.connector {
	case connectorLMCache:
		found, err = s.buffer.take(c.xid, q.p)
	case connectorShared:
		found = s.store.has(q.p.full)
	}
	if !found || err != nil {
		return err
	}
	q.external = len(q.p.full)*s.cfg.blockSize - q.local(s.cfg.blockSize)
	s.metrics.external.Add(int64(q.external))
	s.metrics.externalHits.Add(int64(q.external))
	s.pool.write(&q.grant, q.p, q.grant.hits, nil)
	return nil
}

// publish lets others have what this engine has computed.
func (c *call) publish() {
	s := c.s
	switch {
	case s.cfg.connector == connectorShared:
		for _, q := range c.seqs {
			s.store.put(q.p.full)
		}
	case c.req.kv.spec != nil:
		c.pushKV()
	}
}
