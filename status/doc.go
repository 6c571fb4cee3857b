// Package status shows people a replica's current state: pools and endpoints, the flow between prefill and decode, the
// latest decisions with their prices, rates and percentiles of the last minutes.
//
// [Feed] reads the server's counts once a second and keeps the last ten minutes of them. [Handler] serves the feed as
// JSON (/status.json) and a page that draws it (/; page/ is embedded, without a build step and without outside
// assets). [Print] writes most of it for a terminal, from the same JSON: `tandem status`.
package status
