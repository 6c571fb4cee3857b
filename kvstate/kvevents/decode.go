package kvevents

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strconv"

	"github.com/cespare/xxhash/v2"

	"tandem/kvstate/prefixindex"
)

// ErrMalformed means that a payload is not a batch of KV events.
var ErrMalformed = errors.New("kvevents: not a batch of KV events")

// Decoder decodes batches of events. Its zero value is ready. It remembers the engine's groups of KV cache, so each
// publisher needs its own. Only one goroutine may use it at a time.
type Decoder struct {
	events []prefixindex.BlockEvent
	words  []uint64 // keys and blocks of the events
	ids    []byte   // the token ids of one event
	extras []uint64 // the extra keys of one event's blocks
	group  uint64   // the group whose blocks count, plus one; 0: none was seen
	Stats  DecoderStats
}

// DecoderStats are the totals of a decoder.
type DecoderStats struct {
	Events  uint64
	Ignored uint64 // events of kinds or groups that do not concern prefixes
	Partial uint64 // stored events whose tokens do not fill their blocks, as hybrid models send them: not used
}

// Batch is the content of one message. It is valid until the decoder reads the next.
type Batch struct {
	Time   float64 // seconds since 1970, by the engine's clock
	Rank   int     // data-parallel rank, -1 if absent
	Events []prefixindex.BlockEvent
}

// Batch reads a payload: [ts, [event...], rank], the same in every release. Events are arrays that begin with their
// type (vLLM up to 0.23, SGLang up to 0.5.16), or maps with a key type (since); one of either kind may follow the
// other. Fields that a release lacks, or that are unknown here, are skipped.
//
// Read in vllm/distributed/kv_events.py 0.9.2 to 0.33.0 and sglang/srt/disaggregation/kv_events.py 0.4.9 to 0.5.23.
func (d *Decoder) Batch(payload []byte) (Batch, error) {
	c := cursor{b: payload}
	d.events, d.words = d.events[:0], d.words[:0]
	n := c.array()
	if n < 2 {
		return Batch{}, ErrMalformed
	}
	batch := Batch{Time: c.float(), Rank: -1}
	for events := c.array(); events > 0 && !c.bad; events-- {
		d.event(&c)
	}
	if n > 2 && !c.null() {
		batch.Rank = int(int32(c.integer()))
	}
	for i := 3; i < n; i++ {
		c.skip()
	}
	if c.bad {
		return Batch{}, ErrMalformed
	}
	batch.Events = d.events
	return batch, nil
}

// rawEvent has the positions of an event's fields in the payload.
type rawEvent struct {
	kind      []byte
	hashes    int // offsets in the payload; 0: absent
	parent    int
	tokens    int
	read      bool // the tokens, into Decoder.ids
	blockSize int
	loraID    int
	medium    int
	loraName  int
	extraKeys int
	group     int
	spec      int
	window    int
	salt      int
}

// The order of fields in the array form. vLLM: block_hashes, parent_block_hash, token_ids, block_size, lora_id,
// medium (0.10.2), lora_name (0.14.1), extra_keys (0.17.1), group_idx, kv_cache_spec_kind,
// kv_cache_spec_sliding_window (0.20.2). SGLang has the first six.
func (e *rawEvent) field(i int) *int {
	if string(e.kind) == "BlockRemoved" {
		switch i {
		case 1:
			return &e.hashes
		case 2:
			return &e.medium
		case 3:
			return &e.group
		}
		return nil
	}
	fields := [...]*int{1: &e.hashes, &e.parent, &e.tokens, &e.blockSize, &e.loraID, &e.medium, &e.loraName,
		&e.extraKeys, &e.group, &e.spec, &e.window}
	if i < len(fields) {
		return fields[i]
	}
	return nil
}

// named returns the field of a key, for events in map form.
func (e *rawEvent) named(key []byte) *int {
	switch string(key) {
	case "block_hashes":
		return &e.hashes
	case "parent_block_hash":
		return &e.parent
	case "token_ids":
		return &e.tokens
	case "block_size":
		return &e.blockSize
	case "lora_id":
		return &e.loraID
	case "medium":
		return &e.medium
	case "lora_name":
		return &e.loraName
	case "extra_keys":
		return &e.extraKeys
	case "group_idx":
		return &e.group
	case "kv_cache_spec_kind":
		return &e.spec
	case "kv_cache_spec_sliding_window":
		return &e.window
	case "cache_salt":
		return &e.salt
	}
	return nil
}

