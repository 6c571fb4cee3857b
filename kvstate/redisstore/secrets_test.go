package redisstore

import (
	"bytes"
	"encoding/hex"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Keys are looked at each second, but by who has never heard of the others' twenty times as often: until then what it seals nobody opens.
func TestHowOftenKeysAreLookedAt(t *testing.T) {
	const commands = 4 // at a time
	for name, c := range map[string]struct {
		atTheStart error
		first      int // times in the first second, the start among them
	}{
		"redis is there":     {nil, 1},
		"redis is not there": {errGone, 20},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := lonely(t, 1)
				x := record(r)
				x.failing(c.atTheStart)
				k, err := r.store.Secrets(t.Context(), func([32]byte, ...[32]byte) error { return nil })
				require.NoError(t, err)
				stop := during(t.Context(), k.Run)
				looked := func(in time.Duration) int {
					before := r.store.Stats().Commands
					time.Sleep(in)
					synctest.Wait()
					return int(r.store.Stats().Commands-before) / commands
				}
				require.Equal(t, c.first-1, looked(secretsEvery-time.Millisecond))
				x.failing(nil)
				require.Equal(t, 5, looked(5*secretsEvery))
				x.failing(errGone)
				require.Equal(t, 5, looked(5*secretsEvery), "it has heard of them")
				stop()
			})
		})
	}
}

// What Redis holds is used as far as it can be read, in an order that is the same for all, and not without bound.
func TestWhichKeysOpen(t *testing.T) {
	key := func(n byte) string { return strings.Repeat(hex.EncodeToString([]byte{n}), 32) }
	but := [32]byte(bytes.Repeat([]byte{2}, 32))
	for name, c := range map[string]struct {
		texts []string
		first []byte // of each key
	}{
		"none":                        {nil, nil},
		"in order":                    {[]string{key(3), key(1)}, []byte{1, 3}},
		"but the one that seals":      {[]string{key(3), key(2), key(1)}, []byte{1, 3}},
		"too short, too long, no hex": {[]string{key(1)[2:], key(1) + "01", "x" + key(1)[1:], ""}, nil},
		"as many as may be":           {slices.Repeat([]string{key(7)}, maxOpen+1), bytes.Repeat([]byte{7}, maxOpen)},
	} {
		var first []byte
		for _, k := range secretsOf(c.texts, but) {
			first = append(first, k[0])
		}
		require.Equal(t, c.first, first, name)
	}
}

// The user of the keys is notified when they change, and only then.
func TestKeysAreToldWhenTheyChange(t *testing.T) {
	published := 0
	k := &Secrets{use: func([32]byte, ...[32]byte) error { published++; return nil }}
	one, other := [32]byte{1}, [32]byte{2}
	for i, step := range []struct {
		seal      [32]byte
		open      [][32]byte
		published int
	}{{[32]byte{}, nil, 1}, {one, nil, 2}, {one, nil, 2}, {one, [][32]byte{other}, 3}, {other, [][32]byte{other}, 4}, {other, [][32]byte{other}, 4}, {other, nil, 5}} {
		require.NoError(t, k.take(step.seal, step.open))
		require.Equal(t, step.published, published, "step %d", i)
	}
}
