package fleetmetrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"tandem/kvstate/notices"
)

// noticeCounter is a series of a board's.
type noticeCounter struct {
	name, help, result string
	count              func(notices.Counts) uint64
}

func noticeCounters() []noticeCounter {
	const messages, messagesHelp = "tandem_kv_notices_total",
		"Messages at notices.listen: taken, ignored (not a notification), or unwanted (no request waited for the id " +
			"here in time); forwarded: received by another replica."
	const waits, waitsHelp = "tandem_kv_notice_waits_total",
		"Prefill legs that waited for notices: there (had come before), woken, or missed (decode computes what it " +
			"lacks)."
	return []noticeCounter{
		{messages, messagesHelp, "taken", func(c notices.Counts) uint64 { return c.Received }},
		{messages, messagesHelp, "forwarded", func(c notices.Counts) uint64 { return c.Forwarded }},
		{messages, messagesHelp, "ignored", func(c notices.Counts) uint64 { return c.Ignored }},
		{messages, messagesHelp, "unwanted", func(c notices.Counts) uint64 { return c.Unwanted }},
		{waits, waitsHelp, "there", func(c notices.Counts) uint64 { return c.First }},
		{waits, waitsHelp, "woken", func(c notices.Counts) uint64 { return c.Woken }},
		{waits, waitsHelp, "missed", func(c notices.Counts) uint64 { return c.Missed }},
	}
}

// RegisterNotices shows the results of notices.
func RegisterNotices(r prometheus.Registerer, b *notices.Waiters) {
	for _, c := range noticeCounters() {
		r.MustRegister(prometheus.NewCounterFunc(
			prometheus.CounterOpts{Name: c.name, Help: c.help, ConstLabels: prometheus.Labels{"result": c.result}},
			func() float64 { return float64(c.count(b.Counts())) }))
	}
	r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tandem_kv_notices_held", Help: "Ids of notices that are kept now, noticed or waited for.",
	}, func() float64 { return float64(b.Held()) }))
}
