package redisstore

import (
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	statev1 "tandem/protos/state/v1"
)

// With a key file, everything that replicas read from Redis is signed with its keys, so that somebody who can write to
// Redis without them can withhold what replicas tell each other, but nothing more (docs/adr/0100). Marks of consumed
// tickets are not signed: who sets one makes Tandem plan a request again, and who deletes one does what an outage of
// Redis does, since tickets do not lie in Redis. An old text of a replica is not taken for a new one: keys in Redis
// name what they are for, and an entry of a stream has its time. A hand-over that is put back is good for nothing but
// the ticket that names it.

// Signer signs what is written to Redis, for a purpose, and knows what was signed for it (kvtransfer.Keys).
type Signer interface {
	Sign(dst []byte, purpose string, text []byte) []byte
	Genuine(purpose string, signed []byte) (text []byte, ok bool)
}

// SignWith makes the store sign what it writes, and take nothing that is not signed. Call it before [Store.Join].
func (s *Store) SignWith(k Signer) { s.signer = k }

// sign signs a text for a purpose, if this store signs.
func (s *Store) sign(purpose string, text []byte) []byte {
	if s.signer == nil {
		return text
	}
	return s.signer.Sign(nil, purpose, text)
}

// genuine returns a text that was signed for the purpose; ok is false if it was not, which is counted.
func (s *Store) genuine(purpose string, signed []byte) (text []byte, ok bool) {
	if s.signer == nil {
		return signed, true
	}
	if text, ok = s.signer.Genuine(purpose, signed); !ok {
		s.counters.forged.Add(1)
		s.forgedOnce.Do(func() {
			s.log.Warn("what another writer left in Redis is not used: it is not signed with this replica's "+
				"ticket keys",
				"for", purpose)
		})
	}
	return text, ok
}

// batchField and its signature's fields are those of a stream's entry: a batch, when it was sent by Redis's clock, in
// milliseconds, and the code for both.
const (
	batchField = "b"
	sentField  = "t"
	codeField  = "s"
)

// sentWithin is the largest difference between when a batch says that it was sent and when Redis took it: more than a
// command takes. Before its first command a replica knows Redis's clock only if its own is right.
const sentWithin = 10 * time.Second

// entryOf returns the values of a stream's entry.
func (p *poolReplica) entryOf(batch []byte) []any {
	if p.s.signer == nil {
		return []any{batchField, batch}
	}
	sent := strconv.FormatInt(p.s.clock.of(time.Now()).Milliseconds(), 10)
	signed := p.s.signer.Sign(nil, p.purpose(sent), batch)
	return []any{batchField, batch, sentField, sent, codeField, signed[:len(signed)-len(batch)]}
}

func (p *poolReplica) purpose(sent string) string { return p.keys.stream() + " " + sent }

// genuineEntry reports whether an entry's batch was signed, and sent when Redis took it.
func (p *poolReplica) genuineEntry(m *redis.XMessage, id streamID) bool {
	if p.s.signer == nil {
		return true
	}
	batch, _ := m.Values[batchField].(string)
	sent, _ := m.Values[sentField].(string)
	code, _ := m.Values[codeField].(string)
	at, err := strconv.ParseInt(sent, 10, 64)
	if err != nil || time.Duration(at-int64(id.ms)).Abs() > sentWithin/time.Millisecond {
		p.s.counters.forged.Add(1)
		return false
	}
	_, ok := p.s.genuine(p.purpose(sent), []byte(code+batch))
	return ok
}

// stranger applies the part of a batch that is not signed with this replica's keys which shows that keys differ: who is
// there, and the fingerprints of its keys. poolReplica.mu is held.
func (p *poolReplica) stranger(b *statev1.Batch, id streamID) {
	of := &statev1.Batch{Replica: b.GetReplica(), LeaseMs: b.GetLeaseMs(), TicketKeys: b.GetTicketKeys()}
	known := p.members[b.GetReplica()]
	if known != nil && known.genuine { // somebody else's word does not count for it
		return
	}
	if member := b.GetMember(); member != nil {
		of.Member = &statev1.Member{Name: member.GetName(), Version: member.GetVersion()}
	}
	if m := p.observe(of, p.s.clock.age(id, time.Now())); m != nil {
		p.noteFingerprints(m, of)
	}
}

// Sign signs a text for other replicas, if the store signs. The key under which it is stored is the purpose.
func (a *Access) Sign(purpose string, text []byte) []byte {
	if a.store == nil {
		return text
	}
	return a.store.sign(purpose, text)
}

// Genuine returns the text that another replica signed for the purpose.
func (a *Access) Genuine(purpose, signed string) (text string, ok bool) {
	if a.store == nil {
		return signed, true
	}
	out, ok := a.store.genuine(purpose, []byte(signed))
	return string(out), ok
}
