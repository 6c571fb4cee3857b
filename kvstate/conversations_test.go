package kvstate

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/paramstore"
)

// TestTurns: the latest turn of a conversation is stored, for one use and a limited time.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{})
		a, b := [16]byte{1}, [16]byte{2}
		take := func(of [16]byte) string {
			turn, ok := s.HandOvers.TakeConversation(of)
			require.Equal(t, ok, turn != nil && ok)
			if !ok {
				return ""
			}
			return string(turn)
		}
		require.Empty(t, take(a), "nothing was kept")

		text := []byte("first")
		require.NoError(t, s.HandOvers.PutConversation(a, text, time.Minute))
		require.NoError(t, s.HandOvers.PutConversation(b, []byte("another"), 2*time.Minute))
		copy(text, "FIRST")
		require.Equal(t, "first", take(a), "a copy is kept")
		require.Empty(t, take(a), "one use")

		require.NoError(t, s.HandOvers.PutConversation(a, []byte("second"), time.Minute))
		require.NoError(t, s.HandOvers.PutConversation(a, []byte("third"), time.Minute))
		require.Equal(t, "third", take(a), "the latest")

		require.NoError(t, s.HandOvers.PutConversation(a, []byte("fourth"), time.Minute))
		require.ErrorIs(t, s.HandOvers.PutConversation(a, make([]byte, MaxConversationBytes+1), time.Minute), paramstore.ErrFull)
		require.Empty(t, take(a), "nor is the one before")

		require.NoError(t, s.HandOvers.PutConversation(a, []byte("fifth"), time.Minute))
		time.Sleep(time.Minute + time.Second)
		require.Empty(t, take(a), "its time is over, though nobody has swept")
		require.NoError(t, s.HandOvers.PutConversation(a, []byte("sixth"), time.Minute))
		time.Sleep(time.Minute + time.Second)
		s.sweep(time.Now())
		entries, bytes := s.HandOvers.conversations.Held()
		require.Zero(t, entries+bytes)
	})
}

// TestTurnsAreBounded: a turn that does not fit is not stored, and reported.
func TestTurnsAreBounded(t *testing.T) {
	s := New(Options{})
	turn := make([]byte, MaxConversationBytes)
	for i := range maxConversationsBytes / MaxConversationBytes {
		require.NoError(t, s.HandOvers.PutConversation([16]byte{byte(i), 1}, turn, time.Minute))
	}
	require.ErrorIs(t, s.HandOvers.PutConversation([16]byte{2}, turn, time.Minute), paramstore.ErrFull)
	_, ok := s.HandOvers.TakeConversation([16]byte{0, 1})
	require.True(t, ok)
	require.NoError(t, s.HandOvers.PutConversation([16]byte{2}, turn, time.Minute))
}
