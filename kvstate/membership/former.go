package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"tandem/internal/guard"
	"tandem/kvstate/redisstore"
	"tandem/kvstate/redisstore/roster"
)

// Until 2026-11-26 each replica kept two records of its own in Redis instead of one in the roster:
//
//   - its slot and addresses as JSON under {replicas}:ID, if Envoys got them from Redis, and
//   - "ID MS MARK NAME" in a hash for each hour, {operator}:replicas:HOUR; MARK is r, or e if it ended in order.
//
// Replicas of both kinds serve the same Envoys while a fleet is upgraded, or an upgrade is undone. While a replica
// without a record in the roster lives, a Bridge reads those of former replicas into the roster, and writes this one's
// as they expect it. Remove it, with its test, when no such replica can be running any more.

const (
	formerTTL   = 10 * time.Second // of addresses
	formerEvery = time.Second
	markRuns    = "r"
	markEnded   = "e"
	hour        = int64(time.Hour / time.Second)
	maxText     = 512 // bytes of a record
)

// Bridge reads and writes the former records.
type Bridge struct {
	redis redisstore.Access
	asked bool // the records of replicas that are gone were read
}

// formerAddresses is the record of a replica's addresses.
type formerAddresses struct {
	Slot    int    `json:"slot"`
	ExtProc string `json:"extProc"`
	Replan  string `json:"replan"`
}

// NewBridge lets this replica know the former ones that live. Call it when the store has joined the other replicas, and
// before this one chooses a slot.
func NewBridge(ctx context.Context, store *redisstore.Store) *Bridge {
	b := &Bridge{redis: store.Access()}
	_ = b.exchange(ctx, markRuns) // Run does it again
	return b
}

// Run lets former replicas and this one know each other, until ctx ends.
func (b *Bridge) Run(ctx context.Context) {
	guard.Keep(ctx, "Redis", func() {
		tick := time.NewTicker(formerEvery)
		defer tick.Stop()
		for {
			_ = b.exchange(ctx, markRuns) // the next one comes soon
			select {
			case <-ctx.Done():
				_ = b.exchange(context.WithoutCancel(ctx), markEnded)
				return
			case <-tick.C:
			}
		}
	})
}

func (b *Bridge) addressesKey(replica uint64) string {
	return b.redis.Prefix + "{replicas}:" + strconv.FormatUint(replica, 16)
}

func (b *Bridge) namesKey(at time.Time) string {
	return b.redis.Prefix + "{operator}:replicas:" + strconv.FormatInt(at.Unix()/hour, 10)
}

// living returns the living replicas whose records are former ones.
func (b *Bridge) living() []uint64 {
	others := b.redis.Roster.Others()
	return slices.DeleteFunc(b.redis.Living(), func(id uint64) bool {
		return id == b.redis.Replica || others[id].Version != ""
	})
}

// exchange reads and writes former records, if anybody lives that has one. The first time it reads them in any case:
// the last such replica may have died a moment ago.
func (b *Bridge) exchange(ctx context.Context, mark string) error {
	living := b.living()
	if len(living) == 0 && b.asked {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	now := time.Now()
	if len(living) > 0 {
		if err := b.write(ctx, mark, now); err != nil {
			return err
		}
	}
	pipe := b.redis.Client.Pipeline()
	before, current := pipe.HVals(ctx, b.namesKey(now.Add(-time.Hour))), pipe.HVals(ctx, b.namesKey(now))
	keys := []string{b.addressesKey(0)} // of nobody: MGET needs one
	for _, id := range living {
		keys = append(keys, b.addressesKey(id))
	}
	addresses := pipe.MGet(ctx, keys...)
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("reading former records: %w", err)
	}
	members := map[uint64]roster.Member{}
	for _, text := range slices.Concat(before.Val(), current.Val()) { // the newer record of a replica comes second
		if m, err := parseName(text); err == nil {
			members[m.Replica] = m
		}
	}
	for i, id := range living {
		m, found := members[id]
		if !found {
			m = roster.Member{Replica: id, Slot: -1}
		}
		m.Heard, m.Ended = now, false
		if text, is := addresses.Val()[i+1].(string); is {
			var a formerAddresses
			if len(text) <= maxText && json.Unmarshal([]byte(text), &a) == nil {
				m.Slot, m.ExtProc, m.Replan = a.Slot, a.ExtProc, a.Replan
			}
		}
		members[id] = m
	}
	for _, m := range members {
		b.redis.Roster.Add(m)
	}
	b.asked = true
	return nil
}

// write writes this replica's records as former ones.
func (b *Bridge) write(ctx context.Context, mark string, now time.Time) error {
	self, _ := b.redis.Roster.Self()
	id := strconv.FormatUint(self.Replica, 16)
	pipe := b.redis.Client.Pipeline()
	pipe.HSet(ctx, b.namesKey(now), id, fmt.Sprintf("%s %d %s %s", id, now.UnixMilli(), mark, self.Name))
	pipe.PExpire(ctx, b.namesKey(now), 2*time.Hour)
	if self.Slot >= 0 {
		text, err := json.Marshal(formerAddresses{self.Slot, self.ExtProc, self.Replan})
		if err != nil {
			return err
		}
		pipe.Set(ctx, b.addressesKey(self.Replica), text, formerTTL)
	}
	_, err := pipe.Exec(ctx)
	return err
}

// parseName reads an entry of the hash of an hour.
func parseName(text string) (m roster.Member, err error) {
	parts := strings.SplitN(text, " ", 4)
	if len(parts) < 4 || len(text) > maxText {
		return m, errors.New("not the record of a replica")
	}
	m = roster.Member{Name: parts[3], Slot: -1, Ended: parts[2] == markEnded}
	if m.Replica, err = strconv.ParseUint(parts[0], 16, 64); err != nil {
		return m, err
	}
	at, err := strconv.ParseInt(parts[1], 10, 64)
	m.Heard = time.UnixMilli(at)
	return m, err
}
