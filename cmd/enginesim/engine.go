package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"
)

// sequence is one answer in the making: choice "choice" of prompt "index".
type sequence struct {
	p        *prompt
	index    int // of the prompt
	choice   int // of the n choices
	grant    grant
	external int  // tokens fetched from another engine
	wrong    bool // its KV is not that of its prompt
	out      output
	handOver []byte // kv_transfer_params of the answer, nil for none
	turn     bool   // external is of the prompt's beginning alone (turns.go)
	kept     bool   // the blocks are with the ledger already
	room     roomParams
}

// local is the number of prompt tokens that this engine's own prefix cache had.
func (q *sequence) local(blockSize int) int { return q.grant.hits * blockSize }

// computed is how many tokens' KV exist when the answer is complete: that of the last token is never computed.
func (q *sequence) computed() int { return q.p.n + q.out.n - 1 }

// prepare makes the call's sequences. The answers' lengths are known before the KV is: they depend on the text only.
func (c *call) prepare(prompts []*prompt) {
	for i, p := range prompts {
		for choice := range int(c.req.n) {
			room := c.s.cfg.maxModelLen - p.n
			q := &sequence{p: p, index: i, choice: choice, out: c.req.answer(p.digest, choice, room, 0)}
			if digest, ok := c.continues(p); ok {
				q.out = c.req.answer(digest, choice, room, 1)
			}
			if c.req.kv.context {
				q.stopAfterContext()
			}
			c.seqs = append(c.seqs, q)
		}
	}
}

// generate carries the call through the engine: admission, KV load, prefill, decode. emit is called with each step's
// number when its tokens are there, from 0 to the longest answer's last; nil for an answer that is sent as one.
func (c *call) generate(ctx context.Context, emit func(step int) error) error {
	s := c.s
	started := time.Now()
	if err := ctx.Err(); err != nil { // vLLM's API server gives such a request up before its scheduler hears of it, and tells P nothing
		c.fetched = true
		return c.abandon(err)
	}
	if err := c.admit(ctx); err != nil {
		return c.abandon(err)
	}
	s.metrics.running.Add(1)
	running := true
	defer func() {
		if running {
			s.metrics.running.Add(-1)
		}
	}()
	if c.req.kv.remotePrefill {
		s.metrics.running.Add(-1)
		running = false
		s.metrics.waitingDeferred.Add(1)
		err := c.load(ctx)
		s.metrics.waitingDeferred.Add(-1)
		if err != nil {
			return c.abandon(err)
		}
		s.metrics.running.Add(1)
		running = true
	}
	if c.fetchesTurn() {
		if err := c.fetchTurn(ctx); err != nil {
			return c.abandon(err)
		}
	}
	if c.req.kv.source != "" {
		c.pullPrefix(ctx)
	}
	if s.cfg.connector.looksUp() && c.req.kv.spec == nil {
		for _, q := range c.seqs {
			if err := c.lookUp(q); err != nil {
				return c.abandon(err)
			}
		}
	}
	if err := c.fill(ctx); err != nil {
		return c.abandon(err)
	}
	c.publish()
	s.metrics.firstToken.Observe(time.Since(started).Seconds())
	if err := c.decode(ctx, emit); err != nil {
		return c.abandon(err)
	}
	c.complete()
	s.metrics.latency.Observe(time.Since(started).Seconds())
	return nil
}

// fill gets the prompts' KV: computed, from another engine, or computed for one.
func (c *call) fill(ctx context.Context) error {
	if c.s.cfg.connector == connectorNCCL && c.req.roomLeg != "" {
		if c.s.cfg.role == roleDecode {
			if err := c.takeKV(); err != nil {
				return err
			}
			return c.prefill(ctx)
		}
		if err := c.prefill(ctx); err != nil {
			return err
		}
		return c.putKV(ctx)
	}
	switch {
	case c.req.kv.genFirst && c.req.kv.context:
		return c.sendContext(ctx)
	case !c.s.roomed():
		return c.prefill(ctx)
	case c.req.n > 1:
		return c.shareRoom(ctx)
	case c.s.cfg.role == rolePrefill:
		return c.sendRooms(ctx)
	}
	if err := c.receiveRooms(ctx); err != nil {
		return err
	}
	return c.prefill(ctx)
}

