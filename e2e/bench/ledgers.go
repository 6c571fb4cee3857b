package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"tandem/e2e/process"
)

// engine is a running engine: the name of its pair, and the model by which shapes ask for it.
type engine struct{ pair, model, addr string }

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

// ledgers checks that the measured requests did their work: every hand-over was fetched once, D got its prompts from
// P, and no rule was broken. It returns a line to print.
func (l *lab) ledgers(ctx context.Context, o options) (string, error) {
	var lines []string
	for i := 0; i < len(l.engines); i += 2 {
		if !slices.ContainsFunc(o.shapes, func(s shape) bool { return s.model == l.engines[i].model }) {
			continue
		}
		p, d, err := l.settled(ctx, i)
		if err != nil {
			return "", err
		}
		for _, b := range []*books{p, d} {
			switch {
			case len(b.Rules) > 0, b.Failed > 0:
				return "", fmt.Errorf("engines of %s: violations %v, failed transfers %d", l.engines[i].pair, b.Rules,
					b.Failed)
			case o.profiles == "" && !b.balance():
				return "", fmt.Errorf("engines of %s: %d hand-overs given, %d fetched, %d blocks held",
					l.engines[i].pair, b.Given, b.Fetched, b.Held)
			}
		}
		if d.External == 0 {
			return "", fmt.Errorf("the decode engine of %s got no token from prefill", l.engines[i].pair)
		}
		text := fmt.Sprintf("%s %d tokens moved", l.engines[i].pair, d.External)
		if p.Given > 0 {
			text += fmt.Sprintf(" in %d hand-overs", p.Given)
		}
		lines = append(lines, text)
	}
	return "Engines' ledgers balance, no violation: " + strings.Join(lines, "; ") + ".", nil
}

// settled returns the books of a pair when no hand-over is pending, or after ledgerTime.
func (l *lab) settled(ctx context.Context, at int) (p, d *books, err error) {
	for until := time.Now().Add(ledgerTime); ; time.Sleep(20 * time.Millisecond) {
		if p, err = readBooks(ctx, l.engines[at].addr); err != nil {
			return nil, nil, err
		}
		if d, err = readBooks(ctx, l.engines[at+1].addr); err != nil {
			return nil, nil, err
		}
		if p.balance() && d.balance() || time.Now().After(until) {
			return p, d, nil
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
