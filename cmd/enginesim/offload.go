package main

import (
	"context"
	"net"
	"strconv"
)

// parseOffload reads kv_transfer_params as vLLM's OffloadingConnector with the P2P tier understands them (0.25 to 0.33).
// P parks a finished prompt's blocks under the name that it is given; D fetches them by that name, and computes what is
// not there. remote_prefiller together with another key is refused by the tier.
func parseOffload(raw []byte) (kv kvParams) {
	if isNull(raw) {
		return kv
	}
	kv.present, kv.cachedOnP, kv.missOK = true, -1, true
	keys := 0
	eachMember(raw, func(key, val []byte) {
		id := string(text(get(val, "kv_request_id")))
		switch string(key) {
		case "remote_decoder":
			keys++
			kv.remoteDecode, kv.keepAs = true, id
		case "remote_prefiller", "remote_kv_source":
			keys++
			host := string(text(get(val, "remote_host")))
			port, ok := integer(get(val, "remote_port"))
			if !ok || host == "" {
				kv.broken = &violation{"incomplete_params", string(key) + " without remote_host or remote_port"}
			}
			if string(key) == "remote_kv_source" {
				kv.source = net.JoinHostPort(host, strconv.FormatInt(port, 10))
			} else {
				kv.remotePrefill, kv.requestID, kv.host, kv.port = true, id, host, int(port)
			}
		default:
			return
		}
		if id == "" {
			kv.broken = &violation{"incomplete_params", string(key) + " without kv_request_id"}
		}
	})
	if kv.remotePrefill && keys > 1 {
		kv.broken = &violation{"forbidden_keys", "remote_prefiller with another key of the tier"}
	}
	return kv
}

// pullPrefix fetches what remote_kv_source still has of the prompts' beginnings.
func (c *call) pullPrefix(ctx context.Context) {
	s := c.s
	for _, q := range c.seqs {
		w := newFrame()
		w.b = append(w.b, opPrefix)
		w.string("")
		w.string("")
		w.words(q.p.full)
		ctx, cancel := context.WithTimeout(ctx, s.cfg.loadTimeout)
		answer, err := s.peers.call(ctx, c.req.kv.source, w.sealFrame())
		cancel()
		r := wireReader{b: answer}
		if n := int(r.uint()); err == nil && r.err == nil && n > q.grant.hits {
			q.external = (n - q.grant.hits) * s.cfg.blockSize
			s.metrics.external.Add(int64(q.external))
			s.metrics.externalHits.Add(int64(q.external))
			s.pool.write(&q.grant, q.p, q.grant.hits, nil)
		}
	}
}

// prefix is how many of the blocks, from the first on, the prefix cache has.
func (p *pool) prefix(blocks []uint64) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for before := int32(noBlock); n < len(blocks); n++ {
		if before = p.find(before, max(blocks[n], 1)); before == noBlock {
			break
		}
	}
	return n
}
