package memory

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// While more than half is in use, the slowest bodies end, and no more of them than there is too much. Fast ones and young
// ones go on, and so do all while there is room.
func TestTheSlowestBodiesEndFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		budget := New(1000)
		bodies := NewBodies(budget)
		var mu sync.Mutex
		var ended []string
		begin := func(name string, bytes int64) *Body {
			b := new(Body)
			bodies.Begin(b, func() {
				mu.Lock()
				defer mu.Unlock()
				ended = append(ended, name)
			})
			b.Received(bytes)
			budget.Add(bytes)
			return b
		}
		sweep := func() []string {
			bodies.endSlow(time.Now())
			synctest.Wait()
			slices.Sort(ended)
			return ended
		}
		begin("a", 150)
		begin("b", 100)
		done := begin("done", 50)
		time.Sleep(SlowBody + time.Second)
		require.Empty(t, sweep(), "there is room")
		bodies.Done(done)
		begin("young", 300)
		budget.Add(90) // of others
		require.Equal(t, []string{"a", "b"}, sweep(), "the slower one is not enough")
		require.Equal(t, []string{"a", "b"}, sweep(), "once")
	})
}
