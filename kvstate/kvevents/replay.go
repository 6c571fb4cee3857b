package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"tandem/internal/zmtp"
)

// Bounds of a connection.
const (
	replayTimeout = 20 * time.Second // from the request to the end marker; an engine looks for requests every 100 ms
	maxMessage    = 64 << 20         // bytes
	maxReplayed   = 1 << 20          // batches
)

// batchOf splits a live message: topic, number (8 bytes, big endian), payload.
func batchOf(frames [][]byte) (topic []byte, seq uint64, payload []byte, ok bool) {
	if len(frames) != 3 || len(frames[1]) != 8 {
		return nil, 0, nil, false
	}
	return frames[0], binary.BigEndian.Uint64(frames[1]), frames[2], true
}

// replayEnd is the number that ends a replay: -1.
const replayEnd = ^uint64(0)

// ask asks the replay socket at addr for all batches from a number on.
//
// The request is an empty frame and the number. An answer is an empty frame, from vLLM 0.26 and SGLang 0.5.23 on also
// the topic, then number and payload; the end has number -1 and an empty payload. So only the last two frames matter.
// (A REQ socket, as in vLLM's own example, sees only the first answer.)
func ask(ctx context.Context, addr string, from uint64, each func(seq uint64, payload []byte)) error {
	ctx, cancel := context.WithTimeout(ctx, replayTimeout)
	defer cancel()
	c, err := zmtp.Dial(ctx, addr, zmtp.Dealer, maxMessage)
	if err != nil {
		return fmt.Errorf("asking for a replay: %w", err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, c.Close)()
	if err := c.Send([]byte{}, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return fmt.Errorf("asking for a replay: %w", err)
	}
	for range maxReplayed {
		frames, err := c.Read()
		if err != nil {
			return fmt.Errorf("reading a replay: %w", err)
		}
		n := len(frames)
		if n < 2 || len(frames[n-2]) != 8 {
			return fmt.Errorf("reading a replay: a message of %d frames that is no batch", n)
		}
		seq := binary.BigEndian.Uint64(frames[n-2])
		if seq == replayEnd && len(frames[n-1]) == 0 {
			return nil
		}
		each(seq, frames[n-1])
	}
	return errors.New("reading a replay: it does not end")
}