// event decodes one event and, if it concerns prefixes, appends it to d.events.
func (d *Decoder) event(c *cursor) {
	var e rawEvent
	if c.isArray() {
		n := c.array()
		if n == 0 {
			c.fail()
			return
		}
		e.kind, _ = c.text()
		for i := 1; i < n && !c.bad; i++ {
			d.note(c, &e, e.field(i))
		}
	} else {
		for n := c.table(); n > 0 && !c.bad; n-- {
			key, _ := c.text()
			if string(key) == "type" {
				e.kind, _ = c.text()
			} else {
				d.note(c, &e, e.named(key))
			}
		}
	}
	if c.bad {
		return
	}
	d.Stats.Events++
	var ok bool
	switch string(e.kind) {
	case "BlockStored":
		ok = d.stored(c, &e)
	case "BlockRemoved":
		ok = d.removed(c, &e)
	case "AllBlocksCleared":
		d.events = append(d.events, prefixindex.BlockEvent{Kind: prefixindex.AllBlocksCleared})
		ok = true
	}
	if !ok {
		d.Stats.Ignored++
	}
}

// note records the position of a field and skips it. Token ids, which are most of a payload, are read at once.
func (d *Decoder) note(c *cursor, e *rawEvent, field *int) {
	if field == nil {
		c.skip()
		return
	}
	if c.null() {
		return
	}
	*field = c.at
	if field == &e.tokens && string(e.kind) == "BlockStored" {
		d.ids = c.tokens(d.ids[:0])
		e.read = true
		return
	}
	c.skip()
}

// field returns a cursor at a field.
func (c *cursor) field(at int) cursor { return cursor{b: c.b, at: at} }

func (d *Decoder) stored(c *cursor, e *rawEvent) bool {
	if e.hashes == 0 || !d.counts(c, e, true) {
		return false
	}
	out := prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, Tier: tier(c, e)}
	f := c.field(e.hashes)
	out.Keys = d.keys(&f)
	if e.parent != 0 {
		p := c.field(e.parent)
		out.Parent, out.HasParent = key(&p), true
		c.bad = c.bad || p.bad
	}
	if e.blockSize != 0 {
		s := c.field(e.blockSize)
		out.BlockSize = int(int32(s.integer()))
		f.bad = f.bad || s.bad
	}
	switch {
	case e.tokens == 0:
		d.ids = d.ids[:0]
	case !e.read: // they came before the event's type
		t := c.field(e.tokens)
		d.ids = t.tokens(d.ids[:0])
		f.bad = f.bad || t.bad
	}
	if c.bad = c.bad || f.bad; c.bad {
		return false
	}
	if len(d.ids) > 0 { // otherwise the event only has the names: a copy in another tier
		if out.BlockSize <= 0 || len(d.ids) != len(out.Keys)*out.BlockSize*4 {
			d.Stats.Partial++
			return true
		}
		d.blocks(c, e, &out)
	}
	d.events = append(d.events, out)
	return true
}

// blocks computes our hashes of the blocks of a stored event.
func (d *Decoder) blocks(c *cursor, e *rawEvent, out *prefixindex.BlockEvent) {
	lora := d.lora(c, e)
	d.readExtras(c, e, lora, len(out.Keys))
	if e.salt != 0 && !out.HasParent && len(d.extras) > 0 {
		if s := c.field(e.salt); s.isText() {
			salt, _ := s.text()
			d.extras[0] = prefixindex.FoldExtraKey(d.extras[0], salt)
		}
	}
	out.Root, out.LoRA = prefixindex.TokenRoot(string(lora), out.BlockSize), lora
	from := len(d.words)
	for i := range out.Keys {
		d.words = append(d.words, prefixindex.TokenBlock(d.ids[i*out.BlockSize*4:(i+1)*out.BlockSize*4], d.extras[i]))
	}
	out.Blocks = d.words[from:len(d.words):len(d.words)]
}

