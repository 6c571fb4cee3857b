package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/require"
)

// replayed asks an engine's replay socket for all batches from a number on. go-zeromq sometimes loses a message that
// follows directly after the handshake; then it is sent again.
func replayed(t *testing.T, e *simulator, from uint64) [][][]byte {
	t.Helper()
	for range 10 {
		if replies, err := askReplay(t, e, from); err == nil {
			return replies
		}
	}
	t.Fatal("the replay socket does not answer")
	return nil
}

func askReplay(t *testing.T, e *simulator, from uint64) (replies [][][]byte, err error) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	dealer := zmq4.NewDealer(ctx)
	defer dealer.Close()
	if err := dealer.Dial("tcp://" + e.Events.ReplayAddr()); err != nil {
		return nil, err
	}
	if err := dealer.Send(zmq4.NewMsgFrom([]byte{}, binary.BigEndian.AppendUint64(nil, from))); err != nil {
		return nil, err
	}
	for {
		m, err := dealer.Recv()
		if err != nil {
			return nil, err
		}
		replies = append(replies, m.Frames)
		if n := len(m.Frames); bytes.Equal(m.Frames[n-2], bytes.Repeat([]byte{0xff}, 8)) {
			if len(m.Frames[n-1]) > 0 {
				t.Errorf("the last reply holds %d bytes", len(m.Frames[n-1]))
			}
			return replies, nil
		}
	}
}

// awaitEvents waits until the batches from a number on contain something, and returns them, joined, and the number after
// them. One request may cause one batch or two.
func awaitEvents(t *testing.T, e *simulator, from int, of string) (events string, next int) {
	t.Helper()
	for deadline := time.Now().Add(patience); !strings.Contains(events, of); {
		require.Less(t, time.Now(), deadline, "%q was not told", of)
		replies := replayed(t, e, 0)
		events, next = "", len(replies)-1
		for i, frames := range replies[from:next] {
			require.Equal(t, uint64(from+i), binary.BigEndian.Uint64(frames[len(frames)-2]))
			events += string(frames[len(frames)-1])
		}
	}
	return events, next
}

func TestKVEvents(t *testing.T) {
	for name, c := range map[string]struct {
		flag   string
		frames int    // of a replayed message: with the topic or without
		stored string // beginning of a stored event
	}{
		"as from vLLM 0.24 on": {"-kv-events-arrays=false", 4, "\x89\xa4type\xabBlockStored\xacblock_hashes\x93\xcf"},
		"as up to vLLM 0.23":   {"-kv-events-arrays=true", 3, "\x99\xabBlockStored\x93\xcf"},
	} {
		t.Run(name, func(t *testing.T) {
			e := startEngine(t, "-kv-events", "tcp://*:0", "-kv-events-replay", "tcp://*:0", "-kv-events-topic", "kv@here@tiny", "-block-size", "4", "-blocks", "7", c.flag)
			prompt := func(word string) string { // three full blocks and a token
				return `{"max_tokens":1,"prompt":"` + strings.Repeat(word, 13) + `"}`
			}
			require.Equal(t, 200, e.post(t, "/v1/completions", "", prompt("aaaa")).status)
			one, next := awaitEvents(t, e, 0, "BlockStored")
			require.Equal(t, "\x93\xcb", one[:2])
			require.Equal(t, "\x91"+c.stored, one[10:11+len(c.stored)], "one event of three blocks")
			require.Equal(t, 1, strings.Count(one, "\x9c\xceaaaa"), "twelve token ids")
			require.Len(t, replayed(t, e, 0)[0], c.frames)
			require.Len(t, replayed(t, e, 1), 1, "nothing from there on")

			require.Equal(t, 200, e.post(t, "/v1/completions", "", prompt("aaaa")).status)
			require.Equal(t, 200, e.post(t, "/v1/completions", "", prompt("bbbb")).status)
			two, next := awaitEvents(t, e, next, "BlockStored")
			require.Equal(t, 1, strings.Count(two, "BlockRemoved"), "7 blocks are 6: the last of the first prompt makes room")
			require.Less(t, strings.Index(two, "BlockRemoved"), strings.Index(two, "BlockStored"))

			require.Equal(t, 200, e.post(t, "/reset_prefix_cache", "", "").status)
			require.Len(t, replayed(t, e, 0), next+1, "as with vLLM, it is told with the next batch")
			require.Equal(t, 200, e.post(t, "/v1/completions", "", `{"max_tokens":1,"cache_salt":"grain","prompt":"`+strings.Repeat("c", 17)+`"}`).status)
			three, _ := awaitEvents(t, e, next, "BlockStored")
			require.Less(t, strings.Index(three, "AllBlocksCleared"), strings.Index(three, "BlockStored"))
			require.Contains(t, three, "\x91\x91\xa5grain", "extra keys of the first block")
		})
	}
}

func TestKVEventsAreKeptFor(t *testing.T) {
	e := startEngine(t, "-kv-events", "tcp://*:0", "-kv-events-replay", "tcp://*:0", "-block-size", "4", "-kv-events-buffer", "2")
	for _, word := range []string{"a", "b", "c"} {
		require.Equal(t, 200, e.post(t, "/v1/completions", "", `{"max_tokens":1,"prompt":"`+strings.Repeat(word, 40)+`"}`).status)
		last := []byte{0xce, word[0], word[0], word[0], word[0]} // a token of four bytes
		require.Eventually(t, func() bool {
			n := replayed(t, e, 0)
			return len(n) > 1 && bytes.Contains(n[len(n)-2][3], last)
		}, patience, 10*time.Millisecond)
	}
	replies := replayed(t, e, 0)
	require.Len(t, replies, 3)
	require.Equal(t, uint64(1), binary.BigEndian.Uint64(replies[0][2]), "the first is lost without notice")
}

// What is stored is in CPU memory as well, and stays there: its events name the medium, and blocks without their tokens.
func TestKVEventsOfCPUMemory(t *testing.T) {
	e := startEngine(t, "-kv-events", "tcp://*:0", "-kv-events-replay", "tcp://*:0", "-block-size", "4", "-blocks", "7", "-host-blocks", "4")
	const gpu, cpu = "\xa6medium\xa3GPU", "\xa6medium\xa3CPU"
	ask := func(word string) {
		t.Helper()
		require.Equal(t, 200, e.post(t, "/v1/completions", "", `{"max_tokens":1,"prompt":"`+strings.Repeat(word, 13)+`"}`).status)
	}
	ask("aaaa")
	one, next := awaitEvents(t, e, 0, cpu)
	require.Equal(t, []int{1, 3}, []int{strings.Count(one, gpu), strings.Count(one, cpu)})
	require.Equal(t, 3, strings.Count(one, "\xa9token_ids\x90\xaablock_size\x00"))
	ask("bbbb")
	two, _ := awaitEvents(t, e, next, cpu)
	require.Equal(t, 3, strings.Count(two, "BlockRemoved"), "one of GPU memory, two of CPU memory, which has four")
	require.Equal(t, []int{2, 5}, []int{strings.Count(two, gpu), strings.Count(two, cpu)})
}
