// Package web is a simulated engine's HTTP port: it opens, closes and opens again, and knows which requests came over a
// connection that had been idle.
package web
