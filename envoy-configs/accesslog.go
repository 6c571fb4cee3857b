package envoyconfigs

import (
	"fmt"
	"hash/fnv"
	"strconv"
	"time"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	celv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/filters/cel/v3"
	grpclogv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/grpc/v3"
	metadatav3 "github.com/envoyproxy/go-control-plane/envoy/type/metadata/v3"
	tracingv3 "github.com/envoyproxy/go-control-plane/envoy/type/tracing/v3"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"tandem/envoy-configs/logwhen"
	"tandem/envoy-configs/usage"
)

// logged is one of the access logs of requests that Envoy sends to Tandem.
type logged struct {
	name    string
	flush   time.Duration
	bytes   *wrapperspb.UInt32Value // kept before they are sent; nil: Envoy's default
	tags    []*tracingv3.CustomTag
	headers []string
	when    func() *accesslogv3.AccessLogFilter
	one     bool // to the replica that the request names, if it names one
	notes   notes
}

// numbered reports whether the ends of passes are logged to one of several replicas.
func (s *settings) numbered() bool { return len(s.Servers.AccessLogs) > 1 }

// fleet returns a fingerprint of the list of replicas, into which replicas' numbers are indexes. With slots there is
// none: the numbers are the slots', and listeners must not change when replicas come and go.
func (s *settings) fleet() string {
	if s.Servers.Slots {
		return "slots"
	}
	h := fnv.New32a()
	for _, replica := range s.Servers.AccessLogs {
		fmt.Fprintln(h, replica.Hosts)
	}
	return strconv.FormatUint(uint64(h.Sum32()), 16)
}

// notOfOne holds for passes that are logged to every replica: those that bear no number, and those that did not end
// well, since another replica may have decided last.
func notOfOne() *accesslogv3.AccessLogFilter {
	return logwhen.Or(logwhen.Header(absent("x-tandem-replica")), logwhen.Flagged(),
		logwhen.StatusFrom(400, "tandem.log.refused"),
		logwhen.Status(accesslogv3.ComparisonFilter_LE, 199, "tandem.log.unanswered"))
}

// toEveryReplica sends a log to each of them, or to the one whose number the request bears: what a request has reserved
// lives in the replica that reserved it.
func (m accessLogs) toEveryReplica(l logged) (out []*accesslogv3.AccessLog) {
	for i, replica := range m.Servers.AccessLogs {
		to, when := grpcTo(replica.Cluster), l.when()
		if l.one && m.numbered() {
			number := strconv.Itoa(i)
			to.InitialMetadata = []*corev3.HeaderValue{{Key: "x-tandem-replica", Value: m.fleet() + "/" + number}}
			when = logwhen.And(when, logwhen.Or(logwhen.Header(exact("x-tandem-replica", number)), notOfOne()))
		}
		if m.Servers.Slots {
			when = logwhen.And(inUse(i), when)
		}
		config := &grpclogv3.HttpGrpcAccessLogConfig{
			CommonConfig: &grpclogv3.CommonGrpcAccessLogConfig{
				LogName: l.name, TransportApiVersion: corev3.ApiVersion_V3, GrpcService: to,
				BufferFlushInterval: durationpb.New(l.flush), BufferSizeBytes: l.bytes, CustomTags: l.tags,
			},
			AdditionalRequestHeadersToLog:  l.headers,
			AdditionalResponseHeadersToLog: []string{"retry-after", "x-tandem-details"},
		}
		out = append(out, noted(m, &accesslogv3.AccessLog{
			Name: "envoy.access_loggers.http_grpc", Filter: when,
			ConfigType: &accesslogv3.AccessLog_TypedConfig{TypedConfig: m.pack(config)},
		}, l.notes))
	}
	return out
}

// endOfPass reports how each pass of a request ended. A pass that ended in a redirect is logged with the ticket of
// the redirect.
func (m accessLogs) endOfPass() []*accesslogv3.AccessLog {
	l := logged{
		name: "tandem", flush: 200 * time.Millisecond, bytes: wrapperspb.UInt32(64 << 10),
		tags:    []*tracingv3.CustomTag{unfollowedTag(), usage.FirstBody()},
		headers: []string{"x-tandem-ticket", "x-tandem-reservation"}, when: booked, one: true,
		notes: notes{"filter": "What may have something booked: passes with a ticket, and clients that left before " +
			"theirs was set. A pass that ended in a redirect too: the replica that serves the next pass may be " +
			"another than the one that booked it. To the replica that decided it, by its number; to all if it bears " +
			"none or did not end well."},
	}
	if !m.several() {
		l.when = func() *accesslogv3.AccessLogFilter { return logwhen.And(booked(), m.notRedirected()) }
		l.notes = notes{"filter": "What may have something booked: passes with a ticket, and clients that left " +
			"before theirs was set. Not a pass that ended in a redirect: the one replica there is learns from the " +
			"next pass that it is over."}
	}
	if m.Tracing != nil {
		l.headers = append(l.headers, "traceparent")
	}
	if header := m.Usage.GetTenantHeader(); header != "" {
		l.headers = append(l.headers, header)
	}
	return m.toEveryReplica(l)
}