// lora returns the adapter's name; for engines that send only a number, a name that no request can ask for.
func (d *Decoder) lora(c *cursor, e *rawEvent) []byte {
	if e.loraName != 0 {
		f := c.field(e.loraName)
		name, _ := f.text()
		return name
	}
	if e.loraID != 0 {
		f := c.field(e.loraID)
		return strconv.AppendUint([]byte("\x00lora_id "), f.integer(), 10)
	}
	return nil
}

// readExtras folds the extra keys of each block. In some releases the adapter's name is among them; it counts once.
// A string is a cache salt, or identifies an image; other values are folded as written.
func (d *Decoder) readExtras(c *cursor, e *rawEvent, lora []byte, blocks int) {
	d.extras = append(d.extras[:0], make([]uint64, blocks)...)
	if e.extraKeys == 0 {
		return
	}
	f := c.field(e.extraKeys)
	n := f.array()
	for i := 0; i < n && !f.bad; i++ {
		if !f.isArray() {
			f.skip()
			continue
		}
		var extra uint64
		for m := f.array(); m > 0 && !f.bad; m-- {
			from := f.at
			if f.isText() {
				if s, text := f.text(); !text || !bytes.Equal(s, lora) || len(lora) == 0 {
					extra = prefixindex.FoldExtraKey(extra, s)
				}
				continue
			}
			f.skip()
			extra = prefixindex.FoldExtraKey(extra, f.b[from:f.at])
		}
		if i < blocks {
			d.extras[i] = extra
		}
	}
	c.bad = c.bad || f.bad
}

func (d *Decoder) removed(c *cursor, e *rawEvent) bool {
	if e.hashes == 0 || !d.counts(c, e, false) {
		return false
	}
	f := c.field(e.hashes)
	keys := d.keys(&f)
	c.bad = c.bad || f.bad
	d.events = append(d.events, prefixindex.BlockEvent{Kind: prefixindex.BlocksRemoved, Keys: keys, Tier: tier(c, e)})
	return true
}

// counts reports whether an event belongs to the group of KV cache by which prefixes are counted. Hybrid models
// have several groups: those with a sliding window or a recurrent state hold only the end of a prompt. The first
// group without either is the one that counts.
func (d *Decoder) counts(c *cursor, e *rawEvent, stored bool) bool {
	if e.window != 0 {
		return false
	}
	if e.spec != 0 {
		f := c.field(e.spec)
		kind, _ := f.text()
		for _, part := range [...]string{"sliding", "mamba", "chunked_local", "linear"} {
			if bytes.Contains(kind, []byte(part)) {
				return false
			}
		}
	}
	if e.group == 0 {
		return true
	}
	f := c.field(e.group)
	group := f.integer() + 1
	c.bad = c.bad || f.bad
	if d.group == 0 && stored {
		d.group = group
	}
	return d.group == group || d.group == 0
}

// tier returns where blocks are. Releases before 0.10.2 do not say: GPU. vLLM has GPU, CPU and STORAGE, SGLang GPU,
// CPU_PINNED, DISK and EXTERNAL. An unknown name counts as the slowest tier.
func tier(c *cursor, e *rawEvent) prefixindex.Tier {
	if e.medium == 0 {
		return prefixindex.TierGPU
	}
	f := c.field(e.medium)
	medium, _ := f.text()
	switch is := func(name string) bool { return bytes.EqualFold(medium, []byte(name)) }; {
	case is("GPU"):
		return prefixindex.TierGPU
	case is("CPU"), is("CPU_PINNED"):
		return prefixindex.TierCPU
	case is("DISK"), is("STORAGE"):
		return prefixindex.TierDisk
	}
	return prefixindex.TierRemote
}

func (d *Decoder) keys(f *cursor) []uint64 {
	from := len(d.words)
	for n := f.array(); n > 0 && !f.bad; n-- {
		d.words = append(d.words, key(f))
	}
	return d.words[from:len(d.words):len(d.words)]
}

// key reads the engine's hash of a block: 64 bits with or without a sign or, with
// VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0, the whole digest, of which vLLM's integers are the last eight bytes.
func key(f *cursor) uint64 {
	if !f.isText() {
		return f.integer()
	}
	s, text := f.text()
	if text || len(s) < 8 {
		return xxhash.Sum64(s)
	}
	return binary.BigEndian.Uint64(s[len(s)-8:])
}
