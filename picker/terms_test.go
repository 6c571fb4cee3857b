package picker

import (
	"encoding/csv"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/residency"
)

// A term of the price, as values of the code that docs/decision.md shows in a picture each: package docs draws the
// files.
type term struct {
	file string // in docs/figures/price
	head []string
	rows []string // what the columns are evaluated at, as it is written
	of   func(row, column int) float64
}

// TestTerms holds docs/figures/price to the code. With -update it writes them; then go test ./docs -update.
func TestTerms(t *testing.T) {
	for _, x := range allTerms() {
		var b strings.Builder
		w := csv.NewWriter(&b)
		require.NoError(t, w.Write(x.head))
		for i, name := range x.rows {
			line := []string{name}
			for j := range x.head[1:] {
				line = append(line, strconv.FormatFloat(math.Round(1e4*x.of(i, j))/1e4, 'f', -1, 64))
			}
			require.NoError(t, w.Write(line))
		}
		w.Flush()
		file := filepath.Join("../docs/figures/price", x.file+".csv")
		if *update {
			require.NoError(t, os.WriteFile(file, []byte(b.String()), 0o600))
			continue
		}
		there, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, string(there), b.String(), "%s: go test ./picker -run TestTerms -update", x.file)
	}
}

// names writes numbers with a unit.
func names(of []float64, unit string) (out []string) {
	for _, x := range of {
		text := strconv.FormatFloat(x, 'f', -1, 64)
		if x >= 1000 {
			text = text[:len(text)-3] + "," + text[len(text)-3:]
		}
		out = append(out, text+unit)
	}
	return out
}

// termsOf returns the terms of one decision about a prompt of so many tokens, in blocks of 512, on a fleet with that
// load.
func termsOf(tokens float64, load kvstate.Utilisation, prefills int) terms {
	k := &Picker{Policy: DefaultPolicy()}
	r := &Request{PromptTokens: int64(tokens), Blocks: int(tokens / 512)}
	return k.terms(r, &kvstate.View{Load: load}, prefills, 8)
}

