package kvtransfer

// ID is the id of a ticket: it names an attempt of a request, and what two engines exchange for it. It is random, and
// good for one decode. Other things that may happen only once for a ticket have ids of their own, which are derived
// from it.
type ID [16]byte

// Inline is the id of a hand-over from a prefill leg whose answer came with pass 2. If it is consumed, pass 2 has read
// that answer. The leg's own filter hands over with the leg's id.
func (id ID) Inline() ID {
	id[0] ^= 0x40
	return id
}

// Cleanup is the id under which the KV of a hand-over that was not fetched is reclaimed.
func (id ID) Cleanup() ID {
	id[0] ^= 0x80
	return id
}

// Cut is the id under which a prefill leg is counted whose answer broke off: both the leg's filter and Envoy's log
// report it.
func (id ID) Cut() ID {
	id[2] ^= 0x80
	return id
}

// Orphaned is the id under which a hand-over is counted whose KV is not fetched: if its pass is refused while the
// client leaves, both events report it.
func (id ID) Orphaned() ID {
	id[3] ^= 0x80
	return id
}

// Replanned is the id under which a hop that failed at a stage is planned again.
func (id ID) Replanned(s Stage) ID {
	id[1] ^= 0x80 | byte(s)
	return id
}
