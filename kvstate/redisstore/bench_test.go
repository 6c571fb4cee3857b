package redisstore

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate"
	statev1 "tandem/protos/state/v1"
)

func total(replicas []*replica) (sum Stats) {
	for _, r := range replicas {
		s := r.store.Stats()
		sum.Commands += s.Commands
		sum.BytesSent += s.BytesSent
		sum.BytesRead += s.BytesRead
		sum.BatchesSent += s.BatchesSent
		sum.BatchesRead += s.BatchesRead
		sum.Snapshots += s.Snapshots
		sum.Gaps += s.Gaps
	}
	return sum
}

// BenchmarkShared is what requests cost in Redis, all replicas together: each request is routed with a prompt of 100 blocks
// (some 12,800 tokens), books two endpoints, releases them, and spends a ticket. They come at 200 a second in all, one after
// the other to each replica in turn, heartbeats included; "idle" is what is there without requests.
func BenchmarkShared(b *testing.B) {
	for _, n := range []int{1, 4, 16} {
		b.Run(fmt.Sprintf("replicas=%d", n), func(b *testing.B) {
			r := startRedis(b)
			var replicas []*replica
			for range n {
				replicas = append(replicas, join(b, Options{URL: "redis://" + r.Addr, Lease: 3 * time.Second}, 16))
			}
			eventually(b, "all know each other", func() bool { return replicas[0].store.Replicas() == n && replicas[n-1].store.Replicas() == n })
			time.Sleep(7 * time.Second) // those who came ask for snapshots until two leases later
			began, before := time.Now(), total(replicas)
			time.Sleep(3 * time.Second)
			idle, seconds := total(replicas), time.Since(began).Seconds()
			const requests = 600
			start := idle
			startedAt := time.Now()
			for i := range requests {
				at := replicas[i%n]
				route(at, i)
				time.Sleep(time.Until(startedAt.Add(time.Duration(i+1) * 5 * time.Millisecond)))
			}
			time.Sleep(100 * time.Millisecond)
			end := total(replicas)
			perRequest := func(of func(Stats) int64) float64 { return float64(of(end)-of(start)) / requests }
			b.ReportMetric(perRequest(func(s Stats) int64 { return s.Commands }), "commands/request")
			b.ReportMetric(perRequest(func(s Stats) int64 { return s.BatchesSent }), "batches/request")
			b.ReportMetric(perRequest(func(s Stats) int64 { return s.BytesSent }), "sent-B/request")
			b.ReportMetric(perRequest(func(s Stats) int64 { return s.BytesRead }), "read-B/request")
			b.ReportMetric(float64(idle.Commands-before.Commands)/seconds/float64(n), "idle-commands/s/replica")
			b.ReportMetric(float64(idle.BytesSent+idle.BytesRead-before.BytesSent-before.BytesRead)/seconds/float64(n), "idle-B/s/replica")
			b.ReportMetric(float64(end.Snapshots-start.Snapshots), "snapshots")
			b.ReportMetric(float64(end.Gaps-start.Gaps), "gaps")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func route(at *replica, i int) {
	p, d := at.e(i%16), at.e((i+5)%16)
	first := at.state.Bookings.Reserve(p, kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 12800, Uncached: 12800, Work: time.Second})
	second := at.state.Bookings.Reserve(d, kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 12800})
	at.state.Routed(at.pool, p, prompt(i, 100))
	at.state.Routed(at.pool, d, prompt(i, 100))
	at.state.Bookings.Release(first)
	at.state.HandOvers.Consume([16]byte{1, byte(i), byte(i >> 8), byte(i >> 16)})
	at.state.Bookings.Release(second)
}

// BenchmarkTell is what a request pays to have others told: no I/O, a copy of its blocks.
func BenchmarkTell(b *testing.B) {
	at := apart(b, Options{URL: "redis://127.0.0.1:1"}, 16)
	hashes := prompt(1, 100)
	e := at.e(3)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%1000 == 0 {
			at.p.out.take()
		}
		at.store.Routed(at.pool, e, hashes)
	}
}

// BenchmarkApply is what it costs a replica to read what 16 others publish, from the stream's entry to the index: the CPU of one
// entry, which has a request's reservations on two endpoints of 64 and its prompt for both. Known prompts are repeated, as those of
// conversations.
func BenchmarkApply(b *testing.B) {
	const replicas, endpoints, prompts = 16, 64, 64
	for _, c := range []struct {
		name   string
		blocks int
		known  bool
	}{{"none", 0, true}, {"100-known", 100, true}, {"100-new", 100, false}, {"8192-known", 8192, true}, {"8192-new", 8192, false}} {
		b.Run(c.name, func(b *testing.B) {
			r := apart(b, Options{URL: "redis://127.0.0.1:1"}, endpoints)
			made := 0
			entries := func(n int) (out []redis.XMessage) {
				for range n {
					made++
					p, d := uint32(0), uint32(1)
					batch := &statev1.Batch{
						Replica: uint64(1 + made%replicas), Seq: uint64(1 + made/replicas), LeaseMs: 60_000,
						Addresses: []string{addr(made % endpoints), addr((made + 5) % endpoints)},
						Loads:     []*statev1.Load{{Address: p, Requests: 3, PromptTokens: 40_000, Jobs: 2, WorkUs: 3e6, LeadUs: 1e5}, {Address: d, Requests: 9, PromptTokens: 9e4}},
					}
					if c.blocks > 0 {
						of := made
						if c.known {
							of = made % prompts
						}
						batch.Blocks = []*statev1.Blocks{{Address: p, Also: []uint32{d}, Kind: statev1.Blocks_KIND_ROUTED, Hashes: prompt(of, c.blocks)}}
					}
					text, err := proto.Marshal(batch)
					if err != nil {
						b.Fatal(err)
					}
					out = append(out, message(streamID{ms: uint64(time.Now().UnixMilli()), n: uint64(made)}.String(), string(text)))
				}
				return out
			}
			r.p.takeIn(entries(prompts)...)
			const read = 32 // entries at once
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				next := entries(read)
				b.StartTimer()
				r.p.takeIn(next...)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/read, "ns/entry")
		})
	}
}

// BenchmarkReference is what a reference in place of a known prompt's hashes would save a replica that reads them, and cost it: taking
// the hashes from an entry, against finding them in the index by the last one. A prompt of 16k tokens has 128 blocks.
func BenchmarkReference(b *testing.B) {
	const blocks, prompts = 128, 4096
	r := apart(b, Options{URL: "redis://127.0.0.1:1"}, 2)
	texts := make([][]byte, prompts)
	for i := range prompts {
		r.state.ApplyRouted(r.pool, r.e(0), prompt(i, blocks))
		var err error
		texts[i], err = proto.Marshal(&statev1.Blocks{Kind: statev1.Blocks_KIND_ROUTED, Hashes: prompt(i, blocks)})
		if err != nil {
			b.Fatal(err)
		}
	}
	b.Run("hashes", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			var read statev1.Blocks
			if err := proto.Unmarshal(texts[i%prompts], &read); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("reference", func(b *testing.B) {
		last := make([]uint64, prompts)
		for i := range last {
			last[i] = prompt(i, blocks)[blocks-1]
		}
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			if len(r.pool.TextOf(nil, last[i%prompts], blocks)) != blocks {
				b.Fatal("not found")
			}
		}
	})
}
