package redisclient

import (
	"bytes"
	"io"
	"net"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"tandem/e2e/redisserver"
)

// Whatever lies in Redis, a replica makes no room for it beyond the bounds.
func TestHugeRepliesAreNotRead(t *testing.T) {
	ctx := t.Context()
	var c Counts
	client := redis.NewClient(&redis.Options{Addr: redisserver.New(t).Addr, Dialer: dialer(nil, &c), MaxRetries: -1,
		ReadTimeout: time.Minute, WriteTimeout: time.Minute})
	defer client.Close()
	require.NoError(t, client.Set(ctx, "well", strings.Repeat("x", 16<<20), 0).Err())
	require.NoError(t, client.SetRange(ctx, "huge", 400<<20, "x").Err())
	require.NoError(t, client.SetRange(ctx, "large", 30<<20, "x").Err())
	require.NoError(t, client.XAdd(ctx, &redis.XAddArgs{Stream: "stream", Values: []any{"a", "x"}}).Err())
	for range 3 {
		require.NoError(t, client.XAdd(ctx, &redis.XAddArgs{Stream: "stream", Values: []any{"a", strings.Repeat("x", 25<<20)}}).Err())
	}

	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for name, err := range map[string]error{
		"GET": client.Get(ctx, "huge").Err(), "MGET": client.MGet(ctx, "large", "large", "large").Err(),
		"XREAD": client.XRead(ctx, &redis.XReadArgs{Streams: []string{"stream", "0"}, Count: 4, Block: -1}).Err(),
	} {
		require.ErrorContains(t, err, "a value in Redis has", name)
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(250<<20))
	got, err := client.Get(ctx, "well").Result()
	require.NoError(t, err)
	require.Len(t, got, 16<<20)
	require.NoError(t, client.MGet(ctx, "large", "well").Err())
}

// pieces is a connection that gives a text in pieces of a size.
type pieces struct {
	net.Conn
	text io.Reader
	size int
}

func (p *pieces) Read(b []byte) (int, error) { return p.text.Read(b[:min(len(b), p.size)]) }

// However a reply is cut, the same lengths are seen: lines within values are none.
func TestLengthsInReplies(t *testing.T) {
	value := func(n int) string { return "$" + strconv.Itoa(n) + "\r\n" }
	for text, refused := range map[string]bool{
		"+OK\r\n:7\r\n$-1\r\n*-1\r\n$0\r\n\r\n":           false,
		"*2\r\n$11\r\n$999999999\r\n\r\n" + "$1\r\na\r\n": false,
		"$12\r\n$999999999\r\n\r\n" + value(maxValue+1):   true,
		value(maxValue):                                     false,
		value(maxValue + 1):                                 true,
		"*999999999\r\n":                                    true,
		"%3\r\n+a\r\n" + value(maxValue+1):                  true,
		"-ERR " + strings.Repeat("x", 100) + "\r\n:1\r\n":   false,
		"-ERR $999999999" + strings.Repeat("x", 9) + "\r\n": false,
		"=" + strconv.Itoa(maxValue+1) + "\r\ntxt:":         true,
	} {
		for size := 1; size <= len(text); size++ {
			c := &boundedConn{Conn: &pieces{text: strings.NewReader(text), size: size}}
			got, err := io.ReadAll(c)
			require.Equal(t, refused, err != nil, "%q in pieces of %d: %v", text, size, err)
			if err == nil {
				require.Equal(t, text, string(got))
			}
		}
	}
	c := &boundedConn{Conn: &pieces{text: io.LimitReader(endless{}, maxReply+1), size: 1 << 20}}
	n, err := io.Copy(io.Discard, c)
	require.ErrorContains(t, err, "larger than 64 MiB")
	require.LessOrEqual(t, n, int64(maxReply))
}

// endless is a line without an end.
type endless struct{}

func (endless) Read(b []byte) (int, error) {
	copy(b, bytes.Repeat([]byte("+"), len(b)))
	return len(b), nil
}
