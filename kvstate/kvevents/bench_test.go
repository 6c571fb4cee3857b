package kvevents

import (
	"fmt"
	"syscall"
	"testing"

	"tandem/internal/budget"
	"tandem/kvstate/prefixindex"
)

// busy returns batches of a full engine: a prompt's new blocks stored, equally many old ones removed.
func busy(maps bool, batches, blocks, blockSize int) (payloads [][]byte, perBatch int) {
	id := 0
	var all [][]int
	e := newEngine(1, 1, maps)
	for n := range batches {
		ids := make([]int, blocks*blockSize)
		for i := range ids {
			id = (id*1103515245 + 12345) % 128_000
			ids[i] = id
		}
		ids[0] = n
		all = append(all, ids)
	}
	names := func(ids []int) []any {
		var out []any
		for i := range blocks {
			out = append(out, e.name(append([]int{i}, ids[:8]...)))
		}
		return out
	}
	for n, ids := range all {
		old := all[(n+batches/2)%batches]
		removed := names(old)
		for i, j := 0, len(removed)-1; i < j; i, j = i+1, j-1 {
			removed[i], removed[j] = removed[j], removed[i]
		}
		var events []any
		if maps {
			events = append(events, fields{"type", "BlockStored", "block_hashes", names(ids), "parent_block_hash", nil, "token_ids", compact(ids), "block_size", blockSize,
				"lora_id", nil, "medium", "GPU", "lora_name", nil, "extra_keys", nil, "group_idx", 0, "kv_cache_spec_kind", "full_attention"})
		} else {
			events = append(events, []any{"BlockStored", names(ids), nil, compact(ids), blockSize, nil, "GPU"})
		}
		for _, name := range removed { // one event each, as vLLM has it
			if maps {
				events = append(events, fields{"type", "BlockRemoved", "block_hashes", []any{name}, "medium", "GPU", "group_idx", 0})
			} else {
				events = append(events, []any{"BlockRemoved", []any{name}, "GPU"})
			}
		}
		payloads = append(payloads, pack([]any{n, events, 0}))
	}
	return payloads, 2 * blocks
}

// cpu returns the processor time of this process in seconds, which does not depend on other load of the machine.
func cpu() float64 {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return float64(r.Utime.Nano()+r.Stime.Nano()) / 1e9
}

// compact are token ids as msgspec writes them: as short as they can be.
type compact []int

func (ids compact) pack() []byte {
	out := append([]byte{0xdc}, be(uint64(len(ids)), 2)...)
	for _, id := range ids {
		switch {
		case id < 1<<7:
			out = append(out, byte(id))
		case id < 1<<8:
			out = append(out, 0xcc, byte(id))
		case id < 1<<16:
			out = append(append(out, 0xcd), be(uint64(id), 2)...)
		default:
			out = append(append(out, 0xce), be(uint64(id), 4)...)
		}
	}
	return out
}

// BenchmarkApply measures an event from the payload to the index: decoding, our hashes, storing, removing.
func BenchmarkApply(b *testing.B) {
	for _, maps := range []bool{false, true} {
		for _, blockSize := range []int{16, 64} {
			b.Run(fmt.Sprintf("maps=%t/%dtokens", maps, blockSize), func(b *testing.B) {
				payloads, per := busy(maps, 1024, 64, blockSize)
				x := newEngineIndex()
				s := stream{sink: x.feed}
				b.ReportAllocs()
				n, began := uint64(0), cpu()
				for b.Loop() {
					s.live(n, payloads[n%uint64(len(payloads))], noReplay)
					n++
				}
				b.ReportMetric(float64(n)*float64(per)/(cpu()-began)/1e6, "Mblocks/cpu-s")
				b.ReportMetric(float64(len(payloads[0]))/float64(per), "B/block")
			})
		}
	}
}

// BenchmarkDecode measures the part before the index.
func BenchmarkDecode(b *testing.B) {
	for _, maps := range []bool{false, true} {
		b.Run(fmt.Sprintf("maps=%t/16tokens", maps), func(b *testing.B) {
			payloads, per := busy(maps, 64, 64, 16)
			var d Decoder
			b.ReportAllocs()
			n, began := 0, cpu()
			for b.Loop() {
				if _, err := d.Batch(payloads[n%len(payloads)]); err != nil {
					b.Fatal(err)
				}
				n++
			}
			b.ReportMetric(float64(n)*float64(per)/(cpu()-began)/1e6, "Mblocks/cpu-s")
		})
	}
}

func TestDecodeAllocates(t *testing.T) {
	payloads, _ := busy(true, 2, 64, 16)
	var d Decoder
	var batch Batch
	budget.Allocs(t, 100, 0, func() { batch, _ = d.Batch(payloads[0]) })
	if len(batch.Events) != 65 || batch.Events[0].Kind != prefixindex.BlocksStored {
		t.Errorf("decoded %d events", len(batch.Events))
	}
}