// failedTries reports tries of a hop that failed.
func (m accessLogs) failedTries() []*accesslogv3.AccessLog {
	return m.toEveryReplica(logged{
		name: "tandem-failed", flush: 50 * time.Millisecond, bytes: wrapperspb.UInt32(0),
		headers: []string{"x-tandem-ticket", "x-tandem-reservation"},
		when: func() *accesslogv3.AccessLogFilter {
			return logwhen.And(
				logwhen.Or(logwhen.Flagged("UF", "UC", "UR", "UPE"), logwhen.StatusFrom(400, "tandem.log.failed"),
					m.redirectedByEngine()),
				logwhen.Header(present("x-tandem-ticket")))
		},
	})
}

// prefillCut reports prefill legs whose answer broke off after it had begun.
func (m accessLogs) prefillCut() []*accesslogv3.AccessLog {
	return m.toEveryReplica(logged{
		name: "tandem-failed", flush: 50 * time.Millisecond, bytes: wrapperspb.UInt32(0),
		headers: []string{"x-tandem-ticket", "x-tandem-reservation"},
		when: func() *accesslogv3.AccessLogFilter {
			return logwhen.And(logwhen.Flagged("UC", "UR", "UPE"), logwhen.StatusFrom(200, "tandem.log.answered"),
				logwhen.Status(accesslogv3.ComparisonFilter_LE, 299, "tandem.log.cut"))
		},
		notes: notes{"": "Of an answer that broke off after it had begun: P has finished, and nobody can name the " +
			"blocks that it keeps."},
	})
}

// redirectedByEngine holds for redirects of engines. All of Tandem's own are 307. CEL costs CPU, so it is evaluated for
// those alone, and not for prefill legs whose short answers Envoy turns into one: nothing else redirects there.
func (m accessLogs) redirectedByEngine() *accesslogv3.AccessLogFilter {
	return logwhen.And(logwhen.StatusFrom(300, "tandem.log.redirected"), logwhen.Header(absent("x-tandem-carry")),
		logwhen.Or(logwhen.Status(accesslogv3.ComparisonFilter_LE, 306, "tandem.log.redirected_before"),
			logwhen.StatusFrom(308, "tandem.log.redirected_after"), m.cel("!('x-tandem-ticket' in response.headers)")))
}

// endOfMirror reports how the prefill leg of a pair ended.
func (m accessLogs) endOfMirror() []*accesslogv3.AccessLog {
	return m.toEveryReplica(logged{
		name: "tandem-prefill-mirror", flush: 50 * time.Millisecond, bytes: wrapperspb.UInt32(0),
		headers: []string{"x-tandem-ticket", "x-tandem-request-id"},
		when:    func() *accesslogv3.AccessLogFilter { return logwhen.Header(present("x-tandem-ticket")) },
		notes: notes{"": "At once: where the decode leg is watched by another replica, this is how that learns " +
			"of the prefill."},
	})
}

// unfollowedTag writes into the log what lua/unfollowed.lua found.
func unfollowedTag() *tracingv3.CustomTag {
	return &tracingv3.CustomTag{Tag: "unfollowed",
		Type: &tracingv3.CustomTag_Metadata_{Metadata: &tracingv3.CustomTag_Metadata{
			Kind: &metadatav3.MetadataKind{Kind: &metadatav3.MetadataKind_Request_{Request: &metadatav3.MetadataKind_Request{}}},
			MetadataKey: &metadatav3.MetadataKey{Key: "tandem", Path: []*metadatav3.MetadataKey_PathSegment{{
				Segment: &metadatav3.MetadataKey_PathSegment_Key{Key: "unfollowed"},
			}}},
		}}}
}

// booked holds for passes that may have something reserved.
func booked() *accesslogv3.AccessLogFilter {
	return logwhen.Or(logwhen.Header(present("x-tandem-ticket")), logwhen.Flagged("DC"))
}

// notRedirected holds for passes that did not end in a redirect. CEL costs CPU, so it is evaluated only for 307, which
// an engine may answer, too.
func (m accessLogs) notRedirected() *accesslogv3.AccessLogFilter {
	return logwhen.Or(logwhen.Status(accesslogv3.ComparisonFilter_LE, 306, "tandem.log.below"),
		logwhen.StatusFrom(308, "tandem.log.above"), m.cel("response.code_details != 'internal_redirect'"))
}

func (b *notebook) cel(expression string) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_ExtensionFilter{
		ExtensionFilter: &accesslogv3.ExtensionFilter{
			Name: "envoy.access_loggers.extension_filters.cel",
			ConfigType: &accesslogv3.ExtensionFilter_TypedConfig{
				TypedConfig: b.pack(&celv3.ExpressionFilter{Expression: expression}),
			},
		},
	}}
}
