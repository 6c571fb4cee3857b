package redisstore

import (
	"encoding/hex"
	"strconv"
	"time"
)

// version is the version of the keys and their contents. A release that changes either incompatibly increments it, and
// shares nothing with this one.
const version = "1"

// How long keys live unless they are written again. A stream outlives its replicas for long enough to restart all
// of them.
const (
	streamTTL   = 10 * time.Minute
	expireEvery = streamTTL / 10 // the interval at which a replica sets it again
	snapshotTTL = 10 * time.Minute
	spentTTL    = 2 * time.Minute // longer than the life of a hand-over (extproc, HandOverTTL)
	handOverTTL = time.Minute
	secretsTTL  = 24 * time.Hour
)

// streamLength is the approximate number of batches in a stream: the last 5 s of 16 busy replicas, else minutes. A
// replica that missed more requests a snapshot.
const streamLength = 16384

// poolKeys are the keys of a pool. Its name is their hash tag: one node of a Cluster stores them.
type poolKeys struct{ prefix string }

func (o *Options) poolKeys(pool string) poolKeys {
	return poolKeys{o.KeyPrefix + ":" + version + ":{" + pool + "}:"}
}

func (k poolKeys) stream() string   { return k.prefix + "deltas" }
func (k poolKeys) snapshot() string { return k.prefix + "snapshot" }

func (k poolKeys) chunk(snapshot uint64, i int) string {
	return k.prefix + "snapshot:" + strconv.FormatUint(snapshot, 16) + "." + strconv.Itoa(i)
}

// The keys that belong to no pool. Those of tickets and hand-overs have no tag, so that a Cluster spreads them.
func (o *Options) spentKey(ticket [16]byte) string {
	return o.KeyPrefix + ":" + version + ":spent:" + hex.EncodeToString(ticket[:])
}

func (o *Options) handOverKey(ref [16]byte) string {
	return o.KeyPrefix + ":" + version + ":handover:" + hex.EncodeToString(ref[:])
}

func (o *Options) sealKey() string { return o.KeyPrefix + ":" + version + ":{tickets}:seal" }
func (o *Options) openKey() string { return o.KeyPrefix + ":" + version + ":{tickets}:open" }