func allTerms() []term {
	candidate := func() *kvstate.Candidate {
		return &kvstate.Candidate{Endpoint: &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Role: kvstate.RoleBoth}}, Usable: true}
	}
	rho, fleets := []float64{.2, .4, .6, .8, .9}, []int{4, 8, 64}
	tokens := []float64{1000, 8000, 32_000, 100_000}
	held := []float64{0, .5, .9}
	answers := []float64{1, 4, 16}
	batches, contexts := []float64{1, 16, 64, 128}, []float64{1000, 4000, 16_000}
	filled := []float64{.8, .9, 1, 1.1}
	after := []float64{1, 4.9, 5.1, 20}
	uses := []float64{1, 10, 60, 300}
	needs := []float64{50_000, 150_000, 300_000, 500_000}
	works := []float64{.5, 2, 5, 13}
	rates := []float64{.02, .1, .5}
	shares := []float64{0, .2, .4, .6, .8}
	return []term{
		{"work", []string{"tokens of the prompt", "none held", "half held", "nine tenths held"}, names(tokens, ""), func(i, j int) float64 {
			m := DefaultModel()
			return m.prefill(tokens[i]*(1-held[j]), tokens[i]*held[j])
		}},
		{"others", []string{"utilisation", "4 engines", "8 engines", "64 engines"}, names(rho, ""), func(i, j int) float64 {
			return termsOf(8000, kvstate.Utilisation{Prefill: rho[i]}, fleets[j]).others
		}},
		{"shared", []string{"requests in a minute", "one engine holds it", "four hold it"}, names(uses, ""), func(i, j int) float64 {
			k, v := &Picker{Policy: DefaultPolicy()}, &kvstate.View{Load: kvstate.Utilisation{Prefill: .8, Work: kvstate.Seconds(.6)}}
			for n := range 8 {
				c := candidate()
				if n < 1+3*j {
					c.Hit = 16
				}
				v.Endpoints = append(v.Endpoints, *c)
			}
			v.Uses = append(v.Uses, kvstate.UseStep{Blocks: 16, Uses: float32(uses[i])})
			t := k.terms(&Request{PromptTokens: 9000, Blocks: 18}, v, 8, 8)
			k.share(&t, v)
			return 1 - t.paid(0)/t.m.between(0, 16*t.perBlock)
		}},
		{"late", []string{"first token after", "promised in 5 s"}, names(after, " s"), func(i, _ int) float64 {
			t := termsOf(8000, kvstate.Utilisation{}, 8)
			return t.late(after[i])
		}},
		{"beside", []string{"answers there", "prompt of 1,000 tokens", "8,000", "32,000"}, names(answers, ""), func(i, j int) float64 {
			t, b := termsOf(tokens[j], kvstate.Utilisation{}, 8), batch{}
			c := candidate()
			c.Requests = int64(answers[i])
			t.batch(c, &b)
			return b.prompt.delayed(&t, b.answers)
		}},
		{"share", []string{"share of the time for prompts", "0 other answers run", "32", "128"}, names(shares, ""), func(i, j int) float64 {
			t, c := termsOf(1000, kvstate.Utilisation{}, 8), candidate()
			c.Share = shares[i]
			return 1000 * t.tokenTime(c, t.step(c, []float64{0, 32, 128}[j], 2000*[]float64{1, 33, 129}[j]))
		}},
		{"step", []string{"answers", "of 1,000 tokens of KV", "of 4,000", "of 16,000"}, names(batches, ""), func(i, j int) float64 {
			t := termsOf(1000, kvstate.Utilisation{}, 8)
			return 1000 * t.step(candidate(), batches[i]-1, batches[i]*contexts[j])
		}},
		{"overflow", []string{"KV of the capacity", "16 answers", "256 answers"}, names(filled, ""), func(i, j int) float64 {
			t := termsOf(1000, kvstate.Utilisation{}, 8)
			b := batch{answers: []float64{15, 255}[j], kv: 1e5 * filled[i], freeKV: 1e5, step: .03}
			return t.overflow(&b)
		}},
		{"transfer", []string{"tokens to bring", "within a node", "within a zone", "between zones"}, names(tokens, ""), func(i, j int) float64 {
			t, c := termsOf(tokens[i], kvstate.Utilisation{}, 8), candidate()
			return []float64{t.transferWithin(c), t.transfer(c, true), t.transfer(c, false)}[j]
		}},
		{"load", []string{"tokens that a tier holds", "CPU memory", "disk", "remote", "computed instead"}, names(tokens[1:], ""), func(i, j int) float64 {
			t, c := termsOf(tokens[i+1]+1, kvstate.Utilisation{}, 8), candidate()
			if j == 3 {
				return t.m.prefill(tokens[i+1], 0)
			}
			c.Loads[j] = int32(tokens[i+1] / t.perBlock)
			return t.load(c)
		}},
		{"evicts", []string{"tokens that need room", "which come back with probability .1, .5, .9", "all with .9"}, names(needs, ""), func(i, j int) float64 {
			t, c := termsOf(needs[i], kvstate.Utilisation{}, 8), candidate()
			c.Memory = &residency.Memory{Tokens: 1e6, Free: 1e5}
			for n, back := range [][]float64{{.1, .5, .9}, {.9, .9, .9}}[j] {
				c.Memory.Old[n] = residency.Part{Tokens: 2e5, Back: back, End: 1e5, Middle: 5e4}
			}
			return t.evicts(c, needs[i])
		}},
		{"returns", []string{"time to compute the prompt", ".02 come back in a second", ".1", ".5"}, names(works, " s"), func(i, j int) float64 {
			t, c := termsOf(8000, kvstate.Utilisation{}, 8), candidate()
			c.Memory = &residency.Memory{Returns: rates[j]}
			return t.returns(c, works[i])
		}},
	}
}
