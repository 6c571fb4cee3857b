package attempts

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
)

func fresh() *int { return new(int) }

// What is remembered of attempts is bounded in time and number; what a stream uses stays.
func TestAttemptsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var table Table[int]
		id := func(n int) kvtransfer.ID { return kvtransfer.ID{byte(n), byte(n >> 8), byte(n >> 16)} }
		one := func(n *int) { *n = 1 }
		for i := range maxIdle + 1000 {
			table.Update(id(i), fresh, one)
		}
		require.LessOrEqual(t, table.Len(), maxIdle)
		time.Sleep(keptFor + time.Second)
		used := table.Enter(id(7), fresh)
		table.Update(id(7), fresh, one)
		table.Update(id(1<<20), fresh, one)
		require.Equal(t, 2, table.Len())
		require.Equal(t, 1, *used)
		table.Leave(id(7))
		time.Sleep(keptFor + time.Second)
		table.Update(id(1<<21), fresh, one)
		require.Equal(t, 1, table.Len())
		table.UpdateUsed(id(1<<22), func(*int) { require.Fail(t, "nobody uses it") })
		require.Equal(t, 1, table.Len())
	})
}
