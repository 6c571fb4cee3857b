package operator

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"tandem/kvstate/redisstore/roster"
)

// Names of replicas, and when each last reported, come from the roster (redisstore). A replica that has not reported
// for a lease and did not end in order is gone.

// settling is the time in which living replicas report themselves again after Redis came back.
const settling = 10 * time.Second

// Gone is a replica that did not end in order and is not living any more.
type Gone struct {
	Name  string    `json:"name"`
	Heard time.Time `json:"heard"` // at most a lease too early
}

// heard records that Redis answers.
func (o *Operator) heard() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.away {
		o.away, o.back = false, time.Now()
	}
	o.logChanges(o.redis.Living())
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

// missingFor is the time after which a replica that is not living is gone: if Redis was slow, no other replica may have
// been known for a moment.
const missingFor = 2 * time.Second

// logChanges logs by name which other replicas have come or gone. None is gone as long as Redis was away lately. mu is
// held.
func (o *Operator) logChanges(living []uint64) {
	others := o.redis.Roster.Others()
	for _, id := range living {
		switch known := o.logged[id]; {
		case known != nil:
			known.missing = time.Time{}
		case id != o.redis.Replica && others[id].Name != "":
			o.logged[id] = &seen{name: others[id].Name}
			o.log.Info("a replica is there", "replica", others[id].Name, "replicas", len(living),
				"release", cmp.Or(others[id].Version, "earlier"))
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
		o.log.Info(message, "replica", known.name, "shut_down", others[id].Ended, "replicas", len(living))
	}
}

// started returns when a replica started, which its number contains.
func started(replica uint64) time.Time { return time.UnixMilli(int64(replica >> 20)) }

// nameOf returns a replica's name for people.
func (o *Operator) nameOf(replica uint64, others map[uint64]roster.Member) string {
	return cmp.Or(others[replica].Name, "started "+started(replica).UTC().Format(time.RFC3339))
}

// addGone adds the replicas that did not end in order and are not living. If Redis was away lately, those of which the
// log does not say yet that they are gone are not among them. mu is held.
func (o *Operator) addGone(to *Answers, living []uint64, others map[uint64]roster.Member) {
	settled := o.settled()
	last := map[string]uint64{o.name: o.redis.Replica} // the replica of each name that started last
	for id, m := range others {
		last[m.Name] = max(last[m.Name], id)
	}
	for id, m := range others {
		switch {
		case m.Ended || slices.Contains(living, id) || !settled && o.logged[id] != nil:
		case last[m.Name] != id:
			to.Restarted = append(to.Restarted, Gone{m.Name, m.Heard})
		default:
			to.Gone = append(to.Gone, Gone{o.nameOf(id, others), m.Heard})
		}
	}
	byName := func(a, b Gone) int { return cmp.Or(strings.Compare(a.Name, b.Name), a.Heard.Compare(b.Heard)) }
	slices.SortFunc(to.Gone, byName)
	slices.SortFunc(to.Restarted, byName)
}
