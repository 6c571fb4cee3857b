package redisclient

import (
	"context"
	"errors"
	"net"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// Commands count one by one, however they are sent; that there is no such thing is an answer, and who goes away is no failure of Redis's.
func TestCommandsAreCounted(t *testing.T) {
	late, lost := context.DeadlineExceeded, errors.New("connection reset")
	for name, c := range map[string]struct {
		answers  []error
		failures int64
	}{
		"answered":              {[]error{nil, nil, nil}, 0},
		"nothing there":         {[]error{redis.Nil}, 0},
		"given up":              {[]error{context.Canceled}, 0},
		"late":                  {[]error{late}, 1},
		"all lost":              {[]error{lost, lost}, 2},
		"one of three":          {[]error{nil, lost, nil}, 1},
		"behind one not there":  {[]error{redis.Nil, late, nil, lost}, 2},
		"behind what succeeded": {[]error{nil, late}, 1},
	} {
		var c1, c2 Counts
		var cmds []redis.Cmder
		for _, err := range c.answers {
			cmd := redis.NewStringResult("", err)
			cmds = append(cmds, cmd)
			require.Equal(t, err, counting{&c1}.ProcessHook(func(context.Context, redis.Cmder) error { return err })(t.Context(), cmd))
		}
		_ = counting{&c2}.ProcessPipelineHook(func(context.Context, []redis.Cmder) error { return c.answers[0] })(t.Context(), cmds)
		for _, got := range []*Counts{&c1, &c2} {
			require.Equal(t, []int64{int64(len(c.answers)), c.failures}, []int64{got.Commands.Load(), got.Errors.Load()}, name)
		}
	}

	var c Counts
	ours, theirs := net.Pipe()
	go func() {
		_, _ = theirs.Write([]byte("+OK\r\n"))
		_, _ = theirs.Read(make([]byte, 100))
		_ = theirs.Close()
	}()
	conn := &countedConn{ours, &c}
	_, err := conn.Read(make([]byte, 3))
	require.NoError(t, err)
	_, err = conn.Read(make([]byte, 3))
	require.NoError(t, err)
	_, err = conn.Write([]byte("PING\r\n\r\n"))
	require.NoError(t, err)
	require.Equal(t, []int64{8, 5}, []int64{c.BytesSent.Load(), c.BytesRead.Load()})
}
