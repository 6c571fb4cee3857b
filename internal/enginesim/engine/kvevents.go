package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	stdlog "log" //nolint:depguard // zmq4 takes no other
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

// Events publishes the prefix cache's stored and evicted blocks, as vLLM does (vllm/distributed/kv_events.py): a PUB
// socket with three frames (topic, number, batch), and a ROUTER that serves the last batches again. The pool calls it
// under its lock; batches are sent from a separate goroutine.
type Events struct {
	cfg    *Config
	mu     sync.Mutex
	batch  []byte // the events of the next batch, encoded
	count  int
	seq    uint64
	kept   []keptBatch // the last cfg.eventSteps, oldest first
	lose   int         // batches still to be dropped: kept, but not published
	wake   chan struct{}
	pub    zmq4.Socket
	Subs   subscribers
	replay zmq4.Socket
	stop   context.CancelFunc
	done   sync.WaitGroup
}

type keptBatch struct {
	seq     uint64
	payload []byte
}

// startKVEvents opens the sockets; nil if none are configured.
func startKVEvents(cfg *Config) (*Events, error) {
	if cfg.Events == "" {
		return nil, nil
	}
	ctx, stop := context.WithCancel(context.Background())
	quiet := zmq4.WithLogger(stdlog.New(io.Discard, "", 0))
	e := &Events{cfg: cfg, wake: make(chan struct{}, 1), stop: stop}
	// As vLLM: an endpoint with a wildcard is bound, one with a host is connected to.
	bound := strings.Contains(cfg.Events, "*") || strings.Contains(cfg.Events, "::")
	// A bound socket that reconnects would connect to itself when a subscriber leaves.
	e.pub = zmq4.NewPub(ctx, quiet, zmq4.WithSecurity(&e.Subs), zmq4.WithDialerMaxRetries(-1),
		zmq4.WithAutomaticReconnect(!bound))
	var err error
	if bound {
		err = e.pub.Listen(wildcard(cfg, cfg.Events))
	} else {
		e.done.Go(func() { _ = e.pub.Dial(cfg.Events) })
	}
	if err == nil && cfg.EventsReplay != "" {
		e.replay = zmq4.NewRouter(ctx, quiet)
		if err = e.replay.Listen(wildcard(cfg, cfg.EventsReplay)); err == nil {
			e.done.Go(e.answer)
		}
	}
	if err != nil {
		e.close()
		return nil, fmt.Errorf("opening the KV event sockets: %w", err)
	}
	e.done.Go(func() { e.publish(ctx) })
	return e, nil
}

// subscribers counts the connections of the PUB socket, which has no counter: each of them begins with a handshake. It
// adds no security.
type subscribers struct {
	mu    sync.Mutex
	conns []*zmq4.Conn
}

func (s *subscribers) Type() zmq4.SecurityType { return zmq4.NullSecurity }

func (s *subscribers) Encrypt(w io.Writer, b []byte) (int, error) { return w.Write(b) }

func (s *subscribers) Decrypt(w io.Writer, b []byte) (int, error) { return w.Write(b) }

// Handshake implements [zmq4.Security].
func (s *subscribers) Handshake(c *zmq4.Conn, server bool) error {
	if err := null.Security().Handshake(c, server); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns = append(s.conns, c)
	return nil
}

// Count returns the current number.
func (s *subscribers) Count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns = slices.DeleteFunc(s.conns, func(c *zmq4.Conn) bool {
		_, err := c.Write(nil) // a closed connection is detected by a write
		return err != nil
	})
	return len(s.conns)
}

// wildcard replaces "*" by the engine's own host: the simulator listens on no address that is not configured.
func wildcard(cfg *Config, endpoint string) string {
	host, _, _ := net.SplitHostPort(cfg.Listen)
	if host == "" {
		host = "0.0.0.0"
	}
	endpoint = strings.Replace(endpoint, "*", host, 1)
	return abovePort(endpoint, cfg.Rank)
}

func (e *Events) close() {
	if e == nil {
		return
	}
	e.stop()
	_ = e.pub.Close()
	if e.replay != nil {
		_ = e.replay.Close()
	}
	e.done.Wait()
}

// publish sends a batch whenever there are events: about one for each engine step.
func (e *Events) publish(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.wake:
		}
		k, lost := e.next()
		if k.payload == nil || lost {
			continue
		}
		_ = e.pub.SendMulti(zmq4.NewMsgFrom([]byte(e.cfg.EventsTopic), binary.BigEndian.AppendUint64(nil, k.seq),
			k.payload))
	}
}

// next takes the next batch.
func (e *Events) next() (k keptBatch, lost bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.count == 0 {
		return k, false
	}
	p := append([]byte{0x93, 0xcb},
		binary.BigEndian.AppendUint64(nil, math.Float64bits(float64(time.Now().UnixMicro())/1e6))...)
	p = packArray(p, e.count)
	p = packUint(append(p, e.batch...), uint64(e.cfg.Rank))
	k = keptBatch{e.seq, p}
	e.seq++
	e.batch, e.count = e.batch[:0], 0
	select {
	case <-e.wake: // for an event that is in this batch
	default:
	}
	if e.kept = append(e.kept, k); len(e.kept) > e.cfg.EventSteps {
		e.kept = e.kept[len(e.kept)-e.cfg.EventSteps:]
	}
	if lost = e.lose > 0; lost {
		e.lose--
	}
	return k, lost
}

