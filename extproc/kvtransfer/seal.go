package kvtransfer

import (
	"encoding/base64"
	"errors"
	"fmt"
	"time"
)

// A sealed ticket, before base64 (URL alphabet, no padding):
//
//	version  1 byte
//	key id   4 bytes, derived from the key
//	nonce    12 random bytes
//	sealed   AES-256-GCM of the message, with the version and the request id as additional data; its tag last
//
// Random nonces allow 2^32 tickets under one key by NIST's rule (SP 800-38D: a chance of 2^-32 that a nonce came
// twice); at 1,000 requests/s that is two weeks, and the chance grows with the square. Change keys now and then.
const (
	sealVersion = 1
	sealHead    = 1 + 4
	sealMin     = sealHead + 12 + 16
	// maxSealed is the longest ticket that is read. Envoy refuses headers of that length.
	maxSealed = 64 << 10
)

var sealed64 = base64.RawURLEncoding.Strict()

// scratch is the temporary memory of sealing and opening.
type scratch struct{ message, packed, sealed, aad []byte }

// maxScratch bounds the memory that is kept for the next ticket.
const maxScratch = 256 << 10

// Seal appends t as a header value to dst, valid only for requests with this id. The result may be longer than
// MaxHeaderBytes when Params are long.
func (k *Keys) Seal(dst []byte, t *Ticket, requestID string) ([]byte, error) {
	if len(t.Excluded) > maxExcluded || len(t.Undo) > maxEdits || t.Undo.Size() > MaxUndoBytes ||
		len(t.Params) > MaxParamsBytes {
		return dst, fmt.Errorf("sealing a ticket: it holds too much: %d addresses, %d edits with %d bytes, %d bytes "+
			"of KV parameters",
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
	first := &(*k.ring.Load())[0]
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
// ErrTicketVersion, or ErrTicketExpired; the ticket is nil except with the last. Replicas' clocks may differ by less
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

// openMessage returns the message inside a header value, in memory of its own.
func (k *Keys) openMessage(s *scratch, header, requestID string) ([]byte, error) {
	s.message = append(s.message[:0], header...)
	var err error
	s.sealed, err = sealed64.AppendDecode(s.sealed[:0], s.message)
	// The decoder skips line breaks, so only the length shows that it has read everything.
	if err != nil || len(s.sealed) < sealMin || len(s.sealed) != sealed64.DecodedLen(len(header)) {
		return nil, fmt.Errorf("%w: not base64 of a ticket", ErrTicketForged)
	}
	if s.sealed[0] != sealVersion {
		return nil, fmt.Errorf("%w: version %d", ErrTicketVersion, s.sealed[0])
	}
	s.setAAD(requestID)
	known := false
	for _, each := range *k.ring.Load() {
		if each.id != [4]byte(s.sealed[1:sealHead]) {
			continue
		}
		known = true
		size := len(s.sealed) - sealMin
		message, err := each.aead.Open(make([]byte, 0, size), nil, s.sealed[sealHead:], s.aad)
		if err == nil {
			return message, nil
		}
	}
	if !known {
		return nil, fmt.Errorf("%w: sealed under a key that is not here", ErrTicketForged)
	}
	return nil, fmt.Errorf("%w: changed, or for another request", ErrTicketForged)
}
