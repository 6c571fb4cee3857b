package roster

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Others' records have bounds, and what is no address is left out.
func TestRecordsAreChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := New(Member{Replica: 1}, func() {})
		for text, good := range map[string]bool{
			"10.0.0.1:9002": true, "[fd00::1]:9002": true, "0.0.0.0:9002": false, "10.0.0.1:0": false, "replica:9002": false, "": false,
		} {
			for _, m := range []Member{{ExtProc: text, Replan: "10.0.0.1:1"}, {ExtProc: "10.0.0.1:1", Replan: text}} {
				m.Replica, m.Slot, m.Heard = 7, 3, time.Now()
				r.others = map[uint64]Member{}
				r.Add(m)
				require.Equal(t, good, r.Others()[7].Slot == 3, text)
			}
		}
		r.others = map[uint64]Member{}
		r.Add(Member{Replica: 1, Name: "this one", Heard: time.Now()})
		r.Add(Member{Replica: 2, Name: strings.Repeat("x", maxName+1), Heard: time.Now()})
		r.Add(Member{Replica: 3, Heard: time.Now().Add(-Remembered - time.Second)})
		require.Empty(t, r.Others())
		r.Add(Member{Replica: 4, Name: "a", Version: "1", Heard: time.Now().Add(time.Hour)})
		require.Equal(t, time.Now(), r.Others()[4].Heard, "its clock is ahead")
		time.Sleep(time.Second)
		r.Add(Member{Replica: 4, Name: "b", Heard: time.Now()})
		require.Equal(t, "a", r.Others()[4].Name, "a later record says less")
		for i := range uint64(2 * maxMembers) {
			r.Add(Member{Replica: 10 + i, Heard: time.Now()})
		}
		require.Len(t, r.Others(), maxMembers)
		time.Sleep(Remembered)
		r.Add(Member{Replica: 5, Heard: time.Now()})
		time.Sleep(time.Second)
		require.Len(t, r.Others(), 1, "the others are forgotten")
	})
}
