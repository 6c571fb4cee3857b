package main

import (
	"context"
	"log/slog"
	"net"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"tandem/kvstate/notices"
)

// registerNotices shows what became of notices.
func registerNotices(r prometheus.Registerer, b *notices.Board) {
	counter := func(name, help, result string, count func(notices.Counts) uint64) {
		r.MustRegister(prometheus.NewCounterFunc(
			prometheus.CounterOpts{Name: name, Help: help, ConstLabels: prometheus.Labels{"result": result}},
			func() float64 { return float64(count(b.Counts())) }))
	}
	const messages, messagesHelp = "tandem_kv_notices_total",
		"Messages at notices.listen: taken, ignored (no notice), or unwanted (nobody waited for the id here in time); told, those that another replica received."
	counter(messages, messagesHelp, "taken", func(c notices.Counts) uint64 { return c.Received })
	counter(messages, messagesHelp, "told", func(c notices.Counts) uint64 { return c.Told })
	counter(messages, messagesHelp, "ignored", func(c notices.Counts) uint64 { return c.Ignored })
	counter(messages, messagesHelp, "unwanted", func(c notices.Counts) uint64 { return c.Unwanted })
	const waits, waitsHelp = "tandem_kv_notice_waits_total", "Prefill legs that waited for notices: there (had come before), woken, or missed (decode computes what it lacks)."
	counter(waits, waitsHelp, "there", func(c notices.Counts) uint64 { return c.First })
	counter(waits, waitsHelp, "woken", func(c notices.Counts) uint64 { return c.Woken })
	counter(waits, waitsHelp, "missed", func(c notices.Counts) uint64 { return c.Missed })
	r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "tandem_kv_notices_held", Help: "Ids of notices that are kept now, noticed or waited for."},
		func() float64 { return float64(b.Held()) }))
}

// takeNotices receives notices, and has every replica know of those that any of them receives, where there is a Redis.
func (f *fleet) takeNotices(ctx context.Context, l net.Listener, log *slog.Logger) error {
	if f.store == nil {
		return notices.Serve(ctx, l, f.board, nil, log)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { f.store.ShareNotices(ctx, f.board.Told); return nil })
	group.Go(func() error { return notices.Serve(ctx, l, f.board, f.store.TellNotice, log) })
	return group.Wait()
}
