package kvtransfer

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// Keys seal and open tickets. One key seals; all of them open, so that keys can be changed while requests are under way.
// Immutable and safe for concurrent use.
type Keys struct {
	ring []key // the first seals
	pool sync.Pool
}

// key is what is derived from 32 secret bytes.
type key struct {
	id   [4]byte
	aead cipher.AEAD
}

// A sealed ticket, before base64 (URL alphabet, no padding):
//
//	version  1 byte
//	key id   4 bytes, derived from the key
//	nonce    12 random bytes
//	sealed   AES-256-GCM of the message, with the version and the request id as additional data; its tag last
//
// Random nonces allow 2^32 tickets under one key by NIST's rule (SP 800-38D: a chance of 2^-32 that a nonce came twice);
// at 1,000 requests/s that is two weeks, and the chance grows with the square. Change keys now and then.
const (
	sealVersion = 1
	sealHead    = 1 + 4
	sealMin     = sealHead + 12 + 16
	// maxSealed is the longest ticket that is read. Envoy refuses headers that long.
	maxSealed = 64 << 10
)

var sealed64 = base64.RawURLEncoding.Strict()

// scratch is what sealing and opening need besides their result.
type scratch struct{ message, packed, sealed, aad []byte }

// maxScratch bounds what is kept for the next ticket.
const maxScratch = 256 << 10

// NewKeys makes Keys that seal under primary and open what primary or one of the older keys sealed.
func NewKeys(primary [32]byte, older ...[32]byte) (*Keys, error) {
	k := &Keys{pool: sync.Pool{New: func() any { return new(scratch) }}}
	for i, secret := range append([][32]byte{primary}, older...) {
		derived, err := newKey(secret)
		if err != nil {
			return nil, fmt.Errorf("ticket key %d: %w", i+1, err)
		}
		k.ring = append(k.ring, derived)
	}
	return k, nil
}

// GenerateKeys makes a key that nobody else knows: good for one replica, until it ends.
func GenerateKeys() (*Keys, error) {
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails (crypto/rand)
	return NewKeys(secret)
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
	return key{id: [4]byte(id), aead: aead}, nil
}

// ReadKeyFile reads keys from a file: one to a line, 32 bytes as 64 hex digits or base64, '#' before comments. The first
// seals, all open. To change keys without losing a request: add the new key as the last line on every replica, then make
// it the first on every replica, then drop the old one. warnings are for the log: a file that others can read.
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
		warnings = append(warnings, fmt.Sprintf("ticket key file %s has mode %04o: others than its owner may read it", path, mode))
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

// parseKeys reads a key file. Errors name lines and never what is on them.
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
		for _, earlier := range secrets {
			if earlier == secret {
				return nil, fmt.Errorf("line %d is a key that is there already", number+1)
			}
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

// Seal appends t as a header value to dst, good for requests with this id alone. The result may be longer than
// MaxHeaderBytes when Params are long.
func (k *Keys) Seal(dst []byte, t *Ticket, requestID string) ([]byte, error) {
	if len(t.Excluded) > maxExcluded || len(t.Undo) > maxEdits || t.Undo.Size() > MaxUndoBytes || len(t.Params) > MaxParamsBytes {
		return dst, fmt.Errorf("sealing a ticket: it holds too much: %d addresses, %d edits with %d bytes, %d bytes of KV parameters",
			len(t.Excluded), len(t.Undo), t.Undo.Size(), len(t.Params))
	}
	if t.Redirects < 0 || t.Prefills < 0 || t.BodyBytes < 0 || t.PromptTokens < 0 {
		return dst, errors.New("sealing a ticket: it counts below zero")
	}
	s := k.pool.Get().(*scratch)
	defer k.release(s)
	s.message = appendTicket(s.message[:0], t)
	if t.Params != nil {
		s.packed = pack(s.packed[:0], t.Params)
		s.message = appendParams(s.message, s.packed)
	}
	return k.sealMessage(dst, s, requestID), nil
}

// sealMessage seals s.message.
func (k *Keys) sealMessage(dst []byte, s *scratch, requestID string) []byte {
	first := &k.ring[0]
	s.sealed = append(append(s.sealed[:0], sealVersion), first.id[:]...)
	s.setAAD(requestID)
	s.sealed = first.aead.Seal(s.sealed, nil, s.message, s.aad)
	return sealed64.AppendEncode(dst, s.sealed)
}

func (s *scratch) setAAD(requestID string) {
	s.aad = append(append(s.aad[:0], sealVersion), requestID...)
}

func (k *Keys) release(s *scratch) {
	if cap(s.message)+cap(s.packed)+cap(s.sealed) <= maxScratch {
		k.pool.Put(s)
	}
}

// Open reads a header value that Seal made for this request id, under any of the keys. Errors wrap ErrTicketForged,
// ErrTicketVersion, or ErrTicketExpired; with the last comes the ticket, else nil. Replicas' clocks may differ by less
// than tickets live.
func (k *Keys) Open(header, requestID string, now time.Time) (*Ticket, error) {
	if len(header) > maxSealed {
		return nil, fmt.Errorf("%w: %d bytes", ErrTicketForged, len(header))
	}
	s := k.pool.Get().(*scratch)
	defer k.release(s)
	message, err := k.openMessage(s, header, requestID)
	if err != nil {
		return nil, err
	}
	t := new(Ticket)
	if err := parseTicket(t, message); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTicketVersion, err)
	}
	if !now.Before(t.Expires) {
		return t, fmt.Errorf("%w: %v ago, at stage %v", ErrTicketExpired, now.Sub(t.Expires), t.Stage)
	}
	return t, nil
}

// openMessage gives the message inside a header value, in memory of its own.
func (k *Keys) openMessage(s *scratch, header, requestID string) ([]byte, error) {
	s.message = append(s.message[:0], header...)
	var err error
	s.sealed, err = sealed64.AppendDecode(s.sealed[:0], s.message)
	// The decoder skips line breaks, so only the length says that it has read all.
	if err != nil || len(s.sealed) < sealMin || len(s.sealed) != sealed64.DecodedLen(len(header)) {
		return nil, fmt.Errorf("%w: not base64 of a ticket", ErrTicketForged)
	}
	if s.sealed[0] != sealVersion {
		return nil, fmt.Errorf("%w: version %d", ErrTicketVersion, s.sealed[0])
	}
	s.setAAD(requestID)
	known := false
	for i := range k.ring {
		if k.ring[i].id != [4]byte(s.sealed[1:sealHead]) {
			continue
		}
		known = true
		size := len(s.sealed) - sealMin
		message, err := k.ring[i].aead.Open(make([]byte, 0, size), nil, s.sealed[sealHead:], s.aad)
		if err == nil {
			return message, nil
		}
	}
	if !known {
		return nil, fmt.Errorf("%w: sealed under a key that is not here", ErrTicketForged)
	}
	return nil, fmt.Errorf("%w: changed, or for another request", ErrTicketForged)
}
