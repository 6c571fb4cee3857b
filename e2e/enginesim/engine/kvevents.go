package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
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
	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// Events publishes the prefix cache's stored and evicted blocks, as vLLM does (vllm/distributed/kv_events.py): a PUB
// socket with three frames (topic, number, batch), and a ROUTER that serves the last batches again. The pool calls it
// under its lock; batches are sent from a separate goroutine.
type Events struct {
	cfg    *Config
	mu     sync.Mutex
	batch  []any // the events of the next batch
	seq    uint64
	size   int         // of the next batch, as the last one lets expect
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
	e := &Events{cfg: cfg, wake: make(chan struct{}, 1), stop: stop, Subs: subscribers{Security: null.Security()}}
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
	zmq4.Security

	mu    sync.Mutex
	conns []*zmq4.Conn
}

// Handshake implements [zmq4.Security].
func (s *subscribers) Handshake(c *zmq4.Conn, server bool) error {
	if err := s.Security.Handshake(c, server); err != nil {
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

// next takes the next batch. It encodes the batch after it has released the lock, so that the engine need not wait.
func (e *Events) next() (k keptBatch, lost bool) {
	e.mu.Lock()
	batch := e.batch
	e.batch = nil
	select {
	case <-e.wake: // for an event that is in this batch
	default:
	}
	e.mu.Unlock()
	if len(batch) == 0 {
		return k, false
	}
	payload := bytes.NewBuffer(make([]byte, 0, e.size))
	enc := msgpack.NewEncoder(payload)
	enc.UseCompactInts(true)
	enc.UseArrayEncodedStructs(e.cfg.EventArrays)
	at := float64(time.Now().UnixMicro()) / 1e6
	_ = errors.Join(enc.EncodeArrayLen(3), enc.EncodeFloat64(at), enc.EncodeArrayLen(len(batch))) // numbers and text
	for _, event := range batch {
		if b, ok := event.(blockRemoved); ok {
			_ = b.EncodeMsgpack(enc)
		} else {
			_ = enc.Encode(event)
		}
	}
	_ = enc.EncodeInt(int64(e.cfg.Rank))
	e.mu.Lock()
	defer e.mu.Unlock()
	k, e.size = keptBatch{e.seq, payload.Bytes()}, payload.Len()+payload.Len()/8
	e.seq++
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

// The events, with vLLM's names. Each is a map, or an array of the values (-kv-events-arrays). blockCopied is a
// BlockStored without what only a computed block has.
type (
	blockCopied struct {
		Type   string          `msgpack:"type"`
		Hashes numbers[uint64] `msgpack:"block_hashes"`
		Parent *uint64         `msgpack:"parent_block_hash"`
		Tokens numbers[uint32] `msgpack:"token_ids"`
		Size   int             `msgpack:"block_size"`
		LoRAID *int            `msgpack:"lora_id"`
		Medium string          `msgpack:"medium"`
	}
	blockStored struct {
		blockCopied

		LoRA  *string `msgpack:"lora_name"`
		Extra []any   `msgpack:"extra_keys"`
	}
	blockRemoved struct {
		hash   uint64
		medium string
		array  bool
	}
	allCleared struct {
		Type string `msgpack:"type"`
	}
)

// EncodeMsgpack implements [msgpack.CustomEncoder], without reflection: a full cache gives up a block for each that it
// stores, and has an event for each.
func (b blockRemoved) EncodeMsgpack(enc *msgpack.Encoder) error {
	begin, name := enc.EncodeMapLen, enc.EncodeString
	if b.array {
		begin, name = enc.EncodeArrayLen, func(string) error { return nil }
	}
	return errors.Join(begin(3), name("type"), enc.EncodeString("BlockRemoved"),
		name("block_hashes"), enc.EncodeArrayLen(1), enc.EncodeUint(b.hash), name("medium"), enc.EncodeString(b.medium))
}

// numbers are encoded in as few bytes as each needs, and many at a time: a prompt has many tokens.
type numbers[T uint32 | uint64] []T

// EncodeMsgpack implements [msgpack.CustomEncoder].
func (n numbers[T]) EncodeMsgpack(enc *msgpack.Encoder) error {
	if err := enc.EncodeArrayLen(len(n)); err != nil {
		return err
	}
	out := make([]byte, 0, 1<<10)
	for _, t := range n {
		if len(out) > 1<<10-9 {
			if _, err := enc.Writer().Write(out); err != nil {
				return err
			}
			out = out[:0]
		}
		switch v := uint64(t); {
		case v < 1<<7:
			out = append(out, byte(v))
		case v < 1<<8:
			out = append(out, msgpcode.Uint8, byte(v))
		case v < 1<<16:
			out = binary.BigEndian.AppendUint16(append(out, msgpcode.Uint16), uint16(v))
		case v < 1<<32:
			out = binary.BigEndian.AppendUint32(append(out, msgpcode.Uint32), uint32(v))
		default:
			out = binary.BigEndian.AppendUint64(append(out, msgpcode.Uint64), v)
		}
	}
	_, err := enc.Writer().Write(out)
	return err
}

// stored adds an event for consecutive blocks of a sequence.
func (e *Events) stored(seq *Prompt, from, to, blockSize int) {
	if e == nil || from == to {
		return
	}
	b := blockStored{blockCopied: blockCopied{Type: "BlockStored", Tokens: seq.Ids[from*blockSize : to*blockSize],
		Size: blockSize, Medium: mediumGPU}, Extra: make([]any, to-from)}
	for i := from; i < to; i++ {
		b.Hashes = append(b.Hashes, seq.key(i))
	}
	if from > 0 {
		parent := seq.key(from - 1)
		b.Parent = &parent
	} else if seq.saltText != "" {
		b.Extra[0] = []string{seq.saltText}
	}
	e.add(b)
}

// The media of vLLM's events.
const (
	mediumGPU = "GPU"
	mediumCPU = "CPU"
)

// copied tells of a block that is in CPU memory as well. Like vLLM's offloading it names the block and not its tokens.
func (e *Events) copied(key uint64) {
	e.add(blockCopied{Type: "BlockStored", Hashes: numbers[uint64]{key}, Tokens: numbers[uint32]{}, Medium: mediumCPU})
}

func (e *Events) removed(key uint64, medium string) {
	if e == nil {
		return
	}
	e.add(blockRemoved{key, medium, e.cfg.EventArrays})
}

// cleared adds an event for a reset of the cache. As with vLLM it is sent with the next batch.
func (e *Events) cleared() {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.batch = append(e.batch, allCleared{"AllBlocksCleared"})
}

// add adds an event to the next batch.
func (e *Events) add(event any) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.batch = append(e.batch, event)
	select {
	case e.wake <- struct{}{}:
	default:
	}
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
