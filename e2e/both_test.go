package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Engines that are P and D at once, with memory for little more than two prompts each, and more requests than that:
// each engine would hold prompts for the others until none could fetch (docs/adr/0052). All are answered from the right
// KV, and no engine holds anything in the end. No lease ends meanwhile that could free what engines hold for each other.
func TestBothRoles(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		engines  int
		replicas int
		pool     string
		tokens   int
		requests int
		ids      bool // prompts are token ids, of two bytes each: twice as many as Tandem expects
	}{
		{"four requests", 2, 1, "  split: always\n  binding: immediate\n", 1900, 4, false},
		{"two, always, immediate", 2, 1, "  split: always\n  binding: immediate\n", 1900, 16, false},
		{"two, auto, immediate", 2, 1, "  split: auto\n  binding: immediate\n", 1900, 16, false},
		{"two, always, late", 2, 1, "  split: always\n  binding: late\n", 1900, 16, false},
		{"two, auto, late", 2, 1, "  split: auto\n  binding: late\n", 1900, 16, false},
		{"three, always, immediate", 3, 1, "  split: always\n  binding: immediate\n", 1900, 24, false},
		{"three, always, late", 3, 1, "  split: always\n  binding: late\n", 1900, 24, false},
		{"many short ones", 2, 1, "  split: always\n  binding: immediate\n", 300, 64, false},
		{"two replicas, immediate", 2, 2, "  split: always\n  binding: immediate\n", 1900, 16, false},
		{"two replicas, late", 3, 2, "  split: always\n  binding: late\n", 1900, 24, false},
		{"never alone, immediate", 2, 1, "  split: always\n  decodeAlone: never\n  binding: immediate\n", 1900, 16, false},
		{"longer than expected", 2, 1, "  split: always\n", 1900, 4, true},
		{"many longer than expected", 2, 1, "  split: always\n", 1900, 16, true},
		{"longer than expected, immediate", 2, 1, "  split: always\n  binding: immediate\n", 1900, 16, true},
		{"longer than expected, auto", 3, 1, "  split: auto\n", 1900, 24, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // mostly waits
			// Requests that are chosen at the same moment may leave unfetched KV, until its lease ends.
			lease := "40s"
			if c.replicas > 1 {
				lease = "5s" // together they may give an engine too much before they know of each other's requests
			}
			o := options{
				prefills: c.engines, replicas: c.replicas,
				engineArgs: []string{"--role", "both", "--blocks", "261", "--prefill-speed", "6000", "--decode-step", "2ms", "--lease", lease},
			}
			o.pools = "pools:\n- name: chat\n  models: [\"*\"]\n  kvTransfer: nixl\n" + c.pool + "  endpoints:\n" +
				strings.Repeat("  - {address: %P, role: both}\n", c.engines)
			if c.replicas > 1 {
				r := startRedis(t)
				o.top, o.madeKeys = r.yaml(), true
			}
			f := start(t, o)
			if c.replicas > 1 {
				f.allReplicas(c.replicas)
			}
			for _, admin := range f.admins { // the engines have said how much memory they have
				soon(t, "metrics are read", func() bool {
					return metric(t, admin, "tandem_scrapes_total", `result="ok"`) >= float64(c.engines) || c.replicas > 1
				})
			}
			require.NoError(t, f.fill(c.requests, c.tokens, c.ids))
			t.Logf("%v split, %v alone", f.sum("tandem_decisions_total", `route="split"`), f.sum("tandem_decisions_total", `route="decode_alone"`))
			require.Positive(t, f.sum("tandem_decisions_total", `route="split"`))
		})
	}
}

// fill sends so many requests at once, every second one for a stream, and returns an error unless all are answered. An
// answer from wrong KV would be a violation, which the account at the end finds.
func (f *fleet) fill(n, tokens int, ids bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second) // before a lease ends
	defer cancel()
	failed := make(chan error, n)
	path, body := "/v1/chat/completions", func(i int) string { return question(fmt.Sprintf("both-%d", i), tokens) }
	if ids {
		path, body = "/v1/completions", func(i int) string {
			return fmt.Sprintf(`{"model":"tiny","max_tokens":3,"prompt":[%d%s]}`, 1000+i, strings.Repeat(",7", tokens-1))
		}
	}
	f.burst(n, func(i int) answer {
		text := body(i)
		if i%2 == 1 {
			text = `{"stream":true,` + text[1:]
		}
		a, err := f.try(ctx, "POST", path, text)
		if err == nil && a.status != 200 || strings.Contains(a.body, `"error"`) {
			err = fmt.Errorf("request %d: status %d: %.300s", i, a.status, a.body)
		}
		failed <- err
		return a
	})
	for range n {
		if err := <-failed; err != nil {
			return err
		}
	}
	return nil
}