// answer serves the replay socket: [empty, number] is answered by every kept batch from there on and an end marker.
func (e *Events) answer() {
	for {
		m, err := e.replay.Recv()
		if err != nil {
			return
		}
		if len(m.Frames) != 3 || len(m.Frames[1]) != 0 || len(m.Frames[2]) != 8 {
			continue // vLLM logs it and continues
		}
		from := binary.BigEndian.Uint64(m.Frames[2])
		e.mu.Lock()
		kept := e.kept
		e.mu.Unlock()
		for _, k := range kept {
			if k.seq >= from {
				e.reply(m.Frames[0], e.cfg.EventsTopic, k.seq, k.payload)
			}
		}
		e.reply(m.Frames[0], "", math.MaxUint64, nil)
	}
}

// reply sends one replayed batch: with the topic as vLLM 0.26 and later, or without, as before. The releases without a
// topic are, except two, those whose events are arrays.
func (e *Events) reply(to []byte, topic string, seq uint64, payload []byte) {
	frames := [][]byte{to, {}}
	if !e.cfg.EventArrays {
		frames = append(frames, []byte(topic))
	}
	_ = e.replay.SendMulti(zmq4.NewMsgFrom(append(frames, binary.BigEndian.AppendUint64(nil, seq), payload)...))
}

// stored adds an event for consecutive blocks of a sequence.
func (e *Events) stored(seq *Prompt, from, to, blockSize int) {
	if e == nil || from == to {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.begin("BlockStored", 8)
	b = packArray(e.field(b, "block_hashes"), to-from)
	for i := from; i < to; i++ {
		b = packUint(b, seq.key(i))
	}
	b = e.field(b, "parent_block_hash")
	if from == 0 {
		b = append(b, msgpackNil)
	} else {
		b = packUint(b, seq.key(from-1))
	}
	ids := seq.Ids[from*blockSize : to*blockSize]
	b = packArray(e.field(b, "token_ids"), len(ids))
	for _, id := range ids {
		b = packUint(b, uint64(id))
	}
	b = packUint(e.field(b, "block_size"), uint64(blockSize))
	b = append(e.field(b, "lora_id"), msgpackNil)
	b = packString(e.field(b, "medium"), mediumGPU)
	b = append(e.field(b, "lora_name"), msgpackNil)
	b = packArray(e.field(b, "extra_keys"), to-from)
	for i := from; i < to; i++ {
		if i == 0 && seq.saltText != "" {
			b = packString(append(b, 0x91), seq.saltText)
		} else {
			b = append(b, msgpackNil)
		}
	}
	e.end(b)
}

// The media of vLLM's events.
const (
	mediumGPU = "GPU"
	mediumCPU = "CPU"
)

// copied tells of a block that is in CPU memory as well. Like vLLM's offloading it names the block and not its tokens.
func (e *Events) copied(key uint64) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.begin("BlockStored", 6)
	b = packUint(packArray(e.field(b, "block_hashes"), 1), key)
	b = append(e.field(b, "parent_block_hash"), msgpackNil)
	b = packArray(e.field(b, "token_ids"), 0)
	b = packUint(e.field(b, "block_size"), 0)
	b = append(e.field(b, "lora_id"), msgpackNil)
	e.end(packString(e.field(b, "medium"), mediumCPU))
}

func (e *Events) removed(key uint64, medium string) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.begin("BlockRemoved", 2)
	b = packUint(packArray(e.field(b, "block_hashes"), 1), key)
	e.end(packString(e.field(b, "medium"), medium))
}

// cleared adds an event for a reset of the cache. As with vLLM it is sent with the next batch.
func (e *Events) cleared() {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.batch = e.begin("AllBlocksCleared", 0)
	e.count++
}

const msgpackNil = 0xc0

// begin starts an event with that many fields: an array that begins with its type, or a map that has a key for it.
func (e *Events) begin(kind string, fields int) []byte {
	if e.cfg.EventArrays {
		return packString(packArray(e.batch, 1+fields), kind)
	}
	return packString(packString(append(e.batch, 0x80|byte(1+fields)), "type"), kind)
}

func (e *Events) field(b []byte, name string) []byte {
	if e.cfg.EventArrays {
		return b
	}
	return packString(b, name)
}

func (e *Events) end(b []byte) {
	e.batch = b
	e.count++
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

func packArray(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, 0x90|byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xdc), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, 0xdd), uint32(n))
}

func packUint(b []byte, v uint64) []byte {
	switch {
	case v < 1<<7:
		return append(b, byte(v))
	case v < 1<<8:
		return append(b, 0xcc, byte(v))
	case v < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(v))
	case v < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
}

func packString(b []byte, s string) []byte {
	if len(s) < 32 {
		b = append(b, 0xa0|byte(len(s)))
	} else {
		b = binary.BigEndian.AppendUint16(append(b, 0xda), uint16(min(len(s), 1<<16-1)))
	}
	return append(b, s[:min(len(s), 1<<16-1)]...)
}

// LoseNext keeps the next n batches for replay without publishing them.
func (e *Events) LoseNext(n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lose = n
}

// ReplayAddr returns the address of the replay socket, host:port.
func (e *Events) ReplayAddr() string { return e.replay.Addr().String() }

// abovePort returns an endpoint n ports above another one: vLLM's rank n publishes there.
func abovePort(endpoint string, n int) string {
	at := strings.LastIndexByte(endpoint, ':')
	port, err := strconv.Atoi(endpoint[at+1:])
	if err != nil || port == 0 {
		return endpoint
	}
	return endpoint[:at+1] + strconv.Itoa(port+n)
}
