// Package ledger checks, after a measurement, that simulated engines did the work that was measured.
package ledger

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"tandem/e2e/process"
)

// Engine is a running engine. Hand-overs are between engines of a group.
type Engine struct{ Group, Addr string }

// books are an engine's counts of the KV that it handed over or fetched (enginesim's /sim/state). Engines whose legs
// meet in a room count no hand-overs: there D's tokens show that KV was moved.
type books struct {
	Given    int64          `json:"given"`
	Fetched  int64          `json:"fetched"`
	Held     int64          `json:"blocks_held"`
	Failed   int64          `json:"failed_transfers"`
	External int64          `json:"external_tokens"`
	Rules    map[string]int `json:"violations_by"`
}

// balance reports whether no hand-over is pending.
func (b *books) balance() bool { return b.Held == 0 && b.Given == b.Fetched }

// ledgerTime is the time after the last request in which the last hand-over must end. A client that leaves, as those
// of -cpuprofile do, leaves blocks behind for the engines' lease, and these are never fetched.
const ledgerTime = 5 * time.Second

// Check checks that the measured requests did their work: every hand-over was fetched once, decode engines got their
// prompts from prefill, and no rule was broken. Those of a group stand together. Where clients left, hand-overs may be
// pending. It returns a line to print.
func Check(ctx context.Context, engines []Engine, left bool) (string, error) {
	var lines []string
	for rest := engines; len(rest) > 0; {
		n := slices.IndexFunc(rest, func(e Engine) bool { return e.Group != rest[0].Group })
		if n < 0 {
			n = len(rest)
		}
		group := rest[:n]
		rest = rest[n:]
		all, err := settled(ctx, group)
		if err != nil {
			return "", err
		}
		var given, moved int64
		for _, b := range all {
			switch {
			case len(b.Rules) > 0, b.Failed > 0:
				return "", fmt.Errorf("engines of %s: violations %v, failed transfers %d", group[0].Group, b.Rules,
					b.Failed)
			case !left && !b.balance():
				return "", fmt.Errorf("engines of %s: %d hand-overs given, %d fetched, %d blocks held", group[0].Group,
					b.Given, b.Fetched, b.Held)
			}
			given, moved = given+b.Given, moved+b.External
		}
		if moved == 0 {
			return "", fmt.Errorf("no decode engine of %s got a token from prefill", group[0].Group)
		}
		text := fmt.Sprintf("%s %d tokens moved", group[0].Group, moved)
		if given > 0 {
			text += fmt.Sprintf(" in %d hand-overs", given)
		}
		lines = append(lines, text)
	}
	return "Engines' ledgers balance, no violation: " + strings.Join(lines, "; ") + ".", nil
}

// settled returns the books of engines when no hand-over is pending, or after ledgerTime.
func settled(ctx context.Context, engines []Engine) (out []*books, err error) {
	for until := time.Now().Add(ledgerTime); ; time.Sleep(20 * time.Millisecond) {
		out = out[:0]
		for _, e := range engines {
			b, err := readBooks(ctx, e.Addr)
			if err != nil {
				return nil, err
			}
			out = append(out, b)
		}
		pending := slices.ContainsFunc(out, func(b *books) bool { return !b.balance() })
		if !pending || time.Now().After(until) {
			return out, nil
		}
	}
}

func readBooks(ctx context.Context, addr string) (*books, error) {
	text, err := process.Get(ctx, "http://"+addr+"/sim/state")
	b := &books{}
	if err == nil {
		err = json.Unmarshal(text, b)
	}
	if err != nil {
		return nil, fmt.Errorf("the books of %s: %w", addr, err)
	}
	return b, nil
}
