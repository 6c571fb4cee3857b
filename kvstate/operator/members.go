package operator

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A replica writes its name and the time into a hash every few seconds, and once more, marked, when it ends in order.
// So a replica that ended otherwise has a name for people, also if it never answered a question. There is a
// hash for each hour, which expires: nothing has to be removed, and the Redis user needs no more rights.

const (
	goneFor  = time.Hour        // a replica that is gone is named for this time, then it was removed for good
	starting = 3 * time.Second  // in this time a new replica may be in the hash, and not yet known to be living
	settling = 10 * time.Second // in this time after Redis came back, living replicas report themselves again
)

// Gone is a replica that did not end in order and is not living any more.
type Gone struct {
	Name  string    `json:"name"`
	Heard time.Time `json:"heard"` // by that replica's clock, at most 5 s too early
}

// member is an entry of a hash.
type member struct {
	name  string
	heard time.Time
	ended bool // in order
}

// Marks of entries.
const (
	markRuns  = "r"
	markEnded = "e"
)

// membersKey returns the key of the hash of an hour.
func (o *Operator) membersKey(at time.Time) string {
	return o.key("replicas:" + strconv.FormatInt(at.Unix()/int64(goneFor.Seconds()), 10))
}

// announce writes this replica's entry and reads those of all.
func (o *Operator) announce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	mark := markRuns
	if o.left.Load() {
		mark = markEnded
	}
	now := time.Now()
	key, id := o.membersKey(now), strconv.FormatUint(o.redis.Replica, 16)
	pipe := o.redis.Client.Pipeline()
	pipe.HSet(ctx, key, id, fmt.Sprintf("%s %d %s %s", id, now.UnixMilli(), mark, o.name))
	pipe.PExpire(ctx, key, 2*goneFor)
	before, current := pipe.HVals(ctx, o.membersKey(now.Add(-goneFor))), pipe.HVals(ctx, key)
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("announcing this replica: %w", err)
	}
	members := map[uint64]member{}
	for _, text := range slices.Concat(before.Val(), current.Val()) { // the newer entry of a replica comes second
		parts := strings.SplitN(text, " ", 4)
		if len(parts) < 4 || len(parts[3]) > maxName {
			continue
		}
		replica, err := strconv.ParseUint(parts[0], 16, 64)
		at, wrong := strconv.ParseInt(parts[1], 10, 64)
		if err == nil && wrong == nil {
			members[replica] = member{parts[3], time.UnixMilli(at), parts[2] == markEnded}
		}
	}
	o.note(members, now, o.redis.Living())
	return nil
}

// note takes in the members that Redis has, and the living replicas.
func (o *Operator) note(members map[uint64]member, now time.Time, living []uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for replica, m := range o.members { // Redis may have come back empty: what was known of them still holds
		if _, found := members[replica]; !found && now.Sub(m.heard) <= goneFor {
			members[replica] = m
		}
	}
	o.members = members
	if o.away {
		o.away, o.back = false, now
	}
	o.logChanges(living)
}

// lost notes that Redis does not answer. Other replicas cannot report themselves meanwhile.
func (o *Operator) lost() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.away = true
}

// settled reports whether a replica that is not known to be living is gone: Redis has not been away lately. mu is held.
func (o *Operator) settled() bool { return !o.away && time.Since(o.back) >= settling }

// seen is another replica that the log has as present.
type seen struct {
	name    string
	missing time.Time // since when it is not living; zero: it is
}

// missingFor is the time after which a replica that is not living is gone: Redis may have been slow, and nobody known
// for a moment.
const missingFor = 2 * time.Second

// logChanges logs by name which other replicas have come or gone. None is gone as long as Redis was away lately. mu is
// held.
func (o *Operator) logChanges(living []uint64) {
	for _, id := range living {
		switch known := o.logged[id]; {
		case known != nil:
			known.missing = time.Time{}
		case id != o.redis.Replica && o.members[id].name != "":
			o.logged[id] = &seen{name: o.members[id].name}
			o.log.Info("a replica is there", "replica", o.members[id].name, "replicas", len(living))
		}
	}
	for id, known := range o.logged {
		if slices.Contains(living, id) || !o.settled() {
			continue
		}
		if known.missing.IsZero() {
			known.missing = time.Now()
		}
		if time.Since(known.missing) < missingFor {
			continue
		}
		delete(o.logged, id)
		message := "a replica is gone"
		for _, other := range o.logged {
			if other.name == known.name { // started again, which the log has already
				message = "a replica's earlier process is gone"
			}
		}
		o.log.Info(message, "replica", known.name, "shut_down", o.members[id].ended, "replicas", len(living))
	}
}

// missing reports whether a replica is not living that has not announced its end, as far as was read.
func (o *Operator) missing() bool {
	living := o.redis.Living()
	o.mu.Lock()
	defer o.mu.Unlock()
	var found Answers
	o.addGone(&found, living)
	return len(found.Gone) > 0
}

// watch logs which other replicas have come or gone, soon after they have. It reads the names for a new one, and for
// one that is missing whether it ended in order.
func (o *Operator) watch(ctx context.Context) {
	living := o.redis.Living()
	o.mu.Lock()
	changed := false
	for _, id := range living {
		changed = changed || id != o.redis.Replica && o.logged[id] == nil
	}
	for id := range o.logged {
		changed = changed || !slices.Contains(living, id)
	}
	o.mu.Unlock()
	if changed {
		_ = o.announce(ctx) // the next one comes soon
	}
}

// leave publishes that this replica ends in order.
func (o *Operator) leave(ctx context.Context) {
	o.left.Store(true)
	if err := o.announce(context.WithoutCancel(ctx)); err != nil {
		o.log.Debug("a replica that ends", "err", err)
	}
}

// started returns when a replica started, which its number contains.
func started(replica uint64) time.Time { return time.UnixMilli(int64(replica >> 20)) }

// nameOf returns a replica's name for people. mu is held.
func (o *Operator) nameOf(replica uint64) string {
	return cmp.Or(o.members[replica].name, "started "+started(replica).UTC().Format(time.RFC3339))
}

// addGone adds the replicas that did not end in order and are not living; none if Redis was away lately. mu is held.
func (o *Operator) addGone(to *Answers, living []uint64) {
	if !o.settled() {
		return
	}
	last := map[string]uint64{o.name: o.redis.Replica} // the replica of each name that started last
	for id, m := range o.members {
		last[m.name] = max(last[m.name], id)
	}
	for id, m := range o.members {
		switch {
		case m.ended || time.Since(m.heard) > goneFor || id == o.redis.Replica || slices.Contains(living, id):
		case last[m.name] != id:
			to.Restarted = append(to.Restarted, Gone{m.name, m.heard})
		case time.Since(started(id)) <= starting:
			to.Starting = append(to.Starting, m.name)
		default:
			to.Gone = append(to.Gone, Gone{m.name, m.heard})
		}
	}
	byName := func(a, b Gone) int { return cmp.Or(strings.Compare(a.Name, b.Name), a.Heard.Compare(b.Heard)) }
	slices.SortFunc(to.Gone, byName)
	slices.SortFunc(to.Restarted, byName)
	slices.Sort(to.Starting)
}