func (c *call) admit(ctx context.Context) error {
	prompts := make([]*prompt, len(c.seqs))
	lens := make([]int, len(c.seqs))
	for i, q := range c.seqs {
		prompts[i], lens[i] = q.p, q.computed()
	}
	s := c.s
	if !s.pool.fits(lens) {
		return badRequest("The request needs more KV cache blocks than the engine has (%d of %d tokens): raise -blocks", len(s.pool.blocks)-1, s.cfg.blockSize)
	}
	stop := func() {}
	grants, err := s.pool.admit(ctx, prompts, lens, func(d int64) {
		s.metrics.waitingCapacity.Add(d)
		if d > 0 {
			stop = c.heartbeat()
		}
	})
	stop()
	if err != nil {
		return err
	}
	for i, q := range c.seqs {
		q.grant = grants[i]
		s.metrics.prefixQueries.Add(int64(q.p.n))
		s.metrics.prefixHits.Add(int64(q.local(s.cfg.blockSize)))
		if s.cfg.connector != connectorNone {
			s.metrics.externalQueries.Add(int64(q.p.n - q.local(s.cfg.blockSize)))
		}
	}
	return nil
}

// heartbeat keeps the prefill engine's lease alive while a decode leg waits for room, as vLLM does: one beat for every
// sixth of a lease.
func (c *call) heartbeat() (stop func()) {
	kv := &c.req.kv
	if !kv.remotePrefill || c.s.cfg.pushes() {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		tick := time.NewTicker(max(c.s.cfg.lease/6, time.Millisecond))
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				c.s.peers.notify(opHeartbeat, kv.addr(), kv.engineID, kv.requestID)
			case <-done:
				return
			}
		}
	}()
	return func() { close(done) }
}

func (kv *kvParams) addr() string { return net.JoinHostPort(kv.host, strconv.Itoa(kv.port)) }

// load fetches each sequence's KV. With the policy "recompute" a failed load only costs its time.
func (c *call) load(ctx context.Context) error {
	s := c.s
	if s.cfg.pushes() {
		return c.await(ctx)
	}
	if c.req.kv.genFirst {
		return c.receiveContext(ctx)
	}
	for _, q := range c.seqs {
		actual, err := c.fetchScheduled(ctx, q)
		c.fetched = true
		if errors.Is(err, errLoadFailed) {
			s.logf("%v (x-request-id %q)", err, c.xid)
			if s.cfg.recompute || c.req.kv.missOK {
				continue
			}
		}
		if err != nil {
			return err
		}
		q.external = q.p.n - q.local(s.cfg.blockSize)
		s.metrics.external.Add(int64(q.external))
		s.metrics.externalHits.Add(int64(q.external))
		s.pool.write(&q.grant, q.p, q.grant.hits, actual)
		if actual != nil {
			q.corrupt(c.req, q.grant.hits, actual[q.grant.hits:], s.cfg.maxModelLen)
		}
	}
	return ctx.Err()
}

// corrupt makes the answer one of the KV that was really there: block i of got is that of the sequence's block from+i.
func (q *sequence) corrupt(req *request, from int, got []uint64, maxLen int) {
	digest := q.p.digest
	for i, content := range got {
		if content != q.p.content(from+i) {
			digest = mix(digest^k0, content^uint64(i)^k2)
		}
	}
	if digest == q.p.digest { // what was wrong, if anything, was not read
		return
	}
	planned := q.out.n
	q.wrong = true
	q.out = req.answer(digest, q.choice, maxLen-q.p.n, 0)
	if q.out.n > planned { // there are blocks for no more
		q.out.n = planned
		if q.out.literal {
			q.out.text = q.out.text[:min(len(q.out.text), planned*tokenBytes)]
		}
	}
}

