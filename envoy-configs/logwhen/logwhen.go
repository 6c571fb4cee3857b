// Package logwhen says which requests a log of Envoy contains.
package logwhen

import (
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
)

// And holds where all of them do.
func And(filters ...*accesslogv3.AccessLogFilter) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_AndFilter{
		AndFilter: &accesslogv3.AndFilter{Filters: filters},
	}}
}

// Or holds where one of them does.
func Or(filters ...*accesslogv3.AccessLogFilter) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_OrFilter{
		OrFilter: &accesslogv3.OrFilter{Filters: filters},
	}}
}

// Flagged holds where Envoy set one of these response flags or, if none is given, any flag.
func Flagged(flags ...string) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_ResponseFlagFilter{
		ResponseFlagFilter: &accesslogv3.ResponseFlagFilter{Flags: flags},
	}}
}

// Header holds for requests with such a header.
func Header(header *routev3.HeaderMatcher) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_HeaderFilter{
		HeaderFilter: &accesslogv3.HeaderFilter{Header: header},
	}}
}

// StatusFrom holds for answers from a status on.
func StatusFrom(status uint32, key string) *accesslogv3.AccessLogFilter {
	return Status(accesslogv3.ComparisonFilter_GE, status, key)
}

// Status compares the answer's status; Envoy requires the name of a runtime key that could change the value; nothing
// ever sets that key.
func Status(op accesslogv3.ComparisonFilter_Op, status uint32, key string) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_StatusCodeFilter{
		StatusCodeFilter: &accesslogv3.StatusCodeFilter{Comparison: &accesslogv3.ComparisonFilter{
			Op: op, Value: &corev3.RuntimeUInt32{DefaultValue: status, RuntimeKey: key},
		}},
	}}
}
