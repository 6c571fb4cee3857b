package kvtransfer

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
)

// Keys seal and open tickets. One key seals; all of them open, so that keys can be changed while requests are in
// flight. Safe for concurrent use.
type Keys struct {
	ring atomic.Pointer[[]key] // the first seals
	pool sync.Pool
}

// key is derived from 32 secret bytes.
type key struct {
	id          [4]byte
	fingerprint uint64
	aead        cipher.AEAD
	mac         [32]byte // for what replicas leave each other in Redis
}

// NewKeys returns Keys that seal with primary and open tickets sealed with primary or an older key.
func NewKeys(primary [32]byte, older ...[32]byte) (*Keys, error) {
	k := &Keys{pool: sync.Pool{New: func() any { return new(scratch) }}}
	return k, k.Change(primary, older...)
}

// Change replaces the keys.
func (k *Keys) Change(primary [32]byte, older ...[32]byte) error {
	var ring []key
	for i, secret := range append([][32]byte{primary}, older...) {
		derived, err := newKey(secret)
		if err != nil {
			return fmt.Errorf("ticket key %d: %w", i+1, err)
		}
		ring = append(ring, derived)
	}
	k.ring.Store(&ring)
	return nil
}

// GenerateKeys generates a random key: enough for a single replica, until it ends.
func GenerateKeys() (*Keys, error) {
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails (crypto/rand)
	return NewKeys(secret)
}

// Take replaces the keys by those of from.
func (k *Keys) Take(from *Keys) { k.ring.Store(from.ring.Load()) }

// ID identifies a set of keys without revealing them: it differs if another key seals or other keys open.
func (k *Keys) ID() string {
	var id []byte
	for _, one := range *k.ring.Load() {
		id = hex.AppendEncode(append(id, '.'), one.id[:])
	}
	return string(id[1:])
}

// Fingerprints identify the keys to other replicas, the sealing key first. They are derived from the keys like those
// of tickets, and do not reveal them.
func (k *Keys) Fingerprints() []uint64 {
	ring := *k.ring.Load()
	out := make([]uint64, len(ring))
	for i := range ring {
		out[i] = ring[i].fingerprint
	}
	return out
}

