package assign

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http/httptest"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/redisserver"
	"tandem/extproc/kvtransfer"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/redisstore"
	"tandem/picker"
	"tandem/picker/roles"
)

// soon is how long tests wait for an event, on a machine that may stand still for seconds.
const soon = 50 * time.Second

func TestMain(m *testing.M) {
	redisstore.LogTo(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

// replica is a state with a pool of four endpoints that serve both legs, and its words.
func replica(t *testing.T, addr string, auto bool) (*kvstate.State, *redisstore.Store, *Assigner) {
	t.Helper()
	s := kvstate.New(kvstate.Options{})
	var store *redisstore.Store
	if addr != "" {
		var err error
		store, err = redisstore.New(redisstore.Options{URL: "redis://" + addr, Log: slog.New(slog.DiscardHandler)}, s)
		require.NoError(t, err)
		s.Connect(store)
	}
	var eps []kvstate.EndpointSpec
	for _, a := range []string{"10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80"} {
		eps = append(eps, kvstate.EndpointSpec{Addr: a, Role: kvstate.RoleBoth})
	}
	s.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, eps)
	return s, store, New(Options{State: s, Store: store, Log: slog.New(slog.DiscardHandler), Pools: func() []Pool {
		return []Pool{{Name: "chat", Auto: auto, Policy: picker.DefaultPolicy()}}
	}})
}

func wordsOf(s *kvstate.State) (out []kvstate.Role) {
	for _, e := range s.Pool("chat").Endpoints() {
		out = append(out, e.Word())
	}
	return out
}

// A replica alone gives words, and follows the load; a pool with fixed roles only gets advice.
func TestAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _, a := replica(t, "", true)
		fixed, _, advice := replica(t, "", false)
		ctx, stop := context.WithCancel(guard.With(t.Context(), guard.New(slog.New(slog.DiscardHandler), func(string) {})))
		defer stop()
		go a.Run(ctx)
		go advice.Run(ctx)
		time.Sleep(time.Second)
		require.Equal(t, []kvstate.Role{kvstate.RoleDecode, kvstate.RolePrefill, kvstate.RoleDecode, kvstate.RolePrefill}, wordsOf(s))
		require.Equal(t, make([]kvstate.Role, 4), wordsOf(fixed))

		for range 400 { // answers that need more than half of the fleet
			s.Bookings.Reserve(s.Pool("chat").Endpoint("10.0.0.1:80"), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 6000})
		}
		time.Sleep(7 * time.Second)
		prefills := 0
		for _, w := range wordsOf(s) {
			if w == kvstate.RolePrefill {
				prefills++
			}
		}
		require.Equal(t, 1, prefills)
		got := a.Advice()["chat"]
		require.Zero(t, got.WantedDecode, "not known yet")
		changed := 0
		for _, w := range got.Words {
			if w.Why != "it was new" {
				changed++
				require.Contains(t, w.Why, "answers 3.")
			}
		}
		require.Equal(t, 1, changed)

		time.Sleep(time.Minute)
		got = advice.Advice()["chat"]
		require.Equal(t, []int{1, 1}, []int{got.WantedPrefill, got.WantedDecode}, "an idle fleet: %+v", got)
		got = a.Advice()["chat"]
		require.Equal(t, []int{1, 4}, []int{got.WantedPrefill, got.WantedDecode}, "%+v", got)
		sentence, short := got.Sentence()
		require.Equal(t, "the pool is short by 1: 1 for prefill and 4 for decode would serve this", sentence)
		require.True(t, short)

		rec := httptest.NewRecorder()
		a.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), "GET", "/debug/roles", nil))
		var shown map[string]roles.Advice
		require.NoError(t, json.Unmarshal(rec.Body.Bytes(), &shown))
		require.Len(t, shown["chat"].Words, 4)
	})
}

