// Package status shows people what a replica is doing now: pools and endpoints, the flow between prefill and
// decode, the latest decisions taken apart, rates and percentiles of the last minutes.
//
// [Feed] takes the server's counts once a second and keeps the last ten minutes of them. [Handler] serves the feed
// as JSON (/status.json) and a page that draws it (/; page/ is embedded, without a build step and without anything
// from elsewhere). [Print] writes the same for a terminal, from the same JSON: `tandem status`.
package status