// prefill computes what neither cache had, one call after another at the configured speed.
func (c *call) prefill(ctx context.Context) error {
	s := c.s
	compute := 0
	for _, q := range c.seqs {
		s.metrics.localHit.Add(int64(q.local(s.cfg.blockSize)))
		switch {
		case q.external == 0:
			compute += q.p.n - q.local(s.cfg.blockSize)
		case q.turn:
			compute += q.p.n - q.local(s.cfg.blockSize) - q.external
		}
	}
	s.metrics.localCompute.Add(int64(compute))
	if s.cfg.prefillSpeed > 0 && compute > 0 {
		if err := s.compute(ctx, time.Duration(float64(compute)/s.cfg.prefillSpeed*float64(time.Second))); err != nil {
			return err
		}
	}
	for _, q := range c.seqs {
		if q.external == 0 || q.turn {
			s.pool.write(&q.grant, q.p, q.grant.hits, nil)
		}
		if s.cfg.faithful && !q.wrong {
			c.readHits(q)
		}
	}
	return nil
}

// readHits checks what the prefix cache really held: wrong KV that a faithful engine accepted once stays in its cache
// under the right name.
func (c *call) readHits(q *sequence) {
	held := c.s.pool.read(q.grant.blocks[:q.grant.hits], func(i int) uint64 { return q.p.full[i] })
	q.corrupt(c.req, 0, held, c.s.cfg.maxModelLen)
}

