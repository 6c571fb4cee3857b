package redisstore

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// Secrets are the keys of tickets if no file has them: the replica that starts first generates them, and all others
// use them. A replica that starts while Redis does not answer generates its own; when Redis is back it seals with the
// shared one, and the others learn to open its earlier tickets.
type Secrets struct {
	s     *Store
	use   func(seal [32]byte, open ...[32]byte) error
	own   [32]byte   // made here
	alone bool       // it was used before any other replica knew it
	seal  [32]byte   // in use; own until Redis has another
	open  [][32]byte // in use
	inUse bool
}

// Secrets prepares the keys, and asks Redis for those of the others; use is called with them now and whenever they
// change.
func (s *Store) Secrets(ctx context.Context, use func(seal [32]byte, open ...[32]byte) error) (*Secrets, error) {
	k := &Secrets{s: s, use: use}
	_, _ = rand.Read(k.own[:]) // never fails (crypto/rand)
	k.seal = k.own
	if err := k.sync(ctx); err != nil {
		s.log.Warn("tickets are sealed with a key that other replicas do not have, until redis answers", "err", err)
		k.alone = true
	}
	if k.inUse {
		return k, nil
	}
	return k, k.take(k.own, nil)
}

const (
	// secretsEvery is the interval at which keys are checked: for this time a replica may seal tickets with a key that
	// the others do not have.
	secretsEvery = time.Second
	// secretsSoon is the interval while this replica does not know the others' keys: until then every request that
	// passes two replicas fails.
	secretsSoon = 50 * time.Millisecond
)

// Run synchronises the keys with the others' until ctx ends.
func (k *Secrets) Run(ctx context.Context) {
	every := secretsEvery
	if k.alone {
		every = secretsSoon
	}
	for wait(ctx, every) {
		err := k.sync(ctx)
		if err == nil {
			every = secretsEvery
		} else if ctx.Err() == nil {
			k.s.log.Debug("sharing the keys of tickets", "err", err)
		}
	}
}

// sync offers the key in use as the sealing one, takes the one that was first, and learns which others may open.
func (k *Secrets) sync(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	o := &k.s.o
	pipe := k.s.client.Pipeline()
	pipe.SetArgs(ctx, o.sealKey(), hex.EncodeToString(k.seal[:]), redis.SetArgs{Mode: "NX", TTL: secretsTTL})
	seal := pipe.Get(ctx, o.sealKey())
	pipe.PExpire(ctx, o.sealKey(), secretsTTL)
	open := pipe.HVals(ctx, o.openKey())
	if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
		return err
	}
	if seal.Err() != nil {
		return seal.Err()
	}
	first, err := parseSecret(seal.Val())
	if err != nil {
		return err
	}
	others := secretsOf(open.Val(), first)
	if k.alone && first != k.own && !slices.Contains(others, k.own) {
		if err := k.tell(ctx); err != nil {
			return err
		}
		others = append(others, k.own)
	}
	return k.take(first, others)
}

// maxOpen bounds the keys that open tickets.
const maxOpen = 64

// secretsOf returns the keys in texts that can be read, in order, without the key but.
func secretsOf(texts []string, but [32]byte) (out [][32]byte) {
	for _, text := range texts {
		if secret, err := parseSecret(text); err == nil && secret != but && len(out) < maxOpen {
			out = append(out, secret)
		}
	}
	slices.SortFunc(out, func(a, b [32]byte) int { return bytes.Compare(a[:], b[:]) })
	return out
}

// take uses the keys, if they have changed.
func (k *Secrets) take(seal [32]byte, open [][32]byte) error {
	if k.inUse && seal == k.seal && slices.Equal(open, k.open) {
		return nil
	}
	k.seal, k.open, k.inUse = seal, open, true
	return k.use(seal, open...)
}

// tell publishes the key with which this replica has sealed tickets that the others do not know yet.
func (k *Secrets) tell(ctx context.Context) error {
	text := hex.EncodeToString(k.own[:])
	pipe := k.s.client.Pipeline()
	pipe.HSet(ctx, k.s.o.openKey(), fmt.Sprintf("%x", k.s.replica), text)
	pipe.PExpire(ctx, k.s.o.openKey(), secretsTTL)
	_, err := pipe.Exec(ctx)
	return err
}

func parseSecret(text string) (secret [32]byte, err error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(secret) {
		return secret, errors.New("the ticket key in Redis cannot be read")
	}
	return [32]byte(b), nil
}
