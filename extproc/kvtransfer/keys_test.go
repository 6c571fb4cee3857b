package kvtransfer

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	hexKey    = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
	base64Key = "//79/Pv6+fj39vX08/Lx8O/u7ezr6uno5+bl5OPi4eA="
	urlKey    = "__79_Pv6-fj39vX08_Lx8O_u7ezr6uno5-bl5OPi4eA"
)

func keyFile(t *testing.T, mode os.FileMode, text string) string {
	path := filepath.Join(t.TempDir(), "ticket.key")
	require.NoError(t, os.WriteFile(path, []byte(text), mode))
	require.NoError(t, os.Chmod(path, mode))
	return path
}

func TestReadKeyFile(t *testing.T) {
	k, warnings, err := ReadKeyFile(keyFile(t, 0o600, "# new\n  "+hexKey+"\r\n\n"+base64Key+" # old\n"))
	require.NoError(t, err)
	require.Empty(t, warnings)
	require.Len(t, *k.ring.Load(), 2)

	// The first seals, all open, and a key is the same in every spelling.
	upper, _, err := ReadKeyFile(keyFile(t, 0o400, strings.ToUpper(hexKey)))
	require.NoError(t, err)
	old, _, err := ReadKeyFile(keyFile(t, 0o400, urlKey))
	require.NoError(t, err)
	header, err := k.Seal(nil, smallTicket(), "req-1")
	require.NoError(t, err)
	_, err = upper.Open(string(header), "req-1", now)
	require.NoError(t, err)
	_, err = old.Open(string(header), "req-1", now)
	require.ErrorIs(t, err, ErrTicketForged)
	header, err = old.Seal(nil, smallTicket(), "req-1")
	require.NoError(t, err)
	_, err = k.Open(string(header), "req-1", now)
	require.NoError(t, err)
}

func TestReadKeyFileWarns(t *testing.T) {
	for mode, warned := range map[os.FileMode]int{0o600: 0, 0o400: 0, 0o640: 1, 0o644: 1} {
		_, warnings, err := ReadKeyFile(keyFile(t, mode, hexKey))
		require.NoError(t, err)
		require.Len(t, warnings, warned, "%o", mode)
	}
}

func TestReadKeyFileRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":                            "no key in it",
		"# nothing\n\n":               "no key in it",
		hexKey + "\n" + hexKey[:63]:   "line 2 is not a key",
		hexKey[:62] + "zz":            "line 1 is not a key",
		base64Key + "AA":              "line 1 is not a key",
		"password":                    "line 1 is not a key",
		base64Key + "\n" + urlKey:     "line 2 is a key that is there already",
		strings.Repeat("0", 64):       "no secret",
		strings.Repeat("#\n", 40_000): "longer than",
	} {
		_, _, err := ReadKeyFile(keyFile(t, 0o600, text))
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "password", "what is in the file stays there")
		require.NotContains(t, err.Error(), hexKey[:16])
	}
	_, _, err := ReadKeyFile(filepath.Join(t.TempDir(), "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestGenerateKeys(t *testing.T) {
	a, err := GenerateKeys()
	require.NoError(t, err)
	b, err := GenerateKeys()
	require.NoError(t, err)
	require.NotEqual(t, (*a.ring.Load())[0].id, (*b.ring.Load())[0].id)
}

// What one key signs for a purpose, any replica with that key knows, and nobody else makes: not for another purpose, not
// with another text, not with another key.
func TestSigned(t *testing.T) {
	old, next := [32]byte{1, 2}, [32]byte{3, 4}
	a, err := NewKeys(old)
	require.NoError(t, err)
	b, err := NewKeys(next, old)
	require.NoError(t, err)
	for _, text := range []string{"", "x", strings.Repeat("KV", 1<<16)} {
		signed := a.Sign([]byte("before"), "p", []byte(text))
		require.Equal(t, "before", string(signed[:6]))
		signed = signed[6:]
		for _, k := range []*Keys{a, b} {
			got, ok := k.Genuine("p", signed)
			require.True(t, ok)
			require.Equal(t, text, string(got))
			_, ok = k.Genuine("other", signed)
			require.False(t, ok)
			_, ok = k.Genuine("p", append([]byte(nil), signed[:len(signed)-1]...))
			require.False(t, ok)
			_, ok = k.Genuine("p", append(slices.Clone(signed), 'x'))
			require.False(t, ok)
		}
		_, ok := a.Genuine("p", b.Sign(nil, "p", []byte(text)))
		require.False(t, ok, "a has not got the new key yet")
	}
	// a purpose and a text that together have the same bytes
	_, ok := a.Genuine("pur", append(a.Sign(nil, "purpose", []byte("text"))[:macBytes], "posetext"...))
	require.False(t, ok)
}