func newKey(secret [32]byte) (key, error) {
	if bytes.Count(secret[:], secret[:1]) == len(secret) {
		return key{}, errors.New("the same byte 32 times is no secret")
	}
	derive := func(purpose string, n int) ([]byte, error) {
		return hkdf.Key(sha256.New, secret[:], nil, "tandem ticket "+purpose, n)
	}
	id, err := derive("key id", 4)
	if err != nil {
		return key{}, fmt.Errorf("deriving its id: %w", err)
	}
	fingerprint, err := derive("fingerprint", 8)
	if err != nil {
		return key{}, fmt.Errorf("deriving its fingerprint: %w", err)
	}
	sealing, err := derive("seal", 32)
	if err != nil {
		return key{}, fmt.Errorf("deriving it: %w", err)
	}
	block, err := aes.NewCipher(sealing)
	if err != nil {
		return key{}, fmt.Errorf("setting up AES: %w", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return key{}, fmt.Errorf("setting up GCM: %w", err)
	}
	mac, err := derive("redis", 32)
	if err != nil {
		return key{}, fmt.Errorf("deriving the key of what is in Redis: %w", err)
	}
	return key{
		id: [4]byte(id), fingerprint: binary.BigEndian.Uint64(fingerprint), aead: aead, mac: [32]byte(mac),
	}, nil
}

// macBytes is the length of what Sign adds: the key's id, and HMAC-SHA256 cut to 128 bits.
const macBytes = 4 + 16

// Sign appends text to dst, behind a code for this text and purpose that only the owner of the key can make. It
// implements [redisstore.Signer] together with Genuine.
func (k *Keys) Sign(dst []byte, purpose string, text []byte) []byte {
	first := &(*k.ring.Load())[0]
	return append(first.sum(append(dst, first.id[:]...), purpose, text), text...)
}

// Genuine returns the text that Sign has signed for this purpose, under any of the keys.
func (k *Keys) Genuine(purpose string, signed []byte) (text []byte, ok bool) {
	if len(signed) < macBytes {
		return nil, false
	}
	text = signed[macBytes:]
	ring := *k.ring.Load()
	for i := range ring {
		if ring[i].id == [4]byte(signed[:4]) && hmac.Equal(ring[i].sum(nil, purpose, text), signed[4:macBytes]) {
			return text, true
		}
	}
	return nil, false
}

// sum appends the code. The purpose's length goes before it, so no other purpose and text have the same bytes.
func (k *key) sum(dst []byte, purpose string, text []byte) []byte {
	h := hmac.New(sha256.New, k.mac[:])
	var size [4]byte
	binary.BigEndian.PutUint32(size[:], uint32(len(purpose)))
	h.Write(size[:])
	h.Write([]byte(purpose))
	h.Write(text)
	var out [sha256.Size]byte
	return append(dst, h.Sum(out[:0])[:macBytes-4]...)
}

// ReadKeyFile reads keys from a file: one to a line, 32 bytes as 64 hex digits or base64, '#' before comments. The
// first seals, all open. To change keys without losing a request: add the new key as the last line on every replica,
// then make it the first on every replica, then drop the old one. warnings are for the log: a file that others can
// read.
func ReadKeyFile(path string) (k *Keys, warnings []string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, fmt.Errorf("reading ticket keys: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, nil, fmt.Errorf("reading ticket keys: %w", err)
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		warnings = append(warnings,
			fmt.Sprintf("ticket key file %s has mode %04o: others than its owner may read it", path, mode))
	}
	text, err := io.ReadAll(io.LimitReader(f, maxKeyFile+1))
	if err != nil {
		return nil, nil, fmt.Errorf("reading ticket keys: %w", err)
	}
	secrets, err := parseKeys(text)
	if err != nil {
		return nil, nil, fmt.Errorf("ticket key file %s: %w", path, err)
	}
	k, err = NewKeys(secrets[0], secrets[1:]...)
	if err != nil {
		return nil, nil, fmt.Errorf("ticket key file %s: %w", path, err)
	}
	return k, warnings, nil
}

const (
	maxKeyFile = 64 << 10
	maxKeys    = 16
)

// parseKeys parses a key file. Errors name line numbers and never quote a line.
func parseKeys(text []byte) ([][32]byte, error) {
	if len(text) > maxKeyFile {
		return nil, fmt.Errorf("longer than %d bytes", maxKeyFile)
	}
	var secrets [][32]byte
	for number, line := range bytes.Split(text, []byte("\n")) {
		line, _, _ = bytes.Cut(line, []byte("#"))
		line = bytes.TrimSpace(line)
		if len(line) == 0 {
			continue
		}
		secret, ok := parseKey(line)
		if !ok {
			return nil, fmt.Errorf("line %d is not a key: 64 hex digits, or base64 of 32 bytes", number+1)
		}
		if slices.Contains(secrets, secret) {
			return nil, fmt.Errorf("line %d is a key that is there already", number+1)
		}
		if secrets = append(secrets, secret); len(secrets) > maxKeys {
			return nil, fmt.Errorf("more than %d keys", maxKeys)
		}
	}
	if len(secrets) == 0 {
		return nil, errors.New("no key in it")
	}
	return secrets, nil
}

func parseKey(line []byte) (secret [32]byte, ok bool) {
	if len(line) == 64 {
		_, err := hex.Decode(secret[:], line)
		return secret, err == nil
	}
	text := bytes.TrimRight(line, "=")
	for _, enc := range [...]*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		if b, err := enc.DecodeString(string(text)); err == nil && len(b) == len(secret) {
			return [32]byte(b), true
		}
	}
	return secret, false
}
