package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// agents is what the engines of TestMemoryAsInTheReplay have, and what the sessions there ask. Of their conversations the
// memory holds one copy each, and not two.
var agents = struct {
	engines, blocks, sessions int
	tokens                    int   // a second, of prefill
	turns                     []int // tokens of their prompts, of which each begins with the one before
}{engines: 4, blocks: 6000, sessions: 24, tokens: 16_000, turns: growing(10, 12_000, 400)}

const (
	agentStep  = 14 * time.Millisecond // of decode, as in the replay
	agentThink = 1500 * time.Millisecond
	agentWords = 8 // tokens of an answer
	agentsWarm = 13 * time.Second
	agentsLast = 12 * time.Second
)

func growing(turns, first, more int) (prompts []int) {
	for i := range turns {
		prompts = append(prompts, first+more*i)
	}
	return prompts
}

// served is how a policy served agents: turns, and the share of what their conversations had that was not computed
// again.
type served struct{ turns, kept float64 }

// Engines whose memory is the least recently used, and agents that ask again after each answer: what the replay says of
// policies holds in a real Envoy. Copies on two engines do not fit, and are computed again and again; the default does
// as well as a pool that never splits. TestClosedLoops compares sizes.
func TestMemoryAsInTheReplay(t *testing.T) {
	t.Parallel()
	policies := []string{"never", "auto", "always"}
	var measured, simulated []served
	for _, split := range policies {
		var r served
		require.True(t, t.Run(split, func(t *testing.T) { r = agentsLive(t, split) }))
		s := agentsReplayed(t, split)
		measured, simulated = append(measured, r), append(simulated, s)
		t.Logf("%s: %.0f turns an hour, %.1f %% kept; in the replay %.0f, %.1f %%", split, r.turns, 100*r.kept, s.turns, 100*s.kept)
	}
	for i, split := range policies {
		speed(t, math.Abs(simulated[i].kept-measured[i].kept) < .15, "%s: %.2f kept, %.2f in the replay", split, measured[i].kept, simulated[i].kept)
		for j := range policies {
			if simulated[i].kept > simulated[j].kept+.15 {
				require.Greater(t, measured[i].kept, measured[j].kept, "%s is better than %s", split, policies[j])
			}
		}
	}
	require.Greater(t, simulated[1].kept, simulated[2].kept+.15, "else nothing was compared")
}

// agentsReplayed plays the sessions against modelled engines.
func agentsReplayed(t *testing.T, split string) served {
	t.Helper()
	bin, err := binaries()
	require.NoError(t, err)
	var rows []string // as package replay/sessions reads them
	had := 0
	for _, tokens := range agents.turns {
		rows = append(rows, fmt.Sprintf("[0,%v,%d,%d,%d,%d,\"t\",0.1]", agentThink.Seconds(), min(had, 1), had, tokens, agentWords))
		had = tokens
	}
	file := filepath.Join(t.TempDir(), "sessions.jsonl")
	line := `{"session":1,"tools":0,"system":0,"turns":[` + strings.Join(rows, ",") + "]}\n"
	require.NoError(t, os.WriteFile(file, []byte(line), 0o600))
	out, err := exec.Command(filepath.Join(bin, "tandem"), "replay", "--trace", file, "--sessions", strconv.Itoa(agents.sessions),
		"--both", strconv.Itoa(agents.engines), "--kv-tokens", strconv.Itoa(16*agents.blocks), "--split", split, "--policy", "tandem",
		"--routed-index", "--warm-up", "60", "--measured", "600", "--json").Output()
	require.NoError(t, err)
	var r struct {
		PerHour float64
		Again   struct{ All float64 }
	}
	require.NoError(t, json.Unmarshal(out, &r), "%s", out)
	return served{r.PerHour, 1 - r.Again.All}
}

// agentsLive plays the sessions against engines behind Envoy.
func agentsLive(t *testing.T, split string) served {
	t.Helper()
	f := start(t, options{
		prefills: agents.engines,
		engineArgs: []string{"--role", "both", "--blocks", fmt.Sprint(agents.blocks), "--prefill-speed", fmt.Sprint(agents.tokens),
			"--decode-step", agentStep.String(), "--record=false"},
		pools: "pools:\n- name: chat\n  models: [\"*\"]\n  kvTransfer: nixl\n  split: " + split + "\n  endpoints:\n" +
			strings.Repeat("  - {address: %P, role: both}\n", agents.engines),
	})
	computed := func() (sum float64) {
		for _, e := range f.engines() {
			sum += metric(t, "http://"+e.addr, "vllm:prompt_tokens_by_source_total", `source="local_compute"`)
		}
		return sum
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var mu sync.Mutex
	var turns, had, more float64
	var clients sync.WaitGroup
	for n := range agents.sessions {
		clients.Go(func() {
			for session := 0; ctx.Err() == nil; session++ {
				text := agentText(n, session)
				first := 0
				if session == 0 { // not all begin at once
					first = n % len(agents.turns)
				}
				for i, tokens := range agents.turns[first:] {
					select {
					case <-ctx.Done():
						return
					case <-time.After(agentThink):
					}
					body := fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":%d}`, text[:4*tokens], agentWords)
					a, err := f.try(t.Context(), "POST", "/v1/completions", body)
					if err != nil || a.status != 200 {
						t.Errorf("%d %v %s", a.status, err, a.body)
						return
					}
					before := 0
					if first+i > 0 {
						before = agents.turns[first+i-1]
					}
					mu.Lock()
					turns, had, more = turns+1, had+float64(before), more+float64(tokens-before)
					mu.Unlock()
				}
			}
		})
	}
	time.Sleep(agentsWarm) // until the engines' memory is full
	mu.Lock()
	turns, had, more = 0, 0, 0
	mu.Unlock()
	before := computed()
	time.Sleep(agentsLast) // this long it is measured
	mu.Lock()
	out := served{turns * float64(time.Hour) / float64(agentsLast), 1 - (computed()-before-more)/had}
	mu.Unlock()
	stop()
	clients.Wait()
	return out
}

// agentText returns the text that the prompts of a session begin with.
func agentText(client, session int) string {
	random := rand.New(rand.NewPCG(uint64(client), uint64(session)))
	last := agents.turns[len(agents.turns)-1]
	var b strings.Builder
	for b.Len() < 4*last {
		fmt.Fprintf(&b, "%08x", random.Uint32())
	}
	return b.String()
}
