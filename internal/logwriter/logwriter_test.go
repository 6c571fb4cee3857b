package logwriter

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// A reader that has stopped reading holds nobody who logs; what was dropped is counted when it reads on.
func TestNeverWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reader, pipe := io.Pipe()
		w := New(pipe)
		const lines = 3 * maxLogLines
		for i := range lines {
			n, err := fmt.Fprintf(w, "line %d\n", i)
			require.NoError(t, err)
			require.Positive(t, n)
		}
		require.NotZero(t, w.dropped.Load())
		read := make(chan string)
		go func() {
			text, _ := io.ReadAll(reader)
			read <- string(text)
		}()
		w.Close()
		require.NoError(t, pipe.Close())
		text := <-read
		got := strings.Count(text, "line ")
		var dropped int
		_, last, found := strings.Cut(text, "tandem: ")
		require.True(t, found)
		_, err := fmt.Sscanf(last, "%d log lines", &dropped)
		require.NoError(t, err)
		require.Equal(t, lines, got+dropped)
	})
}

func TestBoundsBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reader, pipe := io.Pipe()
		w := New(pipe)
		for range 20 {
			_, _ = w.Write(bytes.Repeat([]byte("x"), 1<<20))
		}
		require.LessOrEqual(t, w.held.Load(), int64(maxLogBytes))
		require.NotZero(t, w.dropped.Load())
		w.Close() // the reader never reads: it gives up after a while
		require.NoError(t, reader.Close())
		<-w.done
	})
}
