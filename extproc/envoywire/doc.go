// Package envoywire decodes Envoy's messages and encodes the replies to them, in place.
//
//   - ext_proc: [Message] is one ProcessingRequest, [Reply] one ProcessingResponse. Only the fields that Tandem uses
//     are read, and body bytes go straight into a [Body], since generated types would copy each prompt twice.
//   - The gRPC access log: [LogBatch] is one message of it, [LogEntry] one entry.
//   - names.go lists the header names, route legs and roles that Tandem and Envoy's configuration agree on.
//   - [Codec] connects these types to gRPC.
//
// The package knows the encoding and nothing of the meaning of a message. Fuzz tests compare it with
// go-control-plane's generated types.
package envoywire