// Replicas agree on the words. When the one that decides is gone, another goes on from the words that are there; while
// Redis is away, each keeps those that it has.
func TestReplicasAgree(t *testing.T) {
	redis := redisserver.New(t)
	one, firstStore, a := replica(t, redis.Addr, true)
	time.Sleep(5 * time.Millisecond) // replicas are ordered by when they started
	other, secondStore, b := replica(t, redis.Addr, true)
	alive, kill := context.WithCancel(t.Context())
	ctx := guard.With(t.Context(), guard.New(slog.New(slog.DiscardHandler), func(string) {}))
	go firstStore.Run(alive)
	go secondStore.Run(ctx)
	require.Eventually(t, func() bool { return firstStore.Replicas() == 2 && secondStore.Replicas() == 2 }, soon, 10*time.Millisecond)
	require.True(t, a.leads())
	require.False(t, b.leads())

	go b.Run(ctx)
	go a.Run(guard.With(alive, guard.New(slog.New(slog.DiscardHandler), func(string) {})))
	require.Eventually(t, func() bool {
		w := wordsOf(other)
		return w[0] != 0 && w[1] != 0 && w[2] != 0 && w[3] != 0
	}, soon, 10*time.Millisecond)
	require.Equal(t, wordsOf(one), wordsOf(other))
	require.Equal(t, a.Advice()["chat"].Words["10.0.0.1:80"].Why, b.Advice()["chat"].Words["10.0.0.1:80"].Why)

	kill()
	require.Eventually(t, func() bool { return b.leads() }, soon, 10*time.Millisecond)
	before := wordsOf(other)
	for range 400 {
		other.Bookings.Reserve(other.Pool("chat").Endpoint("10.0.0.1:80"), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 6000})
	}
	require.Eventually(t, func() bool {
		changed := 0
		for i, w := range wordsOf(other) {
			if w != before[i] {
				changed++
			}
		}
		return changed == 1
	}, soon, 10*time.Millisecond, "the other goes on from the words that are there")

	kept := wordsOf(other)
	redis.Kill()
	var decided time.Time
	require.Error(t, b.step(ctx, &decided))
	require.Equal(t, kept, wordsOf(other))
}

// What is read from Redis is not trusted.
func TestStrangeWords(t *testing.T) {
	redis := redisserver.New(t)
	s, store, a := replica(t, redis.Addr, true)
	ctx := t.Context()
	for _, text := range []string{
		"", "nonsense", `{"10.0.0.1:80": {"word": "decode"}}`, `{"pool": "chat", "words": {"10.0.0.1:80": {"word": "encode"}}}`,
		`{"pool": "chat", "words": {"10.0.0.1:80": {"word": "boss"}, "x": {"word": "decode"}}}`,
	} {
		require.NoError(t, store.Access().Client.HSet(ctx, a.key(), "chat", text, "other", text).Err())
		require.NoError(t, a.follow(ctx))
		require.Equal(t, make([]kvstate.Role, 4), wordsOf(s), text)
	}
}

// With a key file only words that a replica signed count.
func TestWordsOfStrangersDoNotCount(t *testing.T) {
	redis := redisserver.New(t)
	s, store, a := replica(t, redis.Addr, true)
	keys, err := kvtransfer.NewKeys([32]byte{1, 2})
	require.NoError(t, err)
	store.SignWith(keys)
	const text = `{"pool": "chat", "words": {"10.0.0.1:80": {"word": "decode"}}}`
	set := func(value any) {
		require.NoError(t, store.Access().Client.HSet(t.Context(), a.key(), "chat", value).Err())
		require.NoError(t, a.follow(t.Context()))
	}
	set(text)
	set(keys.Sign(nil, "for another purpose", []byte(text)))
	require.Equal(t, make([]kvstate.Role, 4), wordsOf(s))
	set(keys.Sign(nil, a.key(), []byte(text)))
	require.Equal(t, kvstate.RoleDecode, wordsOf(s)[0])
}