// compute occupies the engine's prefill, for which requests queue.
func (s *sim) compute(ctx context.Context, d time.Duration) error {
	select {
	case s.prefillTurn <- struct{}{}:
	default:
		s.metrics.waitingCapacity.Add(1)
		s.metrics.running.Add(-1)
		var err error
		select {
		case s.prefillTurn <- struct{}{}:
		case <-ctx.Done():
			err = ctx.Err()
		}
		s.metrics.waitingCapacity.Add(-1)
		s.metrics.running.Add(1)
		if err != nil {
			return err
		}
	}
	defer func() { <-s.prefillTurn }()
	return sleep(ctx, d)
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// untilStep is the time until the engine's next decode step. Continuous batching gives every running sequence its token in
// the same step, so the tokens of different answers come together, however far apart their requests came.
func (s *sim) untilStep() time.Duration {
	pace := s.cfg.decodeStep
	return pace - time.Since(s.started)%pace
}

func (c *call) decode(ctx context.Context, emit func(step int) error) error {
	steps := 0
	for _, q := range c.seqs {
		steps = max(steps, q.out.n)
	}
	pace := c.s.cfg.decodeStep
	if emit == nil {
		if pace > 0 && steps > 1 {
			if err := sleep(ctx, pace*time.Duration(steps-1)); err != nil {
				return err
			}
			for range steps - 1 {
				c.s.metrics.gaps.Observe(pace.Seconds())
			}
		}
		return ctx.Err()
	}
	last := time.Now()
	for step := range steps {
		if pace > 0 && step > 0 {
			if err := sleep(ctx, c.s.untilStep()); err != nil {
				return err
			}
			now := time.Now()
			c.s.metrics.gaps.Observe(now.Sub(last).Seconds())
			last = now
		}
		if step == steps-1 && c.keepsTurns() { // the last event tells of it
			for _, q := range c.seqs {
				c.keepTurn(q)
			}
		}
		if err := emit(step); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// complete books a finished answer: its KV goes to the prefix cache, and then to the ledger or back to the pool.
func (c *call) complete() {
	s := c.s
	for _, q := range c.seqs {
		if c.keepsTurns() {
			c.keepTurn(q)
		} else {
			c.writeAnswer(q)
		}
		s.metrics.generated.Add(int64(q.out.n))
		s.metrics.promptTokens.Observe(float64(q.p.n))
		s.metrics.genTokens.Observe(float64(q.out.n))
		reason := q.out.finish
		if reason == "tool_calls" {
			reason = "stop"
		}
		s.metrics.finished.add(reason, 1)
		if q.kept {
			continue
		}
		used := blocksFor(q.computed(), s.cfg.blockSize)
		s.pool.free(q.grant.blocks[used:]) // fewer tokens than planned
		blocks := q.grant.blocks[:used]
		if !c.req.kv.remoteDecode || c.req.kv.genFirst || c.req.kv.context && q.over() {
			s.pool.free(blocks)
			continue
		}
		if s.cfg.pushes() {
			c.offer(q, blocks)
		} else {
			c.keep(q, blocks)
		}
	}
}

// keep puts a sequence's blocks under a lease and writes its hand-over.
func (c *call) keep(q *sequence, blocks []int32) {
	s := c.s
	id := fmt.Sprintf("%s-%08x", c.internalID(q), s.random.Uint32())
	cached := -1
	if q.out.n == 1 {
		cached = q.local(s.cfg.blockSize)
	}
	var params []byte
	switch s.cfg.connector {
	case connectorOffload:
		id = c.req.kv.keepAs
	case connectorTRTLLM:
		contextID := strconv.FormatUint(s.random.Uint64()>>2|1<<61, 10) // more than a float holds
		id = contextID + "/" + c.req.kv.keepAs
		params = s.appendDisaggregated(nil, contextID, c.req.kv.keepAs)
	default:
		params = s.appendHandOver(nil, id, blocks, q.computed(), cached)
	}
	params, spoilt := c.rule.spoilParams(params)
	q.handOver = params
	if spoilt {
		s.pool.free(blocks)
		return
	}
	s.ledger.keep(id, c.xid, blocks, q.computed())
}

// internalID is vLLM's name for a sequence, without its random tail.
func (c *call) internalID(q *sequence) string {
	id := c.id
	switch c.req.api {
	case apiCompletions:
		id += "-" + strconv.Itoa(q.index)
	case apiResponses:
		id += "_0"
	case apiGenerate:
		id = "generate-tokens-" + id
	}
	if c.req.n > 1 {
		id = strconv.Itoa(q.choice) + "_" + id
	}
	return id
}

// writeAnswer caches the blocks that the generated tokens filled, and, where the answer is kept, notes what the last one holds.
func (c *call) writeAnswer(q *sequence) {
	if q.out.n < 2 || q.wrong {
		return
	}
	blockSize := c.s.cfg.blockSize
	if q.computed()/blockSize == len(q.p.full) && !c.keepsTurns() {
		return
	}
	t := resume(q.p, blockSize)
	for i := range q.out.n - 1 {
		t.token(tokenID([]byte(q.out.token(i))))
	}
	t.p.tail = 0
	if c.keepsTurns() {
		t.finish("")
	}
	c.s.pool.write(&q.grant, &t.p, len(q.p.full), nil)
}

// abandon gives back what a call that will not be answered holds, on this engine and on the one it meant to read from.
func (c *call) abandon(err error) error {
	s := c.s
	for _, q := range c.seqs {
		s.pool.free(q.grant.blocks)
		q.grant.blocks = nil
	}
	c.releaseRemote()
	reason := "error"
	if errors.Is(err, context.Canceled) || errors.Is(err, errAborted) {
		reason = "abort"
		s.metrics.aborted.Add(1)
		c.rec.setAborted()
	}
	s.metrics.finished.add(reason, 1)
	if v, ok := errors.AsType[*violation](err); ok {
		s.violate(v, c.xid)
		c.rec.set(func() { c.rec.Violation = v.kind })
	}
	return err
}

// releaseRemote tells the prefill engine that its blocks will not be fetched. vLLM does so when a decode leg is aborted while it
// waits to be scheduled (request_finished of nixl_connector.py, with do_remote_prefill still set), and from 0.21 on when it refuses one.
func (c *call) releaseRemote() {
	kv := &c.req.kv
	if c.s.cfg.pushes() || !kv.remotePrefill || c.fetched || kv.fatal != "" || kv.incomplete != "" {
		return
	}
	c.fetched = true
	go c.s.peers.notify(opRelease, kv.addr(), kv.engineID, kv.requestID)
}

var errAborted = errors.New("the client has gone")
