package redisstore

import (
	"maps"
	"slices"

	statev1 "tandem/protos/state/v1"
)

// Replicas whose ticket keys differ refuse each other's tickets, so behind two of them about half of all requests
// fail. Each publishes fingerprints of its keys, never a key, and compares those of the others with its own.

// KeyCheck is the comparison of a replica's ticket keys with those of the others.
type KeyCheck struct {
	// living replicas that cannot open this one's tickets, or whose tickets this one cannot open; sorted
	Differ []uint64
	Yields bool // this replica is in the smaller group, or the younger of two equal ones, and should take no requests
}

// CompareKeys makes the store publish and compare fingerprints of this replica's ticket keys. fingerprints returns
// them, the sealing key's first; changed is called when the result of [Store.KeyCheck] may have changed, and must not
// block. Call it before [Store.Run].
func (s *Store) CompareKeys(fingerprints func() []uint64, changed func()) {
	s.fingerprints, s.keysChanged = fingerprints, changed
}

// maxFingerprints bounds the keys that another replica can claim to have.
const maxFingerprints = 2 * maxOpen

// addFingerprints adds the fingerprints to a batch that is complete, and to the first one after a change.
// poolReplica.mu is held.
func (p *poolReplica) addFingerprints(b *statev1.Batch) {
	if p.s.fingerprints == nil {
		return
	}
	now := p.s.fingerprints()
	changed := !slices.Equal(now, p.publishedKeys)
	if b.GetComplete() || changed {
		b.TicketKeys, p.publishedKeys = now, now
	}
	if changed {
		p.s.keysMayDiffer()
	}
}

// noteFingerprints records the fingerprints of another replica's keys. poolReplica.mu is held.
func (p *poolReplica) noteFingerprints(m *remoteReplica, b *statev1.Batch) {
	if keys := b.GetTicketKeys(); len(keys) > 0 && len(keys) <= maxFingerprints && !slices.Equal(keys, m.ticketKeys) {
		m.ticketKeys = keys
		p.s.keysMayDiffer()
	}
}

func (s *Store) keysMayDiffer() {
	if s.keysChanged != nil {
		s.keysChanged()
	}
}

// KeyCheck compares this replica's ticket keys with those of all living replicas that publish theirs.
func (s *Store) KeyCheck() KeyCheck {
	if s.fingerprints == nil {
		return KeyCheck{}
	}
	s.mu.RLock()
	all := slices.Collect(maps.Values(s.byPool))
	s.mu.RUnlock()
	others := map[uint64][]uint64{}
	for _, p := range all {
		p.mu.Lock()
		for id, m := range p.members {
			if len(m.ticketKeys) > 0 {
				others[id] = m.ticketKeys
			}
		}
		p.mu.Unlock()
	}
	return compareKeys(s.replica, s.fingerprints(), others)
}

// compareKeys finds the replicas whose keys do not work with this one's. Two replicas work together if each can open
// the other's tickets.
func compareKeys(replica uint64, own []uint64, others map[uint64][]uint64) (c KeyCheck) {
	same, oldest := 1, replica
	for id, keys := range others {
		oldest = min(oldest, id)
		if slices.Contains(keys, own[0]) && slices.Contains(own, keys[0]) {
			same++
		} else {
			c.Differ = append(c.Differ, id)
		}
	}
	slices.Sort(c.Differ)
	c.Yields = len(c.Differ) > same || len(c.Differ) == same && slices.Contains(c.Differ, oldest)
	return c
}
